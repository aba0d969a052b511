"""Where maps of features and their masks come from: a model over a data set, or arrays that were kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

from torch import Tensor

from timm_locat.errors import UserError

__all__ = ["ArraySource", "Batch", "Source"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some images of a source."""

    indices: list[int]
    """Their numbers."""
    maps: Tensor
    """(B, D, H, W) features."""
    masks: Tensor
    """(B, height, width) classes, or values such as depths."""


class Source(Interface):
    """Images with masks; their numbers must not depend on the order of files."""

    def __len__(self) -> int:
        """Number of images."""

    def name(self, index: int) -> str:
        """What an error calls an image."""

    def batches(self, indices: Sequence[int], epoch: int | None) -> Iterator[Batch]:
        """These images in this order; augmented by the numbers of (epoch, image), or as they are where it is None."""

    def masks(self, indices: Sequence[int]) -> Iterator[Tensor]:
        """The (height, width) masks of these images, not augmented, without computing features."""


class ArraySource:
    """Features that were kept.

    Args:
        maps: (N, D, H, W) float.
        masks: (N, height, width).
        batch: Images at a time.
    """

    def __init__(self, maps: Tensor, masks: Tensor, batch: int = 16) -> None:
        if len(maps) != len(masks):
            raise UserError(f"maps and masks must be of the same images, got {len(maps)} and {len(masks)}")
        self._maps, self._masks, self._batch = maps, masks, batch

    def __len__(self) -> int:
        return len(self._maps)

    def name(self, index: int) -> str:
        return f"number {index}"

    def batches(self, indices: Sequence[int], epoch: int | None) -> Iterator[Batch]:
        for start in range(0, len(indices), self._batch):
            some = list(indices[start : start + self._batch])
            yield Batch(some, self._maps[some], self._masks[some])

    def masks(self, indices: Sequence[int]) -> Iterator[Tensor]:
        return (self._masks[i] for i in indices)
