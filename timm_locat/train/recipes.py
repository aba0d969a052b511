"""Recipes: functions that return a complete `TrainConfig`. A variant is `dataclasses.replace` of another.

Each says what it reproduces, what it costs and its command. A number is the paper's where it says so; our own come from
records in eval/results. ImageNet, mini-ImageNet, CIFAR, SVHN and Tiny-ImageNet recipes have not been run in full here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from timm_locat.train.config import DataConfig, TrainConfig

__all__ = ["RECIPES", "describe"]


def demo() -> TrainConfig:
    """LocAtViT compact on the embedded Fashion-MNIST images: 80 % in under 5 minutes on two CPU cores.

    accelerate launch -q -m timm_locat.train demo
    """
    return TrainConfig(
        model="locatvit_compact_patch4_32",
        # Xavier weights: timm's default std of 0.02 is small for width 192, and a short run then starts slowly.
        model_kwargs='{"weight_init": "moco"}',
        # Every shoe points to the left, in the test images too: a run this short is better spent without flips.
        data=DataConfig(name="fashion_mnist_mini", protocol="none"),
        epochs=4,
        global_batch_size=25,
        peak_lr=1e-3,
        warmup_epochs=0.5,
        mixed_precision="bf16",
    )


def demo_long() -> TrainConfig:
    """The demo with more passes over the same images, mirrored at random: 82 % in under 20 minutes on two CPU cores.

    accelerate launch -q -m timm_locat.train demo_long
    """
    return replace(demo(), data=DataConfig(name="fashion_mnist_mini", protocol="flip"), epochs=20, warmup_epochs=1)


# ImageNet. Values are those of the paper's training script where nothing else is said.


def locatvit_tiny_in1k() -> TrainConfig:
    """LocAtViT-Ti on ImageNet-1k, arXiv:2603.04892; the paper's top-1 is 73.94 %. 300 epochs: days on one GPU.

    accelerate launch -m timm_locat.train locatvit_tiny_in1k --data.root /data/imagenet
    """
    return TrainConfig(
        model="locatvit_tiny",
        data=DataConfig(name="imagenet1k", protocol="deit", workers=8, in_memory=False),
        epochs=300,
        global_batch_size=1024,
        peak_lr=1e-3,
        min_lr=1e-7,
        warmup_epochs=20,
        schedule="linear",
        weight_decay=0.05,
        clip_grad=5.0,
        drop_path_rate=0.1,
        mixed_precision="fp16",
        seed=42,
    )


def locatvit_small_in1k() -> TrainConfig:
    """LocAtViT-S on ImageNet-1k with the recipe of arXiv:2603.04892; the paper's number was not available to us.

    accelerate launch -m timm_locat.train locatvit_small_in1k --data.root /data/imagenet
    """
    return replace(locatvit_tiny_in1k(), model="locatvit_small", drop_path_rate=0.2)


def locatvit_base_in1k() -> TrainConfig:
    """LocAtViT-B on ImageNet-1k, arXiv:2603.04892; the paper's top-1 is 82.31 %. The paper's run: 4 GPUs of 256 images.

    accelerate launch --num_processes 4 -m timm_locat.train locatvit_base_in1k --data.root /data/imagenet
    """
    return replace(locatvit_tiny_in1k(), model="locatvit_base", drop_path_rate=0.4)


def vit_tiny_in1k() -> TrainConfig:
    """The control of locatvit_tiny_in1k: a plain ViT, the same recipe; the paper's top-1 is 72.39 %.

    accelerate launch -m timm_locat.train vit_tiny_in1k --data.root /data/imagenet
    """
    return replace(locatvit_tiny_in1k(), model="vit_tiny_patch16_224")


def vit_small_in1k() -> TrainConfig:
    """The control of locatvit_small_in1k: a plain ViT, the same recipe.

    accelerate launch -m timm_locat.train vit_small_in1k --data.root /data/imagenet
    """
    return replace(locatvit_small_in1k(), model="vit_small_patch16_224")


def vit_base_in1k() -> TrainConfig:
    """The control of locatvit_base_in1k: a plain ViT, the same recipe; the paper's top-1 is 80.99 %.

    accelerate launch --num_processes 4 -m timm_locat.train vit_base_in1k --data.root /data/imagenet
    """
    return replace(locatvit_base_in1k(), model="vit_base_patch16_224")


def jumbo_tiny_in1k() -> TrainConfig:
    """The control of locatjumbo_tiny_in1k: a plain Jumbo, the same recipe; the paper's number was not available to us.

    accelerate launch -m timm_locat.train jumbo_tiny_in1k --data.root /data/imagenet
    """
    return replace(locatvit_tiny_in1k(), model="jumbo_tiny")


def jumbo_base_in1k() -> TrainConfig:
    """The control of locatjumbo_base_in1k: a plain Jumbo, the same recipe; the paper's number was not available to us.

    accelerate launch --num_processes 4 -m timm_locat.train jumbo_base_in1k --data.root /data/imagenet
    """
    return replace(locatvit_base_in1k(), model="jumbo_base")


def locatjumbo_tiny_in1k() -> TrainConfig:
    """LocAtJumbo-Ti on ImageNet-1k with the recipe of arXiv:2603.04892; the paper's number was not available to us.

    accelerate launch -m timm_locat.train locatjumbo_tiny_in1k --data.root /data/imagenet
    """
    return replace(jumbo_tiny_in1k(), model="locatjumbo_tiny")


def locatjumbo_base_in1k() -> TrainConfig:
    """LocAtJumbo-B on ImageNet-1k with the recipe of arXiv:2603.04892; the paper's number was not available to us.

    accelerate launch --num_processes 4 -m timm_locat.train locatjumbo_base_in1k --data.root /data/imagenet
    """
    return replace(jumbo_base_in1k(), model="locatjumbo_base")


def locatvit_tiny_mini_imagenet() -> TrainConfig:
    """LocAtViT-Ti on mini-ImageNet (100 classes), arXiv:2603.04892; the paper's number was not available to us.

    accelerate launch --num_processes 2 -m timm_locat.train locatvit_tiny_mini_imagenet --data.root /data/mini-imagenet
    """
    base = locatvit_tiny_in1k()
    data = replace(base.data, name="mini_imagenet")
    return replace(base, data=data, epochs=600, warmup_epochs=120, peak_lr=5e-4)


def vit_tiny_mini_imagenet() -> TrainConfig:
    """The control of locatvit_tiny_mini_imagenet: a plain ViT, the same recipe.

    accelerate launch --num_processes 2 -m timm_locat.train vit_tiny_mini_imagenet --data.root /data/mini-imagenet
    """
    return replace(locatvit_tiny_mini_imagenet(), model="vit_tiny_patch16_224")


_BACKBONES = {
    "vit_tiny_reg4": ("tiny", "vit_tiny_patch16_224", '{"reg_tokens": 4}', "72.90 %"),
    "locatvit_tiny_reg4": ("tiny", "locatvit_tiny_reg4", "{}", "74.08 %"),
    "vit_base_reg4": ("base", "vit_base_patch16_224", '{"reg_tokens": 4}', "80.71 %"),
    "locatvit_base_reg4": ("base", "locatvit_base_reg4", "{}", "82.19 %"),
    "swin_tiny": ("tiny", "swin_tiny_patch4_window7_224", "{}", "81.18 %"),
    "locatswin_tiny": ("tiny", "locatswin_tiny", "{}", "81.43 %"),
    "swin_base": ("base", "swin_base_patch4_window7_224", "{}", None),
    "locatswin_base": ("base", "locatswin_base", "{}", None),
    "vit_tiny_rope_mixed": ("tiny", "vit_tiny_patch16_rope_mixed_224", "{}", None),
    "locatvit_tiny_rope_mixed": ("tiny", "locatvit_tiny_rope_mixed", "{}", None),
    "vit_base_rope_mixed": ("base", "vit_base_patch16_rope_mixed_224", "{}", None),
    "locatvit_base_rope_mixed": ("base", "locatvit_base_rope_mixed", "{}", None),
}
"""Rows of the paper's table beside ViT: size, model, its arguments, and the paper's top-1 where it was available to us.
Four registers are our choice; the paper's code does not tell how many its results used."""


def backbone(name: str) -> TrainConfig:
    """A backbone of arXiv:2603.04892 with or without LocAt on ImageNet-1k; the recipe is LocAtViT's of its size."""
    size, model, model_kwargs, _ = _BACKBONES[name]
    base = locatvit_tiny_in1k() if size == "tiny" else locatvit_base_in1k()
    return replace(base, model=model, model_kwargs=model_kwargs)


# Fine-tuning. Our choice throughout.


def finetune() -> TrainConfig:
    """Fine-tune a model on your images: new head, 20 epochs, each block learning slower than the one above it.

    accelerate launch -m timm_locat.train finetune --model local-dir:runs/demo --data.name /path/to/images
    accelerate launch -m timm_locat.train finetune --model locatvit_base --img-size 384 --data.name /path/to/images
    """
    return TrainConfig(
        model="locatvit_base",
        pretrained=True,
        data=DataConfig(name="fashion_mnist_mini", protocol="deit", mixup=0.0, cutmix=0.0),
        epochs=20,
        global_batch_size=128,
        peak_lr=5e-4,
        warmup_epochs=2,
        layer_decay=0.75,
        drop_path_rate=0.1,
        mixed_precision="bf16",
    )


# The compact family, arXiv:2605.16390: the same optimisation for every protocol. The paper's optimiser, schedule,
# epochs and batch size were not available to us: the values are our choice.


def compact(model: str, data: str, protocol: str) -> TrainConfig:
    """A compact model from scratch with one of the paper's protocols."""
    return TrainConfig(
        model=f"{model}_compact_{'patch8_64' if data == 'tiny_imagenet' else 'patch4_32'}",
        data=DataConfig(name=data, protocol=protocol),
        epochs=200,
        global_batch_size=128,
        peak_lr=1e-3,
        warmup_epochs=10,
        weight_decay=0.05,
        clip_grad=None,
        mixed_precision="bf16",
    )


# Positional attention, arXiv:2210.09221: AdamW, cosine, 300 epochs, batch 1024 on ImageNet and 128 elsewhere are known
# from summaries of the paper. Learning rate, weight decay, warm-up and augmentation were not available: our choice.


def vit_posattn_in1k() -> TrainConfig:
    """ViT-Ti/16 with positional attention on ImageNet-1k; the paper's top-1, known from a summary, is 68.9 %.

    accelerate launch -m timm_locat.train vit_posattn_in1k --data.root /data/imagenet
    """
    base = locatvit_tiny_in1k()
    return replace(base, model="vit_posattn", schedule="cosine", warmup_epochs=5, min_lr=1e-6, drop_path_rate=0.0)


def vit_posattn_control_in1k() -> TrainConfig:
    """The control of vit_posattn_in1k: a plain ViT-Ti, the same recipe; the paper's top-1, by a summary, is 71.9 %.

    accelerate launch -m timm_locat.train vit_posattn_control_in1k --data.root /data/imagenet
    """
    return replace(vit_posattn_in1k(), model="vit_tiny_patch16_224")


def posattn(kind: str, data: str) -> TrainConfig:
    """The paper's model for small images: 7 layers, 12 heads, width and MLP width 384.

    Args:
        kind: `posattn`; `plain`, its control; `permuted`, with one permutation of the patches for all images.
        data: Name of the data set.
    """
    shape = '{"embed_dim": 384, "depth": 7, "num_heads": 12, "mlp_ratio": 1.0}'
    return TrainConfig(
        model="vit_compact_patch4_32" if kind == "plain" else "vit_posattn_patch4_32",
        model_kwargs=shape if kind == "plain" else "{}",
        data=DataConfig(name=data, protocol="aa+ls", permute_patches=0 if kind == "permuted" else None),
        epochs=300,
        global_batch_size=128,
        peak_lr=1e-3,
        min_lr=1e-5,
        warmup_epochs=5,
        weight_decay=0.05,
        clip_grad=None,
        mixed_precision="bf16",
    )


_NAMED = (
    demo,
    demo_long,
    finetune,
    locatvit_tiny_in1k,
    locatvit_small_in1k,
    locatvit_base_in1k,
    vit_tiny_in1k,
    vit_small_in1k,
    vit_base_in1k,
    jumbo_tiny_in1k,
    jumbo_base_in1k,
    locatjumbo_tiny_in1k,
    locatjumbo_base_in1k,
    locatvit_tiny_mini_imagenet,
    vit_tiny_mini_imagenet,
    vit_posattn_in1k,
    vit_posattn_control_in1k,
)

RECIPES: dict[str, Callable[[], TrainConfig]] = {recipe.__name__: recipe for recipe in _NAMED} | {
    f"{model}_compact_{data}_{protocol}": partial(compact, model, data, protocol)
    for data in ("cifar10", "cifar100", "svhn", "tiny_imagenet", "fashion_mnist")
    for model in ("vit", "locatvit")
    for protocol in ("baseline", "modern")
}
RECIPES |= {
    f"{'vit_posattn' if kind == 'posattn' else f'vit_posattn_{kind}'}_{data}": partial(posattn, kind, data)
    for data in ("cifar10", "cifar100", "svhn")
    for kind in ("posattn", "plain", "permuted")
}
RECIPES |= {f"{name}_in1k": partial(backbone, name) for name in _BACKBONES}
"""Every recipe by name. The compact ones are MODEL_compact_DATA_PROTOCOL."""


def describe(name: str) -> str:
    """What a recipe says about itself."""
    recipe = RECIPES[name]
    if isinstance(recipe, partial) and recipe.func is backbone:
        size, model, _, top1 = _BACKBONES[recipe.args[0]]
        number = f"the paper's top-1 is {top1}" if top1 else "the paper's number was not available to us"
        launch = "--num_processes 4 " if size == "base" else ""
        return (
            f"{model} on ImageNet-1k with the recipe of arXiv:2603.04892; {number}. 300 epochs, batch 1,024."
            f"\n\n    accelerate launch {launch}-m timm_locat.train {name} --data.root /data/imagenet"
        )
    if isinstance(recipe, partial) and recipe.func is posattn:
        kind, data = recipe.args
        about = {
            "posattn": "Positional attention (arXiv:2210.09221)",
            "plain": f"The control of vit_posattn_{data}: a plain ViT of the same shape",
            "permuted": "Positional attention on images with permuted patches: are the neighbours found again?",
        }[kind]
        return (
            f"{about}, on {data}: 7 layers, 12 heads, width 384, 300 epochs, batch 128. The paper's accuracy was not "
            f"available to us.\n\n    accelerate launch -m timm_locat.train {name} --data.root /path/to/{data}"
        )
    if isinstance(recipe, partial):
        model, data, protocol = recipe.args
        kind = "Compact ViT" if model == "vit" else "Compact LocAtViT"
        about = (
            f"{kind} on {data} from scratch, protocol {protocol} (arXiv:2605.16390). 200 epochs, batch 128: our choice."
        )
        return f"{about}\n\n    accelerate launch -m timm_locat.train {name} --data.root /path/to/{data}"
    return (recipe.__doc__ or "").strip()
