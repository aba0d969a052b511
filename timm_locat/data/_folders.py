"""Splits by name, and folders of image files: which files belong to a split, and which label each of them has."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from timm_locat.data._shards import Shard
from timm_locat.data.images import ImageSource
from timm_locat.errors import UserError

ALL = "all"
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
"""The two kinds of split and the names that each goes by."""

EXTENSIONS = (*IMG_EXTENSIONS, ".jfif", ".gif", ".avif", ".jp2", ".pbm", ".pnm", ".tga")
"""Endings, in lower case, that count as image files."""

T = TypeVar("T")


class Samples(Protocol):
    """Undecoded images by index."""

    def __getitem__(self, index: int) -> ImageSource: ...
    def source(self, index: int) -> str: ...


class Streamed(Protocol):
    """Undecoded images to be read from start to end."""

    @property
    def num_rows(self) -> int | None: ...
    def shards(self, labels: Tensor | None) -> list[Shard]: ...
    def source(self, index: int) -> str: ...


@dataclass(frozen=True)
class Found:
    """A split before decoding: N samples, their labels (N,) int64, the class names, and what was left out.

    A split to be streamed has shards in the place of samples, and no labels yet where it comes from the Hub.
    """

    samples: "Samples | Streamed"
    labels: Tensor | None
    classes: tuple[str, ...]
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class Files:
    """Image files by index."""

    paths: Sequence[str]

    def __getitem__(self, index: int) -> str:
        return self.paths[index]

    def source(self, index: int) -> str:
        return self.paths[index]


def kind_of_split(split: str, others: Collection[str] = ()) -> str:
    """`"train"`, `"test"` or `"all"` for any name that a split goes by; any of the `others` is a kind of its own."""
    for kind, names in SPLITS.items():
        if split in names:
            return kind
    if split == ALL or split in others:
        return split
    known = ", ".join((*SPLITS["train"], *SPLITS["test"], ALL))
    raise UserError(f"expected a split named one of {known}, got {split!r}; choose one of these")


def find_split(split: str, available: Mapping[str, T], where: str) -> T | None:
    """The entry of the asked split: the one of exactly that name, else the only one that goes by another of its names.

    Raises:
        UserError: Several entries go by other names of the split, such as `val` and `valid` for `test`.
    """
    kind = kind_of_split(split, available)
    if split in available:
        return available[split]
    names = [name for name in SPLITS.get(kind, ()) if name in available]
    if len(names) > 1:
        raise UserError(f"{where} has {' and '.join(names)} but no {split}; ask for one of them by its name")
    return available[names[0]] if names else None


def follows_training(split: str) -> bool:
    """Whether the classes of a split are set by another one, the training split."""
    return split not in (*SPLITS["train"], ALL)


def extension(path: str) -> str:
    """Ending of a file's name in lower case, with its dot; `"(none)"` where it has none."""
    stem, dot, end = path.rpartition(os.sep)[2].rpartition(".")
    return f".{end.lower()}" if stem and dot else "(none)"


def open_folder(root: Path, split: str, classes: tuple[str, ...] | None) -> Found:
    """Image files of one split, in class folders.

    Args:
        root: Folder with `<split>/<class>/...`, or for split `all` with `<class>/...`.
        split: Any name of a split.
        classes: Class names in the order of their labels; the sorted class folders of the training split when None.
    """
    splits = _split_folders(root)
    if kind_of_split(split) == ALL:
        if splits:
            raise UserError(f"{root} is divided into {', '.join(splits)}; ask for one of them instead of {ALL!r}")
        return read_class_folders(root, classes or trained_on(root))
    folder = find_split(split, splits, str(root))
    if folder is None:
        _refuse_flat(root, split)
        hint = f"it has {', '.join(splits)}" if splits else f"it has no split folders; ask for {ALL!r} to use all of it"
        raise UserError(f"expected image files as {root / split}/<class>/... but {hint}")
    if classes is None and kind_of_split(split) == "test":
        trained = find_split("train", splits, str(root))
        if trained is None:
            raise UserError(
                f"{root} has no train folder to tell which classes there are; give the class names in the order of "
                "their labels (classes=...)"
            )
        classes = trained_on(trained)
    return read_class_folders(folder, classes or trained_on(folder))


def _refuse_flat(root: Path, split: str) -> None:
    """A split whose image files lie in one folder, as ImageNet's validation images are handed out, has no labels."""
    for name in (split, *SPLITS[kind_of_split(split)]):
        flat = root / name
        if flat.is_dir() and any(is_image(entry.name) for entry in flat.iterdir() if entry.is_file()):
            raise UserError(
                f"{flat} holds image files without class folders, so that nothing says what they show; "
                "move each of them into a folder named after its class"
            )


def _split_folders(root: Path) -> dict[str, Path]:
    """Subfolders that are splits: named like one, and holding folders themselves, so that a class may be called so."""
    named = [name for names in SPLITS.values() for name in names if (root / name).is_dir()]
    return {name: root / name for name in named if _subfolders(root / name)}


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def trained_on(folder: Path) -> tuple[str, ...]:
    """The classes that a training folder defines; none of them may be empty."""
    classes = _subfolders(folder)
    if not classes:
        raise UserError(f"expected class folders with image files in {folder}, found none; check the path")
    for name in classes:
        if not any(is_image(file) for file in _files(folder / name)):
            raise UserError(f"class folder {folder / name} holds no image files; fill it or remove it")
    return tuple(classes)


def _files(folder: Path) -> Iterable[str]:
    """Names of all files below a folder that are not hidden, nor in a hidden folder."""
    for _, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (name for name in files if not name.startswith("."))


def is_image(name: str) -> bool:
    """Whether a file counts as an image by its ending."""
    return extension(name) in EXTENSIONS


def read_class_folders(folder: Path, classes: tuple[str, ...]) -> Found:
    """Image files in the class folders of one split; a class may have none, but no folder may be of another class."""
    for name in _subfolders(folder):
        if name not in classes:
            raise UserError(
                f"class folder {folder / name} is none of the {len(classes)} classes of the training split or of "
                "classes=...; remove it, or add it there"
            )
    left_out = Counter(extension(entry.name) for entry in folder.iterdir() if _is_stray(entry))

    start = len(str(folder))

    def keep(path: str) -> bool:  # called for each of up to millions of files, hence on plain strings
        if f"{os.sep}." in path[start:]:
            return False  # hidden, or in a hidden folder
        if is_image(path):
            return True
        left_out[extension(path)] += 1
        return False

    labels = {name: label for label, name in enumerate(classes)}
    pairs = make_dataset(str(folder), labels, is_valid_file=keep, allow_empty=True)
    if not pairs:
        raise UserError(f"expected image files as {folder}/<class>/..., found none; check the path")
    return Found(Files([path for path, _ in pairs]), torch.tensor([label for _, label in pairs]), classes, left_out)


def _is_stray(entry: Path) -> bool:
    """Whether this is a file beside the class folders, which belongs to no class."""
    return entry.is_file() and not entry.name.startswith(".")
