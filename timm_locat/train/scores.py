"""Accuracy and loss of a classifier, every sample counted once whatever the number of processes."""

from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

__all__ = ["evaluate", "predict"]


@torch.inference_mode()
def predict(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    prepare: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Logits (N, K) float32 and labels (N,) of all batches, on the device of the logits."""
    parts = [(forward(prepare(images)).float(), labels) for images, labels in batches]
    logits = torch.cat([part for part, _ in parts])
    return logits, torch.cat([labels for _, labels in parts]).to(logits.device)


@torch.inference_mode()
def evaluate(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    prepare: Callable[[Tensor], Tensor],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Sum over the batches of this process, then over the processes.

    Args:
        forward: From normalised images to (B, classes) logits; the model must be in eval mode.
        batches: uint8 (B, 3, H, W) and int64 (B,), this process's share.
        prepare: Moves such images to the device and normalises them.
        accelerator: Adds up over processes.

    Returns:
        `loss` (mean cross-entropy, no smoothing), `accuracy` and `top5` in percent, `samples`.
        `top5` is over min(5, classes).
    """
    sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
    for images, labels in batches:
        labels = labels.to(accelerator.device, non_blocking=True)
        logits = forward(prepare(images)).float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += top[:, 0].sum()
        sums[2] += top.sum()
        sums[3] += len(labels)
    loss, correct, correct5, samples = accelerator.reduce(sums, reduction="sum").tolist()
    return {
        "loss": loss / samples,
        "accuracy": 100 * correct / samples,
        "top5": 100 * correct5 / samples,
        "samples": int(samples),
    }
