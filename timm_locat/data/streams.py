"""Labelled images read from the start to the end, for tables that are too large to hold or to fetch.

The order is a function of a seed: shards in a random order, then a buffer from which rows are drawn. Parts of a stream
(for processes, for the workers of a DataLoader) neither overlap nor leave anything out, however many shards there are.
Where the number of rows is known, a part is a run of the shuffled shards and reads little that others read; elsewhere
each part reads everything and keeps every n-th row.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import NamedTuple

from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from timm_locat.data._shards import Shard
from timm_locat.data.images import ImageSource, read_image
from timm_locat.errors import UserError

__all__ = ["ImageStream", "StreamRow"]


class StreamRow(NamedTuple):
    """A row before decoding."""

    shard: int
    row: int
    image: ImageSource
    label: int


@dataclass(frozen=True, eq=False)
class ImageStream(IterableDataset[tuple[Image.Image, int]]):
    """Images and labels of one split, one after the other; what `load(..., streaming=True)` returns.

    Iterating gives PIL RGB images and their labels in 0..len(classes) - 1. In the workers of a DataLoader each gives
    its part. An image that cannot be read raises `UserError` with its name. A new iteration starts from the beginning.
    """

    name: str
    """Name or path that it was loaded by."""
    split: str
    """Split that was asked for."""
    classes: tuple[str, ...]
    """Class names in the order of their labels; the training split's, whichever split this is."""
    num_images: int | None
    """Of the whole split, not of a part; None where nothing states it."""
    shards: Sequence[Shard] = field(repr=False)
    """In the order in which they are stored."""
    seed: int | None = None
    """Of the order; None for that in which the rows are stored."""
    buffer: int = 1
    """Rows from which the next one is drawn."""
    index: int = 0
    """Which part this is."""
    count: int = 1
    """Of how many."""

    def shuffled(self, seed: int, buffer: int = 10_000) -> "ImageStream":
        """The same images in another order.

        Args:
            seed: Give another one in each epoch.
            buffer: Undecoded images that an iteration holds in memory to draw from.

        Raises:
            UserError: The buffer is empty.
        """
        if buffer < 1:
            raise UserError(f"the shuffle buffer must hold at least 1 image, got {buffer}")
        return replace(self, seed=seed, buffer=buffer)

    def part(self, index: int, count: int) -> "ImageStream":
        """One of `count` parts, of sizes that differ by at most one; each has a buffer of its own."""
        if not 0 <= index < count:
            raise UserError(f"a part must be in 0..{count - 1}, got {index}")
        # So that a part of a part stays within it, whichever way rows are shared.
        index = self.index * count + index if self._ends else self.index + self.count * index
        return replace(self, index=index, count=self.count * count)

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        worker = get_worker_info()
        mine = self if worker is None else self.part(worker.id, worker.num_workers)
        for row in mine.rows():
            yield read_image(row.image, name=self.source(row)), row.label

    def source(self, row: StreamRow) -> str:
        """What a row is called in errors: its number, from 0, and the file or shard that has it."""
        return self.shards[row.shard].source(row.row)

    def rows(self, first: int = 0) -> Iterator[StreamRow]:
        """The rows of this part, undecoded, from number `first` of its order on.

        Where the number of rows of every shard is known, shards of which nothing is left are passed over unread;
        elsewhere everything is read up to there.
        """
        held: dict[int, StreamRow] = {}
        if self._ends is None:
            order = self._drawn(self._read_counting(held))
            for position in islice(order, first):
                del held[position]
            yield from (held.pop(position) for position in order)
            return
        start, stop = (self._ends[-1] * k // self.count for k in (self.index, self.index + 1))
        order = self._drawn(iter(range(start, stop)))
        passed = bytearray(stop - start)
        for position in islice(order, first):
            passed[position - start] = 1
        reader = self._read(start, passed)
        for position in order:
            while position not in held:
                found, row = next(reader)
                held[found] = row
            yield held.pop(position)

    @property
    def _ends(self) -> tuple[int, ...] | None:
        """Number of rows up to the end of each shard, as ordered; None where a shard does not know its own."""
        sizes = [self.shards[i].num_rows for i in self._shard_order]
        return None if None in sizes else tuple(accumulate(sizes))

    @property
    def _shard_order(self) -> list[int]:
        order = list(range(len(self.shards)))
        if self.seed is not None:
            draw = random.Random(self.seed)
            order.sort(key=lambda _: draw.random())  # of all its methods, only this one never changes
        return order

    def _drawn(self, positions: Iterator[int]) -> Iterator[int]:
        """Positions in the order in which they are drawn from the buffer: a function of the seed and the part."""
        draw = random.Random(f"{self.seed} {self.index} {self.count}")
        held = list(islice(positions, self.buffer))
        for position in positions:
            k = int(draw.random() * len(held))
            yield held[k]
            held[k] = position
        while held:
            yield held.pop(int(draw.random() * len(held)))

    def _read(self, start: int, passed: bytearray) -> Iterator[tuple[int, StreamRow]]:
        """The rows at the positions from `start` on that have not been passed, with their positions."""
        begin = 0
        for shard, end in zip(self._shard_order, self._ends, strict=True):
            low, high = max(begin, start), min(end, start + len(passed))
            if low < high and passed.count(0, low - start, high - start):
                for position, row in enumerate(self._read_shard(shard), begin):
                    if low <= position < high and not passed[position - start]:
                        yield position, row
            begin = end

    def _read_counting(self, held: dict[int, StreamRow]) -> Iterator[int]:
        """Positions of this part's rows, each put into `held` as it is read."""
        position = 0
        for shard in self._shard_order:
            for row in self._read_shard(shard):
                if position % self.count == self.index:
                    held[position] = row
                    yield position
                position += 1

    def _read_shard(self, shard: int) -> Iterator[StreamRow]:
        for number, (image, label) in enumerate(self.shards[shard].read()):
            yield StreamRow(shard, number, image, label)
