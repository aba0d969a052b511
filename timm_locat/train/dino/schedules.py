"""What changes along a run of DINO, as functions of the update; arXiv:2104.14294 and its code."""

import math

import torch

from timm_locat.train.dino.config import DinoConfig

__all__ = ["DinoSchedule", "cosine", "teacher_temperature"]


def cosine(step: int, steps: int, start: float, end: float, warmup: int = 0) -> float:
    """A half cosine from `start` towards `end`, which step number `steps` would reach; before it a linear rise.

    Args:
        step: From 0.
        steps: Of the whole run.
        start: Value at the end of the warm-up.
        end: Value that the cosine goes to.
        warmup: Steps that rise linearly from 0, the last of which has `start`.
    """
    if step < warmup:
        return start * step / (warmup - 1) if warmup > 1 else 0.0
    return end + (start - end) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def teacher_temperature(epoch: int, config: DinoConfig) -> float:
    """Temperature of the teacher in an epoch: linear over the warm-up epochs, then constant."""
    epochs, first, last = config.teacher_temp_warmup_epochs, config.warmup_teacher_temp, config.teacher_temp
    if epoch >= epochs:
        return last
    return first + (last - first) * epoch / (epochs - 1) if epochs > 1 else first


class DinoSchedule:
    """Sets learning rate and weight decay before an update.

    Args:
        optimizer: Groups without weight decay stay without.
        config: The run.
        updates_per_epoch: How many updates make an epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: DinoConfig, updates_per_epoch: int) -> None:
        self.optimizer, self.config = optimizer, config
        self.updates = config.epochs * updates_per_epoch
        self.warmup = round(config.warmup_epochs * updates_per_epoch)
        self.decayed = [group["weight_decay"] > 0 for group in optimizer.param_groups]

    def step_update(self, update: int) -> None:
        """Go to an update, counted from 0 over all epochs."""
        config = self.config
        rate = cosine(update, self.updates, config.peak_lr, config.min_lr, self.warmup)
        decay = cosine(update, self.updates, config.weight_decay, config.weight_decay_end)
        for group, decayed in zip(self.optimizer.param_groups, self.decayed, strict=True):
            group["lr"] = rate
            group["weight_decay"] = decay if decayed else 0.0
