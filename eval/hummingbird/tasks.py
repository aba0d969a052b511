"""What neighbours are asked for: classes of pixels, or a number such as depth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eval.hummingbird.labels import (
    CountLabels,
    LabelRows,
    PixelLabels,
    ValueLabels,
    count_labels,
    decode_soft,
    grid_cells,
    upsample,
)
from eval.hummingbird.protocol import Protocol
from timm_locat.errors import UserError
from timm_locat.metrics import class_iou, classes_present, confusion, mean_iou, pixel_accuracy

__all__ = ["Depth", "Segmentation", "check_mask"]

DEPTH_BINS = 255


def check_mask(mask: Tensor, name: str, num_classes: int, ignore_index: int | None) -> None:
    """Refuse labels that no class has, naming the image."""
    labels = mask if ignore_index is None else mask[mask != ignore_index]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        allowed = f"0..{num_classes - 1}" + ("" if ignore_index is None else f" or {ignore_index} (ignored)")
        raise UserError(
            f"the mask of image {name} must hold labels in {allowed}, it has {int(labels.min())}.."
            f"{int(labels.max())}; correct the mask or the number of classes"
        )


class Segmentation:
    """Classes of pixels, scored by IoU.

    Args:
        protocol: Says how ignored pixels enter the bank, how labels are decoded and how IoU is averaged.
        classes: Names of the classes.
        ignore_index: Label of pixels that do not count; None when there is none.
    """

    def __init__(self, protocol: Protocol, classes: Sequence[str], ignore_index: int | None = None) -> None:
        self.protocol, self.classes, self.ignore_index = protocol, list(classes), ignore_index
        self.num_classes = len(self.classes)

    def check(self, mask: Tensor, name: str) -> None:
        check_mask(mask, name, self.num_classes, self.ignore_index)

    def check_grid(self, size: tuple[int, int], grid: tuple[int, int]) -> None:
        """Refuse a grid that the protocol cannot decode."""
        if self.protocol.decode == "vote" and (size[0] % grid[0] or size[1] % grid[1]):
            raise UserError(
                f"this protocol labels every place in a patch, so the grid must divide the image, got a grid of "
                f"{grid[0]}x{grid[1]} for {size[0]}x{size[1]} pixels; choose another --img-size"
            )

    def bank_counts(self, masks: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, N, C) counts as the bank sees them."""
        masks, ignore_index = self._bank_masks(masks)
        return count_labels(masks, grid, self.num_classes, ignore_index)

    def bank_labels(
        self, ids: Tensor, masks: Tensor, counts: Tensor, chosen: Tensor, grid: tuple[int, int]
    ) -> LabelRows:
        """Labels of the chosen (B, N) patches, whose ids are given in that order."""
        if self.protocol.decode == "soft":
            return CountLabels(ids, counts[chosen])
        masks, ignore_index = self._bank_masks(masks)
        pixels = masks.long() if ignore_index is None else masks.long().masked_fill(masks == ignore_index, -1)
        return PixelLabels(ids, _patches(pixels, grid)[chosen], self.num_classes)

    def empty(self) -> Tensor:
        """The sum that `score` adds to."""
        return torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def predict(
        self, labels: Any, weights: Tensor, ids: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """(height, width) classes of one image from the (N, k) neighbours of its patches."""
        if self.protocol.decode == "soft":
            return decode_soft(labels.soft(weights, ids), grid, size)
        return _unpatched(labels.vote(ids), grid, size)

    def score(self, mask: Tensor, prediction: Tensor) -> Tensor:
        return confusion(mask, prediction, self.num_classes, self.ignore_index)

    def ceiling(self, mask: Tensor, grid: tuple[int, int]) -> Tensor:
        """What the true labels of the patches decode to: the best that any features can do on this grid."""
        if self.protocol.decode == "vote":
            return mask.long() if self.ignore_index is None else mask.long().masked_fill(mask == self.ignore_index, 0)
        counts = count_labels(mask[None], grid, self.num_classes, self.ignore_index)[0].float()
        return decode_soft(counts / counts.sum(1, keepdim=True).clamp_min(1), grid, tuple(mask.shape))

    def summary(self, total: Tensor) -> dict[str, Any]:
        """The numbers that a confusion matrix gives; IoU and accuracy are shares, 0 to 1."""
        iou, present = class_iou(total), classes_present(total)
        return {
            "miou": mean_iou(total, self.protocol.average, self.protocol.match),
            "miou_identity": mean_iou(total, self.protocol.average),
            "miou_hungarian": mean_iou(total, self.protocol.average, "hungarian"),
            "miou_present": mean_iou(total),
            "pixel_accuracy": pixel_accuracy(total),
            "classes_present": int(present.sum()),
            "class_iou": {name: iou[i].item() for i, name in enumerate(self.classes) if present[i]},
        }

    def _bank_masks(self, masks: Tensor) -> tuple[Tensor, int | None]:
        if self.protocol.ignored == "drop" or self.ignore_index is None:
            return masks, self.ignore_index
        return masks.masked_fill(masks == self.ignore_index, 0), None


class Depth:
    """A positive number at each pixel, scored by the root of the mean squared error, in the unit of the masks.

    Pixels that are 0, negative or not finite have no value and do not count. A row's value is the mean over its patch,
    and patches are chosen by the values in 255 steps from an image's least to its greatest (our choice; the public
    code takes the steps over a batch).
    """

    num_classes = DEPTH_BINS + 1

    def check(self, mask: Tensor, name: str) -> None:
        if not (mask.isfinite() & (mask > 0)).any():
            raise UserError(f"the depth of image {name} has no value above 0; remove the image")

    def check_grid(self, size: tuple[int, int], grid: tuple[int, int]) -> None:
        pass

    def bank_counts(self, masks: Tensor, grid: tuple[int, int]) -> Tensor:
        values = masks.masked_fill(~self._valid(masks), torch.nan)
        low = values.nan_to_num(torch.inf).amin((1, 2), keepdim=True)
        high = values.nan_to_num(-torch.inf).amax((1, 2), keepdim=True)
        bins = ((values - low) / (high - low).clamp_min(1e-12) * DEPTH_BINS).nan_to_num(-1).long()
        return count_labels(bins, grid, self.num_classes, -1)

    def bank_labels(
        self, ids: Tensor, masks: Tensor, counts: Tensor, chosen: Tensor, grid: tuple[int, int]
    ) -> LabelRows:
        return ValueLabels(ids, self._means(masks, grid)[chosen])

    def empty(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def predict(
        self, labels: Any, weights: Tensor, ids: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        return upsample(labels.soft(weights, ids).view(1, 1, *grid), size)[0, 0]

    def score(self, mask: Tensor, prediction: Tensor) -> Tensor:
        valid = self._valid(mask)
        return torch.stack([(mask - prediction)[valid].double().square().sum(), valid.sum().double()])

    def ceiling(self, mask: Tensor, grid: tuple[int, int]) -> Tensor:
        return upsample(self._means(mask[None], grid).view(1, 1, *grid), tuple(mask.shape))[0, 0]

    def summary(self, total: Tensor) -> dict[str, Any]:
        return {"rmse": (total[0] / total[1]).sqrt().item()}

    @staticmethod
    def _valid(masks: Tensor) -> Tensor:
        return masks.isfinite() & (masks > 0)

    def _means(self, masks: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, N) mean of the values in each patch, 0 where it has none."""
        valid, cells = self._valid(masks), grid_cells(tuple(masks.shape[-2:]), grid)
        places = (cells + torch.arange(len(masks))[:, None, None] * grid[0] * grid[1])[valid]
        length = len(masks) * grid[0] * grid[1]
        sums = torch.bincount(places, masks[valid].double(), minlength=length)
        return (sums / torch.bincount(places, minlength=length).clamp_min(1)).float().view(len(masks), -1)


def _patches(masks: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, N, p) pixels of each patch of (B, height, width)."""
    rows = masks.unflatten(2, (grid[1], -1)).unflatten(1, (grid[0], -1))
    return rows.transpose(2, 3).flatten(3).flatten(1, 2)


def _unpatched(patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(height, width) image of (N, p) patches."""
    shape = (*grid, size[0] // grid[0], size[1] // grid[1])
    return patches.view(shape).transpose(1, 2).reshape(size)
