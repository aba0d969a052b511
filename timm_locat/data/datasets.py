"""Labelled images behind one function: `load` takes the name of a known data set, a path, or an id of the Hub."""

import difflib
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, overload

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from timm_locat.data._folders import Found, Samples, find_split, open_folder
from timm_locat.data._hub import open_hub, parse_hub_id
from timm_locat.data._imagenet import is_tiny_imagenet, open_tiny_imagenet, readable
from timm_locat.data._tables import ParquetTable, choose_table, open_parquet, open_tables, read_table, stream_table
from timm_locat.data.images import read_image
from timm_locat.data.registry import DATASETS, DatasetEntry
from timm_locat.data.streams import ImageStream
from timm_locat.errors import UserError

__all__ = ["ImageData", "load"]

_SUPPORTED = "a folder <split>/<class>/<image files>, parquet files with an image column, or a folder of save_to_disk"


@dataclass(frozen=True, eq=False)
class ImageData(Dataset[tuple[Image.Image, int]]):
    """Images and labels of one split; images are decoded when asked for, by the project's one image reader.

    `data[i]` is a PIL RGB image and its label in 0..len(classes) - 1; i counts from the end where negative. An image
    that cannot be read raises `UserError` with the name that `source(i)` gives it. Can be pickled, for the workers of a
    DataLoader.
    """

    name: str
    """Name or path that it was loaded by."""
    split: str
    """Split that was asked for."""
    classes: tuple[str, ...]
    """Class names in the order of their labels; the training split's, whichever split this is."""
    labels: Tensor
    """(N,) int64, known without decoding."""
    left_out: Mapping[str, int]
    """Number of files that were passed over since they are no images or belong to no class or split, by ending
    (`".txt"`; `"(none)"` without one). Hidden files are not counted."""
    samples: Samples = field(repr=False)
    """The undecoded images."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        i = self._index(i)
        return read_image(self.samples[i], name=self.samples.source(i)), int(self.labels[i])

    def source(self, i: int) -> str:
        """What sample i is called in errors: the path of its file, or its row, from 0, and the file that has it."""
        return self.samples.source(self._index(i))

    def _index(self, i: int) -> int:
        i = operator.index(i)  # refuses slices and fractions, takes whole numbers of NumPy and torch
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.name} ({self.split}) has {len(self)} images, there is no number {i}")
        return i % len(self)


@overload
def load(
    name_or_path: str | os.PathLike[str],
    split: str = ...,
    *,
    classes: Sequence[str] | None = ...,
    root: str | os.PathLike[str] | None = ...,
    streaming: Literal[False] = ...,
) -> ImageData: ...


@overload
def load(
    name_or_path: str | os.PathLike[str],
    split: str = ...,
    *,
    classes: Sequence[str] | None = ...,
    root: str | os.PathLike[str] | None = ...,
    streaming: Literal[True],
) -> ImageStream: ...


def load(
    name_or_path: str | os.PathLike[str],
    split: str = "train",
    *,
    classes: Sequence[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    streaming: bool = False,
) -> ImageData | ImageStream:
    """Open one split of a labelled image data set.

    Args:
        name_or_path: A name in `DATASETS`, or a path to one of these (write `./name` for a path that is also a name):
            a folder with image files as `<split>/<class>/...`, or `<class>/...` for split `all`;
            Tiny-ImageNet as its zip unpacks;
            a parquet file, or a folder of them, each named after its split at the beginning or end of its name;
            a folder written by `save_to_disk` of a `datasets` table or dictionary of tables.
            Where there is no such path, `owner/name` or `owner/name:config` is a data set of the Hub.
            Tables need an image column (`image`, `img`, or the only one of its kind) and a label column (`label`,
            `labels`, `fine_label`, or the only ClassLabel): class labels, whole numbers from 0, or strings.
        split: `train` (or `training`), `test` (or `val`, `valid`, `validation`), or `all` for data that is not
            divided; or another split that the set has, such as SVHN's `extra`. A split of exactly that name is
            preferred to one that goes by another of its names. Data without the asked split is refused, never
            replaced by another split.
        classes: Class names in the order of their labels. When None they are those of the training split, for every
            split: sorted folder names or strings, the names of a ClassLabel, or the numbers up to the largest label;
            for a set known by name they are always the same.
        root: For a set known by name, where its files are: see its entry's `layouts`, or parquet files or a folder of
            `save_to_disk` as on the Hub. When None it is fetched from the Hub and kept in the cache of `datasets`.
        streaming: Read the images from the start to the end, and neither hold nor keep them. For parquet files, folders
            of `save_to_disk` and data sets of the Hub; of the latter only with class labels, or with `classes`.

    Returns:
        The images with labels that follow `classes`. A class may be without images in a test split.

    Raises:
        UserError: Nothing is there, it cannot be fetched, it is damaged or not the whole set of that name, the split
            is missing or empty, the columns are missing, a class of the split is unknown to the training split, or a
            label is missing or out of range.
        MissingExtra: What reads the data, such as `datasets` for tables, is not installed.
    """
    name = os.fspath(name_or_path)
    if classes is not None:
        classes = _checked_classes(classes)
    entry = DATASETS.get(name)
    if entry is not None:
        found = _reordered(_open_named(name, entry, split, root, streaming), classes)
    elif root is not None:
        raise UserError(f"root goes with the name of a set ({', '.join(DATASETS)}), not with {name!r}; leave it out")
    else:
        found = _open_path(name, split, classes, streaming, hub_allowed=isinstance(name_or_path, str))
    if streaming:
        rows = found.samples
        return ImageStream(name, split, found.classes, rows.num_rows, rows.shards(found.labels))
    return ImageData(name, split, found.classes, found.labels, dict(found.left_out), found.samples)


def _open_named(
    name: str, entry: DatasetEntry, split: str, root: str | os.PathLike[str] | None, streaming: bool
) -> Found:
    """One split of a set known by name, with the classes that the set is defined to have."""
    read = stream_table if streaming else read_table
    asked = find_split(split, {known: known for known in entry.sizes}, name)
    if asked is None:
        raise UserError(f"{name} has no split {split}, it has {', '.join(entry.sizes)}; ask for one of these")
    if entry.files:
        if root is not None:
            raise UserError(f"{name} is shipped with this package; leave root out")
        return choose_table({asked: ParquetTable((entry.files[asked],))}, name, asked, None, f"a split {asked}", read)
    if root is None:
        instead = f"give the path of a local copy (root=...), which holds {entry.layouts}"
        found = open_hub(entry.hub, asked, None, instead, streaming=streaming)
        return _as_defined(found, name, entry, str(entry.hub))
    path = Path(root).expanduser()
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; root must be one that holds {entry.layouts}")
    found = open_tables(path, entry.hub.splits.get(asked, asked), None, read)
    if found is None and streaming:
        raise UserError(_not_to_be_streamed(path))
    found = found or entry.open_local(path, asked)
    found = _as_defined(found, name, entry, str(path))
    if len(found.labels) != entry.sizes[asked]:
        raise UserError(
            f"{path} has {len(found.labels):,} images of the {asked} split of {name}, expected "
            f"{entry.sizes[asked]:,}; copy it again, or give a part of it by its own path instead of the name"
        )
    return found


def _as_defined(found: Found, name: str, entry: DatasetEntry, where: str) -> Found:
    """With the class names of the set, if it has as many classes as it should, in the right order."""
    if len(found.classes) != entry.num_classes:
        raise UserError(f"{where} has {len(found.classes)} classes, {name} has {entry.num_classes}; is it that set?")
    if entry.names is None:
        return replace(found, classes=readable(found.classes))
    order = {_plain(known): label for label, known in enumerate(entry.names)}
    for label, written in enumerate(found.classes):
        if order.get(_plain(written), label) != label:
            raise UserError(f"{where} has {written!r} as label {label}, not as {name} has it; is it that set?")
    return replace(found, classes=entry.names)


def _plain(name: str) -> str:
    """A class name without what spellings of it differ in."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _reordered(found: Found, classes: tuple[str, ...] | None) -> Found:
    """With labels in the order of the given class names."""
    if classes is None or classes == found.classes:
        return found
    labels = {name: label for label, name in enumerate(classes)}
    order = tuple(labels.get(name, -1) for name in found.classes)
    if found.labels is None:
        return replace(found, classes=classes, samples=found.samples.ordered(order))
    labels = torch.tensor(order)[found.labels]
    unknown = (labels < 0).nonzero()
    if len(unknown):
        index = int(unknown[0])
        raise UserError(
            f"{found.samples.source(index)} is of class {found.classes[found.labels[index]]!r}, which is none of the "
            f"{len(classes)} in classes=...; add it there"
        )
    return replace(found, classes=classes, labels=labels)


def _not_to_be_streamed(path: Path) -> str:
    return (
        f"{path} cannot be streamed, which is for parquet files, folders of save_to_disk and data sets of the Hub; "
        "leave streaming out: files of images are read one by one anyway"
    )


def _open_path(name: str, split: str, classes: tuple[str, ...] | None, streaming: bool, *, hub_allowed: bool) -> Found:
    read = stream_table if streaming else read_table
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise UserError(f"cannot load {name}: it is a file of another kind; expected {_SUPPORTED}")
    if path.is_file():
        return open_parquet(path, split, classes, read)
    if not path.is_dir():
        hub = parse_hub_id(name) if hub_allowed else None
        if hub is None:
            raise UserError(_not_there(name))
        instead = f"if {name} was meant as a path, there is none; give one to {_SUPPORTED}"
        return open_hub(hub, split, classes, instead, streaming=streaming)
    if is_tiny_imagenet(path) and not streaming:
        asked = find_split(split, {known: known for known in ("train", "test")}, name)
        if asked is None:
            raise UserError(f"{name} is divided into train and val; ask for one of them instead of {split!r}")
        return _reordered(open_tiny_imagenet(path, asked), classes)
    found = open_tables(path, split, classes, read)
    if found is not None:
        return found
    if streaming:
        raise UserError(_not_to_be_streamed(path))
    return open_folder(path, split, classes)


def _not_there(name: str) -> str:
    near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}" if near else f"expected one of the names {', '.join(DATASETS)}"
    return (
        f"there is no data set, folder or parquet file {name!r}; {names}, owner/name of a data set of the Hub, or a "
        f"path to {_SUPPORTED}"
    )


def _checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str) or not classes or not all(isinstance(name, str) for name in classes):
        raise UserError(f"classes must be a list of class names, got {classes!r}")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise UserError(f"classes must differ, {twice!r} is there more than once")
    return tuple(classes)
