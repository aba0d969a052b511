"""Tiny segmentation sets in the layouts in which the real ones are published, for whatever must read them.

Every writer takes the folder that `root` or a config's `data_root` will be (for VOC and Context the one that holds
`VOCdevkit`), and makes `COUNT[split]` pairs with every label of `some` in them and some ignored pixels. `size` is
height and width; images are noise over a ramp, so that nothing is flat.
"""

import json

import numpy as np
from PIL import Image

COUNT = {"train": 3, "trainaug": 4, "val": 2}


def write_image(path, size, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = size
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] * 120 / (height + width)
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    Image.fromarray((ramp + noise).astype(np.uint8)).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))


def write_mask(path, size, values, palette=None):
    """Stripes of the given numbers, each at least one pixel wide where there is room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = np.array(values)[np.arange(size[1]) * len(values) // size[1]]
    image = Image.fromarray(np.tile(columns.astype(np.uint8), (size[0], 1)))
    if palette is not None:
        image.putpalette(palette)
    image.save(path)


def write_ade20k(root, size=(20, 30), values=(0, 1, 2, 150)):
    """ids 1 to 150, 0 for what belongs to no class."""
    for split, folder in (("train", "training"), ("val", "validation")):
        for i in range(COUNT[split]):
            stem = f"ADE_{split}_{i + 1:08d}"
            write_image(root / "images" / folder / f"{stem}.jpg", size, i)
            write_mask(root / "annotations" / folder / f"{stem}.png", size, values)
    return root


VOC_PALETTE = [c for i in range(256) for c in ((i & 1) << 7, (i & 2) << 6, (i & 4) << 5)]  # enough to be no grey


def write_voc(root, size=(20, 30), values=(0, 1, 20, 255)):
    """Palette PNGs of ids 0 to 20 and 255; SBD's masks for the ids of `aug.txt`, as mmsegmentation lists them."""
    base = root / "VOCdevkit/VOC2012"
    stems = {"train": [f"2007_00000{i}" for i in range(3)], "val": [f"2008_00000{i}" for i in range(2)]}
    stems["aug"] = ["2009_000001"]
    lists = base / "ImageSets/Segmentation"
    lists.mkdir(parents=True, exist_ok=True)
    for split, named in stems.items():
        (lists / f"{split}.txt").write_text("".join(f"{stem}\n" for stem in named))
        for i, stem in enumerate(named):
            write_image(base / "JPEGImages" / f"{stem}.jpg", size, i)
            folder = "SegmentationClassAug" if split == "aug" else "SegmentationClass"
            write_mask(base / folder / f"{stem}.png", size, values, None if split == "aug" else VOC_PALETTE)
    write_image(base / "JPEGImages/2010_000009.jpg", size, 9)  # most images of VOC have no mask
    return root


def write_pascal_context(root, size=(20, 30), values=(0, 1, 2, 59)):
    """ids 0 to 59, 0 for background; the lists of SegmentationContext."""
    base = root / "VOCdevkit/VOC2010"
    lists = base / "ImageSets/SegmentationContext"
    lists.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        stems = [f"2008_{split}{i}" for i in range(COUNT[split])]
        (lists / f"{split}.txt").write_text("".join(f"{stem}\n" for stem in stems))
        for i, stem in enumerate(stems):
            write_image(base / "JPEGImages" / f"{stem}.jpg", size, i)
            write_mask(base / "SegmentationClassContext" / f"{stem}.png", size, values)
    return root


def write_cityscapes(root, size=(20, 40), values=(0, 1, 18, 255)):
    """Cities as folders; ids 0 to 18 and 255 in labelTrainIds, beside the files that gtFine brings as well."""
    for split in ("train", "val"):
        for i in range(COUNT[split]):
            city, stem = ("aachen", "bochum")[i % 2], f"city_{i:06d}_000019"
            write_image(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", size, i)
            masks = root / "gtFine" / split / city
            write_mask(masks / f"{stem}_gtFine_labelTrainIds.png", size, values)
            write_mask(masks / f"{stem}_gtFine_labelIds.png", size, (7, 8, 33, 0))
            write_image(masks / f"{stem}_gtFine_color.png", size, i)
    return root


def write_coco_stuff164k(root, size=(20, 30), values=(0, 1, 170, 255)):
    """The original pixel maps with ids up to 181, and beside them the labelTrainIds that are read."""
    for split in ("train", "val"):
        for i in range(COUNT[split]):
            write_image(root / "images" / f"{split}2017" / f"{i:012d}.jpg", size, i)
            masks = root / "annotations" / f"{split}2017"
            write_mask(masks / f"{i:012d}.png", size, (0, 1, 181, 255))
            write_mask(masks / f"{i:012d}_labelTrainIds.png", size, values)
    return root


WRITERS = {
    "ade20k": write_ade20k,
    "voc": write_voc,
    "pascal_context_59": write_pascal_context,
    "pascal_context_60": write_pascal_context,
    "cityscapes": write_cityscapes,
    "coco_stuff164k": write_coco_stuff164k,
}


THINGS = (
    *("person", "vehicle", "outdoor", "animal", "accessory", "sports"),
    *("kitchen", "food", "furniture", "electronic", "appliance", "indoor"),
)


def write_coco_super(root, size=(20, 30)):
    """Panoptic masks of a person, a vehicle, stuff, nothing; pixel maps of two kinds of stuff, things and nothing."""
    things = [{"id": i + 1, "isthing": 1, "supercategory": name} for i, name in enumerate(THINGS)]
    stuff = [{"id": 92 + i, "isthing": 0, "supercategory": f"stuff{i % 15:02d}"} for i in range(91)]
    for split in ("train", "val"):
        images, annotations = [], []
        for i in range(COUNT[split]):
            name = f"{i:012d}"
            write_image(root / f"{split}2017" / f"{name}.jpg", size, i)
            write_mask(root / f"stuff_annotations/stuff_{split}2017_pixelmaps/{name}.png", size, (0, 92, 107, 183, 108))
            ids = [0, 7 + i, 70_000 + i, 300]
            columns = np.array(ids)[np.arange(size[1]) * 4 // size[1]]
            codes = np.tile(columns, (size[0], 1))
            mask = np.stack([codes & 255, codes >> 8 & 255, codes >> 16], -1).astype(np.uint8)
            path = root / f"annotations/panoptic_{split}2017/{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(path)
            images.append({"id": i, "file_name": f"{name}.jpg"})
            segments = [{"id": n, "category_id": c} for n, c in zip(ids[1:], (1, 2, 92), strict=True)]
            annotations.append({"image_id": i, "file_name": f"{name}.png", "segments_info": segments})
        panoptic = {"images": images, "annotations": annotations, "categories": things + stuff}
        (root / f"annotations/panoptic_{split}2017.json").write_text(json.dumps(panoptic))
    other = {"id": 183, "supercategory": "other"}
    (root / "stuff_annotations/stuff_val2017.json").write_text(json.dumps({"categories": [*stuff, other]}))
    return root
