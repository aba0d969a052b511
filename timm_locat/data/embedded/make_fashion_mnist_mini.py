"""Draw the 6,000 images of `fashion_mnist_mini` from the full Fashion-MNIST and write them as two parquet files.

    python timm_locat/data/embedded/make_fashion_mnist_mini.py --source /usr/share/datasets/fashion-mnist

The source is the folder of Debian's package `dataset-fashion-mnist`, or any folder with the four original `.gz` files.
The same source gives the same rows in the same order each time; see README.md beside this file.
"""

import argparse
import gzip
import io
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# split: (prefix of the source files, images there, images drawn per class, seed)
SPLITS = {"train": ("train", 60_000, 500, 2017), "test": ("t10k", 10_000, 100, 2018)}
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=list(CLASSES)),
        "source_index": datasets.Value("int32"),
    }
)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The unsigned bytes of a gzipped idx file.

    Args:
        path: File to read.
        shape: The sizes that its header must state.

    Returns:
        uint8 array of that shape.

    Raises:
        ValueError: The magic number, the sizes, or the number of bytes differ from what `shape` asks for.
    """
    with gzip.open(path) as file:
        content = file.read()
    header = np.frombuffer(content, ">u4", count=1 + len(shape))
    magic = 0x0800 + len(shape)  # 0x08: unsigned bytes; the last byte: number of dimensions
    if header[0] != magic:
        raise ValueError(f"{path} starts with magic number {header[0]}, expected {magic}; is it the right file?")
    if tuple(header[1:]) != shape:
        raise ValueError(f"{path} states sizes {tuple(map(int, header[1:]))}, expected {shape}; is it the right file?")
    values = np.frombuffer(content, np.uint8, offset=header.nbytes)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} holds {values.size} values, expected {np.prod(shape)}; fetch it again")
    return values.reshape(shape)


def read_split(source: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All images (N, 28, 28) and labels (N,) of one split of the full set, uint8."""
    prefix, count, _, _ = SPLITS[split]
    images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz", (count, 28, 28))
    labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz", (count,))
    if not np.array_equal(np.bincount(labels), [count // len(CLASSES)] * len(CLASSES)):
        raise ValueError(f"the labels of {split} in {source} are not balanced over {len(CLASSES)} classes")
    return images, labels


def draw(labels: np.ndarray, split: str) -> np.ndarray:
    """Rows of the full split that the small one keeps, equally many of each class, in their final order."""
    _, _, per_class, seed = SPLITS[split]
    # RandomState, not Generator: NumPy promises that its streams never change.
    random = np.random.RandomState(seed)
    drawn = [random.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(len(CLASSES))]
    return random.permutation(np.concatenate(drawn))


def png(pixels: np.ndarray) -> bytes:
    """A grey image (H, W) as the bytes of an optimised PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def write_split(source: Path, split: str, folder: Path) -> Path:
    """Draw one split and write `fashion_mnist_mini-<split>.parquet` into `folder`."""
    images, labels = read_split(source, split)
    rows = draw(labels, split)
    table = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": png(images[row]), "path": None} for row in rows],
            "label": labels[rows].tolist(),
            "source_index": rows.tolist(),
        },
        features=FEATURES,
    )
    path = folder / f"fashion_mnist_mini-{split}.parquet"
    unfinished = path.with_suffix(".unfinished")  # another process never sees half a file under the final name
    table.to_parquet(unfinished)
    unfinished.replace(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, default=DEBIAN, help="folder with the four .gz files (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the two parquet files (%(default)s)")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    for split in SPLITS:
        path = write_split(args.source, split, args.out)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
