"""Build the model, the optimizer and the schedule of a run."""

from typing import Any

import torch
from timm.layers import set_fused_attn, use_fused_attn
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from timm_locat.models import create_model, parse_kwargs
from timm_locat.train.config import TrainConfig

__all__ = ["build_model", "build_optimizer", "build_schedule"]


def build_model(config: TrainConfig, num_classes: int, *, fused: bool = True) -> nn.Module:
    """Create the model of a run.

    Args:
        config: Names the model and its arguments.
        num_classes: Classes of the data.
        fused: Build attention with the fused kernel where timm would.

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
        return create_model(config.model, pretrained=config.pretrained, img_size=size, **kwargs)
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
