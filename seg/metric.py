"""mmsegmentation's mIoU, class by class and unrounded.

The stock metric sums pixels in float32, which cannot count beyond 2**24 one by one, and rounds to 0.01 %.
"""

from typing import Any

import torch
from mmseg.evaluation.metrics import IoUMetric
from mmseg.registry import METRICS

__all__ = ["ClassIoU", "class_iou"]


def class_iou(areas: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """(C,) float64 intersection over union; nan for a class that is neither in the masks nor predicted.

    Args:
        areas: For each image, pixels per class of the intersection and of the union, as the stock metric gathers them.
    """
    intersection, union = (torch.stack([area[i].double() for area in areas]).sum(0) for i in range(2))
    return intersection / union


@METRICS.register_module()
class ClassIoU(IoUMetric):
    """`IoUMetric` that keeps `per_class`: {class name: IoU in percent, or nan}."""

    per_class: dict[str, float]

    def compute_metrics(self, results: list) -> dict[str, float]:
        """As in the base class."""
        iou = 100 * class_iou(results)
        self.per_class = dict(zip(self.dataset_meta["classes"], iou.tolist(), strict=True))
        metrics: dict[str, Any] = super().compute_metrics(results)
        return metrics
