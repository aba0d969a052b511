"""Patch association: do the C largest entries of a row of A name the row's own set?

Source of the measure: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221.

Shape letters in this file:
    S seeds   D patches   C patches of a set
"""

import math

import torch
from torch import Tensor

__all__ = ["chance", "patch_association"]


def patch_association(logits_SDD: Tensor, set_of_SD: Tensor) -> tuple[Tensor, Tensor]:
    """How far the largest entries of each row are the row's own set, the patch itself included.

    Equal entries are not ordered in favour of either: the recall is its mean over all orders of them, and a row is
    exact only when every entry of its set is larger than every other.

    Args:
        logits_SDD: A of each model.
        set_of_SD: Set of each patch; sets of equal size.

    Returns:
        exact_S: (S,) share of rows whose C largest entries are their set, in [0, 1].
        recall_S: (S,) mean share of the set among the C largest entries, in [0, 1].
    """
    same_SDD = set_of_SD[:, :, None] == set_of_SD[:, None, :]
    size = int(same_SDD[0, 0].sum())
    kth_SD1 = logits_SDD.topk(size, dim=-1).values[..., -1:]
    above, level = logits_SDD > kth_SD1, logits_SDD == kth_SD1
    free_SD = size - above.sum(-1)
    hits_SD = (above & same_SDD).sum(-1) + free_SD * (level & same_SDD).sum(-1) / level.sum(-1)
    least_own_SD = logits_SDD.masked_fill(~same_SDD, math.inf).amin(-1)
    most_other_SD = logits_SDD.masked_fill(same_SDD, -math.inf).amax(-1)
    return (least_own_SD > most_other_SD).double().mean(-1), (hits_SD / size).double().mean(-1)


def chance(patches: int, set_size: int, *, diagonal_first: bool) -> tuple[float, float]:
    """Exact share and recall of rows in random order.

    Args:
        patches: D.
        set_size: C.
        diagonal_first: The patch itself is known to be the largest, as with a large fixed diagonal.
    """
    if diagonal_first:
        others = set_size - 1
        return 1 / math.comb(patches - 1, others), (1 + others * others / (patches - 1)) / set_size
    return 1 / math.comb(patches, set_size), set_size / patches


def in_set_order(set_of_D: Tensor) -> Tensor:
    """(D,) order of the patches that puts each set together; the first patches' sets come first."""
    return torch.argsort(set_of_D, stable=True)
