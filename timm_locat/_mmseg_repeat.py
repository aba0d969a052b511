"""Training in mmsegmentation that repeats itself: stopped and resumed, a run computes what it would have computed.

mmengine restores weights, optimizer and the order of the images, but draws augmentations from whatever state the random
generators are in. Here every draw is a function of the seed and of the position in the stream of images, whatever the
number of workers or processes, and dropout one of the seed, the update and the process:

    train_dataloader = dict(sampler=dict(type="DrawSampler"), dataset=dict(pipeline=[dict(type="SeedDraw"), ...]))
    custom_hooks = [dict(type="SeedUpdate")]
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmseg.registry import DATA_SAMPLERS, HOOKS, TRANSFORMS

__all__ = ["DrawSampler", "SeedDraw", "SeedUpdate"]


class Draw(int):
    """Index of an image that also knows the seed of its augmentations, all the way into a worker."""

    entropy: tuple[int, ...]

    def __new__(cls, index: int, entropy: tuple[int, ...]) -> "Draw":
        """Index `index`, augmented from `entropy`."""
        draw = super().__new__(cls, index)
        draw.entropy = entropy
        return draw

    def __getnewargs__(self) -> tuple[int, tuple[int, ...]]:
        """What pickle needs."""
        return int(self), self.entropy

    def __sub__(self, other: int) -> "Draw":
        """`ConcatDataset` subtracts to find the index within a part."""
        return Draw(int(self) - other, self.entropy)


@DATA_SAMPLERS.register_module()
class DrawSampler(InfiniteSampler):
    """mmengine's endless shuffled order, each index with its number in the stream of all processes."""

    _skipped = 0

    def skip(self, num_samples: int) -> None:
        """Go on after `num_samples` indices of this process; mmengine calls it when a run is resumed."""
        super().skip(num_samples)
        self._skipped = num_samples

    def __iter__(self) -> Iterator[Draw]:
        """Endless."""
        for count, index in enumerate(self.indices, self._skipped):
            yield Draw(index, (self.seed, self.rank + self.world_size * count))


@TRANSFORMS.register_module()
class SeedDraw(BaseTransform):
    """First of a training pipeline: the transforms after it draw from the seed of this one image."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Returns `results` as they came."""
        draw = results["sample_idx"]
        if isinstance(draw, Draw):  # another sampler, or a look at one image by hand
            state = np.random.SeedSequence(draw.entropy).generate_state(2)
            np.random.seed(state[0])
            random.seed(int(state[1]))
        return results


@HOOKS.register_module()
class SeedUpdate(Hook):
    """Seeds torch before every update, so that dropout and stochastic depth do not depend on what ran before."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Called by the runner."""
        entropy = (runner.seed, runner.iter, get_rank())
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
