"""The same batches from a stream: which images a step sees is a function of (seed, epoch, update) here too."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from timm_locat.data import ImageData, ImageStream, eval_transform
from timm_locat.data.augment import LoaderTransform
from timm_locat.data.images import read_image
from timm_locat.data.streams import StreamRow
from timm_locat.errors import UserError
from timm_locat.train.samples import BatchPlan, Samples, native_transform, seed_for

__all__ = ["StreamedSamples", "open_samples"]


class StreamedSamples(Dataset):
    """`Samples` of a stream. Rows are read by the process that trains, and decoded by its workers.

    Each of the `grad_accum_steps * processes` micro-batches of an update comes from a part of the stream of its own, so
    that two processes see in one step what one process sees in two.

    Args:
        stream: From `timm_locat.data.load`.
        img_size: Height and width that the model takes.
        crop_pct: See `timm_locat.data.eval_transform`.
        interpolation: The same.
        buffer: Rows to shuffle from, held by all processes together.
        skip_broken: Unreadable images in a row for which the next readable one of the batch may stand in.
        per_image: What the augmentation protocol does to each image, instead of the evaluation transform.
    """

    def __init__(
        self,
        stream: ImageStream,
        img_size: tuple[int, int],
        *,
        crop_pct: float,
        interpolation: str,
        buffer: int = 1,
        skip_broken: int = 0,
        per_image: LoaderTransform | None = None,
    ) -> None:
        native = native_transform(stream)
        self.data = stream
        self.transform = eval_transform(img_size, crop_pct, interpolation, native_transform=native)
        self.buffer = buffer
        self.skip_broken = skip_broken
        self.per_image = per_image
        self.num_images = stream.num_images
        self.found_at_start: dict[str, str] = {}

    def training_ids(self, plan: BatchPlan, epoch: int, rank: int, first_update: int = 0) -> Iterator[list[StreamRow]]:
        """As `Samples.training_ids`: the rows themselves, undecoded.

        Raises:
            UserError: The stream has fewer than the plan takes from it.
        """
        parts = plan.grad_accum_steps * plan.processes
        order = self.data.shuffled(seed_for(plan.seed, epoch), max(1, self.buffer // parts))
        mine = [order.part(step * plan.processes + rank, parts) for step in range(plan.grad_accum_steps)]
        sources = [part.rows(first_update * plan.micro_batch_size) for part in mine]
        for update in range(first_update, plan.updates_per_epoch):
            for source in sources:
                rows = list(islice(source, plan.micro_batch_size))
                if len(rows) < plan.micro_batch_size:
                    raise UserError(
                        f"the training split of {self.data.name} ends after {update} updates, an epoch was to have "
                        f"{plan.updates_per_epoch}, as asked for or by its stated length; start again with "
                        f"--data.updates-per-epoch {update}"
                    )
                yield rows

    def evaluation_ids(self, batch_size: int, rank: int, processes: int) -> Iterator[list[StreamRow]]:
        """As `Samples.evaluation_ids`."""
        rows = self.data.part(rank, processes).rows()
        while batch := list(islice(rows, batch_size)):
            yield batch

    def numbers(self, row: StreamRow) -> tuple[int, ...]:
        """What the seed of a row is made of."""
        return row.shard, row.row

    def source(self, row: StreamRow) -> str:
        """What a row is called in errors."""
        return self.data.source(row)

    def __getitems__(self, ids: list[tuple[StreamRow, int]]) -> tuple[Tensor, Tensor, dict[str, str]] | UserError:
        """As `Samples.__getitems__`."""
        rows = [row for row, _ in ids]
        pixels, labels, found = [], [], {}
        for i, (_, seed) in enumerate(ids):
            for row in (rows[i:] + rows[:i])[: self.skip_broken + 1]:
                try:
                    image = read_image(row.image, name=self.source(row))
                except UserError as err:
                    found[self.source(row)] = str(err)
                    last = err
                    continue
                pixels.append(self._transformed(image, seed))
                labels.append(row.label)
                break
            else:
                return last
        return torch.stack(pixels), torch.tensor(labels), found

    def _transformed(self, image: Image.Image, seed: int) -> Tensor:
        if self.per_image is None:
            return self.transform(image)
        return self.per_image(image, torch.Generator().manual_seed(seed))


def open_samples(
    data: ImageData | ImageStream,
    img_size: tuple[int, int],
    *,
    in_memory: bool = True,
    progress: bool = False,
    buffer: int = 1,
    **options: Any,
) -> Samples | StreamedSamples:
    """What reads `data`; see `Samples` and `StreamedSamples` for the arguments."""
    if isinstance(data, ImageStream):
        return StreamedSamples(data, img_size, buffer=buffer, **options)
    return Samples(data, img_size, in_memory=in_memory, progress=progress, **options)
