"""Segmentation sets in their published layouts: pairs, labels and what is said of a bad copy."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from segmentation_layouts import (
    COUNT,
    THINGS,
    WRITERS,
    write_ade20k,
    write_coco_super,
    write_image,
    write_mask,
    write_voc,
)

from timm_locat.data.scenes import ComposedScenes, write_scenes
from timm_locat.data.segmentation import SEGMENTATION, load_segmentation
from timm_locat.errors import UserError

# What the stripes of each fixture must come out as.
LABELS = {
    "ade20k": [0, 1, 149, 255],
    "voc": [0, 1, 20, 255],
    "pascal_context_59": [0, 1, 58, 255],
    "pascal_context_60": [0, 1, 2, 59],
    "cityscapes": [0, 1, 18, 255],
    "coco_stuff164k": [0, 1, 170, 255],
}
CLASSES = {
    "ade20k": (150, "wall", "flag"),
    "voc": (21, "background", "tvmonitor"),
    "pascal_context_59": (59, "aeroplane", "wood"),
    "pascal_context_60": (60, "background", "wood"),
    "cityscapes": (19, "road", "bicycle"),
    "coco_stuff164k": (171, "person", "wood"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_in_its_published_layout_gives_its_images_and_labels(name, tmp_path):
    root = WRITERS[name](tmp_path)
    for split in SEGMENTATION[name].splits:
        data = load_segmentation(name, split, root=root)
        assert len(data) == COUNT[split] and data.num_classes == CLASSES[name][0]
        for image, mask in data:
            assert image.mode == "RGB" and mask.shape == (image.height, image.width)
            assert mask.dtype == torch.int64 and mask.unique().tolist() == LABELS[name]


@pytest.mark.parametrize("name", WRITERS)
def test_class_names_and_colours_are_complete(name):
    entry = SEGMENTATION[name]
    assert (len(entry.classes), entry.classes[0], entry.classes[-1]) == CLASSES[name]
    assert len(set(entry.classes)) == len(entry.classes) or name == "coco_stuff164k"
    assert len(entry.palette) == len(entry.classes) == len(set(entry.palette))


@pytest.mark.parametrize("name", WRITERS)
def test_a_mask_with_a_class_too_many_is_named(name, tmp_path):
    root = WRITERS[name](tmp_path, values=(0, 200))
    with pytest.raises(UserError, match=r"cannot read mask .*\.png: it holds 200"):
        load_segmentation(name, "train", root=root)[0]


def test_pairs_share_their_names_and_their_order_is_that_of_names(tmp_path):
    data = load_segmentation("ade20k", root=write_ade20k(tmp_path))
    stems = [data.source(i).rpartition("/")[2].removesuffix(".jpg") for i in range(3)]
    assert stems == sorted(stems)
    assert [data.masks.source(i).rpartition("/")[2].removesuffix(".png") for i in range(3)] == stems


def test_the_root_may_be_the_set_or_the_folder_that_holds_it(tmp_path):
    write_voc(tmp_path)
    for root in (tmp_path, tmp_path / "VOCdevkit", tmp_path / "VOCdevkit/VOC2012"):
        assert len(load_segmentation("voc", "val", root=root)) == 2


def test_trainaug_takes_its_own_list_before_train_and_aug(tmp_path):
    lists = write_voc(tmp_path) / "VOCdevkit/VOC2012/ImageSets/Segmentation"
    joined = load_segmentation("voc", "trainaug", root=tmp_path)
    assert [data.rpartition("/")[2][:4] for data in joined.images.paths] == ["2007"] * 3 + ["2009"]
    (lists / "trainaug.txt").write_text("2009_000001\n2007_000000\n")
    assert len(load_segmentation("voc", "trainaug", root=tmp_path)) == 2


def test_the_mask_of_a_bad_pair_is_refused_by_its_size(tmp_path):
    root = write_ade20k(tmp_path)
    write_mask(root / "annotations/validation/ADE_val_00000002.png", (20, 31), (0, 1))
    data = load_segmentation("ade20k", "val", root=root)
    assert data[0][1].shape == (20, 30)
    with pytest.raises(UserError, match=r"ADE_val_00000002\.png: it has 31x20 pixels, but its image has 30x20"):
        data[1]


def test_orphans_are_refused_before_anything_is_read(tmp_path):
    root = write_ade20k(tmp_path)
    (root / "annotations/training/ADE_train_00000002.png").unlink()
    with pytest.raises(UserError, match=r"1 image\(s\) without mask, such as .*ADE_train_00000002\.jpg"):
        load_segmentation("ade20k", root=root)
    (root / "images/validation/ADE_val_00000001.jpg").unlink()
    with pytest.raises(UserError, match=r"1 entry\(s\) without image, such as .*ADE_val_00000001\.png"):
        load_segmentation("ade20k", "val", root=root)


def test_a_listed_image_that_is_missing_is_an_orphan(tmp_path):
    write_voc(tmp_path)
    (tmp_path / "VOCdevkit/VOC2012/JPEGImages/2008_000001.jpg").unlink()
    with pytest.raises(UserError, match=r"without image, such as .*2008_000001\.jpg"):
        load_segmentation("voc", "val", root=tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("ade20k", "test", "ade20k has no split test, it has train, val"),
        ("ade20k", "train", "has no folder images/training, it is of something else or half copied"),
        ("voc", "train", "has no folder JPEGImages"),
    ],
)
def test_what_is_not_there_is_said(name, split, says, tmp_path):
    with pytest.raises(UserError, match=says):
        load_segmentation(name, split, root=tmp_path)


def test_half_a_set_says_what_is_missing(tmp_path):
    write_image(tmp_path / "images/training/a.jpg", (9, 9), 0)
    with pytest.raises(UserError, match="has no folder annotations/training with masks"):
        load_segmentation("ade20k", root=tmp_path)
    (write_voc(tmp_path) / "VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt").unlink()
    with pytest.raises(UserError, match=r"has no ImageSets/Segmentation/val\.txt, which says what belongs"):
        load_segmentation("voc", "val", root=tmp_path)


def test_names_need_a_root_and_nothing_else(tmp_path):
    with pytest.raises(UserError, match="must be on this machine"):
        load_segmentation("ade20k")
    with pytest.raises(UserError, match="there is no folder"):
        load_segmentation("ade20k", root=tmp_path / "none")
    with pytest.raises(UserError, match="has classes and ids of its own"):
        load_segmentation("ade20k", root=tmp_path, classes=["a"])
    with pytest.raises(UserError, match="no segmentation set or path 'ade'"):
        load_segmentation("ade", classes=["a"])


def test_two_folders_are_paired_by_name(tmp_path):
    for i, ending in enumerate((".jpg", ".png")):
        write_image(tmp_path / f"i/deep/{i}{ending}", (8, 12), i)
        write_mask(tmp_path / f"m/deep/{i}.png", (8, 12), (0, 1, 2))
    data = load_segmentation(("i", "m"), root=tmp_path, classes=["a", "b"], reduce_zero_label=True)
    assert len(data) == 2 and data[0][1].unique().tolist() == [0, 1, 255]
    mapped = load_segmentation((tmp_path / "i", tmp_path / "m"), classes=["x", "y"], id_map={0: 255, 1: 1, 2: 0})
    assert mapped[1][1][0].unique_consecutive().tolist() == [255, 1, 0]
    with pytest.raises(UserError, match="names the classes"):
        load_segmentation((tmp_path / "i", tmp_path / "m"))
    (tmp_path / "m/deep/0.png").unlink()
    with pytest.raises(UserError, match="without mask"):
        load_segmentation((tmp_path / "i", tmp_path / "m"), classes=["a"])


def test_folders_of_colour_masks_are_read_by_a_palette(tmp_path):
    write_image(tmp_path / "i/a.png", (1, 3), 0)
    (tmp_path / "m").mkdir()
    Image.fromarray(np.array([[[128, 0, 0], [0, 0, 0], [224, 224, 192]]], np.uint8)).save(tmp_path / "m/a.png")
    folders = (tmp_path / "i", tmp_path / "m")
    with pytest.raises(UserError, match="holds colours"):
        load_segmentation(folders, classes=["a", "b"])[0]
    data = load_segmentation(folders, classes=["a", "b"], mask_colours="voc")
    assert data[0][1].tolist() == [[1, 0, 255]]


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_tables_with_an_image_and_a_mask_column_are_read(kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    write_image(tmp_path / "a.png", (8, 12), 0)
    write_mask(tmp_path / "b.png", (8, 12), (0, 3, 255), [5] * 768)
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    rows = {"image": [str(tmp_path / "a.png")] * 2, "annotation": [str(tmp_path / "b.png")] * 2}
    table = datasets.Dataset.from_dict(rows, features=features)
    if kind == "saved":
        datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "t")
    else:
        (tmp_path / "t").mkdir()
        table.to_parquet(tmp_path / "t/train.parquet")
    data = load_segmentation(str(tmp_path / "t"), classes=["a", "b", "c", "d"])
    image, mask = data[1]
    assert len(data) == 2 and image.size == (12, 8) and mask.unique().tolist() == [0, 3, 255]
    with pytest.raises(UserError, match=r"row 0 of .*it holds 3 in"):
        load_segmentation(str(tmp_path / "t"), classes=["a", "b"])[0]


def test_composed_scenes_are_made_in_memory_or_read_from_files(tmp_path):
    data = load_segmentation("composed", "val")
    image, mask = ComposedScenes(split="val", length=50, size=(224, 224))[7]
    assert len(data) == 50 and data[7][0].tobytes() == image.tobytes() and torch.equal(data[7][1], mask)
    out = write_scenes(tmp_path / "s", train=2, val=1, size=(32, 48))
    files = load_segmentation("composed", root=out)
    assert len(files) == 2 and files.classes == data.classes and files[0][1].shape == (32, 48)
    (out / "composed.json").unlink()
    with pytest.raises(UserError, match=r"has no composed\.json.*not whole"):
        load_segmentation("composed", root=out)


def test_data_can_be_sent_to_workers_and_counts_from_the_end(tmp_path):
    data = pickle.loads(pickle.dumps(load_segmentation("ade20k", root=write_ade20k(tmp_path))))
    assert torch.equal(data[-1][1], data[2][1])
    with pytest.raises(IndexError, match="3 images, there is no number 3"):
        data[3]


def test_super_categories_of_coco_are_sorted_and_ignore_the_other_half(tmp_path):
    write_coco_super(tmp_path)
    for split in ("train", "val"):
        things = load_segmentation("coco_things", split, root=tmp_path)
        assert things.classes == tuple(sorted(THINGS)) and len(things) == COUNT[split]
        person, vehicle = things.classes.index("person"), things.classes.index("vehicle")
        assert all(mask[0].unique_consecutive().tolist() == [255, person, vehicle, 255] for _, mask in things)
        stuff = load_segmentation("coco_stuff", split, root=tmp_path)
        assert stuff.num_classes == 15
        # 92 and 107 are 15 apart, hence of one super-category in the fixture.
        assert all(mask[0].unique_consecutive().tolist() == [255, 0, 255, 1] for _, mask in stuff)
    (tmp_path / "val2017/000000000001.jpg").unlink()
    with pytest.raises(UserError, match=r"there is no file .*000000000001\.jpg"):
        load_segmentation("coco_stuff", "val", root=tmp_path)


def test_a_segment_that_the_annotations_do_not_know_is_refused(tmp_path):
    write_coco_super(tmp_path)
    Image.new("RGB", (30, 20), (9, 9, 9)).save(tmp_path / "annotations/panoptic_val2017/000000000000.png")
    with pytest.raises(UserError, match=r"it holds 592137, which id_map gives no label"):
        load_segmentation("coco_things", "val", root=tmp_path)[0]
