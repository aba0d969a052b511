"""The pictures of a report, as PNG bytes: print size, colours that the colour-blind can tell apart."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from timm_locat.locality.plots import draw_plane, new_figure
from timm_locat.study.results import Interval, Row, course

__all__ = ["draw_conditions", "draw_courses", "draw_planes"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")  # Okabe and Ito
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_conditions(panels: Mapping[str, Mapping[str, Interval]], paper: Mapping[str, float] | None = None) -> bytes:
    """Means and intervals of each condition, one panel per number.

    Args:
        panels: Label of the axis -> condition -> mean.
        paper: The paper's values of the last panel's number, drawn as crosses.
    """
    names = list(next(iter(panels.values())))
    figure = new_figure(4.2 * len(panels), 0.32 * len(names) + 1.2)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    places = {name: i for i, name in enumerate(names)}
    for axis, (label, values) in zip(axes, panels.items(), strict=True):
        for name, value in values.items():
            axis.errorbar(value.mean, places[name], xerr=value.half, fmt="o", color=COLOURS[0], capsize=3, markersize=5)
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    for name, value in (paper or {}).items():
        if name in places:
            axes[-1].plot(value, places[name], "x", color=COLOURS[1], markersize=8, markeredgewidth=2)
    axes[0].set_yticks(range(len(names)), labels=names)
    axes[0].invert_yaxis()
    return to_png(figure)


def draw_courses(rows: Sequence[Row], conditions: Sequence[str]) -> bytes:
    """Least distance of a head, mean distance and mean entropy over training, a line for each condition."""
    figure = new_figure(12.6, 3.8)
    panels = figure.subplots(1, 3)
    numbers = (
        ("min_mad_over_heads", "least distance of a head\n(fraction of the longest)"),
        ("mean_mad", "mean distance of all heads\n(fraction of the longest)"),
        ("mean_entropy", "mean entropy / log of the number\nof patches"),
    )
    for axis, (name, label) in zip(panels, numbers, strict=True):
        for i, condition in enumerate(conditions):
            found = course([row for row in rows if row.condition == condition], name)
            style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKS[i % len(MARKS)], markersize=4)
            axis.plot(list(found), [value.mean for value in found.values()], label=condition, **style)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(left=0)
        axis.set_xlabel("update (log scale; 0 is before training)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return to_png(figure)


def draw_planes(rows: Sequence[Row]) -> bytes:
    """The plane of distance and entropy, one panel per run, named by its condition."""
    from dataclasses import replace

    results = [replace(row.locality(), model=f"{row.condition}, seed {row.seed}") for row in rows]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plane.png"
        draw_plane(results, path)
        return path.read_bytes()


def to_png(figure) -> bytes:
    """A figure as PNG bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    return png.getvalue()
