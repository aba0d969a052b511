"""Tables with an image column: parquet files, and folders written by `datasets`' `save_to_disk`.

Parquet files are read into memory, still compressed as the image files they are, and not by `datasets.load_dataset`:
that keeps a copy in a cache and finds it again by path and time of change, so that a file replaced by one of the same
time (as unpacking an archive does) would give the old images.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from timm_locat.data._columns import image_and_label, labels_of
from timm_locat.data._folders import ALL, SPLITS, Found, extension, find_split, follows_training, kind_of_split
from timm_locat.data._shards import ParquetShard, SavedShard, Shard, as_user_error
from timm_locat.data.images import ImageSource
from timm_locat.errors import UserError, require

if TYPE_CHECKING:
    import datasets

MAX_PARQUET_BYTES = 4 * 2**30
"""Parquet files larger than this together are refused, since they are held in memory."""

SAVED_SHARD_ROWS = 1000
"""Rows that make a shard of a table written by `save_to_disk`."""

_WHY = "reading tables of images"


@dataclass(frozen=True)
class Origins:
    """Where each row of a table comes from.

    Args:
        pieces: What to call a row of each piece of the table, without its number: `"parquet row {} of a.parquet"`.
        ends: Number of rows up to the end of each piece.
    """

    pieces: tuple[tuple[str, str], ...]
    ends: tuple[int, ...]

    def locate(self, index: int) -> tuple[int, int]:
        """The piece that a row lies in, and its number there."""
        piece = bisect_right(self.ends, index)
        return piece, index - (self.ends[piece - 1] if piece else 0)

    def source(self, index: int) -> str:
        piece, row = self.locate(index)
        kind, place = self.pieces[piece]
        return f"{kind} {row} of {place}"


@dataclass(frozen=True)
class Rows:
    """Undecoded images by row: a table with an image column that does not decode, and where its rows come from."""

    table: "datasets.Dataset"
    column: str
    origins: Origins

    def __getitem__(self, index: int) -> ImageSource:
        return self.table[index][self.column]

    def source(self, index: int) -> str:
        return self.origins.source(index)


@dataclass(frozen=True)
class StreamedRows:
    """Undecoded images that are read from start to end: a table, and its image column."""

    table: "Table"
    column: str

    @property
    def num_rows(self) -> int:
        return self.table.origins.ends[-1]

    def shards(self, labels: Tensor) -> list[Shard]:
        return self.table.shards(self.column, labels)

    def source(self, index: int) -> str:
        return self.table.origins.source(index)


class Table(Protocol):
    """One split as a table."""

    @property
    def where(self) -> str: ...
    @property
    def features(self) -> "datasets.Features": ...
    @property
    def origins(self) -> Origins: ...
    def column(self, name: str) -> list[Any]: ...
    def undecoded(self, name: str) -> "datasets.Dataset": ...
    def shards(self, name: str, labels: Tensor) -> list[Shard]: ...


Reader = Callable[[Table, Table | None, str, tuple[str, ...] | None], Found]
"""`read_table` or `stream_table`."""


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files with the same columns, one after the other."""

    files: tuple[Path, ...]

    @property
    def where(self) -> str:
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def features(self) -> "datasets.Features":
        datasets = require("datasets", "data", _WHY)
        first, *others = (datasets.Features.from_arrow_schema(_parquet_header(file)[0]) for file in self.files)
        for features, file in zip(others, self.files[1:], strict=True):
            if features != first:
                raise UserError(f"{file} has other columns or classes than {self.files[0]}; write them alike")
        return first

    @property
    def origins(self) -> Origins:
        counts = [_parquet_header(file)[1] for file in self.files]
        return Origins(tuple(("parquet row", str(file)) for file in self.files), tuple(accumulate(counts)))

    def column(self, name: str) -> list[Any]:
        return [value for file in self.files for value in _parquet_column(file, name)[name].to_pylist()]

    def undecoded(self, name: str) -> "datasets.Dataset":
        size = sum(file.stat().st_size for file in self.files)
        if size > MAX_PARQUET_BYTES:
            raise UserError(
                f"{self.where} takes {size / 2**30:.1f} GiB, more than the {MAX_PARQUET_BYTES / 2**30:g} GiB that are "
                "read into memory; stream it (streaming=True, --data.streaming), or convert it once with "
                "datasets.load_dataset('parquet', ...) and save_to_disk"
            )
        datasets = require("datasets", "data", _WHY)
        arrow = require("pyarrow", "data", _WHY)
        table = arrow.concat_tables([_parquet_column(file, name) for file in self.files])
        return not_decoding(datasets.Dataset(datasets.table.InMemoryTable(table)), name)

    def shards(self, name: str, labels: Tensor) -> list[Shard]:
        """A shard for each row group."""
        shards: list[Shard] = []
        read = 0
        for file in self.files:
            first = 0
            for group, rows in enumerate(_row_groups(file)):
                shards.append(ParquetShard(file, group, name, first, labels[read : read + rows]))
                first, read = first + rows, read + rows
        return shards


@dataclass(frozen=True)
class SavedTable:
    """A table written by `save_to_disk`, mapped into memory."""

    table: "datasets.Dataset"
    where: str

    @property
    def features(self) -> "datasets.Features":
        return self.table.features

    @property
    def origins(self) -> Origins:
        return Origins((("row", self.where),), (len(self.table),))

    def column(self, name: str) -> list[Any]:
        return list(self.table[name][:])

    def undecoded(self, name: str) -> "datasets.Dataset":
        return not_decoding(self.table.select_columns([name]), name)

    def shards(self, name: str, labels: Tensor) -> list[Shard]:
        """A shard for every thousand rows; they are mapped into memory, so that any can be read."""
        table = self.undecoded(name)
        starts = range(0, len(table), SAVED_SHARD_ROWS)
        return [SavedShard(table, self.where, name, i, labels[i : i + SAVED_SHARD_ROWS]) for i in starts]


def open_tables(path: Path, split: str, classes: tuple[str, ...] | None, read: Reader) -> Found | None:
    """One split of whatever tables a folder holds; None where it holds none. Arguments as for `open_parquet`."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return open_saved(path, split, classes, read)
    return open_parquet(path, split, classes, read) if parquet_files(path) else None


def open_parquet(path: Path, split: str, classes: tuple[str, ...] | None, read: Reader) -> Found:
    """One split of a parquet file, or of the parquet files in a folder.

    Args:
        path: A file, or a folder with the files in it or in its subfolder `data`. A file belongs to the split that its
            name begins or ends with: `train.parquet`, `train-00000-of-00002.parquet`, `mini-train.parquet`.
        split: Any name of a split; `all` reads a given file whatever its name, or a folder whose files name no split.
        classes: Class names in the order of their labels; those of the training split when None.
        read: What is made of the table that is found.
    """
    files = [path] if path.is_file() else parquet_files(path)
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file), []).append(file)
    unnamed = by_split.pop(None, [])
    if kind_of_split(split) == ALL:
        if by_split and path.is_dir():
            raise UserError(f"{path} is divided into {', '.join(by_split)}; ask for one of them instead of {ALL!r}")
        return read(ParquetTable(tuple(files)), None, split, classes)
    tables = {name: ParquetTable(tuple(named)) for name, named in by_split.items()}
    found = choose_table(tables, path, split, classes, f"a file named {split}*.parquet or *-{split}.parquet", read)
    return replace(found, left_out=Counter(extension(file.name) for file in unnamed))


def open_saved(path: Path, split: str, classes: tuple[str, ...] | None, read: Reader) -> Found:
    """One split of a folder written by `save_to_disk`; arguments as for `open_parquet`."""
    datasets = require("datasets", "data", _WHY)
    with _no_bars(datasets), as_user_error(path):
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        tables = {name: SavedTable(table, str(path / name)) for name, table in saved.items()}
        if split == ALL:
            raise UserError(f"{path} is divided into {', '.join(tables)}; ask for one of them instead of {ALL!r}")
    else:
        table = SavedTable(saved, str(path))
        if split == ALL:
            return read(table, None, split, classes)
        tables = {str(saved.split): table} if saved.split else {}
    return choose_table(tables, path, split, classes, f"a split named {split}", read)


def choose_table(
    tables: Mapping[str, Table],
    path: Path | str,
    split: str,
    classes: tuple[str, ...] | None,
    wanted: str,
    read: Reader,
) -> Found:
    """Read the asked one of several splits, labelled as in the training split.

    Args:
        tables: Splits by name.
        path: Where they are.
        split: Any name of a split but `all`, or another name that one of the tables has.
        classes: Class names in the order of their labels; those of the training split when None.
        wanted: What an error says was expected there.
        read: What is made of the table that is found.
    """
    table = find_split(split, tables, str(path))
    if table is None:
        has = f"it has {', '.join(tables)}" if tables else f"nothing there names a split; ask for {ALL!r} to use all"
        raise UserError(f"expected {wanted} in {path}, but {has}")
    trained = find_split("train", tables, str(path)) if follows_training(split) else None
    return read(table, trained, split, classes)


def read_table(table: Table, trained: Table | None, split: str, classes: tuple[str, ...] | None) -> Found:
    """Find the image and label columns of a table and give its rows labels.

    Args:
        table: The asked split.
        trained: The training split where that is another one; it then sets the classes.
        split: Name of the asked split.
        classes: Class names in the order of their labels; those of the training split when None.
    """
    image_column, labels, classes = _described(table, trained, split, classes)
    return Found(Rows(table.undecoded(image_column), image_column, table.origins), labels, classes, {})


def stream_table(table: Table, trained: Table | None, split: str, classes: tuple[str, ...] | None) -> Found:
    """The same for reading from start to end: labels are read now, images are not."""
    image_column, labels, classes = _described(table, trained, split, classes)
    return Found(StreamedRows(table, image_column), labels, classes, {})


def _described(
    table: Table, trained: Table | None, split: str, classes: tuple[str, ...] | None
) -> tuple[str, Tensor, tuple[str, ...]]:
    """Image column, labels (N,) and class names."""
    image_column, label_column = image_and_label(table)
    labels, classes = labels_of(table, trained, label_column, split, classes)
    if not len(labels):
        raise UserError(f"{table.where} has no rows; a split needs at least one image")
    return image_column, labels, classes


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in a folder, or else in its subfolder `data`, that are not hidden, by name."""
    for place in (folder, folder / "data"):
        files = sorted(file for file in place.glob("*.parquet") if not file.name.startswith("."))
        if files:
            return files
    return []


def _split_of(file: Path) -> str | None:
    """The split that a file's name begins or ends with; None where it does neither."""
    words = re.split(r"[^a-zA-Z]+", file.stem)
    named = {word for word in (words[0], words[-1]) if any(word in names for names in SPLITS.values())}
    if len(named) > 1:
        raise UserError(f"the name of {file} begins with one split and ends with another; rename it")
    return next(iter(named), None)


def _parquet_header(file: Path) -> tuple[Any, int]:
    """Arrow schema and number of rows of a parquet file."""
    parquet = require("pyarrow.parquet", "data", _WHY)
    with as_user_error(file), parquet.ParquetFile(file) as opened:
        return opened.schema_arrow, opened.metadata.num_rows


def _parquet_column(file: Path, name: str) -> Any:
    """One column of a parquet file, as an arrow table."""
    parquet = require("pyarrow.parquet", "data", _WHY)
    with as_user_error(file), parquet.ParquetFile(file) as opened:
        return opened.read(columns=[name])


def _row_groups(file: Path) -> list[int]:
    """Number of rows of each row group of a parquet file."""
    parquet = require("pyarrow.parquet", "data", _WHY)
    with as_user_error(file), parquet.ParquetFile(file) as opened:
        return [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]


def not_decoding(table: "datasets.Dataset", column: str) -> "datasets.Dataset":
    """The table with its image column as bytes and path: decoding is the image reader's work."""
    datasets = require("datasets", "data", _WHY)
    table = table.with_format(None)
    if isinstance(table.features[column], datasets.Image):
        return table.cast_column(column, datasets.Image(decode=False))
    return table


@contextmanager
def _no_bars(datasets: Any) -> Iterator[None]:
    """Without the progress bars of `datasets`, and then as before."""
    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()
