"""Shards: the pieces that a streamed table is read in, each from its start to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from timm_locat.data.images import ImageSource
from timm_locat.errors import UserError, require

if TYPE_CHECKING:
    import datasets

READ_ROWS = 64
"""Rows of undecoded images that a shard takes into memory at a time."""

_WHY = "reading tables of images"


class Shard(Protocol):
    """Consecutive rows of a split."""

    @property
    def num_rows(self) -> int | None:
        """None where only reading it would tell."""

    def read(self) -> Iterator[tuple[ImageSource, int]]:
        """The undecoded image and the label of each row, in order."""

    def source(self, row: int) -> str:
        """What a row is called in errors, as a table that is not streamed calls it."""


@dataclass(frozen=True, eq=False)
class ParquetShard:
    """A row group of a parquet file.

    Args:
        file: The file.
        group: Number of the row group.
        column: Column of the images.
        first: Number of its first row in the file.
        labels: (rows,) int64.
    """

    file: Path
    group: int
    column: str
    first: int
    labels: Tensor = field(repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    def read(self) -> Iterator[tuple[ImageSource, int]]:
        parquet = require("pyarrow.parquet", "data", _WHY)
        labels = iter(self.labels.tolist())
        with as_user_error(self.file), parquet.ParquetFile(self.file) as opened:
            for batch in opened.iter_batches(READ_ROWS, row_groups=[self.group], columns=[self.column]):
                for image in batch.column(0):
                    yield image.as_py(), next(labels)

    def source(self, row: int) -> str:
        return f"parquet row {self.first + row} of {self.file}"


@dataclass(frozen=True, eq=False)
class SavedShard:
    """Rows of a table written by `save_to_disk`.

    Args:
        table: The whole table, whose images do not decode.
        where: What the table is called.
        column: Column of the images.
        first: Number of the first row.
        labels: (rows,) int64.
    """

    table: "datasets.Dataset" = field(repr=False)
    where: str
    column: str
    first: int
    labels: Tensor = field(repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    def read(self) -> Iterator[tuple[ImageSource, int]]:
        for start in range(0, len(self.labels), READ_ROWS):
            labels = self.labels[start : start + READ_ROWS].tolist()
            first = self.first + start
            yield from zip(self.table[first : first + len(labels)][self.column], labels, strict=True)

    def source(self, row: int) -> str:
        return f"row {self.first + row} of {self.where}"


@dataclass(frozen=True, eq=False)
class HubShard:
    """A shard of a data set of the Hub as `datasets` streams it, usually one of its files.

    Args:
        table: All shards, whose images do not decode.
        where: What they are called.
        columns: Columns of the images and of the labels.
        index: Which shard.
        label: From a value of the label column to a label; raises `UserError`.
    """

    table: "datasets.IterableDataset" = field(repr=False)
    where: str
    columns: tuple[str, str]
    index: int
    label: Callable[[Any], int] = field(repr=False)

    @property
    def num_rows(self) -> None:
        return None

    def read(self) -> Iterator[tuple[ImageSource, int]]:
        shard, row = self.table.shard(self.table.num_shards, self.index), 0
        # Not `for row in shard`: in a worker process of a DataLoader that leaves rows to the other workers.
        batches = shard.iter(READ_ROWS)
        while batch := self._next(batches):
            for image, value in zip(*(batch[column] for column in self.columns), strict=True):
                try:
                    label = self.label(value)
                except UserError as err:
                    raise UserError(f"{self.source(row)} {err}") from err
                yield image, label
                row += 1

    def _next(self, batches: Iterator[dict[str, list]]) -> dict[str, list] | None:
        try:
            return next(batches, None)
        # As when a data set is fetched: the network's and the Hub's errors, of several libraries.
        except Exception as err:
            cause = " ".join(str(err).split())[:200] or type(err).__name__
            raise UserError(f"cannot go on reading shard {self.index} of {self.where} ({cause}); try again") from err

    def source(self, row: int) -> str:
        return f"row {row} of shard {self.index} of {self.where}"


@contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """Damaged tables are the user's to mend; arrow's own errors are OSErrors and ValueErrors."""
    try:
        yield
    except (OSError, ValueError) as err:
        raise UserError(f"cannot read {path}: {' '.join(str(err).split())}; write it again") from err
