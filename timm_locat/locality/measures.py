"""How local attention is: pure functions of logits or attention maps.

Attention distance follows Dosovitskiy et al. (arXiv:2010.11929, App. D.7) and Raghu et al. (arXiv:2108.08810): the
distance from a query patch to the patches it attends to, weighted by attention. What neither says (class token, unit)
is a named choice here: `Conventions`.

Only patches are queries; class token and registers have no place to measure from. Every measure is a mean over all
query patches of all images for which it is defined.

Everything is computed from a few sums along each row of one block of logits, so that maps need not be kept.

Shape letters in this file:
    B images   h heads   Q query patches of the block at hand   N patches (= rows * columns of the grid, row-major)
    P prefix tokens   T tokens (= P + N)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from timm_locat.errors import UserError
from timm_locat.locality.conventions import Conventions

__all__ = [
    "GAUSSIANS",
    "MEASURES",
    "Layout",
    "RowSums",
    "Tally",
    "chance_recall",
    "make_layout",
    "measure",
    "neighbourhood_recall",
    "patch_distances",
    "row_measures",
    "row_sums",
]

MEASURES = {
    "mad": "mean attention distance, in the unit of the conventions",
    "mad_without_self": "the same, with what a patch pays to itself spread over the other keys",
    "mad_dropped": "mean attention distance with prefix='drop', whatever the conventions say",
    "entropy": "entropy of the attention over log of the number of keys: 0 is one key, 1 is all alike",
    "entropy_tokens": "the same over all tokens, whatever the conventions say",
    "effective_tokens": "exp of the entropy before that division: a number of keys attended to",
    "self_mass": "share of a patch's attention that goes to itself",
    "neighbour_mass": "share that goes to the patches around it, 3 x 3 without itself",
    "prefix_mass": "share that goes to class token and registers",
    "empty_rows": "share of patches with no attention left for patches; they have no mad and no entropy over patches",
}
"""Measures by name. Shares are of all attention of a patch, so self, neighbours, prefix and the rest add up to 1."""

GAUSSIANS = {
    "alpha": "strength of the Gaussian in units of the logit",
    "sigma_rows": "its standard deviation along rows, in patches",
    "sigma_columns": "the same along columns",
}
"""Of layers with a learned Gaussian bias: means over query patches and images."""

EMPTY = torch.finfo(torch.float32).eps
"""A mass below what float32 can tell from nothing beside 1 is nothing: a row of such is not renormalised."""

_AROUND = [(dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1) if (dr, dc) != (0, 0)]


def patch_distances(grid: tuple[int, int], patch: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Euclidean distance between all pairs of patch centres.

    Args:
        grid: Patch rows and columns, not pixels.
        patch: Height and width of a patch in the unit wanted; 1 for a distance in patches.

    Returns:
        (N, N) float32.
    """
    rows = torch.arange(grid[0], dtype=torch.float32).repeat_interleave(grid[1]) * patch[0]
    columns = torch.arange(grid[1], dtype=torch.float32).repeat(grid[0]) * patch[1]
    return torch.hypot(rows.unsqueeze(1) - rows, columns.unsqueeze(1) - columns)


def longest_distance(grid: tuple[int, int]) -> float:
    """Distance between the centres of opposite corners in patches; 1 for a single patch, which has no other."""
    return math.hypot(grid[0] - 1, grid[1] - 1) or 1.0


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of a layer lie; the same for all images and heads."""

    grid: tuple[int, int]
    """Patch rows and columns."""
    num_prefix: int
    """P."""
    distance: Tensor
    """(N, N) in the unit of the conventions."""
    near: Tensor
    """(N, 8) token index of each patch around a patch; of those that would lie outside, the patch's own."""
    inside: Tensor
    """(N, 8) 1 where `near` is a patch of the grid, else 0."""


def make_layout(
    grid: tuple[int, int],
    num_prefix: int,
    conventions: Conventions,
    patch_pixels: tuple[float, float] | None = None,
    device: torch.device | None = None,
) -> Layout:
    """Describe a grid for the conventions at hand.

    Raises:
        UserError: Distances are wanted in pixels and the size of a patch is not given.
    """
    if conventions.unit == "pixels" and patch_pixels is None:
        raise UserError("unit='pixels' needs the size of a patch: pass patch_pixels=(height, width)")
    step = {
        "fraction": (1 / longest_distance(grid),) * 2,
        "patches": (1.0, 1.0),
        "pixels": patch_pixels,
        "sides": tuple(1 / max(1, side - 1) for side in grid),
    }[conventions.unit]
    near, inside = neighbours(grid)
    distance = patch_distances(grid, step)
    return Layout(grid, num_prefix, distance.to(device), (near + num_prefix).to(device), inside.float().to(device))


def neighbours(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The up to 8 patches around each patch: (N, 8) indices, and (N, 8) whether they are inside of the grid.

    Of those outside, the index is the patch's own.
    """
    index = torch.arange(grid[0] * grid[1]).view(grid)
    near, inside = [], []
    for dr, dc in _AROUND:
        row, column = torch.meshgrid(torch.arange(grid[0]) + dr, torch.arange(grid[1]) + dc, indexing="ij")
        ok = (row >= 0) & (row < grid[0]) & (column >= 0) & (column < grid[1])
        near.append((row * grid[1] + column).where(ok, index).flatten())
        inside.append(ok.flatten())
    return torch.stack(near, dim=1), torch.stack(inside, dim=1)


class RowSums(NamedTuple):
    """Sums of the weights along each row; all (h, B * Q)."""

    own: Tensor
    near: Tensor
    others: Tensor
    """Over the patches but the query."""
    prefix: Tensor
    distance: Tensor
    """Weighted by distance."""
    logit_patches: Tensor
    """Weighted by the logit, over patches."""
    logit_prefix: Tensor


def row_sums(logits: Tensor, weights: Tensor, layout: Layout, first: int) -> RowSums:
    """Everything that the measures need, in one go over a block of rows; both tensors are overwritten.

    The rows need not sum to 1: dividing Q sums is cheaper than dividing Q * T entries, and with the logits at hand an
    entropy needs no logarithm of each.

    Args:
        logits: (B, h, Q, T) float32 or wider, finite.
        weights: Their exponentials.
        layout: Of the layer.
        first: Patch index of the first query.
    """
    prefix = layout.num_prefix
    here = slice(first, first + logits.shape[2])
    logits *= weights
    logit_prefix, logit_patches = logits[..., :prefix].sum(-1), logits[..., prefix:].sum(-1)
    near = weights.gather(-1, layout.near[here].expand(*weights.shape[:2], -1, -1)).mul_(layout.inside[here]).sum(-1)
    # The query's own weight is taken out before summing: beside it, a small rest would lose its digits.
    diagonal = weights.diagonal(prefix + first, dim1=-2, dim2=-1)
    own = diagonal.clone()
    diagonal.zero_()
    patches = weights[..., prefix:]
    others = patches.sum(-1)
    distance = torch.mul(patches, layout.distance[here], out=logits[..., prefix:]).sum(-1)
    sums = RowSums(own, near, others, weights[..., :prefix].sum(-1), distance, logit_patches, logit_prefix)
    return RowSums(*(x.transpose(0, 1).flatten(1) for x in sums))


def row_measures(sums: RowSums, layout: Layout, conventions: Conventions) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Each measure of each row, and which rows have it (None: all)."""
    patches = sums.own + sums.others
    total = patches + sums.prefix
    dropped = sums.distance / total
    filled = patches > EMPTY * total
    kept = {"renormalise": patches, "drop": total, "include": total}[conventions.prefix]
    left = sums.others + (sums.prefix if conventions.prefix == "include" else 0)
    spread = sums.distance / left * (patches / total if conventions.prefix == "drop" else 1)
    entropy_patches = (patches.log() - sums.logit_patches / patches).clamp(min=0)
    entropy_tokens = (total.log() - (sums.logit_patches + sums.logit_prefix) / total).clamp(min=0)
    num_patches = layout.grid[0] * layout.grid[1]
    num_tokens = num_patches + layout.num_prefix
    over_patches = conventions.entropy == "patches"
    entropy, keys = (entropy_patches, num_patches) if over_patches else (entropy_tokens, num_tokens)
    known = filled if over_patches else None
    return {
        "mad": (sums.distance / kept, filled if conventions.prefix == "renormalise" else None),
        "mad_without_self": (spread, left > EMPTY * total),
        "mad_dropped": (dropped, None),
        "entropy": (entropy / (math.log(keys) or 1.0), known),
        "entropy_tokens": (entropy_tokens / (math.log(num_tokens) or 1.0), None),
        "effective_tokens": (entropy.exp(), known),
        "self_mass": (sums.own / total, None),
        "neighbour_mass": (sums.near / total, None),
        "prefix_mass": (sums.prefix / total, None),
        "empty_rows": ((~filled).to(total.dtype), None),
    }


class Tally:
    """Running means per head over rows of many blocks; does not grow with their number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: Tensor | None = None  # (2, measures, h): sums, and numbers of rows in them

    def add(self, rows: dict[str, tuple[Tensor, Tensor | None]]) -> None:
        """Take in measures of shape (h, rows), as from `row_measures`."""
        totals, counts = [], []
        for values, known in rows.values():
            totals.append((values if known is None else values.where(known, 0)).sum(-1))
            counts.append(torch.full_like(totals[-1], values.shape[-1]) if known is None else known.sum(-1))
        self.names = list(rows)
        # Added up on the CPU in float64: a sum over a million rows would lose digits in float32.
        both = torch.stack([torch.stack(totals), torch.stack(counts)]).double().cpu()
        self.sums = both if self.sums is None else self.sums + both

    def means(self) -> dict[str, list[float | None]]:
        """Mean per head; None where no row had the measure."""
        totals, counts = self.sums.tolist()
        return {
            name: [t / c if c else None for t, c in zip(total, count, strict=True)]
            for name, total, count in zip(self.names, totals, counts, strict=True)
        }


def measure(
    attention: Tensor,
    grid: tuple[int, int],
    *,
    num_prefix: int = 1,
    conventions: Conventions | None = None,
    patch_pixels: tuple[float, float] | None = None,
) -> dict[str, list[float | None]]:
    """Every measure of attention maps that are at hand.

    Args:
        attention: (B, h, T, T) after softmax, prefix tokens first, then the patches row by row; rows sum to 1.
        grid: Patch rows and columns.
        num_prefix: P, the number of class tokens and registers.
        conventions: What the numbers mean; the default ones when None.
        patch_pixels: Height and width of a patch, for `unit="pixels"`.

    Returns:
        For each of `MEASURES` a number per head; None where it is defined for no patch of any image.

    Raises:
        UserError: The shape does not fit the grid, or rows do not sum to 1.
    """
    tokens = num_prefix + grid[0] * grid[1]
    if attention.ndim != 4 or attention.shape[2:] != (tokens, tokens):
        raise UserError(
            f"a grid of {grid[0]}x{grid[1]} patches and {num_prefix} prefix tokens needs attention of shape "
            f"(images, heads, {tokens}, {tokens}), got {tuple(attention.shape)}"
        )
    attention = attention if attention.dtype == torch.float64 else attention.float()
    rows = attention[:, :, num_prefix:]
    if not ((rows.sum(-1) - 1).abs() < 0.02).all() or (rows < 0).any():
        raise UserError("rows of attention must sum to 1: give it after softmax, with all tokens, before any dropout")
    conventions = conventions or Conventions()
    layout = make_layout(grid, num_prefix, conventions, patch_pixels, attention.device)
    tally = Tally()
    # Where there is no attention, any finite logarithm will do.
    sums = row_sums(rows.log().clamp(min=-1e4), rows.clone(), layout, 0)
    tally.add(row_measures(sums, layout, conventions))
    return tally.means()


def neighbourhood_recall(
    attention: Tensor, grid: tuple[int, int], permutation: Sequence[int] | Tensor | None = None
) -> list[float]:
    """Share of a patch's true neighbours among the patches that it attends to most.

    Of each patch, as many others as it has neighbours (3 to 8) are taken, those with most attention; the share of
    neighbours among them is averaged over patches. It is `chance_recall` for a head that knows nothing of space.

    Args:
        attention: (h, N, N) between patches, such as a mean over images; the scale of a row does not matter.
        grid: Patch rows and columns.
        permutation: Where the model was shown patches in another order: at i, the place in the image of its i-th token.

    Returns:
        Of each head, from 0 to 1.

    Raises:
        UserError: The shape does not fit the grid, or `permutation` is none.
    """
    count = grid[0] * grid[1]
    if attention.ndim != 3 or attention.shape[1:] != (count, count):
        raise UserError(
            f"a grid of {grid[0]}x{grid[1]} patches needs attention of shape (heads, {count}, {count}), "
            f"got {tuple(attention.shape)}"
        )
    place = torch.arange(count) if permutation is None else torch.as_tensor(permutation).cpu()
    if place.shape != (count,) or not torch.equal(place.sort().values, torch.arange(count)):
        raise UserError(f"permutation must hold each of 0 to {count - 1} once")
    near, inside = neighbours(grid)
    is_near = torch.zeros(count, count, dtype=torch.bool).scatter_(1, near, inside)
    is_near = is_near.fill_diagonal_(False)[place][:, place]
    others = attention.float().cpu().masked_fill(torch.eye(count, dtype=torch.bool), -torch.inf)
    ranks = others.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    wanted = is_near.sum(-1)
    hits = ((ranks < wanted.unsqueeze(-1)) & is_near).sum(-1)
    return (hits / wanted.clamp(min=1)).mean(-1).tolist()


def chance_recall(grid: tuple[int, int]) -> float:
    """`neighbourhood_recall` that a random order of patches has on average."""
    _, inside = neighbours(grid)
    return (inside.sum(-1) / max(1, grid[0] * grid[1] - 1)).mean().item()
