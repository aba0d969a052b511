"""Build what a run trains with: data, model, optimizer, schedule."""

from dataclasses import replace
from typing import Any

import torch
from timm.data import resolve_model_data_config
from timm.layers import set_fused_attn, use_fused_attn
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from timm_locat.data import ImageData, ImageStream, Protocol, load
from timm_locat.models import create_any_size, create_model, parse_kwargs
from timm_locat.train.config import DataConfig, TrainConfig
from timm_locat.train.samples import Samples, input_size, native_transform
from timm_locat.train.stream import StreamedSamples, open_samples

__all__ = ["build_model", "build_optimizer", "build_samples", "build_schedule", "open_sets"]


def open_sets(data: DataConfig) -> tuple[ImageData | ImageStream, ImageData | ImageStream]:
    """The training and the test split, with the classes of the former.

    Raises:
        UserError: See `timm_locat.data.load`.
    """
    options = {"root": data.root, "streaming": data.streaming}
    train = load(data.name, "train", **options)
    return train, load(data.name, "test", classes=train.classes, **options)


def build_samples(
    config: TrainConfig,
    model: nn.Module,
    train: ImageData | ImageStream,
    test: ImageData | ImageStream,
    *,
    progress: bool,
) -> tuple[Protocol, Samples | StreamedSamples, Samples | StreamedSamples]:
    """The augmentation of a run, and what reads its images at the size that the model takes.

    Args:
        config: The run.
        model: As `build_model` returned it.
        train: From `open_sets`.
        test: The same.
        progress: Show a bar where a set is decoded once.
    """
    facts = resolve_model_data_config(model)
    size = input_size(model, config.model)
    options = {"crop_pct": facts["crop_pct"], "interpolation": facts["interpolation"]}
    options |= {"in_memory": config.data.in_memory, "progress": progress}
    # Cutout and the noise of random erasing are to be the model's idea of nothing.
    protocol = replace(config.data.augmentation(), pixel_mean=tuple(facts["mean"]), pixel_std=tuple(facts["std"]))
    per_image = protocol.per_image(size, native_transform=native_transform(train))
    training = {"per_image": per_image, "skip_broken": config.skip_broken, "buffer": config.data.shuffle_buffer}
    return protocol, open_samples(train, size, **training, **options), open_samples(test, size, **options)


def build_model(config: TrainConfig, num_classes: int, *, fused: bool = True, any_size: bool = False) -> nn.Module:
    """Create the model of a run.

    Args:
        config: Names the model and its arguments.
        num_classes: Classes of the data.
        fused: Build attention with the fused kernel where timm would.
        any_size: Let it take images of other sizes than its own, where its class can.

    Raises:
        UserError: See `timm_locat.models.create_model`.
    """
    kwargs: dict[str, Any] = {"num_classes": num_classes, **parse_kwargs(config.model_kwargs, "--model-kwargs")}
    if config.drop_path_rate:
        kwargs["drop_path_rate"] = config.drop_path_rate
    size = None if config.img_size is None else (config.img_size, config.img_size)
    was_fused = bool(use_fused_attn())
    set_fused_attn(fused and was_fused)
    try:
        create = create_any_size if any_size else create_model
        return create(config.model, pretrained=config.pretrained, img_size=size, **kwargs)
    finally:
        set_fused_attn(was_fused)


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with timm's parameter groups: no weight decay on vectors and on what the model exempts."""
    return create_optimizer_v2(
        model,
        "adamw",
        lr=config.peak_lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        layer_decay=config.layer_decay,
    )


def build_schedule(config: TrainConfig, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Scheduler:
    """Learning rate as a function of the update: linear warm-up, then cosine or linear down to `min_lr`."""
    warmup = round(config.warmup_epochs * updates_per_epoch)
    common = dict(
        t_initial=max(1, config.epochs * updates_per_epoch - warmup),
        lr_min=config.min_lr,
        warmup_t=warmup,
        warmup_lr_init=config.min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    if config.schedule == "cosine":
        return CosineLRScheduler(optimizer, **common)
    return PolyLRScheduler(optimizer, power=1.0, **common)
