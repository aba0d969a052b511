"""A picture of a batch as the model sees it: augmented images with their labels and mixing weights."""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from timm_locat.errors import UserError, require
from timm_locat.record import atomic_write

__all__ = ["MAX_TILES", "caption", "show_batch"]

MAX_TILES = 32
"""The picture shows the first of a batch, up to this many."""


def caption(target: Tensor, classes: Sequence[str]) -> str:
    """Class names of one target, and its weights where it is mixed: `Bag 0.63 / Coat 0.37`.

    Args:
        target: A label, or the (K,) weights of the classes. Of weights, the two largest are named that stand out from
            the rest: what label smoothing gives to every class is left out, and missing from the sum.
        classes: Names in the order of their labels.
    """
    if target.ndim == 0:
        return str(classes[int(target)])
    weights, labels = target.topk(min(2, len(target)))
    floor = float(target.min())
    named = [(classes[int(k)], float(w)) for w, k in zip(weights, labels, strict=True) if float(w) - floor > 1e-3]
    return "\n".join(
        f"{name} {weight:.2f}{' /' if i < len(named) - 1 else ''}" for i, (name, weight) in enumerate(named)
    )


def show_batch(
    images: Tensor, targets: Tensor, classes: Sequence[str], path: str | os.PathLike[str], title: str
) -> None:
    """Draw the first images of a batch as a PNG, written by a rename.

    Args:
        images: uint8 (B, 3, H, W) or (B, 1, H, W).
        targets: Labels (B,), or class weights (B, K), as from `Protocol.apply`.
        classes: Names in the order of their labels.
        path: Ends in `.png`.
        title: Says which protocol and data it is.

    Raises:
        UserError: There is nothing to draw, or not a target for each image.
        MissingExtra: matplotlib is not installed.
    """
    if len(images) == 0 or len(images) != len(targets):
        raise UserError(f"expected one target for each image, got {len(images)} images and {len(targets)} targets")
    require("matplotlib", "plots", "the picture of a batch")
    from matplotlib.figure import Figure

    images, targets = images[:MAX_TILES].cpu(), targets[:MAX_TILES].cpu()
    columns = min(8, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(max(1.5 * columns, 4.5), 1.85 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, image, target in zip(axes, images, targets, strict=False):
        axis.imshow(image.permute(1, 2, 0).expand(-1, -1, 3).numpy(), interpolation="nearest")
        axis.set_title(caption(target, classes), fontsize=8, pad=3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    atomic_write(Path(path), png.getvalue())
