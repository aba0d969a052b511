"""Data sets that are stored as arrays: CIFAR, IDX files and SVHN, small ones made in their layouts."""

import gzip
import hashlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from layouts import cifar_records, idx, rgb_planes, write_cifar10, write_cifar100, write_idx, write_mat, write_svhn

from timm_locat.data import DATASETS, decode_all, eval_transform, load
from timm_locat.errors import MissingExtra, UserError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def same_pixels(data, planes):
    images, _ = decode_all(data, eval_transform((32, 32), 1.0, "bicubic"))
    return np.array_equal(images.numpy(), planes)


# CIFAR


@pytest.fixture
def cifar10(tmp_path, small):
    """Binary CIFAR-10: the parent folder, all training pictures and their labels."""
    small("cifar10", train=8, test=2)
    labels = (9, 0, 3, 3, 7, 1, 0, 5)
    write_cifar10(tmp_path, labels)
    return tmp_path, rgb_planes(8), labels


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


def test_binary_cifar100_has_the_fine_labels(tmp_path, small):
    small("cifar100", train=3, test=1)
    write_cifar100(tmp_path, (99, 0, 26), (11,))
    data = load("cifar100", root=tmp_path)
    assert data.labels.tolist() == [99, 0, 26] and same_pixels(data, rgb_planes(3))
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


def test_python_cifar10_is_read_where_there_is_no_binary_version(tmp_path, monkeypatch, small):
    small("cifar10", train=3, test=1)
    planes = rgb_planes(3)
    train = {"data_batch_1": ((4, 9), planes[:2]), "data_batch_2": ((0,), planes[2:])}
    splits = {"train": train, "test": {"test_batch": ((1,), planes[:1])}}
    cifar_pickles(tmp_path / "cifar-10-batches-py", monkeypatch, torchvision.datasets.CIFAR10, splits, "labels")
    data = load("cifar10", root=tmp_path)
    assert data.labels.tolist() == [4, 9, 0] and same_pixels(data, planes)
    assert data.source(2) == f"record 0 of {tmp_path / 'cifar-10-batches-py' / 'data_batch_2'}"


def test_python_cifar100_has_the_fine_labels(tmp_path, monkeypatch, small):
    small("cifar100", train=2, test=1)
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


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "raw", "FashionMNIST/raw"])
def test_idx_files_are_read_where_they_usually_lie(tmp_path, small, zipped, place):
    small("fashion_mnist", train=3, test=2)
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


def test_svhns_label_10_is_the_digit_0(tmp_path, small):
    small("svhn", train=4, test=1, extra=2)
    write_svhn(tmp_path)
    data = load("svhn", root=tmp_path)
    assert data.labels.tolist() == [0, 1, 9, 0] and same_pixels(data, rgb_planes(4))
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
