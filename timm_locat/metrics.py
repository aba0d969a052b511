"""Scores of label maps and of features: pure functions of tensors that training and evaluation share."""

from typing import Literal

import torch
from torch import Tensor

from timm_locat.errors import require

__all__ = [
    "Average",
    "Match",
    "class_iou",
    "classes_present",
    "confusion",
    "effective_rank",
    "knn_votes",
    "matched",
    "mean_iou",
    "pixel_accuracy",
]

Average = Literal["present", "finite", "all"]
Match = Literal["identity", "hungarian"]


def confusion(target: Tensor, prediction: Tensor, num_classes: int, ignore_index: int | None = None) -> Tensor:
    """Count pixels by true and predicted class.

    Args:
        target: Whole numbers of any shape, each in 0..num_classes - 1 or `ignore_index`.
        prediction: The same shape, each in 0..num_classes - 1 where the target is not ignored.
        num_classes: Number of classes C.
        ignore_index: Target value whose pixels do not count, whatever was predicted; it may be a class's number.

    Returns:
        (C, C) int64 on the target's device; rows are true classes, columns predicted ones. Sum them over batches.

    Raises:
        ValueError: The shapes differ, or a class lies outside its range.
    """
    if target.shape != prediction.shape:
        raise ValueError(f"target and prediction must have one shape, got {target.shape} and {prediction.shape}")
    true, predicted = target.flatten().long(), prediction.flatten().long()
    if ignore_index is not None:
        counted = true != ignore_index
        true, predicted = true[counted], predicted[counted]
    for name, values in (("target", true), ("prediction", predicted)):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < num_classes:
            raise ValueError(f"{name} must lie in 0..{num_classes - 1}, got {int(values.min())}..{int(values.max())}")
    pairs = torch.bincount(true * num_classes + predicted, minlength=num_classes**2)
    return pairs.view(num_classes, num_classes)


def class_iou(matrix: Tensor) -> Tensor:
    """(C,) float64 intersection over union of each class of a confusion matrix; NaN where it has no pixel at all."""
    m = matrix.double()
    hits = m.diagonal()
    return hits / (m.sum(0) + m.sum(1) - hits)


def classes_present(matrix: Tensor) -> Tensor:
    """(C,) bool: whether the target has the class."""
    return matrix.sum(1) > 0


def pixel_accuracy(matrix: Tensor) -> float:
    """Share of the counted pixels that are right, 0 to 1; NaN where none counts."""
    return (matrix.diagonal().sum().double() / matrix.sum().double()).item()


def matched(matrix: Tensor) -> Tensor:
    """The confusion matrix with its columns put in the order that gives the highest sum of IoU over the classes.

    This is how clusters without names are scored (Hungarian method). Where classes have names it can only flatter.
    """
    m = matrix.double()
    iou = m / (m.sum(1, keepdim=True) + m.sum(0, keepdim=True) - m).clamp_min(1e-8)
    optimize = require("scipy.optimize", "eval", "the Hungarian match")
    _, columns = optimize.linear_sum_assignment(-iou.cpu().numpy())
    return matrix[:, torch.as_tensor(columns, device=matrix.device)]


def mean_iou(matrix: Tensor, average: Average = "present", match: Match = "identity") -> float:
    """Mean intersection over union, 0 to 1.

    Args:
        matrix: (C, C) counts, true classes in rows.
        average: `present` takes the classes that the target has. `finite` takes those that it has or that were
            predicted. `all` takes every class, and one without pixels counts as 0.
        match: `identity`, or `hungarian` for `matched` columns.

    Returns:
        The mean, NaN where no class is left to take.
    """
    if match == "hungarian":
        matrix = matched(matrix)
    iou = class_iou(matrix)
    if average == "all":
        return iou.nan_to_num(0.0).mean().item()
    return iou[classes_present(matrix) if average == "present" else iou.isfinite()].mean().item()


def knn_votes(
    bank: Tensor, labels: Tensor, queries: Tensor, num_classes: int, *, neighbours: int = 20, temperature: float = 0.07
) -> Tensor:
    """Class weights by the nearest neighbours: DINO's k-NN classifier (arXiv:2104.14294), exact.

    Args:
        bank: (N, C) features, none of length 0.
        labels: int64 (N,).
        queries: (M, C) features.
        num_classes: K.
        neighbours: Those of the largest cosine vote; all N where there are fewer.
        temperature: A neighbour votes with exp(cosine / temperature).

    Returns:
        (M, K); the class is its argmax.
    """
    bank = torch.nn.functional.normalize(bank.float(), dim=1)
    votes = []
    for part in queries.float().split(1024):
        cosines, found = (torch.nn.functional.normalize(part, dim=1) @ bank.T).topk(min(neighbours, len(bank)), dim=1)
        weights = (cosines / temperature).exp()
        votes.append(weights.new_zeros(len(part), num_classes).scatter_add_(1, labels[found], weights))
    return torch.cat(votes)


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the singular values of (N, C) features, scaled to sum to 1 (Roy and Vetterli, 2007).

    From 1 where all lie on a line through the origin, to min(N, C). Not centred: features that are all alike have 1.
    """
    values = torch.linalg.svdvals(features.double())
    return torch.special.entr(values / values.sum()).sum().exp().item()
