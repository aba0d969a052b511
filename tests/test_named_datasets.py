"""Data sets by name: every layout that they are handed out in, made small here, and the Hub's tables."""

import gzip
import hashlib
import pickle
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from timm.data import ImageNetInfo

from timm_locat.data import DATASETS, decode_all, eval_transform, load
from timm_locat.errors import MissingExtra, UserError

datasets = pytest.importorskip("datasets")

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
WNIDS = ("n02124075", "n04067472", "n01443537")  # in the order of wnids.txt, which is not that of the labels


def small(monkeypatch, name, num_classes=None, **sizes):
    """Lets a set known by name have other sizes, as the fixtures have."""
    entry = DATASETS[name]
    entry = replace(entry, sizes={**entry.sizes, **sizes}, num_classes=num_classes or entry.num_classes)
    monkeypatch.setitem(DATASETS, name, entry)


def image(path, grey=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 2), grey).save(path)


def corner(data, i):
    return data[i][0].getpixel((0, 0))


def rgb_planes(count, seed=0):
    """Random pictures (N, 3, 32, 32) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), np.uint8)


def same_pixels(data, planes):
    images, _ = decode_all(data, eval_transform((32, 32), 1.0, "bicubic"))
    return np.array_equal(images.numpy(), planes)


# CIFAR


def cifar_records(labels, planes, superclass=()):
    return b"".join(bytes((*superclass, y)) + x.tobytes() for y, x in zip(labels, planes, strict=True))


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Binary CIFAR-10 whose batches have 1, 2, 3, 1 and 1 pictures; the parent folder, and all training pictures."""
    small(monkeypatch, "cifar10", train=8, test=2)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    planes = rgb_planes(8)
    labels = (9, 0, 3, 3, 7, 1, 0, 5)
    for batch, (first, last) in enumerate(((0, 1), (1, 3), (3, 6), (6, 7), (7, 8)), 1):
        content = cifar_records(labels[first:last], planes[first:last])
        (folder / f"data_batch_{batch}.bin").write_bytes(content)
    (folder / "test_batch.bin").write_bytes(cifar_records((2, 8), rgb_planes(2, seed=1)))
    (folder / "readme.html").touch()
    return tmp_path, planes, labels


@pytest.mark.parametrize("inner", [False, True])
def test_binary_cifar10_is_read_batch_after_batch(cifar10, inner):
    root, planes, labels = cifar10
    data = load("cifar10", root=root / "cifar-10-batches-bin" if inner else root)
    assert data.labels.tolist() == list(labels) and data.labels.dtype == torch.int64
    assert same_pixels(data, planes) and data.classes[9] == "truck"
    assert data.source(4) == f"record 1 of {root / 'cifar-10-batches-bin' / 'data_batch_3.bin'}"
    test = load("cifar10", "val", root=root)
    assert test.labels.tolist() == [2, 8] and same_pixels(test, rgb_planes(2, seed=1))


def test_mapped_files_are_pickled_as_their_path(cifar10):
    root, planes, _ = cifar10
    data = load("cifar10", root=root)
    again = pickle.loads(pickled := pickle.dumps(data))
    assert len(pickled) < 5000 < planes.nbytes and same_pixels(again, planes)


def test_given_classes_reorder_the_labels_of_a_named_set(cifar10):
    root, _, labels = cifar10
    names = DATASETS["cifar10"].names
    data = load("cifar10", root=root, classes=names[::-1])
    assert data.classes == names[::-1] and data.labels.tolist() == [9 - label for label in labels]
    with pytest.raises(UserError, match=r"record 0 of .*data_batch_1\.bin is of class 'truck', which is none of the 9"):
        load("cifar10", root=root, classes=names[:9])


def test_a_missing_batch_is_named(cifar10):
    root, _, _ = cifar10
    for batch in (2, 5):
        (root / "cifar-10-batches-bin" / f"data_batch_{batch}.bin").unlink()
    with pytest.raises(UserError, match=r"batches-bin lacks data_batch_2\.bin, data_batch_5\.bin of the train split"):
        load("cifar10", root=root)
    assert len(load("cifar10", "test", root=root)) == 2


@pytest.mark.parametrize("keep", [0, 3072, 3074])
def test_a_cut_batch_is_named(cifar10, keep):
    root, _, _ = cifar10
    path = root / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"data_batch_2\.bin has {keep:,} bytes, expected records of 3,073 bytes"):
        load("cifar10", root=root)


def test_a_batch_cut_between_records_is_noticed(cifar10):
    root, _, _ = cifar10
    path = root / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:3073])
    with pytest.raises(UserError, match="has 7 images of the train split of cifar10, expected 8; copy it again"):
        load("cifar10", root=root)


def test_a_label_that_cifar10_does_not_have_is_named(cifar10):
    root, planes, _ = cifar10
    path = root / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(cifar_records((0, 0, 10), planes[:3]))
    with pytest.raises(UserError, match=r"record 2 of .*data_batch_3\.bin has label 10, but .* 10 classes are 0\.\.9"):
        load("cifar10", root=root)


def test_binary_cifar100_has_the_fine_labels(tmp_path, monkeypatch):
    small(monkeypatch, "cifar100", train=3, test=1)
    planes = rgb_planes(3)
    (tmp_path / "train.bin").write_bytes(cifar_records((99, 0, 26), planes, superclass=(13,)))
    (tmp_path / "test.bin").write_bytes(cifar_records((11,), planes[:1], superclass=(14,)))
    data = load("cifar100", root=tmp_path)
    assert data.labels.tolist() == [99, 0, 26] and same_pixels(data, planes)
    assert [data.classes[y] for y in data.labels] == ["worm", "apple", "crab"]
    assert load("cifar100", "test", root=tmp_path, classes=data.classes).labels.tolist() == [11]


def cifar_pickles(folder, monkeypatch, cls, splits, key):
    """Python files; torchvision's MD5 become those of these files."""
    folder.mkdir(parents=True)
    for split, batches in splits.items():
        digests = []
        for name, (labels, planes) in batches.items():
            content = pickle.dumps({"data": planes.reshape(-1, 3072), key: list(labels), "batch_label": "made here"})
            (folder / name).write_bytes(content)
            digests.append([name, hashlib.md5(content).hexdigest()])
        monkeypatch.setattr(cls, f"{split}_list", digests)


def test_python_cifar10_is_read_where_there_is_no_binary_version(tmp_path, monkeypatch):
    small(monkeypatch, "cifar10", train=3, test=1)
    planes = rgb_planes(3)
    train = {"data_batch_1": ((4, 9), planes[:2]), "data_batch_2": ((0,), planes[2:])}
    splits = {"train": train, "test": {"test_batch": ((1,), planes[:1])}}
    cifar_pickles(tmp_path / "cifar-10-batches-py", monkeypatch, torchvision.datasets.CIFAR10, splits, "labels")
    data = load("cifar10", root=tmp_path)
    assert data.labels.tolist() == [4, 9, 0] and same_pixels(data, planes)
    assert data.source(2) == f"record 0 of {tmp_path / 'cifar-10-batches-py' / 'data_batch_2'}"


def test_python_cifar100_has_the_fine_labels(tmp_path, monkeypatch):
    small(monkeypatch, "cifar100", train=2, test=1)
    planes = rgb_planes(2)
    splits = {"train": {"train": ((98, 5), planes)}, "test": {"test": ((0,), planes[:1])}}
    cifar_pickles(tmp_path / "here", monkeypatch, torchvision.datasets.CIFAR100, splits, "fine_labels")
    data = load("cifar100", root=tmp_path / "here")
    assert data.labels.tolist() == [98, 5] and same_pixels(data, planes)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_is_not_the_official_file_is_never_opened(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, _ in torchvision.datasets.CIFAR10.train_list:
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match=r"data_batch_1 is not the official file of CIFAR-10 \(its MD5 differs\)"):
        load("cifar10", root=tmp_path)
    assert not (tmp_path / "sprung").exists()


# IDX files


def idx(values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder, zipped, prefix="train", labels=(9, 0, 4), shape=(4, 3)):
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(len(labels) * shape[0] * shape[1]).reshape(-1, *shape)
    for name, values in (("images-idx3", pixels), ("labels-idx1", np.array(labels))):
        path = folder / f"{prefix}-{name}-ubyte{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(idx(values)) if zipped else idx(values))
    return pixels


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "raw", "FashionMNIST/raw"])
def test_idx_files_are_read_where_they_usually_lie(tmp_path, monkeypatch, zipped, place):
    small(monkeypatch, "fashion_mnist", train=3, test=2)
    pixels = write_idx(tmp_path / place, zipped)
    write_idx(tmp_path / place, zipped, "t10k", labels=(7, 7))
    data = load("fashion_mnist", root=tmp_path)
    assert data.labels.tolist() == [9, 0, 4] and data.classes[9] == "Ankle boot"
    assert [np.asarray(data[i][0])[..., 1].tolist() for i in range(3)] == pixels.tolist()
    assert data.source(2).startswith(f"image 2 of {tmp_path / place / 'train-images'}")
    assert load("fashion_mnist", "test", root=tmp_path).labels.tolist() == [7, 7]


def test_a_fashion_image_reaches_the_model_padded():
    entry = DATASETS["fashion_mnist"]
    assert entry.native_transform(torch.zeros(3, 28, 28, dtype=torch.uint8)).shape == (3, 32, 32)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_is_complete():
    for split, per_class in (("train", 6000), ("test", 1000)):
        data = load("fashion_mnist", split, root=DEBIAN)
        assert torch.bincount(data.labels).tolist() == [per_class] * 10
    mean = np.mean([np.asarray(data[i][0]) / 255 for i in range(2000)])
    assert abs(mean - DATASETS["fashion_mnist"].mean[0]) < 0.01


@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_whose_header_states_other_counts_is_refused(tmp_path, zipped):
    write_idx(tmp_path, zipped)
    path = next(tmp_path.glob("train-images*"))
    content = idx(np.zeros((3, 4, 3)))[:-1]
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(UserError, match=r"train-images.* states sizes \(3, 4, 3\) but holds 35 values"):
        load("fashion_mnist", root=tmp_path)


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path):
    write_idx(tmp_path, False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2)))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte has 3 images, .*train-labels-idx1-ubyte 2 labels"):
        load("fashion_mnist", root=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("train-labels-idx1-ubyte", idx(np.zeros((3, 4, 3))), "starts with 00000803, expected 00000801"),
        ("train-labels-idx1-ubyte", b"", "starts with , expected 00000801"),
        ("train-labels-idx1-ubyte", idx(np.array([0, 10, 1])), r"image 1 of .* has label 10, but .* are 0\.\.9"),
    ],
)
def test_a_wrong_idx_file_is_named(tmp_path, name, content, why):
    write_idx(tmp_path, False)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=why):
        load("fashion_mnist", root=tmp_path)


def test_a_cut_gzip_file_is_named(tmp_path):
    write_idx(tmp_path, True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot read .*train-images-idx3-ubyte\.gz \(.*; copy it again"):
        load("fashion_mnist", root=tmp_path)


def test_a_missing_label_file_is_named(tmp_path):
    write_idx(tmp_path / "raw", True)
    (tmp_path / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"raw lacks train-labels-idx1-ubyte \(or train-labels-idx1-ubyte\.gz\)"):
        load("fashion_mnist", root=tmp_path)


# SVHN


def write_mat(path, labels, shape=None):
    """A .mat file as SVHN's; the pictures (N, 3, 32, 32) in it."""
    scipy_io = pytest.importorskip("scipy.io")
    planes = rgb_planes(len(labels))
    pixels = planes.transpose(2, 3, 1, 0)[:, :, :, : shape or len(labels)]
    scipy_io.savemat(path, {"X": pixels, "y": np.array(labels, np.uint8)[:, None]}, do_compression=True)
    return planes


def test_svhns_label_10_is_the_digit_0(tmp_path, monkeypatch):
    small(monkeypatch, "svhn", train=4, test=1, extra=2)
    planes = write_mat(tmp_path / "train_32x32.mat", (10, 1, 9, 10))
    write_mat(tmp_path / "test_32x32.mat", (3,))
    write_mat(tmp_path / "extra_32x32.mat", (8, 10))
    data = load("svhn", root=tmp_path)
    assert data.labels.tolist() == [0, 1, 9, 0] and same_pixels(data, planes)
    assert data.classes == tuple("0123456789")
    assert load("svhn", "test", root=tmp_path).labels.tolist() == [3]
    extra = load("svhn", "extra", root=tmp_path, classes=data.classes)
    assert extra.labels.tolist() == [8, 0] and extra.split == "extra"


def test_a_wrong_mat_file_is_named(tmp_path):
    path = tmp_path / "train_32x32.mat"
    write_mat(path, (1, 11))
    with pytest.raises(UserError, match=r"image 1 of .*train_32x32\.mat has label 11, but SVHN's are 1\.\.10"):
        load("svhn", root=tmp_path)
    write_mat(path, (1, 2, 3), shape=2)
    with pytest.raises(UserError, match=r"shape \(32, 32, 3, 2\) for 3 labels, expected uint8 and \(32, 32, 3, 3\)"):
        load("svhn", root=tmp_path)
    for damaged in (path.read_bytes()[:-40], b"no table", b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*train_32x32\.mat as a \.mat file with X and y"):
            load("svhn", root=tmp_path)


def test_svhn_without_scipy_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "train_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtra, match=r"SVHN's \.mat files needs `scipy`.*timm-locat\[data\]"):
        load("svhn", root=tmp_path)


# Tiny-ImageNet


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Tiny-ImageNet's zip unpacked, with three classes."""
    small(monkeypatch, "tiny_imagenet", num_classes=3, train=6, test=4)
    root = tmp_path / "tiny-imagenet-200"
    for count, wnid in enumerate(WNIDS, 1):
        for i in range(count):
            image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", grey=10 * count)
        (root / "train" / wnid / f"{wnid}_boxes.txt").touch()
    lines = []
    for i, wnid in enumerate((WNIDS[1], WNIDS[2], WNIDS[2], WNIDS[0])):
        image(root / "val" / "images" / f"val_{i}.JPEG", grey=100 + i)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    image(root / "test" / "images" / "test_0.JPEG")
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = {"n00001740": "entity", WNIDS[0]: "Egyptian cat", WNIDS[2]: "goldfish, Carassius auratus"}
    (root / "words.txt").write_text("".join(f"{wnid}\t{text}\n" for wnid, text in words.items()))
    return root


def test_tiny_imagenet_is_read_as_it_unpacks(tiny):
    train, test = load("tiny_imagenet", root=tiny.parent), load("tiny_imagenet", "test", root=tiny)
    assert (
        train.classes == test.classes == ("goldfish", "Egyptian cat", "reel")
    )  # reel: timm knows what words.txt lacks
    assert train.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert train.left_out == {".txt": 3} and corner(train, 3) == (10, 10, 10)
    assert test.labels.tolist() == [2, 0, 0, 1] and corner(test, 2) == (102, 102, 102)
    assert test.source(3) == str(tiny / "val" / "images" / "val_3.JPEG")


@pytest.mark.parametrize("split", ["test", "val", "validation"])
def test_tiny_imagenet_is_recognised_by_its_path(tiny, split):
    assert load(tiny).classes == load("tiny_imagenet", root=tiny).classes
    data = load(tiny, split, classes=["Egyptian cat", "goldfish", "reel"])
    assert data.labels.tolist() == [2, 1, 1, 0]
    with pytest.raises(UserError, match="is divided into train and val"):
        load(tiny, "all")


def test_tiny_imagenets_validation_images_may_be_sorted_into_class_folders(tiny):
    for line in (tiny / "val" / "val_annotations.txt").read_text().splitlines():
        name, wnid = line.split()[:2]
        (tiny / "val" / wnid).mkdir(exist_ok=True)
        (tiny / "val" / "images" / name).rename(tiny / "val" / wnid / name)
    data = load(tiny, "test")
    assert data.labels.tolist() == [0, 0, 1, 2] and [corner(data, i)[0] for i in (0, 1, 2, 3)] == [101, 102, 103, 100]
    assert data.left_out == {".txt": 1}
    (tiny / "val" / "images").rmdir()
    assert load(tiny, "test").labels.tolist() == [0, 0, 1, 2]


def test_what_tiny_imagenets_annotations_do_not_name_is_left_out(tiny):
    image(tiny / "val" / "images" / "extra.png")
    (tiny / "val" / "images" / "notes.md").touch()
    image(tiny / "val" / "images" / "._val_0.JPEG")
    data = load(tiny, "val")
    assert len(data) == 4 and data.left_out == {".png": 1, ".md": 1}


def test_an_annotation_of_an_image_that_is_not_there_is_named(tiny):
    (tiny / "val" / "images" / "val_2.JPEG").unlink()
    with pytest.raises(UserError, match=r"val_annotations\.txt names 1 images, val_2\.JPEG the first, that are not in"):
        load(tiny, "test")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("val_9.JPEG\tn09999999\t0", r"line 5 of .* names no class of wnids\.txt: 'val_9\.JPEG\\tn09999999"),
        ("val_9.JPEG", r"line 5 of .* names no class"),
        (f"val_1.JPEG\t{WNIDS[0]}\t0", "line 5 of .* names an image a second time"),
    ],
)
def test_a_wrong_annotation_is_named(tiny, line, why):
    with (tiny / "val" / "val_annotations.txt").open("a") as file:
        file.write(line)
    with pytest.raises(UserError, match=why):
        load(tiny, "test")


def test_a_half_copied_tiny_imagenet_is_refused(tiny):
    folder = tiny / "train" / WNIDS[1]
    (folder / "images" / f"{WNIDS[1]}_1.JPEG").unlink()
    with pytest.raises(UserError, match="has 5 images of the train split of tiny_imagenet, expected 6"):
        load("tiny_imagenet", root=tiny)
    assert len(load(tiny)) == 5  # by its path, a part will do
    (folder / "images" / f"{WNIDS[1]}_0.JPEG").unlink()
    with pytest.raises(UserError, match=rf"class folder .*{WNIDS[1]} holds no image files"):
        load(tiny)
    folder.rename(tiny / "train" / "moved")
    with pytest.raises(
        UserError, match=rf"lacks the folders of 1 of the 3 classes in wnids\.txt, {WNIDS[1]} the first"
    ):
        load(tiny)
    (tiny / "val" / "val_annotations.txt").unlink()
    with pytest.raises(UserError, match=r"expected .*val_annotations\.txt, or class folders in .*val, found neither"):
        load(tiny, "val")


def test_another_number_of_classes_is_not_tiny_imagenet(tiny, monkeypatch):
    small(monkeypatch, "tiny_imagenet", num_classes=200)
    with pytest.raises(UserError, match="has 3 classes, tiny_imagenet has 200; is it that set"):
        load("tiny_imagenet", root=tiny)


# ImageNet and mini-ImageNet


def test_imagenets_labels_are_timms_whichever_classes_are_there(tmp_path, monkeypatch):
    small(monkeypatch, "imagenet1k", train=3, test=2)
    order = ImageNetInfo().label_names()
    for split, labels in (("train", (999, 7, 134)), ("val", (517, 134))):
        for label in labels:
            image(tmp_path / split / order[label] / f"{label}.JPEG", grey=label % 256)
    (tmp_path / "train" / order[7] / "list.txt").touch()
    image(tmp_path / "test" / "unlabelled.JPEG")
    train, test = load("imagenet1k", root=tmp_path), load("imagenet1k", "test", root=tmp_path)
    assert train.labels.tolist() == [7, 134, 999] and train.left_out == {".txt": 1}
    assert test.labels.tolist() == [134, 517] and corner(test, 1) == (5, 5, 5)
    assert len(set(test.classes)) == 1000 and test.classes == train.classes and test.classes[0] == "tench"
    assert test.classes[134] == f"crane ({order[134]})" and test.classes[517] == f"crane ({order[517]})"
    assert load("imagenet1k", "test", root=tmp_path, classes=train.classes).labels.tolist() == [134, 517]


def test_imagenets_validation_images_in_one_folder_are_refused(tmp_path):
    image(tmp_path / "train" / "n01440764" / "0.JPEG")
    image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    for name, root in (("imagenet1k", tmp_path), (tmp_path, None)):
        with pytest.raises(UserError, match=r"val holds image files without class folders, so that nothing says what"):
            load(name, "val", root=root)


def test_a_folder_of_no_imagenet_class_is_named(tmp_path):
    image(tmp_path / "train" / "n00000000" / "0.JPEG")
    with pytest.raises(UserError, match=r"class folder .*n00000000 is none of the 1000 classes"):
        load("imagenet1k", root=tmp_path)


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_mini_imagenet_has_three_splits(tmp_path, monkeypatch, validation):
    small(monkeypatch, "mini_imagenet", num_classes=3, train=4, validation=2, test=1)
    for split, counts in (("train", (1, 2, 1)), (validation, (1, 0, 1)), ("test", (0, 1, 0))):
        for wnid, count in zip(WNIDS, counts, strict=True):
            for i in range(count):
                image(tmp_path / split / wnid / f"{i}.jpg")
    assert load("mini_imagenet", root=tmp_path).classes == ("goldfish", "Egyptian cat", "reel")
    assert load("mini_imagenet", root=tmp_path).labels.tolist() == [0, 1, 2, 2]
    assert load("mini_imagenet", "validation", root=tmp_path).labels.tolist() == [0, 1]
    assert load("mini_imagenet", "test", root=tmp_path).labels.tolist() == [2]


# The Hub


def table(labels, names, label_column="label", image_column="image"):
    """A table with images of the greys 0, 1, ..."""
    features = {image_column: datasets.Image(), label_column: datasets.ClassLabel(names=list(names))}
    images = [Image.new("L", (3, 2), i) for i in range(len(labels))]
    rows = {image_column: images, label_column: list(labels)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.fixture
def hub(monkeypatch):
    """Tables that `load_dataset` then returns, by id and configuration."""
    there = {}

    def load_dataset(repo, config=None):
        if (repo, config) not in there:
            raise ConnectionError(f"Couldn't reach '{repo}' on\nthe Hub")
        return datasets.DatasetDict(there[repo, config])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return there


@pytest.mark.parametrize("name", [name for name in DATASETS if DATASETS[name].hub])
def test_a_named_set_that_cannot_be_fetched_says_what_to_do(hub, name):
    repo = re.escape(DATASETS[name].hub.repo)
    with pytest.raises(
        UserError, match=rf"cannot fetch {repo}.* \(Couldn't reach .* on the Hub\); .*root=.*which holds"
    ):
        load(name)


def test_named_sets_come_from_the_hub_with_the_same_classes(hub):
    names = list(DATASETS["cifar100"].names)
    names[26] = "cra"  # as it is spelt there
    splits = {"train": table((26, 99), names, "fine_label", "img"), "test": table((3,), names, "fine_label", "img")}
    hub["uoft-cs/cifar100", None] = splits
    data = load("cifar100")
    assert data.labels.tolist() == [26, 99] and data.classes == DATASETS["cifar100"].names
    assert corner(data, 1) == (1, 1, 1) and data.source(1) == "row 1 of split train of uoft-cs/cifar100 on the Hub"
    assert load("cifar100", "val", classes=data.classes).labels.tolist() == [3]


def test_the_hubs_configuration_and_split_names_are_known(hub):
    digits = DATASETS["svhn"].names
    splits = {"train": table((1,), digits), "test": table((2, 2), digits), "extra": table((3, 0, 5), digits)}
    hub["ufldl-stanford/svhn", "cropped_digits"] = splits
    assert load("svhn", "extra").labels.tolist() == [3, 0, 5] and load("svhn", "test").labels.tolist() == [2, 2]
    names = [f"{wnid}, x" for wnid in ImageNetInfo().label_names()]
    unlabelled = table((0,), names).map(lambda row: {"label": -1})
    hub["ILSVRC/imagenet-1k", None] = {
        "train": table((5,), names),
        "validation": table((7, 999), names),
        "test": unlabelled,
    }
    assert load("imagenet1k", "test").labels.tolist() == [7, 999]


def test_wordnet_ids_of_the_hub_become_words(hub, monkeypatch):
    small(monkeypatch, "tiny_imagenet", num_classes=3)
    hub["zh-plus/tiny-imagenet", None] = {"train": table((2,), sorted(WNIDS)), "valid": table((0, 1), sorted(WNIDS))}
    data = load("tiny_imagenet", "test")
    assert data.classes == ("goldfish", "Egyptian cat", "reel") and data.labels.tolist() == [0, 1]


def test_a_copy_on_the_hub_with_other_labels_is_refused(hub):
    swapped = [*DATASETS["cifar10"].names[:8], "truck", "ship"]
    hub["uoft-cs/cifar10", None] = {"train": table((0,), swapped)}
    with pytest.raises(UserError, match="has 'truck' as label 8, not as cifar10 has it"):
        load("cifar10")
    hub["uoft-cs/cifar10", None] = {"train": table((0,), swapped[:3])}
    with pytest.raises(UserError, match="uoft-cs/cifar10 has 3 classes, cifar10 has 10"):
        load("cifar10")


def test_the_hubs_tables_may_lie_in_root(tmp_path, monkeypatch):
    small(monkeypatch, "tiny_imagenet", num_classes=3, train=1, test=2)
    (tmp_path / "data").mkdir()
    table((2,), sorted(WNIDS)).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    table((0, 1), sorted(WNIDS)).to_parquet(tmp_path / "data" / "valid-00000-of-00001.parquet")
    assert load("tiny_imagenet", "test", root=tmp_path).labels.tolist() == [0, 1]


def test_any_data_set_of_the_hub_is_read_by_its_id(hub):
    hub["someone/pets", None] = {"train": table((1, 0), "ab"), "validation": table((1,), "ab")}
    hub["someone/pets", "large.v2"] = {"train": table((0,), "cd"), "difficult": table((1, 1), "dc")}
    data = load("someone/pets")
    assert data.labels.tolist() == [1, 0] and data.classes == ("a", "b") and data.name == "someone/pets"
    assert load("someone/pets", "test").labels.tolist() == [1]
    assert load("someone/pets", "test", classes=["b", "a"]).labels.tolist() == [0]
    data = load("someone/pets:large.v2", "difficult")
    assert data.classes == ("c", "d") and data.labels.tolist() == [0, 0]
    with pytest.raises(
        UserError, match=r"a split named test in someone/pets:large\.v2 on the Hub, but it has train, d"
    ):
        load("someone/pets:large.v2", "test")


def test_a_missing_path_that_looks_like_a_hub_id_is_told_both(hub, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot fetch data/pets from the Hub .*if data/pets was meant as a path"):
        load("data/pets")
    with pytest.raises(UserError, match=r"there is no data set, folder or parquet file 'data/pets'"):
        load(Path("data/pets"))
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "data" / "pets" / "train" / "cat" / "0.png")
    assert len(load("data/pets")) == 1


# Names and facts


@pytest.mark.parametrize("name", [name for name in DATASETS if DATASETS[name].open_local])
def test_a_root_without_the_sets_files_is_named(tmp_path, name):
    for split in DATASETS[name].sizes:
        with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}.*"):
            load(name, split, root=tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*gone; root must be one that holds"):
        load(name, root=tmp_path / "gone")


def test_root_goes_with_names_that_have_files_of_their_own(tmp_path):
    with pytest.raises(UserError, match=r"root goes with the name of a set \(fashion_mnist_mini, .*leave it out"):
        load(tmp_path, root=tmp_path)
    with pytest.raises(UserError, match="fashion_mnist_mini is shipped with this package; leave root out"):
        load("fashion_mnist_mini", root=tmp_path)


@pytest.mark.parametrize(("name", "split"), [("cifar10", "extra"), ("svhn", "more"), ("tiny_imagenet", "all")])
def test_a_split_that_a_named_set_lacks_is_refused(tmp_path, name, split):
    with pytest.raises(UserError, match=f"{split!r}|no split {split}"):
        load(name, split, root=tmp_path)


@pytest.mark.parametrize("name", DATASETS)
def test_the_facts_of_a_set_agree_with_one_another(name):
    entry = DATASETS[name]
    assert entry.names is None or len(set(entry.names)) == entry.num_classes
    assert bool(entry.files) != bool(entry.hub and entry.open_local and entry.layouts)
    assert {"train", "test"} <= set(entry.sizes) and set(entry.files) in (set(), set(entry.sizes))
    assert entry.hflip_ok == (name != "svhn")
