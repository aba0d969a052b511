"""The data sets known by name, and the facts that training and reports need about them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from timm_locat.data._arrays import CifarFiles, open_cifar, open_idx, open_svhn
from timm_locat.data._folders import Found, open_folder
from timm_locat.data._hub import HubSource
from timm_locat.data._imagenet import open_imagenet, open_tiny_imagenet
from timm_locat.data.transforms import pad32_rgb

__all__ = ["DATASETS", "DatasetEntry"]

_EMBEDDED = Path(__file__).parent / "embedded"
_IMAGENET_TERMS = "ImageNet's terms of access: non-commercial research and education"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """A data set that `load` knows by name."""

    files: Mapping[str, Path] = field(default_factory=dict)
    """Parquet file of each split, where the set is shipped with this package."""
    hub: HubSource | None = None
    """Where it is fetched from when no `root` is given."""
    open_local: Callable[[Path, str], Found] | None = None
    """Opens one of `sizes`' splits below a path, in the set's own layouts; tables are read without it."""
    layouts: str = ""
    """What `root` may hold, for people."""
    num_classes: int
    sizes: Mapping[str, int]
    """Number of images of each split, by the split's name."""
    names: tuple[str, ...] | None = None
    """Class names in the order of their labels. None: WordNet ids or the table's names, made readable."""
    image_size: tuple[int, int] | None
    """Height and width of the images as stored, in pixels; None where they differ."""
    mean: tuple[float, float, float]
    """Mean per channel of the training images as stored, where full brightness is 1."""
    std: tuple[float, float, float]
    """Standard deviation per channel, as for the mean."""
    channels: str
    """What the stored channels are and how they become RGB."""
    hflip_ok: bool = True
    """Whether a mirrored image is still one of its class."""
    licence: str
    source: str
    """Where the images come from."""
    native_transform: Callable[[Tensor], Tensor] | None = None
    """Turns stored images, uint8 (..., 3, h, w), into those that models see, before any resizing. None: as stored."""


def _open_class_folders(root: Path, split: str) -> Found:
    if split == "validation" and (root / "val").is_dir():
        split = "val"
    return open_folder(root, split, None)


_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)
_DIGITS = tuple("0123456789")

_CIFAR10_FILES = CifarFiles(
    title="CIFAR-10",
    binary_folder="cifar-10-batches-bin",
    binary_files={"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
    label_bytes=1,
    python=CIFAR10,
    python_labels="labels",
)
_CIFAR100_FILES = CifarFiles(
    title="CIFAR-100",
    binary_folder="cifar-100-binary",
    binary_files={"train": ("train.bin",), "test": ("test.bin",)},
    label_bytes=2,  # the superclass, then the class
    python=CIFAR100,
    python_labels="fine_labels",
)

# Means and deviations are the published ones, taken over and not computed here.
DATASETS: dict[str, DatasetEntry] = {
    "fashion_mnist_mini": DatasetEntry(
        files={split: _EMBEDDED / f"fashion_mnist_mini-{split}.parquet" for split in ("train", "test")},
        num_classes=10,
        sizes={"train": 5_000, "test": 1_000},
        names=_FASHION,
        image_size=(28, 28),
        # Of the full training set; the 5,000 images here have 0.2842 and 0.3522.
        mean=(0.2860, 0.2860, 0.2860),
        std=(0.3530, 0.3530, 0.3530),
        channels="one grey channel, copied to three; padded from 28x28 to 32x32 by pad32_rgb",
        licence="MIT",
        source="5,000 training and 1,000 test images of Fashion-MNIST (Zalando SE), shipped with this package",
        native_transform=pad32_rgb,
    ),
    "fashion_mnist": DatasetEntry(
        hub=HubSource("zalando-datasets/fashion_mnist"),
        open_local=partial(open_idx, classes=_FASHION),
        layouts="the four *-ubyte files, with or without .gz, there, in raw or in FashionMNIST/raw",
        num_classes=10,
        sizes={"train": 60_000, "test": 10_000},
        names=_FASHION,
        image_size=(28, 28),
        mean=(0.2860, 0.2860, 0.2860),
        std=(0.3530, 0.3530, 0.3530),
        channels="one grey channel, copied to three; padded from 28x28 to 32x32 by pad32_rgb",
        licence="MIT",
        source="Fashion-MNIST, Zalando SE, arXiv:1708.07747",
        native_transform=pad32_rgb,
    ),
    "cifar10": DatasetEntry(
        hub=HubSource("uoft-cs/cifar10"),
        open_local=partial(open_cifar, files=_CIFAR10_FILES, classes=_CIFAR10),
        layouts="cifar-10-batches-bin or cifar-10-batches-py, or what is in them",
        num_classes=10,
        sizes={"train": 50_000, "test": 10_000},
        names=_CIFAR10,
        image_size=(32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        channels="RGB",
        licence="none stated; its authors ask for a citation",
        source="CIFAR-10, Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cifar100": DatasetEntry(
        hub=HubSource("uoft-cs/cifar100"),
        open_local=partial(open_cifar, files=_CIFAR100_FILES, classes=_CIFAR100),
        layouts="cifar-100-binary or cifar-100-python, or what is in them",
        num_classes=100,
        sizes={"train": 50_000, "test": 10_000},
        names=_CIFAR100,
        image_size=(32, 32),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        channels="RGB",
        licence="none stated; its authors ask for a citation",
        source="CIFAR-100 with its 100 fine classes, Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "svhn": DatasetEntry(
        hub=HubSource("ufldl-stanford/svhn", "cropped_digits"),
        open_local=partial(open_svhn, classes=_DIGITS),
        layouts="train_32x32.mat, test_32x32.mat, extra_32x32.mat",
        num_classes=10,
        sizes={"train": 73_257, "test": 26_032, "extra": 531_131},
        names=_DIGITS,
        image_size=(32, 32),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        channels="RGB",
        hflip_ok=False,
        licence="non-commercial use only",
        source="SVHN's cropped digits, Netzer et al. 2011, ufldl.stanford.edu/housenumbers",
    ),
    "tiny_imagenet": DatasetEntry(
        hub=HubSource("zh-plus/tiny-imagenet", splits={"test": "valid"}),
        open_local=open_tiny_imagenet,
        layouts="tiny-imagenet-200 or what is in it, val as it unpacks or sorted into class folders",
        num_classes=200,
        sizes={"train": 100_000, "test": 10_000},
        image_size=(64, 64),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        channels="RGB, some grey, copied to three",
        licence=_IMAGENET_TERMS,
        source="Tiny-ImageNet, Stanford CS231n, cs231n.stanford.edu/tiny-imagenet-200.zip; test is its val",
    ),
    "mini_imagenet": DatasetEntry(
        hub=HubSource("timm/mini-imagenet"),
        open_local=_open_class_folders,
        layouts="train, validation and test with a folder per class, the same 100 classes in each",
        num_classes=100,
        sizes={"train": 50_000, "validation": 10_000, "test": 5_000},
        image_size=None,
        mean=(0.485, 0.456, 0.406),  # ImageNet's
        std=(0.229, 0.224, 0.225),
        channels="RGB, some grey, copied to three",
        licence=_IMAGENET_TERMS,
        source="100 classes of ImageNet-1k, huggingface.co/datasets/timm/mini-imagenet; not the few-shot split",
    ),
    "imagenet1k": DatasetEntry(
        hub=HubSource("ILSVRC/imagenet-1k", splits={"test": "validation"}),
        open_local=open_imagenet,
        layouts="train and val with a folder per WordNet id",
        num_classes=1000,
        sizes={"train": 1_281_167, "test": 50_000},
        image_size=None,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        channels="RGB, some grey or CMYK, converted",
        licence=_IMAGENET_TERMS,
        source="ImageNet-1k (ILSVRC 2012), www.image-net.org; test is its validation split",
    ),
}
"""The data sets known by name."""
