"""COCO's super-categories as classes: 12 of things from the panoptic masks, 15 of stuff from the pixel maps.

As the public retrieval protocol divides COCO; class names are sorted, and what belongs to the other half is ignored
here. Category names come from the annotation files themselves.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from timm_locat.errors import UserError

IGNORED = 255
SPLITS = {"train": 118_287, "val": 5_000}


@dataclass(frozen=True)
class CocoSplit:
    """Files of one split, and for each mask the label of each number in it."""

    classes: tuple[str, ...]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    id_maps: tuple[Mapping[int, int], ...]


def open_things(root: Path, split: str) -> CocoSplit:
    """Panoptic masks: a colour is the number r + 256 g + 65536 b of a segment, which the annotation file describes."""
    file = _there(root, f"annotations/panoptic_{split}2017.json")
    folder = _there(root, f"annotations/panoptic_{split}2017", f"annotations/{split}2017")
    images = _there(root, f"images/{split}2017", f"{split}2017")
    stored = _read(file)
    classes, labels = _labels([c for c in stored["categories"] if c["isthing"]], 12, file)
    names = {image["id"]: image["file_name"] for image in stored["images"]}
    rows = sorted(stored["annotations"], key=lambda row: row["file_name"])
    id_maps = tuple(
        {0: IGNORED, **{segment["id"]: labels.get(segment["category_id"], IGNORED) for segment in row["segments_info"]}}
        for row in rows
    )
    return _present(
        CocoSplit(
            classes,
            tuple(str(images / names[row["image_id"]]) for row in rows),
            tuple(str(folder / row["file_name"]) for row in rows),
            id_maps,
        )
    )


def open_stuff(root: Path, split: str) -> CocoSplit:
    """Pixel maps: a number is a category; 0 is unlabelled and 183 all things. The small file names the categories."""
    file = _there(root, "stuff_annotations/stuff_val2017.json", "annotations/stuff_val2017.json")
    folder = _there(root, f"stuff_annotations/stuff_{split}2017_pixelmaps", f"annotations/stuff_{split}2017_pixelmaps")
    images = _there(root, f"images/{split}2017", f"{split}2017")
    categories = _read(file)["categories"]
    classes, labels = _labels([c for c in categories if c["supercategory"] != "other"], 15, file)
    id_map = {0: IGNORED, **{c["id"]: labels.get(c["id"], IGNORED) for c in categories}}
    masks = sorted(path for path in folder.glob("*.png") if not path.name.startswith("."))
    if not masks:
        raise UserError(f"expected masks *.png in {folder}, found none; unpack the pixel maps there")
    return _present(
        CocoSplit(
            classes,
            tuple(str(images / f"{path.stem}.jpg") for path in masks),
            tuple(map(str, masks)),
            (id_map,) * len(masks),
        )
    )


OPEN = {"coco_things": open_things, "coco_stuff": open_stuff}


def _there(root: Path, *places: str) -> Path:
    for place in places:
        if (root / place).exists():
            return root / place
    raise UserError(f"{root} has no {' or '.join(places)}; unpack COCO 2017 with these annotations there")


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_bytes())
    except ValueError as err:
        raise UserError(f"{file} is no whole JSON file ({err}); copy it again") from err


def _labels(categories: list[dict], count: int, file: Path) -> tuple[tuple[str, ...], dict[int, int]]:
    """Sorted super-categories, and the label of each category id."""
    classes = tuple(sorted({category["supercategory"] for category in categories}))
    if len(classes) != count:
        raise UserError(f"{file} has {len(classes)} super-categories, COCO has {count}; is it that file?")
    return classes, {category["id"]: classes.index(category["supercategory"]) for category in categories}


def _present(found: CocoSplit) -> CocoSplit:
    """With every file there."""
    for path in (*found.images, *found.masks):
        if not Path(path).is_file():
            raise UserError(f"there is no file {path}, which the annotations name; copy the set again")
    return found
