"""Pictures of locality: readable in print at the width of a column, in colours that the colour-blind can tell apart."""

import io
import os
from collections.abc import Mapping, Sequence

import torch

from timm_locat.errors import UserError, require
from timm_locat.locality.conventions import Conventions
from timm_locat.locality.measures import measure, patch_distances
from timm_locat.locality.result import Locality
from timm_locat.record import atomic_write

__all__ = ["draw_course", "draw_distances", "draw_gaussians", "draw_plane"]

SELF, NEIGHBOURS, PREFIX = "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
UNITS = {
    "fraction": "fraction of the longest distance",
    "patches": "patches",
    "pixels": "pixels",
    "sides": "sides of the image",
}


def new_figure(width: float, height: float):
    """An empty figure of so many inches, without touching matplotlib's state."""
    require("matplotlib", "plots", "a picture of locality")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure, path: str | os.PathLike) -> None:
    """Write a figure by a rename."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    atomic_write(path, png.getvalue())


def _layer_colours(count: int):
    """A colour for each layer, dark blue for the first to yellow-green for the last, and their scale."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    # Cut off before the bright yellow, which is lost on white paper.
    colours = [colormaps["viridis"](0.92 * i / max(1, count - 1)) for i in range(count)]
    scale = ScalarMappable(BoundaryNorm([i - 0.5 for i in range(count + 1)], count), ListedColormap(colours))
    return colours, scale


def _layer_bar(figure, axis, count: int) -> None:
    bar = figure.colorbar(_layer_colours(count)[1], ax=axis, label="layer")
    shown = list(range(0, count, -(-count // 8)))
    bar.set_ticks(shown, labels=[str(i) for i in shown])


def _number(value: float | None) -> float:
    """matplotlib leaves a gap at what is not a number."""
    return float("nan") if value is None else value


def _distance_label(conventions: Conventions) -> str:
    return f"mean attention distance\n({UNITS[conventions.unit]})"


def _panels(results: Sequence[Locality], width: float, height: float):
    """A figure with one panel for each result; the panels share their axes."""
    if not results or any(result.conventions != results[0].conventions for result in results):
        raise UserError("a picture needs at least one result, all counted by the same conventions")
    figure = new_figure(width * len(results), height)
    axes = figure.subplots(1, len(results), squeeze=False, sharex=True, sharey=True)[0]
    for axis, result in zip(axes, results, strict=True):
        axis.set_title(f"{result.model}\n{_images(result)}", fontsize=9)
        axis.grid(alpha=0.3)
    return figure, axes


def _images(result: Locality) -> str:
    return f"{result.images:,} images" if result.images else "the same for every image"


def draw_distances(results: Sequence[Locality], path: str | os.PathLike) -> None:
    """Distance of every head as a PNG: a line for each layer, its heads sorted, as in Raghu et al. (arXiv:2108.08810).

    Args:
        results: One panel each; counted by the same conventions.
        path: Ends in `.png`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure, axes = _panels(results, 4.2, 3.6)
    for axis, result in zip(axes, results, strict=True):
        for heads, colour in zip(result.values["mad"], _layer_colours(len(result.layers))[0], strict=True):
            values = sorted(value for value in heads if value is not None)
            axis.plot(range(1, len(values) + 1), values, "o-", color=colour, markersize=3.5, linewidth=1)
        axis.set_xlabel("heads of a layer, sorted")
        axis.xaxis.get_major_locator().set_params(integer=True)
        _layer_bar(figure, axis, len(result.layers))
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel(_distance_label(results[0].conventions))
    save_png(figure, path)


def draw_plane(results: Sequence[Locality], path: str | os.PathLike) -> None:
    """Every head in the plane of distance and entropy as a PNG, its layer as colour.

    Three heads worked out for the same grid are marked: uniform over all patches, uniform over 3 x 3 patches, and 98 %
    on the query patch itself.

    Args:
        results: One panel each; counted by the same conventions.
        path: Ends in `.png`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure, axes = _panels(results, 4.2, 3.6)
    for axis, result in zip(axes, results, strict=True):
        for name, x, y in _landmarks(result):
            axis.plot(x, y, "x", color="0.35", markersize=7, markeredgewidth=1.6, zorder=3)
            # What is at the upper end of the entropy has its name above it, what is at the left end beside it.
            place = dict(xytext=(0, 6), ha="center") if y > 0.95 else dict(xytext=(7, 0), va="center")
            axis.annotate(name, (x, y), textcoords="offset points", fontsize=7, **place)
        colours = _layer_colours(len(result.layers))[0]
        for i in range(len(result.layers)):
            pairs = zip(result.values["mad"][i], result.values["entropy"][i], strict=True)
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            axis.scatter(
                *zip(*known, strict=True) if known else ([], []),
                color=colours[i], s=22, edgecolors="white", linewidths=0.4, zorder=2,
            )  # fmt: skip
        axis.set_xlabel(_distance_label(result.conventions))
        _layer_bar(figure, axis, len(result.layers))
    axes[0].set_xlim(left=0)
    axes[0].set_ylim(-0.05, 1.1)
    keys = "patches" if results[0].conventions.entropy == "patches" else "tokens"
    axes[0].set_ylabel(f"entropy / log of the number of {keys}\n(0: one key, 1: all alike)")
    save_png(figure, path)


def _landmarks(result: Locality) -> list[tuple[str, float, float]]:
    """Distance and entropy of heads that are known, on the grid of the first layer, with no prefix tokens."""
    grid = result.grids[0]
    count = grid[0] * grid[1]
    uniform = torch.full((count, count), 1 / count)
    window = (patch_distances(grid) < 1.5).float()
    maps = torch.stack([uniform, window / window.sum(1, keepdim=True), 0.98 * torch.eye(count) + 0.02 * uniform])
    patch = None if result.size is None else tuple(s / g for s, g in zip(result.size, grid, strict=True))
    found = measure(maps[None], grid, num_prefix=0, conventions=result.conventions, patch_pixels=patch)
    return list(zip(("uniform", "3 x 3", "98 % itself"), found["mad"], found["entropy"], strict=True))


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
    figure = new_figure(10, 4)
    figure.suptitle(title, fontsize=10)
    distance, masses = figure.subplots(1, 2)
    for layer, colour in enumerate(_layer_colours(len(results[0].layers))[0]):
        distance.plot(updates, [_number(r.layer_means("mad")[layer]) for r in results], color=colour)
    summaries = [r.summary() for r in results]
    least = [_number(s["min_mad_over_heads"]) for s in summaries]
    distance.plot(updates, least, "k--o", markersize=3, label="least of all heads")
    distance.set_ylabel(_distance_label(results[0].conventions))
    distance.set_ylim(bottom=0)
    distance.legend()
    _layer_bar(figure, distance, len(results[0].layers))
    marks = (
        ("self", SELF, "o-", "itself"),
        ("neighbour", NEIGHBOURS, "s-", "the 8 patches around"),
        ("prefix", PREFIX, "^-", "class token, registers"),
    )
    for mass, colour, mark, name in marks:
        values = [_number(s[f"min_mad_{mass}_mass"]) for s in summaries]
        masses.plot(updates, values, mark, color=colour, markersize=4, label=name)
    masses.set_ylabel("share of its attention")
    masses.set_ylim(-0.02, 1.02)
    masses.set_title("where the head of least distance looks", fontsize=10)
    masses.legend()
    for axis in (distance, masses):
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(0, 1.15 * max(1, updates[-1]))
        axis.set_xlabel("update (log scale; 0 is before training)")
        axis.grid(alpha=0.3)
    save_png(figure, path)


def draw_gaussians(result: Locality, path: str | os.PathLike) -> None:
    """The mean learned Gaussian of every head as a PNG: ellipses of one standard deviation, coloured by strength.

    Args:
        result: Of a model that has them.
        path: Ends in `.png`.

    Raises:
        UserError: The model has none.
        MissingExtra: matplotlib is not installed.
    """
    if result.gaussians is None:
        raise UserError(f"{result.model} has no learned Gaussians to draw")
    tables = result.gaussians
    layers = [i for i, heads in enumerate(tables["alpha"]) if heads[0] is not None]
    rows = -(-len(layers) // 6)
    columns = -(-len(layers) // rows)
    figure = new_figure(1.7 * columns + 1.4, 1.75 * rows + 0.9)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Ellipse

    strongest = max(value for i in layers for value in tables["alpha"][i])
    reach = 1.15 * max(v for name in ("sigma_rows", "sigma_columns") for i in layers for v in tables[name][i])
    shades = ListedColormap([colormaps["viridis"](0.92 * (1 - i / 255)) for i in range(256)])
    scale = ScalarMappable(Normalize(0, strongest), shades)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.ravel()[len(layers) :]:
        axis.axis("off")
    for axis, i in zip(axes.ravel(), layers, strict=False):
        for alpha, high, wide in zip(*(tables[n][i] for n in ("alpha", "sigma_rows", "sigma_columns")), strict=True):
            ellipse = Ellipse((0, 0), 2 * wide, 2 * high, fill=False, linewidth=1.5, edgecolor=scale.to_rgba(alpha))
            axis.add_patch(ellipse)
        axis.plot(0, 0, "k+", markersize=5)
        axis.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")
        axis.set_title(f"layer {i}", fontsize=8)
        axis.grid(alpha=0.3)
    figure.colorbar(scale, ax=axes.ravel().tolist(), label="strength alpha (units of the logit)")
    figure.supxlabel("columns from the query patch (patches)", fontsize=9)
    figure.supylabel("rows (patches)", fontsize=9)
    figure.suptitle(f"{result.model}: mean Gaussian of each head, one standard deviation", fontsize=9)
    save_png(figure, path)
