"""The protocol read word for word: float one-hot labels, gathered keys, lists of pixels.

Slow and large on purpose. Tests hold the real evaluation against it, and `python -m eval speed hummingbird` its costs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["naive_miou"]


def naive_labels(masks: Tensor, grid: tuple[int, int], num_classes: int, ignore_index: int | None) -> Tensor:
    """(B, N, C) share of each class among the counted pixels of each patch; the grid divides the masks."""
    height, width = masks.shape[-2] // grid[0], masks.shape[-1] // grid[1]
    patches = masks.unfold(1, height, height).unfold(2, width, width).flatten(3).flatten(1, 2)
    counted = torch.ones_like(patches, dtype=torch.bool) if ignore_index is None else patches != ignore_index
    one_hot = F.one_hot(patches.masked_fill(~counted, 0), num_classes) * counted[..., None]
    return one_hot.float().sum(2) / counted.sum(2, keepdim=True).clamp_min(1)


def naive_miou(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    num_classes: int,
    ignore_index: int | None = None,
    *,
    k: int = 30,
    beta: float = 0.02,
    batch: int = 10,
) -> float:
    """Mean IoU over the classes present, with every patch of the training images in the bank.

    Args:
        train: (N, D, H, W) features and (N, height, width) masks of the bank.
        val: The same of the queries.
        num_classes: Number of classes C.
        ignore_index: Label of pixels that do not count; a patch without any other pixel stays out of the bank.
        k: Neighbours.
        beta: Temperature.
        batch: Images at a time.
    """
    grid = (train[0].shape[2], train[0].shape[3])
    keys, values = [], []
    for maps, masks in zip(train[0].split(batch), train[1].split(batch), strict=True):
        labels = naive_labels(masks, grid, num_classes, ignore_index)
        rows = F.normalize(maps.flatten(2).transpose(1, 2), dim=2)
        known = labels.sum(2) > 0
        keys.append(rows[known])
        values.append(labels[known])
    bank, bank_labels = torch.cat(keys), torch.cat(values)
    true: list[int] = []
    predicted: list[int] = []
    for maps, masks in zip(val[0].split(batch), val[1].split(batch), strict=True):
        queries = F.normalize(maps.flatten(2).transpose(1, 2), dim=2)
        nearest = (queries.flatten(0, 1) @ bank.T).topk(k).indices.view(*queries.shape[:2], k)
        similarity = torch.einsum("bnd,bnkd->bnk", queries, bank[nearest])
        soft = torch.einsum("bnk,bnkc->bnc", (similarity / beta).softmax(2), bank_labels[nearest])
        soft = soft.transpose(1, 2).unflatten(2, grid)
        guess = F.interpolate(soft, size=masks.shape[-2:], mode="bilinear").argmax(1)
        true += masks.flatten().tolist()
        predicted += guess.flatten().tolist()
    target, guess = torch.tensor(true), torch.tensor(predicted)
    counted = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    target, guess = target[counted], guess[counted]
    ious = [
        ((target == c) & (guess == c)).sum() / ((target == c) | (guess == c)).sum()
        for c in range(num_classes)
        if (target == c).any()
    ]
    return torch.stack(ious).mean().item()
