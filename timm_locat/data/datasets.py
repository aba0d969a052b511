"""Labelled images behind one function: `load` takes the name of a known data set or the path of your own."""

import difflib
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from timm_locat.data._folders import Found, Samples, open_folder
from timm_locat.data._tables import ParquetTable, choose_table, open_parquet, open_saved, parquet_files
from timm_locat.data.images import read_image
from timm_locat.data.transforms import pad32_rgb
from timm_locat.errors import UserError

__all__ = ["DATASETS", "DatasetEntry", "ImageData", "load"]

_EMBEDDED = Path(__file__).parent / "embedded"
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
        """What sample i is called in errors: the path of its file, or its row, from 0, and the table's file."""
        return self.samples.source(self._index(i))

    def _index(self, i: int) -> int:
        i = operator.index(i)  # refuses slices and fractions, takes whole numbers of NumPy and torch
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.name} ({self.split}) has {len(self)} images, there is no number {i}")
        return i % len(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """A data set that `load` knows by name, and the facts that training and reports need about it."""

    files: Mapping[str, Path]
    """Parquet file of each split."""
    num_classes: int
    image_size: tuple[int, int]
    """Height and width of the images as stored, in pixels."""
    mean: tuple[float, float, float]
    """Mean per channel of the training images as stored, where full brightness is 1."""
    std: tuple[float, float, float]
    """Standard deviation per channel, as for the mean."""
    channels: str
    """What the stored channels are and how they become RGB."""
    licence: str
    source: str
    """Where the images come from."""
    native_transform: Callable[[Tensor], Tensor] | None = None
    """Turns stored images, uint8 (..., 3, h, w), into those that models see, before any resizing. None: as stored."""


DATASETS: dict[str, DatasetEntry] = {
    "fashion_mnist_mini": DatasetEntry(
        files={split: _EMBEDDED / f"fashion_mnist_mini-{split}.parquet" for split in ("train", "test")},
        num_classes=10,
        image_size=(28, 28),
        # Of the full training set; the 5,000 images here have 0.2842 and 0.3522.
        mean=(0.2860, 0.2860, 0.2860),
        std=(0.3530, 0.3530, 0.3530),
        channels="one grey channel, copied to three; padded from 28x28 to 32x32 by pad32_rgb",
        licence="MIT",
        source="5,000 training and 1,000 test images of Fashion-MNIST (Zalando SE), shipped with this package",
        native_transform=pad32_rgb,
    ),
}
"""The data sets known by name."""


def load(
    name_or_path: str | os.PathLike[str], split: str = "train", *, classes: Sequence[str] | None = None
) -> ImageData:
    """Open one split of a labelled image data set.

    Args:
        name_or_path: A name in `DATASETS`, or a path to one of these (write `./name` for a path that is also a name):
            a folder with image files as `<split>/<class>/...`, or `<class>/...` for split `all`;
            a parquet file, or a folder of them, each named after its split at the beginning or end of its name;
            a folder written by `save_to_disk` of a `datasets` table or dictionary of tables.
            Tables need an image column (`image`, `img`, or the only one of its kind) and a label column (`label`,
            `labels`, `fine_label`, or the only ClassLabel): class labels, whole numbers from 0, or strings.
        split: `train` (or `training`), `test` (or `val`, `valid`, `validation`), or `all` for data that is not
            divided. A split of exactly that name is preferred to one that goes by another of its names. Data without
            the asked split is refused, never replaced by another split.
        classes: Class names in the order of their labels. When None they are those of the training split, for every
            split: sorted folder names or strings, the names of a ClassLabel, or the numbers up to the largest label.

    Returns:
        The images with labels that follow `classes`. A class may be without images in a test split.

    Raises:
        UserError: Nothing is there, the split is missing or empty, the columns are missing, a class of the split is
            unknown to the training split, or a label is missing or out of range.
        MissingExtra: The data is a table and `datasets` is not installed.
    """
    name = os.fspath(name_or_path)
    if classes is not None:
        classes = _checked_classes(classes)
    found = _open(name, split, classes)
    return ImageData(name, split, found.classes, found.labels, dict(found.left_out), found.samples)


def _open(name: str, split: str, classes: tuple[str, ...] | None) -> Found:
    entry = DATASETS.get(name)
    if entry is not None:
        tables = {known: ParquetTable((file,)) for known, file in entry.files.items()}
        return choose_table(tables, Path(name), split, classes, f"a split {split}")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise UserError(f"cannot load {name}: it is a file of another kind; expected {_SUPPORTED}")
    if path.is_file():
        return open_parquet(path, split, classes)
    if not path.is_dir():
        raise UserError(_not_there(name))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return open_saved(path, split, classes)
    return (open_parquet if parquet_files(path) else open_folder)(path, split, classes)


def _not_there(name: str) -> str:
    near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}" if near else f"expected one of the names {', '.join(DATASETS)}"
    hub = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        hub = " (data sets of the hub, owner/name, are not fetched: download it first)"
    return f"there is no data set, folder or parquet file {name!r}{hub}; {names}, or a path to {_SUPPORTED}"


def _checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str) or not classes or not all(isinstance(name, str) for name in classes):
        raise UserError(f"classes must be a list of class names, got {classes!r}")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise UserError(f"classes must differ, {twice!r} is there more than once")
    return tuple(classes)
