"""Composed scenes: real cut-outs of clothes laid over real photographs, with exact masks. Not natural scenes.

    python -m timm_locat.data.scenes OUT --train 200 --val 50 --size 224 --seed 0

Each scene is a crop of one photograph with up to `MAX_OBJECTS` cut-outs of the embedded Fashion-MNIST images over it,
later ones in front of earlier ones. Training and validation share neither: training scenes are made of training images
and of the photographs in `PHOTOGRAPHS["train"]`, validation scenes of test images and of the others.

The mask is exact by construction: a pixel is an object's where it shows that object, and soft edges do not exist. A
cut-out is what remains of an image when the near-black that reaches its border is taken away, so that holes inside,
such as that of a bag's handle, belong to the object. Cut-outs take the hue of some pixel of their photograph, or else
colour alone would tell them from it. All of these are our own choices; no paper uses these scenes.
"""

import argparse
import functools
import io
import json
import math
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from timm_locat.data.datasets import ImageData, load
from timm_locat.data.images import read_image
from timm_locat.data.registry import DATASETS
from timm_locat.errors import UserError, require, run_cli
from timm_locat.record import atomic_write

__all__ = ["CLASSES", "FOLDERS", "PALETTE", "PHOTOGRAPHS", "ComposedScenes", "Scene", "contact_sheet", "write_scenes"]

CLASSES = ("background", *DATASETS["fashion_mnist_mini"].names)
"""Class names in the order of their labels, 0 to 10."""

PALETTE = (
    *((0, 0, 0), (230, 75, 60), (55, 125, 185), (75, 175, 75), (150, 80, 165), (255, 127, 0), (250, 230, 50)),
    *((165, 85, 40), (245, 130, 190), (100, 205, 200), (160, 160, 160)),
)
"""Colour of each class in pictures and in the palette of the masks."""

PHOTOGRAPHS = {
    "train": ("brick", "clock_motion", "coffee", "gravel", "hubble_deep_field", "rocket"),
    "val": ("camera", "chelsea", "grass"),
}
"""Names of the photographs that each split's scenes lie on."""

FOLDERS = {"train": "training", "val": "validation"}
"""Folder of each split below `images` and `annotations`, as in ADE20K."""

DESCRIPTION = "composed.json"
"""File that says what a folder of scenes was made with; written last, so that a folder without it is not whole."""

MAX_OBJECTS = 6
EMPTY = 0.1
"""Share of scenes without any object."""

SMALLEST = 16
"""Shortest side of a scene in pixels; below, cut-outs have too few pixels to be told apart."""

_EMBEDDED = Path(__file__).parent / "embedded" / "photographs"
_OBJECT_SIDE = (0.25, 0.6)  # of the scene's shorter side
_CROP = (0.5, 1.0)  # of the largest crop that fits into the photograph
_GAIN = (0.7, 1.1)  # brightness of the photograph
_BLACK = 24  # brighter pixels are the object's; below lie specks of what the cut-outs were freed from
_HUE = 0.6  # how much of the photograph's hue a cut-out takes; the rest stays grey


@dataclass(frozen=True, eq=False)
class Scene:
    """One composed scene."""

    image: Image.Image
    """RGB."""
    mask: Tensor
    """(H, W) int64 labels in 0..10, 0 where nothing lies over the photograph."""
    photograph: str
    """Name of the photograph behind it."""
    cutouts: tuple[int, ...]
    """Rows of the cut-outs in that split of `fashion_mnist_mini`, from back to front; one may be wholly covered."""


@dataclass(frozen=True, kw_only=True)
class ComposedScenes(Dataset[tuple[Image.Image, Tensor]]):
    """Scenes of one split, made when asked for: `scenes[i]` is an RGB image and its (H, W) int64 mask.

    Scene i depends on `split`, `size`, `seed`, `max_objects` and i, and on nothing else: not on how many there are or
    in which order they are asked for. Can be pickled, for the workers of a DataLoader.
    """

    split: Literal["train", "val"]
    length: int
    """Number of scenes."""
    size: tuple[int, int]
    """Height and width in pixels. Photographs are at most 512 a side and are enlarged for larger scenes."""
    seed: int = 0
    max_objects: int = MAX_OBJECTS
    """Most objects of a scene; 0 makes scenes without any. One scene in ten has none in any case."""

    classes = CLASSES

    def __post_init__(self) -> None:
        if self.split not in PHOTOGRAPHS:
            raise UserError(f"composed scenes have the splits {' and '.join(PHOTOGRAPHS)}, not {self.split!r}")
        if min(self.size) < SMALLEST:
            height, width = self.size
            raise UserError(f"expected scenes of at least {SMALLEST} pixels a side, got {height}x{width}; enlarge them")
        if self.length < 1:
            raise UserError(f"expected at least one scene, got {self.length}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"expected a seed in 0..{2**32 - 1}, got {self.seed}")
        if self.max_objects < 0:
            raise UserError(f"expected max_objects of at least 0, got {self.max_objects}")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Image.Image, Tensor]:
        scene = self.scene(i)
        return scene.image, scene.mask

    def source(self, i: int) -> str:
        """What scene i is called in errors."""
        return f"composed scene {operator.index(i) % len(self)} ({self.split}, seed {self.seed})"

    def scene(self, i: int) -> Scene:
        """Scene i with what it is made of; i counts from the end where negative."""
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"there are {len(self)} scenes, there is no number {i}")
        # RandomState, since its streams do not change between NumPy's versions.
        random = np.random.RandomState([self.seed, list(PHOTOGRAPHS).index(self.split), i % len(self)])
        name, canvas = _background(self.split, self.size, random)
        labels = np.zeros(self.size, np.uint8)
        rows = []
        for _ in range(_number_of_objects(self.max_objects, random)):
            rows.append(random.randint(len(_clothes(self.split))))
            _lay_over(canvas, labels, self.split, rows[-1], random)
        return Scene(Image.fromarray(canvas), torch.from_numpy(labels).long(), name, tuple(rows))


def _number_of_objects(most: int, random: np.random.RandomState) -> int:
    empty = random.uniform() < EMPTY
    return 0 if empty or most == 0 else random.randint(1, most + 1)


@functools.cache
def _photograph(name: str) -> Image.Image:
    return read_image(_EMBEDDED / f"{name}.jpg")


@functools.cache
def _clothes(split: str) -> ImageData:
    return load("fashion_mnist_mini", {"train": "train", "val": "test"}[split])


def _background(split: str, size: tuple[int, int], random: np.random.RandomState) -> tuple[str, np.ndarray]:
    """A photograph's name and a crop of it (H, W, 3) uint8 in the scene's size, mirrored or not, lighter or darker."""
    height, width = size
    name = PHOTOGRAPHS[split][random.randint(len(PHOTOGRAPHS[split]))]
    photograph = _photograph(name)
    scale = min(photograph.width / width, photograph.height / height) * random.uniform(*_CROP)
    left = random.uniform() * (photograph.width - scale * width)
    top = random.uniform() * (photograph.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    crop = photograph.resize((width, height), Image.Resampling.BICUBIC, box=box)
    pixels = np.asarray(crop).astype(np.float32) * random.uniform(*_GAIN)
    mirrored = pixels[:, ::-1] if random.uniform() < 0.5 else pixels
    return name, np.ascontiguousarray(mirrored.clip(0, 255).astype(np.uint8))


def _lay_over(canvas: np.ndarray, labels: np.ndarray, split: str, row: int, random: np.random.RandomState) -> None:
    """Put one cut-out over a scene, whole inside it, and its label into the mask."""
    height, width = labels.shape
    grey, inside = cut_out(split, row)
    side = max(1, round(min(height, width) * random.uniform(*_OBJECT_SIDE)))
    scale = side / max(grey.size)
    extent = tuple(max(1, round(scale * length)) for length in grey.size)
    grey = np.asarray(grey.resize(extent, Image.Resampling.BICUBIC), np.float32)
    # Half covered counts as covered, so that each pixel shows either the object or what lies behind it.
    inside = np.asarray(inside.resize(extent, Image.Resampling.BILINEAR)) >= 128
    if random.uniform() < 0.5:
        grey, inside = grey[:, ::-1], inside[:, ::-1]
    left, top = random.randint(width - extent[0] + 1), random.randint(height - extent[1] + 1)
    hue = canvas[random.randint(height), random.randint(width)].astype(np.float32)
    hue = 1 - _HUE + _HUE * hue / max(1.0, float(hue.max()))
    coloured = (grey[..., None] * hue).clip(0, 255).astype(np.uint8)
    area = np.s_[top : top + extent[1], left : left + extent[0]]
    canvas[area][inside] = coloured[inside]
    labels[area][inside] = 1 + int(_clothes(split).labels[row])


def cut_out(split: str, row: int) -> tuple[Image.Image, Image.Image]:
    """One of the embedded images without the black around it.

    Returns:
        The object's grey values and where it is (255 inside, 0 outside), both mode L and cropped to the object.
    """
    grey = _clothes(split)[row][0].convert("L")
    framed = Image.new("L", (grey.width + 2, grey.height + 2))
    framed.paste(grey.point(lambda value: 255 * (value > _BLACK)), (1, 1))
    ImageDraw.floodfill(framed, (0, 0), 128)  # the black that reaches the border
    outside = framed.crop((1, 1, grey.width + 1, grey.height + 1))
    inside = outside.point(lambda value: 255 * (value != 128))
    box = inside.getbbox()
    return grey.crop(box), inside.crop(box)


def write_scenes(
    out: str | os.PathLike[str],
    *,
    train: int = 200,
    val: int = 50,
    size: tuple[int, int] = (224, 224),
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Write composed scenes as files in the layout of ADE20K.

    `images/{training,validation}/composed_{train,val}_00000000.png`, masks of the same names in `annotations`, with
    labels 0 to 10 (0 is background, a class like the others) and a palette for viewers; `composed.json`, which names
    classes, settings, and the photograph and cut-outs of each scene; a contact sheet for each split. Images are PNG,
    not JPEG as in ADE20K, so that the files hold the very pixels that `ComposedScenes` gives.

    Args:
        out: Folder to make; it must not exist or must be empty.
        train: Number of training scenes.
        val: Number of validation scenes.
        size: Height and width in pixels.
        seed: Which scenes.
        progress: Show a bar.

    Returns:
        The folder.

    Raises:
        UserError: The folder holds something, or a number is out of range.
    """
    out = Path(out)
    splits = {
        split: ComposedScenes(split=split, length=length, size=size, seed=seed)
        for split, length in (("train", train), ("val", val))
    }
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; give another, or remove what it holds")
    contents = {}
    for split, scenes in splits.items():
        images, annotations = (out / kind / FOLDERS[split] for kind in ("images", "annotations"))
        images.mkdir(parents=True)
        annotations.mkdir(parents=True)
        contents[split] = []
        for i in _bar(len(scenes), split, progress):
            scene, name = scenes.scene(i), f"composed_{split}_{i:08d}.png"
            _save(scene.image, images / name)
            _save(indexed(scene.mask), annotations / name)
            contents[split].append({"file": name, "photograph": scene.photograph, "cutouts": scene.cutouts})
        _save(contact_sheet(scenes), out / f"contact_{split}.png")
    described = {"classes": CLASSES, "size": size, "seed": seed, "scenes": contents}
    atomic_write(out / DESCRIPTION, json.dumps(described, indent=1).encode())
    return out


def contact_sheet(scenes: ComposedScenes, count: int = 16, side: int = 160) -> Image.Image:
    """The first scenes, each above its mask, in one RGB picture.

    Args:
        scenes: What to show.
        count: Number of scenes, at most.
        side: Longer side of a tile in pixels.
    """
    count = min(count, len(scenes))
    columns = min(8, count)
    height, width = (max(1, round(side * length / max(scenes.size))) for length in scenes.size)
    gap = 4
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * 2 * (height + gap) + gap), (255, 255, 255))
    for i in range(count):
        image, mask = scenes[i]
        left, top = gap + i % columns * (width + gap), gap + i // columns * 2 * (height + gap)
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (left, top))
        coloured = indexed(mask).resize((width, height), Image.Resampling.NEAREST).convert("RGB")
        sheet.paste(coloured, (left, top + height + gap // 2))
    return sheet


def indexed(mask: Tensor) -> Image.Image:
    """A mask as an image of mode P with the colours of the classes."""
    image = Image.fromarray(mask.to(torch.uint8).numpy())
    image.putpalette([value for colour in PALETTE for value in colour])
    return image


def _save(image: Image.Image, path: Path) -> None:
    content = io.BytesIO()
    image.save(content, "PNG")
    atomic_write(path, content.getvalue())


def _bar(length: int, split: str, progress: bool) -> Iterator[int]:
    if not progress:
        return iter(range(length))
    return iter(require("tqdm", "train", "the progress bar").tqdm(range(length), desc=f"{split} scenes", unit="scene"))


def _parse_size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) not in (1, 2) or not all(side.isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(
            f"expected a side such as 224, or height x width such as 240x320, got {text!r}"
        )
    return int(sides[0]), int(sides[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m timm_locat.data.scenes",
        description="Write composed scenes: embedded cut-outs over embedded photographs, exact masks, ADE20K's layout.",
    )
    parser.add_argument("out", type=Path, help="folder to make; must be empty if it exists")
    parser.add_argument("--train", type=int, default=200, help="number of training scenes (default: %(default)s)")
    parser.add_argument("--val", type=int, default=50, help="number of validation scenes (default: %(default)s)")
    parser.add_argument(
        "--size", type=_parse_size, default=(224, 224), help="side, or height x width, in pixels (default: 224)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which scenes (default: %(default)s)")
    arguments = vars(parser.parse_args())
    out = write_scenes(arguments.pop("out"), progress=True, **arguments)
    counts = f"{arguments['train']} training and {arguments['val']} validation scenes"
    print(f"wrote {counts} to {out}; look at {out}/contact_train.png and {out}/contact_val.png")


if __name__ == "__main__":
    run_cli(main)
