"""From a data set to the batches of a training run, as a function of (seed, epoch, update) and of nothing else.

No sampler, loader or process holds state that a resumed run would have to restore.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.models import get_model_input_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from timm_locat.data import DATASETS, ImageData, ImageStream, decode_all, eval_transform, permute_patches
from timm_locat.data.augment import LoaderTransform
from timm_locat.data.transforms import EvalTransform
from timm_locat.errors import UserError
from timm_locat.train.broken import Broken, Standby

if TYPE_CHECKING:
    from timm_locat.train.stream import StreamedSamples

__all__ = [
    "BatchPlan",
    "Samples",
    "batches",
    "evaluation_ids",
    "input_size",
    "native_transform",
    "normaliser",
    "num_patches",
    "patch_order",
    "permuted",
    "seed_for",
]

IN_MEMORY_BYTES = 2 * 2**30
"""Sets whose decoded pixels take less than this are decoded once."""


def seed_for(*numbers: int) -> int:
    """A 63-bit seed from whole numbers such as (seed, epoch, batch); neighbouring numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class BatchPlan:
    """Which images each forward pass of a run sees.

    An epoch is a permutation of the training set cut into updates of `global_batch_size`; the rest of the permutation
    (less than one update) is left out, other images each epoch. An update is cut into `grad_accum_steps * processes`
    micro-batches, handed to the processes in turn: two processes see in one step what one process sees in two.

    Args:
        num_samples: None where it is not known, which needs `updates`.
        updates: Per epoch; None for as many as there are images for.
    """

    num_samples: int | None
    global_batch_size: int
    grad_accum_steps: int
    processes: int
    seed: int
    updates: int | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size % (self.grad_accum_steps * self.processes):
            raise UserError(
                f"global_batch_size={self.global_batch_size} must be a multiple of grad_accum_steps="
                f"{self.grad_accum_steps} times {self.processes} processes; change one of them"
            )
        if self.num_samples is None and self.updates is None:
            raise UserError(
                "nothing states how many images the streamed training split has; say with --data.updates-per-epoch how "
                f"many updates of {self.global_batch_size} images make an epoch"
            )
        if self.num_samples is not None and self.num_samples < (self.updates or 1) * self.global_batch_size:
            what = f"{self.updates} updates" if self.updates else "one update"
            raise UserError(
                f"the training split has {self.num_samples} images, fewer than {what} of global_batch_size="
                f"{self.global_batch_size}; lower it"
            )

    @property
    def updates_per_epoch(self) -> int:
        return self.updates or self.num_samples // self.global_batch_size

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // (self.grad_accum_steps * self.processes)

    def epoch(self, epoch: int, rank: int, first_update: int = 0) -> list[list[int]]:
        """Sample ids of each micro-batch of one process, from `first_update` on, in order."""
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        order = order[: self.updates_per_epoch * self.global_batch_size]
        micro = order.view(self.updates_per_epoch, self.grad_accum_steps, self.processes, self.micro_batch_size)
        return micro[first_update:, :, rank].flatten(0, 1).tolist()

    def draw_seed(self, epoch: int, update: int, step: int, rank: int) -> int:
        """Seed of everything random in one forward pass: augmentation, dropout, stochastic depth."""
        return seed_for(self.seed, epoch, update, step * self.processes + rank)


def evaluation_ids(num_samples: int, batch_size: int, rank: int, processes: int) -> list[list[int]]:
    """Sample ids of each batch of one process; every sample is in exactly one batch of one process."""
    mine = list(range(rank, num_samples, processes))
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]


def native_transform(data: ImageData | ImageStream) -> Callable[[Tensor], Tensor] | None:
    """What a known data set does to its pixels before anything else."""
    entry = DATASETS.get(data.name)
    return entry.native_transform if entry is not None else None


def input_size(model: nn.Module, name: str) -> tuple[int, int]:
    """Height and width that a model at hand was built for, which may differ from its published weights'.

    Raises:
        UserError: It was not built for three channels.
    """
    channels, *size = get_model_input_config(model)["input_size"]
    if channels != 3:
        raise UserError(f"images have 3 channels, {name} was built for {channels}: leave out in_chans")
    return tuple(size)


def normaliser(facts: Mapping[str, Any], device: torch.device) -> Callable[[Tensor], Tensor]:
    """From uint8 (B, 3, H, W) to float32 on the device, normalised by the `mean` and `std` in `facts`."""
    mean, std = (torch.tensor(facts[name], device=device).view(1, -1, 1, 1) for name in ("mean", "std"))
    return lambda images: (images.to(device, non_blocking=True).float() / 255 - mean) / std


def patch_order(num_patches: int, seed: int) -> Tensor:
    """The permutation that `permute_patches` applies: (N,) int64, for `timm_locat.data.permute_patches`."""
    return torch.randperm(num_patches, generator=torch.Generator().manual_seed(seed_for(seed)))


def num_patches(model: nn.Module) -> int:
    """Number of patches that a model cuts an image of its own size into.

    Raises:
        UserError: The model does not cut images into patches.
    """
    embed = getattr(model, "patch_embed", None)
    if not hasattr(embed, "num_patches"):
        raise UserError(f"permute_patches needs a model with patches, got {type(model).__name__}; leave it out")
    return embed.num_patches


def permuted(prepare: Callable[[Tensor], Tensor], model: nn.Module, seed: int) -> Callable[[Tensor], Tensor]:
    """`prepare`, and then the patches of every image in one other order; only for models that have patches."""
    order = patch_order(num_patches(model), seed)
    return lambda images: permute_patches(prepare(images), order, tuple(model.patch_embed.patch_size))


class Samples(Dataset):
    """8-bit pixels and labels by lists of ids, from memory where the set is small, else from its files.

    Args:
        data: From `timm_locat.data.load`.
        img_size: Height and width that the model takes.
        crop_pct: See `timm_locat.data.eval_transform`.
        interpolation: The same.
        skip_broken: Unreadable images in a row for which the next readable one may stand in.
        per_image: What the augmentation protocol does to each image while it is read, instead of the evaluation
            transform; rules out decoding once.
        in_memory: Decode the whole set now if it takes less than 2 GiB.
        progress: Show a bar while doing so.
    """

    def __init__(
        self,
        data: ImageData,
        img_size: tuple[int, int],
        *,
        crop_pct: float,
        interpolation: str,
        skip_broken: int = 0,
        per_image: LoaderTransform | None = None,
        in_memory: bool = True,
        progress: bool = False,
    ) -> None:
        native = native_transform(data)
        self.data = data
        self.standby = Standby(data, skip_broken) if skip_broken else None
        self.found_at_start: dict[str, str] = {}
        self.transform: EvalTransform = eval_transform(img_size, crop_pct, interpolation, native_transform=native)
        self.per_image = per_image
        self.pixels: Tensor | None = None
        if in_memory and per_image is None and len(data) * 3 * img_size[0] * img_size[1] < IN_MEMORY_BYTES:
            self.pixels, _ = decode_all(self.standby or data, self.transform, progress=progress)
            if self.standby is not None:
                self.found_at_start = self.standby.take_found()

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_images(self) -> int:
        return len(self.data)

    def training_ids(self, plan: BatchPlan, epoch: int, rank: int, first_update: int = 0) -> Iterable[list[int]]:
        """What `batches` needs of each micro-batch of one process, from `first_update` on, in order."""
        return plan.epoch(epoch, rank, first_update)

    def evaluation_ids(self, batch_size: int, rank: int, processes: int) -> Iterable[list[int]]:
        """The same for an evaluation: every image in exactly one batch of one process."""
        return evaluation_ids(len(self.data), batch_size, rank, processes)

    def numbers(self, i: int) -> tuple[int, ...]:
        """What the seed of a sample is made of."""
        return (i,)

    def source(self, i: int) -> str:
        """What a sample is called in errors."""
        return self.data.source(i)

    @property
    def labels(self) -> Tensor:
        """int64 (N,), with those of the stand-ins known so far."""
        return self.data.labels if self.standby is None else self.standby.labels

    def __getitems__(self, ids: list[tuple[int, int]]) -> tuple[Tensor, Tensor, dict[str, str]] | UserError:
        """Samples, each given by its id and the seed of what happens while it is read.

        Returns:
            uint8 (B, 3, H, W) and int64 (B,); and the unreadable images for which others stand in.

        An unreadable image is returned as its error, not raised: a DataLoader wraps what a worker raises in its own
        traceback.
        """
        order = [i for i, _ in ids]
        if self.pixels is not None:
            return self.pixels[order], self.labels[order], {}
        try:
            pixels = torch.stack([self._read(i, seed) for i, seed in ids])
        except UserError as err:
            return err
        return pixels, self.labels[order], self.standby.take_found() if self.standby is not None else {}

    def _read(self, i: int, seed: int) -> Tensor:
        image = (self.standby or self.data)[i][0]
        if self.per_image is None:
            return self.transform(image)
        return self.per_image(image, torch.Generator().manual_seed(seed))


def _same(batch):
    """Collate function: `Samples.__getitems__` has made a batch already."""
    return batch


def batches(
    samples: "Samples | StreamedSamples",
    ids: Iterable[list[Any]],
    *,
    seeds: tuple[int, ...] = (),
    workers: int = 0,
    broken: Broken | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of `ids` in order.

    Args:
        samples: What to read.
        ids: Sample ids of each batch, or streamed rows; taken from as batches are asked for.
        seeds: What the seed of a sample is made of, besides its own numbers: (seed, epoch).
        workers: Processes that read.
        broken: Takes note of unreadable images for which others stand in.

    Raises:
        UserError: An image cannot be read; the sentence names its file.
    """
    # Seeding takes longer than a lookup in memory, where nothing is drawn.
    draws = samples.per_image is not None
    loader = DataLoader(
        samples,
        batch_sampler=([(i, seed_for(*seeds, *samples.numbers(i)) if draws else 0) for i in batch] for batch in ids),
        num_workers=workers,
        collate_fn=_same,
        # With a generator of its own the loader leaves torch's global one alone.
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
    )
    if broken is not None:
        broken.note(samples.found_at_start)
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        images, labels, found = batch
        if broken is not None:
            broken.note(found)
        yield images, labels
