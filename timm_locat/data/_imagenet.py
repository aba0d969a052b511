"""The ImageNet family: folders of WordNet classes, Tiny-ImageNet's own layout, and readable names for the classes."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from timm.data import ImageNetInfo

from timm_locat.data._folders import Files, Found, extension, is_image, open_folder, read_class_folders
from timm_locat.errors import UserError

_WNID = re.compile(r"n\d{8}")


def open_imagenet(root: Path, split: str) -> Found:
    """ImageNet-1k as `train/<wnid>/...` and `val/<wnid>/...`; labels in timm's order, which is that of the names."""
    return open_folder(root, "train" if split == "train" else "val", tuple(ImageNetInfo().label_names()))


def is_tiny_imagenet(path: Path) -> bool:
    """Whether a folder is Tiny-ImageNet's zip, unpacked."""
    return (path / "wnids.txt").is_file()


def open_tiny_imagenet(root: Path, split: str) -> Found:
    """Tiny-ImageNet as its zip unpacks, or with the validation images moved into class folders.

    Args:
        root: The folder with `wnids.txt`, or the one above it that holds `tiny-imagenet-200`.
        split: `train`, or `test` for the validation images; the official test images have no labels.

    Returns:
        Images with labels in the order of the sorted WordNet ids (`wnids.txt` is in another order), and classes named
        by their first word in `words.txt`.
    """
    if not is_tiny_imagenet(root) and is_tiny_imagenet(root / "tiny-imagenet-200"):
        root = root / "tiny-imagenet-200"
    if not is_tiny_imagenet(root):
        raise UserError(f"expected Tiny-ImageNet's wnids.txt in {root} or in its tiny-imagenet-200; check the path")
    wnids = tuple(sorted((root / "wnids.txt").read_text().split()))
    if not wnids or len(set(wnids)) < len(wnids):
        raise UserError(f"{root / 'wnids.txt'} must list each class once, and at least one; copy it again")
    found = _tiny_train(root / "train", wnids) if split == "train" else _tiny_val(root / "val", wnids)
    return replace(found, classes=readable(wnids, _words(root / "words.txt")))


def _tiny_train(folder: Path, wnids: tuple[str, ...]) -> Found:
    missing = [wnid for wnid in wnids if not (folder / wnid).is_dir()]
    if missing:
        raise UserError(
            f"{folder} lacks the folders of {len(missing)} of the {len(wnids)} classes in wnids.txt, {missing[0]} the "
            "first; copy it again"
        )
    found = read_class_folders(folder, wnids)
    empty = (torch.bincount(found.labels, minlength=len(wnids)) == 0).nonzero()
    if len(empty):
        raise UserError(f"class folder {folder / wnids[int(empty[0])]} holds no image files; copy it again")
    return found


def _tiny_val(folder: Path, wnids: tuple[str, ...]) -> Found:
    images, annotations = folder / "images", folder / "val_annotations.txt"
    entries = images.iterdir() if images.is_dir() else ()
    here = [entry.name for entry in entries if not entry.name.startswith(".")]
    if not any(is_image(name) for name in here) and any((folder / wnid).is_dir() for wnid in wnids):
        found = read_class_folders(folder, (*wnids, "images"))  # emptied, where it is still there
        return replace(found, classes=wnids)
    if not annotations.is_file():
        raise UserError(f"expected {annotations}, or class folders in {folder}, found neither; copy the set again")
    order = {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[str, int] = {}
    for number, line in enumerate(annotations.read_text().splitlines(), 1):
        name, wnid = (*line.split(), "", "")[:2]
        if wnid not in order or name in labels:
            why = "names an image a second time" if name in labels else f"names no class of wnids.txt: {line[:60]!r}"
            raise UserError(f"line {number} of {annotations} {why}; copy the set again")
        labels[name] = order[wnid]
    missing = sorted(set(labels) - set(here))
    if missing or not labels:
        what = f"{len(missing)} images, {missing[0]} the first, that are not in {images}" if missing else "no images"
        raise UserError(f"{annotations} names {what}; copy the set again")
    left_out = Counter(extension(name) for name in here if name not in labels)
    paths = [str(images / name) for name in labels]
    return Found(Files(paths), torch.tensor(list(labels.values())), wnids, left_out)


def _words(path: Path) -> dict[str, str]:
    """`words.txt`: a WordNet id, a tab and its words on each line."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {wnid: words.strip() for wnid, tab, words in (line.partition("\t") for line in lines) if words.strip()}


def readable(names: tuple[str, ...], words: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """First word of each class, followed by what tells it apart where several classes share that word.

    Args:
        names: WordNet ids, or words separated by commas as some tables have them.
        words: Words of WordNet ids; timm's list where one is missing, and the id itself where that lacks it too.

    Returns:
        As many names, all different as long as `names` are.
    """
    known = dict(words or {})
    if any(_WNID.fullmatch(name) and name not in known for name in names):
        info = ImageNetInfo("imagenet-22k")
        known = {wnid: info.label_name_to_description(wnid) for wnid in info.label_names()} | known
    first = [known.get(name, name).split(",")[0].strip() for name in names]
    count = Counter(first)
    return tuple(word if count[word] == 1 else f"{word} ({name})" for word, name in zip(first, names, strict=True))
