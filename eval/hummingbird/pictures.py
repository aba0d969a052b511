"""Retrieval to look at: a patch of a query image, and the patches of the bank that are nearest to it."""

import io
import os
from typing import Any

import torch
from torch import Tensor

from eval.hummingbird.evaluate import Neighbours
from eval.hummingbird.features import ModelSource
from eval.hummingbird.labels import count_labels, draw, patch_ranks, unpack_ids
from eval.hummingbird.protocol import Protocol
from eval.hummingbird.tasks import Segmentation
from timm_locat.errors import require
from timm_locat.record import atomic_write

__all__ = ["draw_retrieval"]

QUERY, SAME, OTHER = "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
SHOWN = 6


def draw_retrieval(
    path: str | os.PathLike[str],
    task: Segmentation,
    protocol: Protocol,
    train: ModelSource,
    queries: ModelSource,
    found: Neighbours,
    rows: int = 6,
) -> None:
    """Write a PNG: for some query images a patch, true and predicted classes, and the nearest patches.

    The images are spread over the set, and the patch is the first that the bank would take from such an image: of a
    class that is rare in it. Neighbours are framed green where their commonest class is that of the query patch.

    Args:
        path: File to write.
        task: Classes.
        protocol: The settings.
        train: Images of the bank.
        queries: Images of the queries.
        found: What was found.
        rows: Images to show.
    """
    require("matplotlib", "plots", "a picture of retrieval")
    from matplotlib.figure import Figure

    places = torch.linspace(0, len(found.images) - 1, min(rows, len(found.images))).long().unique().tolist()
    figure = Figure(figsize=(1.6 * (3 + SHOWN), 1.75 * len(places)), layout="constrained")
    axes = figure.subplots(len(places), 3 + SHOWN, squeeze=False)
    for line, place in zip(axes, places, strict=True):
        _draw_line(line, task, protocol, train, queries, found, place)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    atomic_write(path, png.getvalue())


def _draw_line(line, task, protocol, train, queries, found, place) -> None:
    index, grid = found.images[place], found.grid
    image, mask = queries.picture(index, None)
    patch = _patch(task, protocol, mask, grid, index)
    scores, ids = found.image(place)
    size = tuple(mask.shape)
    weights = (scores / protocol.beta).softmax(1)
    predicted = task.predict(found.labels, weights, ids, grid, size)
    label = _commonest(task, mask, grid, patch)
    _show(line[0], image, f"query: {_name(task, label)}", grid, patch, QUERY)
    colours = {"cmap": "nipy_spectral", "vmin": 0, "vmax": max(1, task.num_classes - 1), "interpolation": "nearest"}
    ignored = mask if task.ignore_index is None else mask.float().masked_fill(mask == task.ignore_index, torch.nan)
    for axis, classes, title in ((line[1], ignored, "true"), (line[2], predicted, "predicted")):
        axis.imshow(classes.numpy(), **colours)
        axis.set_title(title, fontsize=7)
    for axis, score, row in zip(line[3:], scores[patch], ids[patch], strict=False):
        epoch, number, where = (int(part) for part in unpack_ids(row))
        picture, labels = train.picture(number, epoch)
        other = _commonest(task, labels, grid, where)
        colour = SAME if other == label else OTHER
        _show(axis, picture, f"{_name(task, other)}, {score:.2f}", grid, where, colour)


def _patch(task: Segmentation, protocol: Protocol, mask: Tensor, grid: tuple[int, int], index: int) -> int:
    counts = count_labels(mask[None], grid, task.num_classes, task.ignore_index)
    generator = torch.Generator().manual_seed(draw(protocol.seed, index, "picture"))
    return int(patch_ranks(counts, torch.rand(counts.shape[:2], generator=generator)).argmin())


def _commonest(task: Segmentation, mask: Tensor, grid: tuple[int, int], patch: int) -> int | None:
    counts = count_labels(mask[None], grid, task.num_classes, task.ignore_index)[0, patch]
    return int(counts.argmax()) if counts.any() else None


def _name(task: Segmentation, label: int | None) -> str:
    return "ignored" if label is None else task.classes[label]


def _show(axis: Any, image: Tensor, title: str, grid: tuple[int, int], patch: int, colour: str) -> None:
    from matplotlib.patches import Rectangle

    height, width = image.shape[1] / grid[0], image.shape[2] / grid[1]
    row, column = divmod(patch, grid[1])
    axis.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
    corner = (column * width - 0.5, row * height - 0.5)
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=2))
    axis.set_title(title, fontsize=7, color=colour)
