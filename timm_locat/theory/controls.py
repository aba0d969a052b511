"""Solutions that generalise, side by side: with and without patch association.

Source of the question: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221, which
states that association is not forced by generalisation. The choice of solutions is ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timm_locat.theory.association import patch_association
from timm_locat.theory.data import Structure
from timm_locat.theory.descent import Descent, realistic
from timm_locat.theory.model import accuracy, score

__all__ = ["Solution", "solutions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """One way to classify; lists over seeds."""

    accuracy: list[float]
    exact: list[float]
    recall: list[float]
    logits_DD: Tensor
    """A of the first seed."""
    set_of_D: Tensor
    """Sets of the first seed."""


def solutions(
    structure: Structure,
    descent: Descent,
    seeds: Sequence[int],
    *,
    samples: int = 1000,
    bar: Callable[[int], None] | None = None,
) -> dict[str, Solution]:
    """Train with the diagonal of `descent`, with a zero diagonal, and with A frozen at its start; sum over all patches.

    The global-sum rule is told the feature: it is the sign of the sum over all patches of their product with w.
    All solutions of a seed meet the same sets and feature.
    """
    settings = {
        "trained": descent,
        "zero diagonal": replace(descent, diagonal=0.0),
        "frozen diagonal": replace(descent, lr_attention=0.0),
    }
    found = {}
    for name, setting in settings.items():
        run = realistic(structure, setting, seeds, samples=samples, records=1, bar=bar)
        found[name] = Solution(
            accuracy=run.test_accuracy,
            exact=run.exact,
            recall=run.recall,
            logits_DD=run.logits_SDD[0],
            set_of_D=run.worlds[0].set_of_D,
        )
    images, labels = map(torch.stack, zip(*(world.sample(2000) for world in run.worlds), strict=True))
    features_SF = torch.stack([world.feature_F for world in run.worlds])
    uniform_SDD = torch.zeros(len(seeds), structure.patches, structure.patches)
    right = accuracy(score(images, features_SF, uniform_SDD, descent.activation), labels)
    exact, recall = patch_association(uniform_SDD, torch.stack([world.set_of_D for world in run.worlds]))
    found["global sum"] = Solution(
        accuracy=right.tolist(),
        exact=exact.tolist(),
        recall=recall.tolist(),
        logits_DD=uniform_SDD[0],
        set_of_D=run.worlds[0].set_of_D,
    )
    return found
