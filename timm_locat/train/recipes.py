"""Recipes: functions that return a complete `TrainConfig`. A variant is `dataclasses.replace` of another.

Each says what it is, what it costs and what to expect; the numbers come from records in eval/results.
"""

from collections.abc import Callable
from dataclasses import replace

from timm_locat.train.config import DataConfig, TrainConfig

__all__ = ["RECIPES"]


def demo() -> TrainConfig:
    """LocAtViT compact on the embedded Fashion-MNIST images: under 5 minutes on two CPU cores.

    accelerate launch -q -m timm_locat.train demo
    """
    return TrainConfig(
        model="locatvit_compact_patch4_32",
        # Xavier weights: with timm's default std of 0.02 at width 192, 10,000 image passes end 3 points lower.
        model_kwargs='{"weight_init": "moco"}',
        # Every shoe points to the left, in the test images too. So few passes are better spent without flips: they
        # cost 6 points after 10,000 of them.
        data=DataConfig(name="fashion_mnist_mini", protocol="none"),
        epochs=4,
        global_batch_size=25,
        peak_lr=1e-3,
        warmup_epochs=0.5,
        mixed_precision="bf16",
    )


def demo_long() -> TrainConfig:
    """The demo with more passes over the same images, mirrored at random: under 20 minutes on two CPU cores.

    accelerate launch -q -m timm_locat.train demo_long
    """
    return replace(demo(), data=DataConfig(name="fashion_mnist_mini", protocol="flip"), epochs=20, warmup_epochs=1)


RECIPES: dict[str, Callable[[], TrainConfig]] = {recipe.__name__: recipe for recipe in (demo, demo_long)}
