"""Draw the curves of a run from its metrics."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm_locat.errors import require
from timm_locat.record import atomic_write

__all__ = ["draw_curves"]


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Loss, accuracy and learning rate over epochs as a PNG, written by a rename.

    Args:
        rows: One per epoch, with the columns of `metrics.csv`; test columns may be None.
        path: Ends in `.png`.
        title: Says which run it is.
    """
    require("matplotlib", "plots", "the plot of the curves")
    from matplotlib.figure import Figure

    tested = [row for row in rows if row["test_loss"] is not None]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title)
    loss, accuracy, rate = figure.subplots(1, 3)
    for axis, name, label in ((loss, "loss", "cross-entropy"), (accuracy, "accuracy", "top-1 accuracy (%)")):
        axis.plot([r["epoch"] for r in rows], [r[f"train_{name}"] for r in rows], "o--", color="#E69F00", label="train")
        axis.plot(
            [r["epoch"] for r in tested], [r[f"test_{name}"] for r in tested], "s-", color="#0072B2", label="test"
        )
        axis.set_ylabel(label)
        axis.legend()
    rate.plot([r["epoch"] for r in rows], [r["lr"] for r in rows], "o-", color="#009E73")
    rate.set_ylabel("learning rate at the epoch's end")
    for axis in (loss, accuracy, rate):
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())
