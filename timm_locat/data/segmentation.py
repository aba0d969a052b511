"""Images with masks behind one function: `load_segmentation` takes the name of a set, two folders, or a table.

Every file is read by the two readers of this project, `read_image` and `read_mask`. Labels that come out are 0 to K - 1
and `ignore_index`, whatever flavour of ids the files hold.
"""

import difflib
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from timm_locat.data import _coco, scenes
from timm_locat.data import _segmentation_classes as names
from timm_locat.data._columns import pick_image_column
from timm_locat.data._folders import EXTENSIONS, Files, Found, Samples
from timm_locat.data._hub import open_hub, parse_hub_id
from timm_locat.data._tables import Rows, Table, open_parquet, open_tables
from timm_locat.data.images import ImageSource, read_image
from timm_locat.data.masks import PALETTES, Colour, Palette, read_mask, voc_colours
from timm_locat.errors import UserError

__all__ = ["SEGMENTATION", "Pairs", "SegmentationData", "SegmentationEntry", "find_pairs", "load_segmentation"]

IMAGE_COLUMNS = ("image", "img", "pixel_values")
MASK_COLUMNS = ("mask", "annotation", "label", "segmentation", "semantic_mask", "segmentation_mask", "masks", "labels")


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationData(Dataset[tuple[Image.Image, Tensor]]):
    """Images and masks of one split, read when asked for: `data[i]` is an RGB image and its (H, W) int64 mask.

    i counts from the end where negative. Can be pickled, for the workers of a DataLoader.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    """Class names in the order of their labels."""
    palette: tuple[Colour, ...]
    """A colour for each class, for pictures."""
    ignore_index: int = 255
    """Label of pixels that do not count."""
    reduce_zero_label: bool = False
    """Whether 0 in the files is no class; the masks that come out of `data[i]` are reduced already."""
    id_map: Mapping[int, int] | None = None
    """Label of each number in the files, where they are not the labels."""
    id_maps: Sequence[Mapping[int, int]] | None = None
    """The same, mask by mask, where each has numbers of its own."""
    mask_colours: Palette | None = None
    """Label of each colour in the files, where these hold colours."""
    images: Samples = field(repr=False)
    """Undecoded images: `images[i]` is what `read_image` takes, such as a path."""
    masks: Samples = field(repr=False)
    """Undecoded masks, the i-th of the i-th image."""
    length: int

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Image.Image, Tensor]:
        image = self.image(i)
        return image, self.mask(i, image.size)

    def image(self, i: int) -> Image.Image:
        """Image i, without reading its mask."""
        i = self._index(i)
        return read_image(self.images[i], name=self.images.source(i))

    def mask(self, i: int, image_size: tuple[int, int] | None = None) -> Tensor:
        """(H, W) int64 labels of image i, without reading the image; `image_size` as for `read_mask`."""
        i = self._index(i)
        return read_mask(
            self.masks[i],
            name=self.masks.source(i),
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            reduce_zero_label=self.reduce_zero_label,
            id_map=self.id_map if self.id_maps is None else self.id_maps[i],
            palette=self.mask_colours,
            image_size=image_size,
        )

    def source(self, i: int) -> str:
        """What image i is called in errors."""
        return self.images.source(self._index(i))

    def _index(self, i: int) -> int:
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.name} ({self.split}) has {len(self)} images, there is no number {i}")
        return i % len(self)


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """Where one split's files lie below the root of a set."""

    images: str
    masks: tuple[str, ...]
    """Folders with masks; each mask is taken from the first that has it."""
    lists: tuple[str, ...] = ()
    """Files that name the split's images, one a line; any one of these alternatives may consist of several, joined
    by `+`. Without, all images of the folder belong to it."""
    count: int
    """Number of images that the whole set has."""


@dataclass(frozen=True, kw_only=True)
class SegmentationEntry:
    """A set that `load_segmentation` knows by name."""

    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    splits: Mapping[str, SplitFiles]
    image_suffix: str = ".jpg"
    mask_suffix: str = ".png"
    reduce_zero_label: bool = False
    inner: tuple[str, ...] = ("",)
    """Where the set's root may lie below the given one."""
    prepare: str
    """How the masks are made from what is handed out, for people."""


@dataclass(frozen=True)
class Pairs:
    """Files of one split: images and masks that belong together, and what is without its other half."""

    images: tuple[str, ...]
    masks: tuple[str, ...]
    without_mask: tuple[str, ...] = ()
    """Images that have no mask."""
    without_image: tuple[str, ...] = ()
    """Masks, or lines of a list, that have no image."""


def _colours(count: int) -> tuple[Colour, ...]:
    """The first colours of PASCAL VOC's map after black, which tells apart up to 255 classes."""
    return tuple(voc_colours(count + 1))[1:]


_VOC = ("VOCdevkit/VOC2012", "VOC2012", "")
_CONTEXT = ("VOCdevkit/VOC2010", "VOC2010", "")
_CONTEXT_SPLITS = {
    split: SplitFiles(
        images="JPEGImages",
        masks=("SegmentationClassContext",),
        lists=(f"ImageSets/SegmentationContext/{split}.txt",),
        count=count,
    )
    for split, count in (("train", 4998), ("val", 5105))
}
_CONTEXT_HOW = (
    "VOC2010 with JPEGImages, masks of ids 0 to 59 (0 is background) in SegmentationClassContext, and the lists "
    "ImageSets/SegmentationContext/{train,val}.txt, as mmsegmentation's tools/dataset_converters/pascal_context.py "
    "makes them"
)

SEGMENTATION: dict[str, SegmentationEntry] = {
    "ade20k": SegmentationEntry(
        classes=names.ADE20K,
        palette=_colours(150),
        splits={
            split: SplitFiles(images=f"images/{folder}", masks=(f"annotations/{folder}",), count=count)
            for split, folder, count in (("train", "training", 20_210), ("val", "validation", 2_000))
        },
        reduce_zero_label=True,
        inner=("ADEChallengeData2016", ""),
        prepare="ADEChallengeData2016.zip as it unpacks: masks of ids 0 to 150, 0 for what belongs to no class",
    ),
    "voc": SegmentationEntry(
        classes=names.VOC,
        palette=tuple(PALETTES["voc"])[:21],
        splits={
            "train": SplitFiles(
                images="JPEGImages",
                masks=("SegmentationClass",),
                lists=("ImageSets/Segmentation/train.txt",),
                count=1_464,
            ),
            "trainaug": SplitFiles(
                images="JPEGImages",
                masks=("SegmentationClassAug", "SegmentationClass"),
                lists=(
                    "ImageSets/Segmentation/trainaug.txt",
                    "ImageSets/Segmentation/train.txt+ImageSets/Segmentation/aug.txt",
                ),
                count=10_582,
            ),
            "val": SplitFiles(
                images="JPEGImages",
                masks=("SegmentationClass",),
                lists=("ImageSets/Segmentation/val.txt",),
                count=1_449,
            ),
        },
        inner=_VOC,
        prepare=(
            "VOCdevkit/VOC2012 as it unpacks, masks of ids 0 to 20 with 255 for borders; for trainaug also "
            "SegmentationClassAug from SBD and ImageSets/Segmentation/trainaug.txt, or aug.txt as mmsegmentation's "
            "tools/dataset_converters/voc_aug.py makes it"
        ),
    ),
    "pascal_context_59": SegmentationEntry(
        classes=names.PASCAL_CONTEXT_60[1:],
        palette=_colours(59),
        splits=_CONTEXT_SPLITS,
        reduce_zero_label=True,
        inner=_CONTEXT,
        prepare=_CONTEXT_HOW,
    ),
    "pascal_context_60": SegmentationEntry(
        classes=names.PASCAL_CONTEXT_60,
        palette=((0, 0, 0), *_colours(59)),
        splits=_CONTEXT_SPLITS,
        inner=_CONTEXT,
        prepare=_CONTEXT_HOW,
    ),
    "cityscapes": SegmentationEntry(
        classes=names.CITYSCAPES,
        palette=tuple(PALETTES["cityscapes"])[:19],
        splits={
            split: SplitFiles(images=f"leftImg8bit/{split}", masks=(f"gtFine/{split}",), count=count)
            for split, count in (("train", 2_975), ("val", 500))
        },
        image_suffix="_leftImg8bit.png",
        mask_suffix="_gtFine_labelTrainIds.png",
        inner=("cityscapes", ""),
        prepare=(
            "leftImg8bit and gtFine as they unpack, and *_gtFine_labelTrainIds.png made by cityscapesScripts' "
            "createTrainIdLabelImgs.py: ids 0 to 18, 255 for the rest"
        ),
    ),
    "coco_stuff164k": SegmentationEntry(
        classes=names.COCO_STUFF_164K,
        palette=_colours(171),
        splits={
            split: SplitFiles(images=f"images/{split}2017", masks=(f"annotations/{split}2017",), count=count)
            for split, count in (("train", 118_287), ("val", 5_000))
        },
        mask_suffix="_labelTrainIds.png",
        inner=("coco_stuff164k", ""),
        prepare=(
            "images and the pixel maps of COCO-Stuff 164k, and *_labelTrainIds.png made from these by mmsegmentation's "
            "tools/dataset_converters/coco_stuff164k.py: ids 0 to 170, 255 for the rest"
        ),
    ),
    "composed": SegmentationEntry(
        classes=scenes.CLASSES,
        palette=scenes.PALETTE,
        splits={
            split: SplitFiles(images=f"images/{folder}", masks=(f"annotations/{folder}",), count=0)
            for split, folder in scenes.FOLDERS.items()
        },
        image_suffix=".png",
        prepare="python -m timm_locat.data.scenes OUT",
    ),
}
"""The sets known by name."""


def load_segmentation(
    name_or_folders: str | os.PathLike[str] | tuple[str | os.PathLike[str], str | os.PathLike[str]],
    split: str = "train",
    *,
    root: str | os.PathLike[str] | None = None,
    classes: Sequence[str] | None = None,
    ignore_index: int = 255,
    reduce_zero_label: bool = False,
    id_map: Mapping[int, int] | None = None,
    mask_colours: Palette | None = None,
) -> SegmentationData:
    """Open one split of images with masks.

    Args:
        name_or_folders: A name in `SEGMENTATION`, or `coco_things` or `coco_stuff`, COCO's 12 and 15 super-categories;
            or a folder of images and a folder of masks, paired by their paths
            below these without the ending; or a parquet file, a folder of such files or one written by `save_to_disk`,
            or `owner/name` of the Hub, with an image column and a mask column.
        split: `train`, `val`, or another that the set has; for two folders only a word in messages.
        root: For a set known by name, where its files are. `composed` without it makes 200 and 50 scenes of 224 pixels
            in memory.
        classes: Class names in the order of their labels; needed for everything but sets known by name, which have
            their own, as the four below.
        ignore_index: Number of pixels that do not count.
        reduce_zero_label: 0 in the masks is no class, as for `read_mask`.
        id_map: Label of each number in the masks, as for `read_mask`.
        mask_colours: Label of each colour in the masks, as for `read_mask`'s `palette`.

    Raises:
        UserError: Nothing is there, a part is missing, an image has no mask or a mask no image.
    """
    rules = {
        "ignore_index": ignore_index,
        "reduce_zero_label": reduce_zero_label,
        "id_map": id_map,
        "mask_colours": mask_colours,
    }
    if isinstance(name_or_folders, tuple | list):
        return _of_folders(name_or_folders, split, classes, root, rules)
    name = os.fspath(name_or_folders)
    if name in SEGMENTATION or name in _coco.OPEN:
        if classes is not None or rules != _NO_RULES:
            raise UserError(f"{name} has classes and ids of its own; leave classes, ignore_index and the like out")
        return _of_coco(name, split, root) if name in _coco.OPEN else _of_name(name, split, root)
    if root is not None:
        raise UserError(
            f"root goes with the name of a set ({', '.join(SEGMENTATION)}), not with {name!r}; leave it out"
        )
    return _of_table(name, split, _needed(classes, name), rules)


_NO_RULES = {"ignore_index": 255, "reduce_zero_label": False, "id_map": None, "mask_colours": None}


def find_pairs(name: str, split: str, root: str | os.PathLike[str]) -> Pairs:
    """Files of one split of a set known by name, those without their other half told apart.

    Raises:
        UserError: There is no such split or set, a folder or list is missing, or no file is found at all.
    """
    if name not in SEGMENTATION:
        near = difflib.get_close_matches(name, SEGMENTATION, n=1)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join(SEGMENTATION)}"
        raise UserError(f"there is no segmentation set {name!r}; {hint}")
    entry = SEGMENTATION[name]
    files = entry.splits.get(split)
    if files is None:
        raise UserError(f"{name} has no split {split}, it has {', '.join(entry.splits)}; ask for one of these")
    base = _base(name, entry, files, Path(root).expanduser())
    if name == "composed" and not (base / scenes.DESCRIPTION).is_file():
        raise UserError(
            f"{base} has no {scenes.DESCRIPTION}, which is written last, so that these scenes are not whole; make them "
            "again"
        )
    listed = _listed(base, files.lists, entry) if files.lists else None
    pairs = _paired(
        base / files.images, [base / folder for folder in files.masks], entry.image_suffix, entry.mask_suffix, listed
    )
    if not pairs.images and not pairs.without_mask and not pairs.without_image:
        raise UserError(
            f"expected images *{entry.image_suffix} in {base / files.images}, found none; {name} is {entry.prepare}"
        )
    return pairs


def _base(name: str, entry: SegmentationEntry, files: SplitFiles, root: Path) -> Path:
    """The set's own root, in or below the given one."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; {name} is {entry.prepare}")
    base = next((root / inner for inner in entry.inner if (root / inner / files.images).is_dir()), None)
    if base is None:
        raise UserError(
            f"{root} has no folder {files.images}, it is of something else or half copied; {name} is {entry.prepare}"
        )
    if not any((base / folder).is_dir() for folder in files.masks):
        raise UserError(f"{base} has no folder {' or '.join(files.masks)} with masks; {name} is {entry.prepare}")
    return base


def _listed(base: Path, lists: tuple[str, ...], entry: SegmentationEntry) -> list[str]:
    """Names of the images of a split, in the order of its lists."""
    for alternative in lists:
        paths = [base / part for part in alternative.split("+")]
        if all(path.is_file() for path in paths):
            words = [line.split() for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
            stems = [line[0] for line in words if line]
            if len(set(stems)) < len(stems):
                twice = next(stem for stem in stems if stems.count(stem) > 1)
                raise UserError(f"{paths[0]} names {twice} more than once; remove the repeated lines")
            return stems
    raise UserError(f"{base} has no {' or '.join(lists)}, which says what belongs to the split; it is {entry.prepare}")


def _paired(
    images: Path, masks: Sequence[Path], image_suffix: str, mask_suffix: str, listed: Sequence[str] | None
) -> Pairs:
    """Images and masks of the same path below their folders but for the suffix, sorted or in the order listed."""
    of_image = _by_stem(images, image_suffix)
    of_mask = {stem: path for folder in reversed(masks) for stem, path in _by_stem(folder, mask_suffix).items()}
    stems = sorted(of_image) if listed is None else listed
    both = [stem for stem in stems if stem in of_image and stem in of_mask]
    if listed is None:
        lonely = [of_mask[stem] for stem in sorted(of_mask) if stem not in of_image]
    else:
        lonely = [str(images / (stem + image_suffix)) for stem in listed if stem not in of_image]
    return Pairs(
        tuple(of_image[stem] for stem in both),
        tuple(of_mask[stem] for stem in both),
        tuple(of_image[stem] for stem in stems if stem in of_image and stem not in of_mask),
        tuple(lonely),
    )


def _by_stem(folder: Path, suffix: str) -> dict[str, str]:
    """Files below a folder that end in the suffix, by their path there without it; hidden ones are left out."""
    found = {}
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(place).relative_to(folder)
        for name in files:
            if name.endswith(suffix) and not name.startswith("."):
                found[(below / name.removesuffix(suffix)).as_posix()] = str(Path(place, name))
    return found


def _of_name(name: str, split: str, root: str | os.PathLike[str] | None) -> SegmentationData:
    entry = SEGMENTATION[name]
    if root is None and name == "composed":
        return _in_memory(split)
    if root is None:
        raise UserError(f"{name} must be on this machine: give its folder as root; it is {entry.prepare}")
    pairs = _whole(find_pairs(name, split, root), f"{name} ({split})")
    return SegmentationData(
        name=name,
        split=split,
        classes=entry.classes,
        palette=entry.palette,
        reduce_zero_label=entry.reduce_zero_label,
        images=Files(pairs.images),
        masks=Files(pairs.masks),
        length=len(pairs.images),
    )


def _of_coco(name: str, split: str, root: str | os.PathLike[str] | None) -> SegmentationData:
    """COCO's super-categories, whose masks are told by annotation files."""
    if split not in _coco.SPLITS:
        raise UserError(f"{name} has no split {split}, it has {', '.join(_coco.SPLITS)}; ask for one of these")
    if root is None:
        raise UserError(f"{name} must be on this machine: give the folder of COCO 2017 as root")
    found = _coco.OPEN[name](Path(root).expanduser(), split)
    return SegmentationData(
        name=name,
        split=split,
        classes=found.classes,
        palette=_colours(len(found.classes)),
        id_maps=found.id_maps,
        mask_colours="panoptic" if name == "coco_things" else None,
        images=Files(found.images),
        masks=Files(found.masks),
        length=len(found.images),
    )


def _whole(pairs: Pairs, where: str) -> Pairs:
    """The pairs, if nothing lacks its other half."""
    for lonely, what, other in ((pairs.without_mask, "image", "mask"), (pairs.without_image, "entry", "image")):
        if lonely:
            raise UserError(
                f"{where} has {len(lonely)} {what}(s) without {other}, such as "
                f"{lonely[0]}; copy the set again, or remove what is left over"
            )
    return pairs


def _of_folders(
    folders: Sequence[str | os.PathLike[str]],
    split: str,
    classes: Sequence[str] | None,
    root: str | os.PathLike[str] | None,
    rules: dict,
) -> SegmentationData:
    if len(folders) != 2:
        raise UserError(f"expected a folder of images and a folder of masks, got {len(folders)} folders")
    base = Path("" if root is None else root).expanduser()
    images, masks = (base / Path(folder).expanduser() for folder in folders)
    for folder, what in ((images, "images"), (masks, "masks")):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the folder of the {what}")
    of_image, of_mask = (_any_ending(folder) for folder in (images, masks))
    stems = [stem for stem in sorted(of_image) if stem in of_mask]
    pairs = Pairs(
        tuple(of_image[stem] for stem in stems),
        tuple(of_mask[stem] for stem in stems),
        tuple(of_image[stem] for stem in sorted(of_image) if stem not in of_mask),
        tuple(of_mask[stem] for stem in sorted(of_mask) if stem not in of_image),
    )
    pairs = _whole(pairs, f"{images} and {masks}")
    if not pairs.images:
        raise UserError(
            f"expected images in {images} and masks of the same names in {masks}, found none; check the paths"
        )
    return _custom(
        f"{images}, {masks}",
        split,
        _needed(classes, str(images)),
        rules,
        Files(pairs.images),
        Files(pairs.masks),
        len(stems),
    )


def _any_ending(folder: Path) -> dict[str, str]:
    """Image files of any kind by their path without the ending, which must differ."""
    found: dict[str, str] = {}
    for stem, path in _by_stem(folder, "").items():
        ending = Path(path).suffix
        if ending.lower() not in EXTENSIONS:
            continue
        key = stem.removesuffix(ending)
        if key in found:
            raise UserError(f"{found[key]} and {path} differ in their ending only; remove one of them")
        found[key] = path
    return found


def _needed(classes: Sequence[str] | None, where: str) -> tuple[str, ...]:
    if isinstance(classes, str) or not classes or len(set(classes)) < len(classes):
        raise UserError(
            f"nothing in {where} names the classes; give different names in the order of their labels (classes=...)"
        )
    return tuple(classes)


def _custom(
    name: str, split: str, classes: tuple[str, ...], rules: dict, images: Samples, masks: Samples, length: int
) -> SegmentationData:
    palette = ((0, 0, 0), *_colours(len(classes)))[: len(classes)]
    return SegmentationData(
        name=name, split=split, classes=classes, palette=palette, images=images, masks=masks, length=length, **rules
    )


@dataclass(frozen=True)
class _TwoColumns:
    images: Rows
    masks: Rows
    length: int


def _read_pairs(table: Table, trained: Table | None, split: str, classes: tuple[str, ...] | None) -> Found:
    """A reader of tables, as `_tables.read_table` is, that finds images and masks."""
    image = pick_image_column(table, "image", IMAGE_COLUMNS)
    mask = pick_image_column(table, "mask", MASK_COLUMNS, taken=image)
    length = table.origins.ends[-1]
    if not length:
        raise UserError(f"{table.where} has no rows; a split needs at least one image")
    columns = (Rows(table.undecoded(column), column, table.origins) for column in (image, mask))
    return Found(_TwoColumns(*columns, length), None, (), {})


def _of_table(name: str, split: str, classes: tuple[str, ...], rules: dict) -> SegmentationData:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".parquet":
        found = open_parquet(path, split, None, _read_pairs)
    elif path.is_dir():
        found = open_tables(path, split, None, _read_pairs)
        if found is None:
            raise UserError(
                f"{path} holds no parquet files and none of save_to_disk; for folders of files give two, of images and "
                "of masks, or the name of a set and its root"
            )
    else:
        hub = parse_hub_id(name)
        if hub is None:
            raise UserError(
                f"there is no segmentation set or path {name!r}; expected one of {', '.join(SEGMENTATION)}, two "
                "folders, a table, or owner/name of a data set of the Hub"
            )
        found = open_hub(hub, split, None, "give the path of a local copy", read=_read_pairs)
    columns = found.samples
    return _custom(name, split, classes, rules, columns.images, columns.masks, columns.length)


@dataclass(frozen=True)
class _SceneHalf:
    """Images or masks of composed scenes, by index."""

    made: scenes.ComposedScenes
    which: int

    def __getitem__(self, index: int) -> ImageSource:
        half = self.made[index][self.which]
        return half if self.which == 0 else scenes.indexed(half)

    def source(self, index: int) -> str:
        return self.made.source(index)


def _in_memory(split: str) -> SegmentationData:
    if split not in scenes.FOLDERS:
        raise UserError(f"composed has no split {split}, it has {', '.join(scenes.FOLDERS)}; ask for one of these")
    made = scenes.ComposedScenes(split=split, length={"train": 200, "val": 50}[split], size=(224, 224))
    return SegmentationData(
        name="composed",
        split=split,
        classes=scenes.CLASSES,
        palette=scenes.PALETTE,
        images=_SceneHalf(made, 0),
        masks=_SceneHalf(made, 1),
        length=len(made),
    )
