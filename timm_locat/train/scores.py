"""Accuracy and loss of a classifier, every sample counted once whatever the number of processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

__all__ = ["evaluate", "in_step"]


@torch.inference_mode()
def evaluate(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    prepare: Callable[[Tensor], Tensor],
    accelerator: Accelerator,
    num_classes: int,
) -> dict[str, Any]:
    """Sum over the batches of this process, then over the processes; a process may have no batch.

    Args:
        forward: From normalised images to (B, K) logits; the model must be in eval mode.
        batches: uint8 (B, 3, H, W) and int64 (B,), this process's share.
        prepare: Moves such images to the device and normalises them.
        accelerator: Adds up over processes.
        num_classes: K.

    Returns:
        `loss` (mean cross-entropy, no smoothing), `accuracy` and `top5` in percent, `samples`, and `confusion`, int64
        (K, K) on the CPU with a row for each true class. `top5` is over min(5, K).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=accelerator.device)
    for images, labels in batches:
        labels = labels.to(accelerator.device, non_blocking=True)
        logits = forward(prepare(images)).float()
        top = logits.topk(min(5, num_classes), dim=1).indices
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (top == labels.unsqueeze(1)).sum()
        confusion.index_put_((labels, top[:, 0]), torch.ones_like(labels), accumulate=True)
    loss, correct5 = accelerator.reduce(sums, reduction="sum").tolist()
    confusion = accelerator.reduce(confusion, reduction="sum").cpu()
    samples = int(confusion.sum())
    return {
        "loss": loss / samples,
        "accuracy": 100 * int(confusion.trace()) / samples,
        "top5": 100 * correct5 / samples,
        "samples": samples,
        "confusion": confusion,
    }


def in_step(
    batches: Iterable[tuple[Tensor, Tensor]], passes: int, idle: Callable[[], Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, then `idle` until there have been `passes` in all.

    The processes of a sharded model gather its weights in every forward pass, so that all have to make as many.
    """
    done = 0
    for batch in batches:
        done += 1
        yield batch
    for _ in range(passes - done):
        idle()
