"""Transfer: the same sets with a new feature, attention kept as it is and only v learned, from few images.

Source of the experiment: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. Sizes
and the compared attentions are our choice.

Shape letters in this file:
    D patches
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from timm_locat.theory.data import Structure, World
from timm_locat.theory.descent import Descent, descend, realistic
from timm_locat.theory.model import accuracy, score

__all__ = ["attentions", "refit", "transfer"]


def attentions(pretrained_DD: Tensor, set_of_D: Tensor, descent: Descent) -> dict[str, Tensor]:
    """A before the softmax, frozen in the target task: what was learned, its start, nothing, and the truth."""
    patches = len(set_of_D)
    same_DD = (set_of_D[:, None] == set_of_D).float()
    return {
        "pretrained": pretrained_DD,
        "diagonal": descent.start(1, patches)[0],
        "uniform": torch.zeros(patches, patches),
        # exp(-20) of the weight goes to other sets, which is none in float32
        "true sets": 20 * same_DD,
    }


def refit(world: World, frozen: dict[str, Tensor], sizes: Sequence[int], descent: Descent) -> dict[str, list[float]]:
    """Learn v on the first images of one pool with each attention frozen.

    Args:
        world: Target task; sampled from.
        frozen: A of each kind.
        sizes: Numbers of images to learn from.
        descent: Settings; its learning rate of A is not used.

    Returns:
        Accuracy on 2,000 fresh images for each kind and size.
    """
    images, labels = world.sample(max(sizes))
    test_images, test_labels = world.sample(2000)
    # one start for all: the difference is the attention's
    v = descent.start_v * torch.randn(1, world.structure.features, generator=world.generator)
    only_v = replace(descent, lr_attention=0.0)
    found: dict[str, list[float]] = {}
    for name, logits_DD in frozen.items():
        found[name] = []
        for size in sizes:
            fitted, _ = descend(images[None, :size], labels[None, :size], v, logits_DD[None], only_v)
            right = accuracy(score(test_images[None], fitted, logits_DD[None], descent.activation), test_labels[None])
            found[name].append(right.item())
    return found


def transfer(
    structure: Structure,
    pretraining: Descent,
    refitting: Descent,
    seeds: Sequence[int],
    sizes: Sequence[int],
    *,
    samples: int,
    bar: Callable[[int], None] | None = None,
) -> dict:
    """Pretrain on one feature, refit on another, seed after seed.

    Args:
        samples: Images of the pretraining.
        bar: Told the number of pretraining steps done.

    Returns:
        `accuracy`: for each kind of attention, a list over seeds of lists over `sizes`; `source_accuracy` and
        `source_recall` of the pretraining, lists over seeds.
    """
    trained = realistic(structure, pretraining, seeds, samples=samples, records=1, bar=bar)
    accuracies: dict[str, list[list[float]]] = {}
    for world, logits_DD in zip(trained.worlds, trained.logits_SDD, strict=True):
        world.new_feature()
        found = refit(world, attentions(logits_DD, world.set_of_D, pretraining), sizes, refitting)
        for name, values in found.items():
            accuracies.setdefault(name, []).append(values)
    return {"accuracy": accuracies, "source_accuracy": trained.test_accuracy, "source_recall": trained.recall}
