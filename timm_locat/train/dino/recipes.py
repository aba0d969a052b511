"""Recipes of DINO, as those of `timm_locat.train.recipes`. The ImageNet ones have not been run here."""

from collections.abc import Callable
from dataclasses import replace

from timm_locat.train.config import DataConfig
from timm_locat.train.dino.config import DinoConfig

__all__ = ["RECIPES", "describe"]


def dino_vit_small_in1k() -> DinoConfig:
    """DINO with ViT-S/16 on ImageNet-1k, the control of dino_locatvit_small_in1k: 100 epochs, 16 GPUs of 64 images.

    Values are those of the script behind arXiv:2603.04892; its epochs and batch size were not available to us, and are
    those of DINO's own code (arXiv:2104.14294).

    accelerate launch --num_processes 16 -m timm_locat.train.dino dino_vit_small_in1k --data.root /data/imagenet
    """
    return DinoConfig(
        model="vit_small_patch16_224",
        data=DataConfig(name="imagenet1k", protocol="none", workers=8, in_memory=False),
        mixed_precision="fp16",
        eval_every=10,
    )


def dino_locatvit_small_in1k() -> DinoConfig:
    """DINO with LocAtViT-S on ImageNet-1k. The paper's gains (arXiv:2603.04892): linear +2.13, k-NN +2.27 points.

    accelerate launch --num_processes 16 -m timm_locat.train.dino dino_locatvit_small_in1k --data.root /data/imagenet
    """
    return replace(dino_vit_small_in1k(), model="locatvit_small")


def dino_vit_compact() -> DinoConfig:
    """DINO with the compact ViT on the embedded Fashion-MNIST images: our choice of values, made for short runs.

    accelerate launch -q -m timm_locat.train.dino dino_vit_compact
    """
    return DinoConfig(
        model="vit_compact_patch4_32",
        # Xavier weights, as in the demo: timm's default std of 0.02 is small for width 192.
        model_kwargs='{"weight_init": "moco"}',
        data=DataConfig(name="fashion_mnist_mini", protocol="none"),
        epochs=8,
        global_batch_size=50,
        peak_lr=5e-4,
        min_lr=1e-5,
        warmup_epochs=1,
        weight_decay=0.04,
        weight_decay_end=0.1,
        drop_path_rate=0.0,
        local_crops=4,
        local_size=16,
        local_area=(0.15, 0.4),
        # Grey shapes on black that all stand upright: colour tells nothing, and strong blur removes the shape.
        color_jitter=0.5,
        grayscale=0.0,
        blur=(0.3, 0.1, 0.1),
        blur_sigma=(0.1, 1.0),
        solarize=0.0,
        out_dim=1024,
        hidden_dim=512,
        bottleneck_dim=128,
        teacher_momentum=0.99,
    )


def dino_locatvit_compact() -> DinoConfig:
    """The same with LocAtViT compact.

    accelerate launch -q -m timm_locat.train.dino dino_locatvit_compact
    """
    return replace(dino_vit_compact(), model="locatvit_compact_patch4_32")


RECIPES: dict[str, Callable[[], DinoConfig]] = {
    recipe.__name__: recipe
    for recipe in (dino_vit_small_in1k, dino_locatvit_small_in1k, dino_vit_compact, dino_locatvit_compact)
}
"""Every recipe of DINO by name."""


def describe(name: str) -> str:
    """What a recipe says about itself."""
    return (RECIPES[name].__doc__ or "").strip()
