"""Pictures of locality. Readable in print at column width, colours that the colour-blind can tell apart."""

import io
import os
from collections.abc import Mapping

from timm_locat.errors import require
from timm_locat.locality.result import Locality
from timm_locat.record import atomic_write

__all__ = ["draw_course"]

SELF, NEIGHBOURS, PREFIX = "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
UNITS = {"fraction": "fraction of the longest distance", "patches": "patches", "pixels": "pixels"}


def _figure(width: float, height: float):
    require("matplotlib", "plots", "a picture of locality")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure, path: str | os.PathLike) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    atomic_write(path, png.getvalue())


def _layer_colours(count: int):
    """A colour for each layer, dark blue for the first to yellow-green for the last, and their scale."""
    require("matplotlib", "plots", "a picture of locality")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    # Cut off before the bright yellow, which is lost on white paper.
    colours = [colormaps["viridis"](0.92 * i / max(1, count - 1)) for i in range(count)]
    scale = ScalarMappable(BoundaryNorm([i - 0.5 for i in range(count + 1)], count), ListedColormap(colours))
    return colours, scale


def _layer_bar(figure, axis, scale, count: int) -> None:
    bar = figure.colorbar(scale, ax=axis, label="layer")
    step = max(1, count // 8)
    bar.set_ticks(list(range(0, count, step)), labels=[str(i) for i in range(0, count, step)])


def draw_course(course: Mapping[int, Locality], path: str | os.PathLike, title: str) -> None:
    """Distance of every layer over training, and where the attention of the most local head goes, as a PNG.

    Args:
        course: Results by update, 0 being before the first.
        path: Ends in `.png`.
        title: Says which run it is.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    updates = sorted(course)
    results = [course[update] for update in updates]
    count = len(results[0].layers)
    figure = _figure(10, 4)
    figure.suptitle(title, fontsize=10)
    distance, masses = figure.subplots(1, 2)
    colours, scale = _layer_colours(count)
    for layer, colour in enumerate(colours):
        distance.plot(updates, [_none_to_nan(r.layer_means("mad")[layer]) for r in results], color=colour)
    summaries = [r.summary() for r in results]
    least = [_none_to_nan(s["min_mad_over_heads"]) for s in summaries]
    distance.plot(updates, least, "k--o", markersize=3, label="least of all heads")
    distance.set_ylabel(f"mean attention distance\n({UNITS[results[0].conventions.unit]})")
    distance.set_ylim(bottom=0)
    distance.legend()
    _layer_bar(figure, distance, scale, count)
    marks = (("self", SELF, "o-"), ("neighbour", NEIGHBOURS, "s-"), ("prefix", PREFIX, "^-"))
    names = {"self": "itself", "neighbour": "the 8 patches around", "prefix": "class token, registers"}
    for mass, colour, mark in marks:
        values = [_none_to_nan(s[f"min_mad_{mass}_mass"]) for s in summaries]
        masses.plot(updates, values, mark, color=colour, markersize=4, label=names[mass])
    masses.set_ylabel("share of its attention")
    masses.set_ylim(-0.02, 1.02)
    masses.set_title("where the head of least distance looks", fontsize=10)
    masses.legend()
    for axis in (distance, masses):
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(0, 1.15 * max(1, updates[-1]))
        axis.set_xlabel("update (log scale; 0 is before training)")
        axis.grid(alpha=0.3)
    _save(figure, path)


def _none_to_nan(value: float | None) -> float:
    """matplotlib leaves a gap at what is not a number."""
    return float("nan") if value is None else value
