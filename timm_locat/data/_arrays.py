"""Sets that are stored as plain arrays: IDX files, CIFAR's binary and Python files, SVHN's .mat files.

Pixels stay 8 bit and become a picture only when one is asked for. Files of fixed records are mapped into memory, the
others are held as they are. Python's pickles can run any program, so that only the official ones, told by their MD5,
are opened.
"""

import gzip
import hashlib
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10

from timm_locat.data._folders import Found
from timm_locat.data._tables import Origins
from timm_locat.errors import UserError, require

_PLANES = (3, 32, 32)
_DAMAGED = (OSError, EOFError, ValueError, TypeError, KeyError, NotImplementedError, zlib.error)


@dataclass(frozen=True, eq=False)
class Mapped:
    """Bytes of a file as an array of `shape` from byte `start` on; pickled as the path alone."""

    path: Path
    start: int
    shape: tuple[int, ...]

    @cached_property
    def values(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r", self.start, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "values"}


@dataclass(frozen=True, eq=False)
class Held:
    """An array in memory."""

    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Arrays:
    """Pictures by index, from uint8 arrays one after the other.

    Args:
        pieces: Arrays whose first axis counts pictures; each is (H, W) grey or (H, W, 3) RGB, unless `planes` is given.
        origins: What to call the pictures of each piece.
        planes: Channels, height and width of the picture in the last bytes of each row, colour by colour.
    """

    pieces: tuple[Mapped | Held, ...]
    origins: Origins
    planes: tuple[int, int, int] | None = None

    def __getitem__(self, index: int) -> Image.Image:
        piece, row = self.origins.locate(index)
        values = self.pieces[piece].values[row]
        if self.planes is not None:
            values = values[-math.prod(self.planes) :].reshape(self.planes).transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(values))

    def source(self, index: int) -> str:
        return self.origins.source(index)


@dataclass(frozen=True)
class CifarFiles:
    """The two layouts that one of the CIFAR sets is handed out in."""

    title: str
    binary_folder: str
    binary_files: Mapping[str, tuple[str, ...]]
    """Files of each split; a record is `label_bytes` bytes, the last of them the label, and 3,072 of the picture."""
    label_bytes: int
    python: type[CIFAR10]
    """torchvision's class, which knows the Python files and their MD5."""
    python_labels: str
    """Key of the labels in the Python files."""


def open_cifar(root: Path, split: str, files: CifarFiles, classes: tuple[str, ...]) -> Found:
    """One split of CIFAR-10 or CIFAR-100; binary files are preferred, as they can be mapped.

    Args:
        root: The folder that holds the files, or the one above it.
        split: `train` or `test`.
        files: What they are called.
        classes: Class names in the order of their labels.
    """
    python_files = {"train": dict(files.python.train_list), "test": dict(files.python.test_list)}
    folder = _folder_with(root, files.binary_folder, files.binary_files, split)
    if folder is not None:
        pieces, labels = _cifar_binary([folder / name for name in files.binary_files[split]], files.label_bytes)
        paths = [piece.path for piece in pieces]
    else:
        folder = _folder_with(root, files.python.base_folder, python_files, split)
        if folder is None:
            raise UserError(
                f"expected the files of {files.title} in {root} or in its folder {files.binary_folder} (binary "
                f"version) or {files.python.base_folder} (Python version), found neither; check the path"
            )
        paths = [folder / name for name in python_files[split]]
        pieces, labels = _cifar_python(paths, python_files[split], files)
    counts = [len(part) for part in labels]
    origins = Origins(tuple(("record", str(path)) for path in paths), tuple(accumulate(counts)))
    return Found(Arrays(tuple(pieces), origins, _PLANES), _checked(labels, len(classes), origins), classes, {})


def _folder_with(root: Path, name: str, files: Mapping[str, Iterable[str]], split: str) -> Path | None:
    """The folder, `root` or the one of that name in it, that has some of the files and then all of the split's."""
    for folder in (root, root / name):
        if any((folder / file).is_file() for part in files.values() for file in part):
            missing = [file for file in files[split] if not (folder / file).is_file()]
            if missing:
                raise UserError(f"{folder} lacks {', '.join(missing)} of the {split} split; copy it again")
            return folder
    return None


def _cifar_binary(paths: list[Path], label_bytes: int) -> tuple[list[Mapped], list[np.ndarray]]:
    record = label_bytes + math.prod(_PLANES)
    pieces = []
    for path in paths:
        size = path.stat().st_size
        if not size or size % record:
            raise UserError(f"{path} has {size:,} bytes, expected records of {record:,} bytes; copy it again")
        pieces.append(Mapped(path, 0, (size // record, record)))
    return pieces, [np.array(piece.values[:, label_bytes - 1]) for piece in pieces]


def _cifar_python(
    paths: list[Path], digests: Mapping[str, str], files: CifarFiles
) -> tuple[list[Held], list[np.ndarray]]:
    pieces, labels = [], []
    for path in paths:
        content = path.read_bytes()
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != digests[path.name]:
            raise UserError(
                f"{path} is not the official file of {files.title} (its MD5 differs) and is not opened, since a "
                "pickle of unknown origin can run any program; copy it again, or use the binary version"
            )
        batch = pickle.loads(content, encoding="latin1")
        pieces.append(Held(np.asarray(batch["data"], np.uint8)))
        labels.append(np.asarray(batch[files.python_labels]))
    return pieces, labels


def open_svhn(root: Path, split: str, classes: tuple[str, ...]) -> Found:
    """One split of SVHN's cropped digits: `<split>_32x32.mat`, where label 10 stands for the digit 0."""
    path = root / f"{split}_32x32.mat"
    if not path.is_file():
        raise UserError(f"expected the file {path.name} of SVHN's cropped digits in {root}, found none; check the path")
    scipy_io = require("scipy", "data", "reading SVHN's .mat files").io
    try:
        content = scipy_io.loadmat(path, variable_names=["X", "y"])
        pixels, labels = content["X"], content["y"].ravel()
    except (*_DAMAGED, scipy_io.matlab.MatReadError) as err:
        raise UserError(f"cannot read {path} as a .mat file with X and y ({_cause(err)}); copy it again") from err
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, len(labels)):
        raise UserError(
            f"{path} has X of {pixels.dtype} and shape {pixels.shape} for {len(labels)} labels, expected uint8 and "
            f"(32, 32, 3, {len(labels)}); copy it again"
        )
    origins = Origins((("image", str(path)),), (len(labels),))
    wrong = np.flatnonzero((labels < 1) | (labels > 10))
    if len(wrong):
        raise UserError(f"{origins.source(int(wrong[0]))} has label {labels[wrong[0]]}, but SVHN's are 1..10; mend it")
    labels = labels.astype(np.int64) % 10
    return Found(Arrays((Held(np.moveaxis(pixels, 3, 0)),), origins), torch.from_numpy(labels), classes, {})


def open_idx(root: Path, split: str, classes: tuple[str, ...]) -> Found:
    """One split of a set in MNIST's IDX files, each with or without .gz.

    Args:
        root: Folder with the files, or with them in `raw` or `FashionMNIST/raw`.
        split: `train` or `test`.
        classes: Class names in the order of their labels.
    """
    prefix = {"train": "train", "test": "t10k"}[split]
    images_name, labels_name = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
    for folder in (root, root / "raw", root / "FashionMNIST" / "raw"):
        images_path, labels_path = _plain_or_gz(folder / images_name), _plain_or_gz(folder / labels_name)
        if images_path and labels_path:
            break
        if images_path or labels_path:
            missing = labels_name if images_path else images_name
            raise UserError(f"{folder} lacks {missing} (or {missing}.gz); copy it again")
    else:
        raise UserError(
            f"expected {images_name} and {labels_name}, with or without .gz, in {root}, in its folder raw or in "
            "FashionMNIST/raw, found neither; check the path"
        )
    images, (count, _, _) = _read_idx(images_path, 3)
    labels, (count_labels,) = _read_idx(labels_path, 1)
    if count != count_labels:
        raise UserError(f"{images_path} has {count:,} images, {labels_path} {count_labels:,} labels; copy both again")
    origins = Origins((("image", str(images_path)),), (count,))
    return Found(Arrays((images,), origins), _checked([labels.values], len(classes), origins), classes, {})


def _plain_or_gz(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(path.name + ".gz")) if file.is_file()), None)


def _read_idx(path: Path, dims: int) -> tuple[Mapped | Held, tuple[int, ...]]:
    """The unsigned bytes of an IDX file, and its shape of `dims` sizes: mapped where it is not compressed."""
    start = 4 + 4 * dims
    zipped = path.suffix == ".gz"
    try:
        if zipped:
            with gzip.open(path) as file:
                content = file.read()
        else:
            with path.open("rb") as file:
                content = file.read(start)
    except _DAMAGED as err:
        raise UserError(f"cannot read {path} ({_cause(err)}); copy it again") from err
    magic = (0x0800 + dims).to_bytes(4, "big")  # 0x08: unsigned bytes; the last byte: number of sizes
    if content[:4] != magic or len(content) < start:
        raise UserError(f"{path} starts with {content[:4].hex()}, expected {magic.hex()} of an IDX file; copy it again")
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    size = (len(content) if zipped else path.stat().st_size) - start
    if size != math.prod(shape) or not size:
        raise UserError(f"{path} states sizes {shape} but holds {size:,} values; copy it again")
    if zipped:
        return Held(np.frombuffer(content, np.uint8, offset=start).reshape(shape)), shape
    return Mapped(path, start, shape), shape


def _checked(labels: list[np.ndarray], num_classes: int, origins: Origins) -> Tensor:
    """Labels of all pieces (N,) int64, each of them in 0..num_classes - 1."""
    every = np.concatenate(labels).astype(np.int64)
    wrong = np.flatnonzero((every < 0) | (every >= num_classes))
    if len(wrong):
        raise UserError(
            f"{origins.source(int(wrong[0]))} has label {every[wrong[0]]}, but the labels of {num_classes} classes are "
            f"0..{num_classes - 1}; copy the file again"
        )
    return torch.from_numpy(every)


def _cause(err: Exception) -> str:
    return " ".join(str(err).split()) or type(err).__name__
