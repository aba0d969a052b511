"""Tiny data sets in the layouts in which the real ones are published: what `load(name, root=...)` must read."""

import gzip
import struct

import numpy as np
from PIL import Image
from timm.data import ImageNetInfo

WNIDS = ("n02124075", "n04067472", "n01443537")  # in the order of wnids.txt, which is not that of the labels


def image(path, grey=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 2), grey).save(path)


def rgb_planes(count, seed=0):
    """Random pictures (N, 3, 32, 32) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), np.uint8)


def cifar_records(labels, planes, superclass=()):
    return b"".join(bytes((*superclass, y)) + x.tobytes() for y, x in zip(labels, planes, strict=True))


def write_cifar10(root, labels=(9, 0, 3, 3, 7, 1, 0, 5), test_labels=(2, 8)):
    """Binary CIFAR-10 whose five batches have 1, 2, 3, 1 and 1 pictures."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    planes = rgb_planes(8)
    for batch, (first, last) in enumerate(((0, 1), (1, 3), (3, 6), (6, 7), (7, 8)), 1):
        content = cifar_records(labels[first:last], planes[first:last])
        (folder / f"data_batch_{batch}.bin").write_bytes(content)
    (folder / "test_batch.bin").write_bytes(cifar_records(test_labels, rgb_planes(len(test_labels), seed=1)))
    (folder / "readme.html").touch()


def write_cifar100(root, labels=(99, 0, 26), test_labels=(11,)):
    """Binary CIFAR-100, where a superclass stands before each label."""
    for name, of, superclass in (("train", labels, 13), ("test", test_labels, 14)):
        (root / f"{name}.bin").write_bytes(cifar_records(of, rgb_planes(len(of)), superclass=(superclass,)))


def idx(values):
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder, zipped, prefix="train", labels=(9, 0, 4), shape=(4, 3)):
    """One split of Fashion-MNIST; returns its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(len(labels) * shape[0] * shape[1]).reshape(-1, *shape)
    for name, values in (("images-idx3", pixels), ("labels-idx1", np.array(labels))):
        path = folder / f"{prefix}-{name}-ubyte{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(idx(values)) if zipped else idx(values))
    return pixels


def write_mat(path, labels, shape=None):
    """A .mat file as SVHN's; the pictures (N, 3, 32, 32) in it."""
    from scipy import io

    planes = rgb_planes(len(labels))
    pixels = planes.transpose(2, 3, 1, 0)[:, :, :, : shape or len(labels)]
    io.savemat(path, {"X": pixels, "y": np.array(labels, np.uint8)[:, None]}, do_compression=True)
    return planes


def write_tiny_imagenet(root):
    """Tiny-ImageNet's zip unpacked, with three classes of 1, 2 and 3 training images and 4 of validation."""
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


def write_imagenet(root, labels=(999, 7, 134), val_labels=(517, 134)):
    """ImageNet's folders of some of its 1000 classes; an image has the grey of its label, modulo 256."""
    order = ImageNetInfo().label_names()
    for split, of in (("train", labels), ("val", val_labels)):
        for i, label in enumerate(of):
            image(root / split / order[label] / f"{i}.JPEG", grey=label % 256)
    (root / "train" / order[labels[0]] / "list.txt").touch()
    image(root / "test" / "unlabelled.JPEG")


def write_mini_imagenet(root, validation="validation"):
    """mini-ImageNet with three classes: 4 training, 2 validation and 1 test images."""
    for split, counts in (("train", (1, 2, 1)), (validation, (1, 0, 1)), ("test", (0, 1, 0))):
        for wnid, count in zip(WNIDS, counts, strict=True):
            for i in range(count):
                image(root / split / wnid / f"{i}.jpg")


def write_svhn(root):
    """SVHN's three files with 4, 1 and 2 pictures."""
    for split, labels in (("train", (10, 1, 9, 10)), ("test", (3,)), ("extra", (8, 10))):
        write_mat(root / f"{split}_32x32.mat", labels)


def write_fashion_mnist(root):
    """The four IDX files with 4 training and 2 test pictures of 28 x 28."""
    write_idx(root, True, labels=(9, 0, 4, 9), shape=(28, 28))
    write_idx(root, True, "t10k", labels=(7, 7), shape=(28, 28))


LAYOUTS = {
    "cifar10": (write_cifar10, {"train": 8, "test": 2}),
    "cifar100": (lambda root: write_cifar100(root, (99, 0, 26, 0)), {"train": 4, "test": 1}),
    "svhn": (write_svhn, {"train": 4, "test": 1, "extra": 2}),
    "fashion_mnist": (write_fashion_mnist, {"train": 4, "test": 2}),
    "tiny_imagenet": (write_tiny_imagenet, {"train": 6, "test": 4, "num_classes": 3}),
    "mini_imagenet": (write_mini_imagenet, {"train": 4, "validation": 2, "test": 1, "num_classes": 3}),
    "imagenet1k": (lambda root: write_imagenet(root, (999, 7, 134, 7)), {"train": 4, "test": 2}),
}
"""By name of the data set: what writes a tiny one below a folder, and what fixture `small` must be told of it."""
