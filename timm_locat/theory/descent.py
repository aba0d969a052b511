"""Gradient descent on A and v: from samples (realistic), and on the exact expectation (idealised).

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. Learning rates, steps
and start are our choice: the paper's were not available.

Shape letters in this file:
    S seeds   N images   D patches   F features of a patch   K kinds of image, with probabilities
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from timm_locat.errors import UserError
from timm_locat.theory.association import patch_association
from timm_locat.theory.data import Structure, World
from timm_locat.theory.model import Activation, accuracy, gradients, score

__all__ = ["Descent", "Trained", "descend", "idealised", "realistic"]

MAX_KINDS = 50_000  # 11,628 at the default sizes; a step is a pass over all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Descent:
    """Settings of gradient descent; all are our choice."""

    steps: int = 1500
    lr_v: float = 0.01
    lr_attention: float = 5.0
    """Learning rate of A; 0 freezes it."""
    start_v: float = 0.01
    """Standard deviation of each entry of v at the start; in the idealised setting the length of v."""
    diagonal: float = 2.0
    """Every diagonal entry of A, never trained. The other entries start at 0."""
    max_step: float = 0.5
    """Longest step: without one, the gradients of a cubic of D terms overflow at large D. In the realistic setting it
    limits the length of a step of the vector v, and of each row of A. In the idealised one v and A are three numbers,
    and it limits the step of each of these."""
    activation: Activation = field(default_factory=Activation)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")
        for name in ("lr_v", "lr_attention", "start_v"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        if not 0 < self.max_step < math.inf or not math.isfinite(self.diagonal):
            raise UserError(f"max_step must be positive and diagonal finite, got {self.max_step} and {self.diagonal}")

    def start(self, count: int, patches: int) -> Tensor:
        """(S, D, D) A before training."""
        return self.diagonal * torch.eye(patches).repeat(count, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models after descent, one per seed, and the way there."""

    v_SF: Tensor
    logits_SDD: Tensor
    worlds: Sequence[World]
    test_accuracy: list[float]
    exact: list[float]
    recall: list[float]
    course: list[dict]
    """At each recorded step: `step`, `loss`, `accuracy`, `exact`, `recall`, lists over seeds."""
    frames: list[tuple[int, Tensor]]
    """Step and A (D, D) of the first seed, at each recorded step."""


def check_finite(step: int, *numbers: Tensor) -> None:
    """Refuse to go on with numbers that are infinite or nan."""
    if not all(number.isfinite().all() for number in numbers):
        raise UserError(
            f"gradient descent diverged: at step {step} a number is no longer finite; "
            "lower lr_v, lr_attention or max_step"
        )


def limited(step: Tensor, most: float) -> Tensor:
    """`step` with every vector of the last dimension cut to a length of at most `most`."""
    length = step.norm(dim=-1, keepdim=True)
    return step * (most / length.clamp_min(most))


def descend(
    images_SNDF: Tensor,
    labels_SN: Tensor,
    v_SF: Tensor,
    logits_SDD: Tensor,
    descent: Descent,
    watch: Callable[[int, Tensor, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Full-batch gradient descent of all seeds at once.

    Args:
        images_SNDF: Training images of each seed.
        labels_SN: Their labels.
        v_SF: Start of v.
        logits_SDD: Start of A; its diagonal stays as it is.
        descent: Settings.
        watch: Called with step, loss, v and A before each step, and once after the last.

    Returns:
        v_SF and logits_SDD at the end; the arguments are not changed.

    Raises:
        UserError: The loss or a parameter is no longer finite.
    """
    v_SF, logits_SDD = v_SF.clone(), logits_SDD.clone()
    off_diagonal = 1 - torch.eye(logits_SDD.shape[-1])
    trains_attention = descent.lr_attention > 0
    for step in range(descent.steps + 1):
        loss_S, grad_v, grad_A = gradients(
            images_SNDF, labels_SN, v_SF, logits_SDD, descent.activation, attention=trains_attention
        )
        check_finite(step, loss_S, v_SF, logits_SDD)
        if watch is not None:
            watch(step, loss_S, v_SF, logits_SDD)
        if step == descent.steps:
            break
        v_SF -= limited(descent.lr_v * grad_v, descent.max_step)
        if grad_A is not None:
            logits_SDD -= limited(descent.lr_attention * grad_A * off_diagonal, descent.max_step)
    return v_SF, logits_SDD


def realistic(
    structure: Structure,
    descent: Descent,
    seeds: Sequence[int],
    *,
    samples: int = 1000,
    test_samples: int = 2000,
    records: int = 15,
    bar: Callable[[int], None] | None = None,
) -> Trained:
    """Train on samples from a random start, one world per seed.

    Args:
        samples: Training images N.
        test_samples: Fresh images for the accuracy.
        records: Number of points at which the course is recorded, besides the start.
        bar: Told the number of steps done since it was last called.
    """
    if not seeds:
        raise UserError("training needs at least one seed, got none")
    # One seed after the other: a seed's images fit in the cache of a processor core, those of several do not.
    parts = [_one_seed(structure, descent, seed, samples, test_samples, records, bar) for seed in seeds]
    names = ("loss", "accuracy", "exact", "recall")
    course = [
        {"step": points[0]["step"], **{name: [point[name] for point in points] for name in names}}
        for points in zip(*(part[3] for part in parts), strict=True)
    ]
    worlds, v, logits, _, frames = zip(*parts, strict=True)
    last = course[-1]
    return Trained(
        v_SF=torch.cat(v),
        logits_SDD=torch.cat(logits),
        worlds=worlds,
        test_accuracy=last["accuracy"],
        exact=last["exact"],
        recall=last["recall"],
        course=course,
        frames=frames[0],
    )


def _one_seed(structure, descent, seed, samples, test_samples, records, bar):
    world = World(structure, seed)
    (images, labels), (test_images, test_labels) = world.sample(samples), world.sample(test_samples)
    v = descent.start_v * torch.randn(1, structure.features, generator=world.generator)
    at = _recorded(descent.steps, records)
    course: list[dict[str, float]] = []
    frames: list[tuple[int, Tensor]] = []

    def watch(step: int, loss_S: Tensor, v_SF: Tensor, logits_SDD: Tensor) -> None:
        if bar is not None and step:
            bar(1)
        if step not in at:
            return
        right_S = accuracy(score(test_images[None], v_SF, logits_SDD, descent.activation), test_labels[None])
        exact_S, recall_S = patch_association(logits_SDD, world.set_of_D[None])
        numbers = dict(loss=loss_S, accuracy=right_S, exact=exact_S, recall=recall_S)
        course.append({"step": step, **{name: value.item() for name, value in numbers.items()}})
        frames.append((step, logits_SDD[0].clone()))

    v, logits = descend(images[None], labels[None], v, descent.start(1, structure.patches), descent, watch)
    return world, v, logits, course, frames


def _recorded(steps: int, records: int) -> set[int]:
    # Squares, because most of what is to be seen happens early.
    return {round(steps * (i / records) ** 2) for i in range(records + 1)}


def _kinds(structure: Structure) -> tuple[Tensor, Tensor]:
    """Every image up to a reordering of sets and of patches within a set, as feature strengths, and its probability.

    Returns:
        strength_KD: (K, D) float64; the first set is informative with label +1, sets lie next to each other.
        probability_K: (K,) float64, summing to 1.
    """
    size, q = structure.set_size, structure.clutter
    sets = [(plus, minus) for plus in range(size + 1) for minus in range(size + 1 - plus)]
    others = structure.num_sets - 1
    number = math.comb(len(sets) + others - 1, others)
    if number > MAX_KINDS:
        raise UserError(
            f"the idealised setting sums over {number:,} kinds of image and takes at most {MAX_KINDS:,}; "
            "use fewer or smaller sets"
        )

    def chance_of(plus: int, minus: int) -> float:
        orders = math.comb(size, plus) * math.comb(size - plus, minus)
        return orders * (q / 2) ** (plus + minus) * (1 - q) ** (size - plus - minus)

    strengths, probabilities = [], []
    for kinds in combinations_with_replacement(sets, others):
        repeats = math.prod(math.factorial(n) for n in Counter(kinds).values())
        probabilities.append(math.factorial(others) // repeats * math.prod(chance_of(*kind) for kind in kinds))
        row = [1] * size
        for plus, minus in kinds:
            row += [1] * plus + [-1] * minus + [0] * (size - plus - minus)
        strengths.append(row)
    return torch.tensor(strengths, dtype=torch.float64), torch.tensor(probabilities, dtype=torch.float64)


def idealised(structure: Structure, descent: Descent, *, records: int = 15) -> list[dict[str, float]]:
    """Gradient descent on the exact expectation of the loss, with v along the feature and equal entries of A.

    Symmetry then leaves three numbers: v = alpha * w, one entry of A within the sets and one across them. The noise is
    orthogonal to w and drops out. The expectation is a finite sum over all kinds of image, so nothing is sampled.

    Returns:
        At each recorded step: `step`, `loss`, `accuracy`, `alpha`, `within`, `across`. Association is within > across.
    """
    strength_KD, probability_K = _kinds(structure)
    patches, size = structure.patches, structure.set_size
    set_of_D = torch.arange(patches) // size
    own = (set_of_D[:, None] == set_of_D) & ~torch.eye(patches, dtype=torch.bool)
    other = set_of_D[:, None] != set_of_D
    eye = torch.eye(patches, dtype=torch.float64)
    alpha = torch.tensor(descent.start_v, dtype=torch.float64, requires_grad=True)
    within, across = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    at = _recorded(descent.steps, records)
    course = []
    for step in range(descent.steps + 1):
        logits_DD = descent.diagonal * eye + within * own + across * other
        z_KD = patches * alpha * strength_KD @ logits_DD.softmax(-1).T
        score_K = descent.activation.value(z_KD).sum(-1)
        loss = probability_K @ torch.nn.functional.softplus(-score_K)
        check_finite(step, loss, alpha, within, across)
        if step in at:
            numbers = dict(loss=loss, accuracy=probability_K @ (score_K > 0).double())
            numbers.update(alpha=alpha, within=within, across=across)
            course.append({"step": step, **{name: float(value.detach()) for name, value in numbers.items()}})
        if step == descent.steps:
            break
        grads = torch.autograd.grad(loss, (alpha, within, across))
        # A shared number collects the gradients of all its entries; each entry of A takes its own part as a step.
        rates = (descent.lr_v, descent.lr_attention / int(own.sum()), descent.lr_attention / int(other.sum()))
        with torch.no_grad():
            for number, rate, grad in zip((alpha, within, across), rates, grads, strict=True):
                number -= (rate * grad).clamp(-descent.max_step, descent.max_step)
    return course
