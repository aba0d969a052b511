"""The micro-batches of a run: read, on the device, augmented, and ready before they are asked for."""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from timm_locat.data import Protocol
from timm_locat.train.broken import Broken
from timm_locat.train.samples import BatchPlan, Samples, batches
from timm_locat.train.stream import StreamedSamples

__all__ = ["Feed", "MicroBatch"]


class MicroBatch(NamedTuple):
    """What one forward pass sees: uint8 (B, 3, H, W), (B,), (B,) or (B, K); and the seed of what is random in it."""

    images: Tensor
    labels: Tensor
    targets: Tensor
    seed: int


class Feed:
    """Iterates over the micro-batches of one process and epoch.

    Args:
        samples: Training images.
        plan: Which of them each micro-batch has.
        protocol: Their augmentation.
        num_classes: Classes of the data.
        device: Where they go.
        rank: Which process this is.
        workers: Processes that read.
        broken: Takes note of images that cannot be read.
    """

    def __init__(
        self,
        samples: Samples | StreamedSamples,
        plan: BatchPlan,
        protocol: Protocol,
        num_classes: int,
        *,
        device: torch.device,
        rank: int,
        workers: int,
        broken: Broken,
    ) -> None:
        self.samples, self.plan, self.protocol, self.num_classes = samples, plan, protocol, num_classes
        self.device, self.rank, self.workers, self.broken = device, rank, workers, broken
        self.start(0)

    def start(self, epoch: int, first_update: int = 0) -> None:
        """Go to an update of an epoch."""
        self.waited = 0.0
        """Seconds spent waiting for images since."""
        self._ready: list[MicroBatch] = []
        self._source = self._micro_batches(epoch, first_update)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return self._ready.pop() if self._ready else next(self._source)

    def prepare(self) -> None:
        """Get the next micro-batch ready now, if the epoch has one."""
        if not self._ready:
            self._ready.extend(itertools.islice(self._source, 1))

    def _micro_batches(self, epoch: int, first_update: int) -> Iterator[MicroBatch]:
        plan = self.plan
        ids = self.samples.training_ids(plan, epoch, self.rank, first_update)
        source = batches(self.samples, ids, seeds=(plan.seed, epoch), workers=self.workers, broken=self.broken)
        updates = range(first_update, plan.updates_per_epoch)
        for update, step in itertools.product(updates, range(plan.grad_accum_steps)):
            asked = time.perf_counter()
            images, labels = next(source)
            self.waited += time.perf_counter() - asked
            seed = plan.draw_seed(epoch, update, step, self.rank)
            yield self._augmented(images, labels, seed)

    def _augmented(self, images: Tensor, labels: Tensor, seed: int) -> MicroBatch:
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on every device
        images, targets = self.protocol.apply(images, labels, self.num_classes, generator)
        return MicroBatch(images, labels, targets, seed + 1)

    def sources(self, epoch: int, update: int) -> list[str]:
        """What the images of an update are called in errors, as far as this process sees them."""
        steps = self.samples.training_ids(self.plan, epoch, self.rank, update)
        ids = itertools.chain.from_iterable(itertools.islice(steps, self.plan.grad_accum_steps))
        return [self.samples.source(i) for i in ids]
