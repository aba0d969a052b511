"""Labels of patches: counts from masks, which patches enter the bank, and how the labels of neighbours decode."""

import hashlib
from typing import Protocol as Interface

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "CountLabels",
    "LabelRows",
    "PixelLabels",
    "ValueLabels",
    "count_labels",
    "decode_soft",
    "draw",
    "grid_cells",
    "pack_ids",
    "patch_ranks",
    "unpack_ids",
]

EPOCH_BIT, IMAGE_BIT = 48, 20  # 2^20 patches of an image, 2^28 images
OUT = 2**40  # rank of a patch that no bank may have


def pack_ids(epoch: int, image: int, patches: Tensor) -> Tensor:
    """int64 ids of an image's patches, in the order of (epoch, image, patch)."""
    return patches.long() + (epoch << EPOCH_BIT) + (image << IMAGE_BIT)


def unpack_ids(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Epochs, images and patches of ids."""
    return ids >> EPOCH_BIT, (ids >> IMAGE_BIT) % 2 ** (EPOCH_BIT - IMAGE_BIT), ids % 2**IMAGE_BIT


def draw(*key: int | str) -> int:
    """A 63 bit seed that belongs to a key such as (seed, epoch, image, purpose), and to nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def grid_cells(size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """(height, width) number of the grid cell that each pixel belongs to; sides need not divide.

    Pixel y is in row y * rows // height.
    """
    rows, columns = (torch.arange(side) * cells // side for side, cells in zip(size, grid, strict=True))
    return rows[:, None] * grid[1] + columns


def count_labels(masks: Tensor, grid: tuple[int, int], num_classes: int, ignore_index: int | None) -> Tensor:
    """Count the pixels of each class in each patch.

    Args:
        masks: (B, height, width) whole numbers in 0..num_classes - 1, or `ignore_index`, which does not count.
        grid: Rows and columns of patches.
        num_classes: Number of classes C.
        ignore_index: See above; None when every pixel counts.

    Returns:
        (B, rows * columns, C) int32.
    """
    images, patches = len(masks), grid[0] * grid[1]
    cells = grid_cells((masks.shape[-2], masks.shape[-1]), grid).to(masks.device)
    bins = masks.long() + (cells + torch.arange(images, device=masks.device)[:, None, None] * patches) * num_classes
    if ignore_index is not None:
        bins = bins[masks != ignore_index]
    counts = torch.bincount(bins.flatten(), minlength=images * patches * num_classes)
    return counts.view(images, patches, num_classes).int()


def patch_ranks(counts: Tensor, uniform: Tensor, least: Tensor | int = 1) -> Tensor:
    """Order in which an image's patches enter a bank: 0 for the first; a bank of n per image has ranks below n.

    A patch's score is its uniform number times the sum, over the classes in it, of the number of patches that have
    the class, and the lowest scores come first: small patches of one class that is rare in the image.

    Args:
        counts: (B, N, C) counts of pixels.
        uniform: (B, N) random numbers in [0, 1).
        least: Patches with fewer counted pixels are left out.

    Returns:
        (B, N) int64; patches that are left out have a rank beyond every bank.
    """
    has = (counts > 0).float()
    scores = (has @ has.sum(1)[:, :, None])[:, :, 0] * uniform
    valid = counts.sum(-1) >= least
    order = scores.masked_fill(~valid, torch.inf).argsort(dim=1, stable=True)
    return order.argsort(dim=1).masked_fill_(~valid, OUT)


class LabelRows(Interface):
    """Labels of the rows of a bank, found by id."""

    def select(self, ids: Tensor) -> "LabelRows":
        """Only the rows with these ids, for another process or to forget the others."""


class CountLabels:
    """Pixel counts of rows, as pairs of class and count: about 20 bytes for a row, whatever the number of classes.

    Args:
        ids: (n,) int64.
        counts: (n, C).
    """

    def __init__(self, ids: Tensor, counts: Tensor) -> None:
        order = ids.argsort()
        rows, classes = counts[order].nonzero(as_tuple=True)
        lengths = torch.bincount(rows, minlength=len(ids))
        self.num_classes = counts.shape[1]
        self.ids = ids[order]
        self.starts = F.pad(lengths.cumsum(0), (1, 0))
        self.classes = classes.to(torch.int32)
        self.counts = counts[order][rows, classes].to(torch.int32)

    @classmethod
    def joined(cls, parts: "list[CountLabels]") -> "CountLabels":
        """One store of several; an id occurs in one of them only."""
        new = cls.__new__(cls)
        new.num_classes = parts[0].num_classes
        ids = torch.cat([part.ids for part in parts])
        order = ids.argsort()
        new.ids = ids[order]
        lengths = torch.cat([part.starts.diff() for part in parts])
        offsets = F.pad(lengths.cumsum(0), (1, 0))[:-1][order]
        new.starts = F.pad(lengths[order].cumsum(0), (1, 0))
        entries = _ranges(offsets, lengths[order])
        new.classes = torch.cat([part.classes for part in parts])[entries]
        new.counts = torch.cat([part.counts for part in parts])[entries]
        return new

    def select(self, ids: Tensor) -> "CountLabels":
        new = type(self).__new__(type(self))
        new.num_classes, new.ids = self.num_classes, ids.unique()
        places = torch.searchsorted(self.ids, new.ids)
        lengths = self.starts.diff()[places]
        entries = _ranges(self.starts[places], lengths)
        new.starts = F.pad(lengths.cumsum(0), (1, 0))
        new.classes, new.counts = self.classes[entries], self.counts[entries]
        return new

    def soft(self, weights: Tensor, ids: Tensor) -> Tensor:
        """(Q, C) soft labels: the neighbours' shares of classes, weighted. Both arguments are (Q, k)."""
        queries, k = ids.shape
        places = torch.searchsorted(self.ids, ids.flatten().contiguous())
        starts, lengths = self.starts[places], self.starts.diff()[places]
        entries = _ranges(starts, lengths)
        pairs = torch.repeat_interleave(torch.arange(len(places)), lengths)
        counts = self.counts[entries].float()
        totals = torch.zeros(len(places)).index_add_(0, pairs, counts)
        shares = (weights.flatten() / totals.clamp_min(1))[pairs] * counts
        out = torch.zeros(queries * self.num_classes)
        out.index_add_(0, (pairs // k) * self.num_classes + self.classes[entries], shares)
        return out.view(queries, self.num_classes)


class PixelLabels:
    """Every pixel's label of rows, for a vote at each place in a patch.

    Args:
        ids: (n,) int64.
        pixels: (n, p) labels; -1 where a pixel does not count.
        num_classes: Number of classes C.
    """

    def __init__(self, ids: Tensor, pixels: Tensor, num_classes: int) -> None:
        order = ids.argsort()
        self.ids, self.pixels, self.num_classes = ids[order], pixels[order].to(torch.int16), num_classes

    @classmethod
    def joined(cls, parts: "list[PixelLabels]") -> "PixelLabels":
        ids, pixels = torch.cat([p.ids for p in parts]), torch.cat([p.pixels for p in parts])
        return cls(ids, pixels, parts[0].num_classes)

    def select(self, ids: Tensor) -> "PixelLabels":
        ids = ids.unique()
        return type(self)(ids, self.pixels[torch.searchsorted(self.ids, ids)], self.num_classes)

    def vote(self, ids: Tensor) -> Tensor:
        """(Q, p) commonest label of the (Q, k) neighbours at each place, the lower one of two; 0 where none counts."""
        labels = (
            self.pixels[torch.searchsorted(self.ids, ids.flatten().contiguous())]
            .long()
            .view(*ids.shape, -1)
            .transpose(1, 2)
        )
        votes = torch.zeros(*labels.shape[:2], self.num_classes, dtype=torch.int16)
        votes.scatter_add_(2, labels.clamp_min(0), (labels >= 0).to(torch.int16))
        return votes.argmax(-1)


class ValueLabels:
    """One number for each row, such as a depth.

    Args:
        ids: (n,) int64.
        values: (n,) float32.
    """

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        order = ids.argsort()
        self.ids, self.values = ids[order], values[order]

    @classmethod
    def joined(cls, parts: "list[ValueLabels]") -> "ValueLabels":
        return cls(torch.cat([p.ids for p in parts]), torch.cat([p.values for p in parts]))

    def select(self, ids: Tensor) -> "ValueLabels":
        ids = ids.unique()
        return type(self)(ids, self.values[torch.searchsorted(self.ids, ids)])

    def soft(self, weights: Tensor, ids: Tensor) -> Tensor:
        """(Q, 1) weighted mean of the (Q, k) neighbours' numbers."""
        return (weights * self.values[torch.searchsorted(self.ids, ids.contiguous())]).sum(1, keepdim=True)


def decode_soft(soft: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(height, width) classes: (N, C) soft patch labels, bilinearly upsampled, and the highest taken at each pixel.

    Classes that no patch has are left out of the upsampling; they are 0 everywhere and cannot be the highest.
    """
    present = soft.sum(0).nonzero()[:, 0]
    if len(present) < 2:
        return torch.full(size, int(present[0]) if len(present) else 0)
    maps = soft[:, present].T.reshape(1, len(present), *grid)
    return present[upsample(maps, size)[0].argmax(0)]


def upsample(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear upsampling as the public code has it: half-pixel centres, edges repeated."""
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The whole numbers of several ranges, one after the other."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) + torch.repeat_interleave(starts - ends + lengths, lengths)
