"""Pictures of the laboratory, in colours that the colour-blind can tell apart."""

import io
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from timm_locat.errors import require
from timm_locat.record import atomic_write
from timm_locat.theory.association import in_set_order
from timm_locat.theory.controls import Solution
from timm_locat.theory.descent import Trained

__all__ = [
    "animate_growth",
    "draw_controls",
    "draw_course",
    "draw_growth",
    "draw_idealised",
    "draw_sets",
    "draw_transfer",
    "interval",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D")


def _figure(width: float, height: float):
    require("matplotlib", "plots", "a picture of patch association")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure, path: str | os.PathLike) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    atomic_write(path, png.getvalue())


def interval(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float] | None:
    """95 % interval of the mean by resampling the seeds with replacement; None for a single seed, which has none."""
    if len(values) < 2:
        return None
    data = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(len(data), (draws, len(data)), generator=torch.Generator().manual_seed(0))
    low, high = data[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _attention(axis, logits_DD: Tensor, set_of_D: Tensor, title: str, top: float):
    """Softmax of A with the patches of a set next to each other, and lines between the sets."""
    order = in_set_order(set_of_D)
    image = axis.imshow(logits_DD.softmax(-1)[order][:, order].numpy(), cmap="viridis", vmin=0, vmax=top)
    size = int((set_of_D == 0).sum())
    for edge in range(size, len(set_of_D), size):
        axis.axhline(edge - 0.5, color="white", linewidth=0.4)
        axis.axvline(edge - 0.5, color="white", linewidth=0.4)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=9)
    return image


def draw_growth(trained: Trained, path: str | os.PathLike) -> None:
    """A of the first seed as it grows: six moments, most of them early."""
    last = len(trained.frames) - 1
    picked = sorted({0, *(max(1, round(last * share)) for share in (2 / 15, 3 / 15, 4 / 15, 6 / 15, 1.0))})
    figure = _figure(1.9 * len(picked), 2.2)
    set_of_D = trained.worlds[0].set_of_D
    top = max(float(trained.frames[i][1].softmax(-1).max()) for i in picked)
    axes = figure.subplots(1, len(picked), squeeze=False)[0]
    for axis, i in zip(axes, picked, strict=True):
        step, logits_DD = trained.frames[i]
        image = _attention(axis, logits_DD, set_of_D, f"step {step}", top)
    figure.colorbar(image, ax=axes, label="attention")
    axes[0].set_ylabel("query, sorted by set", fontsize=8)
    _save(figure, path)


def animate_growth(trained: Trained, path: str | os.PathLike) -> None:
    """A of the first seed at every recorded step, as a GIF that stays on the last frame for a while."""
    image = require("PIL.Image", "data", "an animation of patch association")
    top = max(float(logits_DD.softmax(-1).max()) for _, logits_DD in trained.frames)
    pages = []
    for step, logits_DD in trained.frames:
        figure = _figure(3.8, 3.2)
        axis = figure.subplots()
        shown = _attention(axis, logits_DD, trained.worlds[0].set_of_D, f"step {step}", top)
        axis.set_ylabel("query, sorted by set", fontsize=8)
        axis.set_xlabel("key, sorted by set", fontsize=8)
        figure.colorbar(shown, ax=axis, label="attention")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        pages.append(image.open(png).convert("RGB").quantize(128))
    gif = io.BytesIO()
    waits = [400] * (len(pages) - 1) + [2500]
    pages[0].save(gif, format="GIF", save_all=True, append_images=pages[1:], duration=waits, loop=0)
    atomic_write(path, gif.getvalue())


def draw_sets(trained: Trained, path: str | os.PathLike) -> None:
    """Sets of the first seed in the image's order of patches: the true ones, and the largest C entries of each row."""
    set_of_D = trained.worlds[0].set_of_D
    same_DD = set_of_D[:, None] == set_of_D
    size = int(same_DD[0].sum())
    logits_DD = trained.logits_SDD[0]
    chosen_DD = torch.zeros_like(same_DD).scatter_(1, logits_DD.topk(size, dim=-1).indices, True)
    figure = _figure(7.2, 3.7)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = {"in the set, missed": "#E69F00", "found": COLOURS[0], "wrongly chosen": COLOURS[1]}
    axes = figure.subplots(1, 2, sharey=True)
    colours = ListedColormap(["#F4F4F4", *names.values()])
    kinds = torch.where(same_DD & chosen_DD, 2, torch.where(same_DD, 1, torch.where(chosen_DD, 3, 0)))
    axes[0].imshow((same_DD.long() * 2).numpy(), cmap=colours, vmin=0, vmax=3)
    axes[1].imshow(kinds.numpy(), cmap=colours, vmin=0, vmax=3)
    axes[0].set(title="hidden sets", ylabel="patch of the image", xlabel="patch of the image")
    axes[1].set(title=f"largest {size} entries of each row of A", xlabel="patch of the image")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in names.items()], loc="outside lower center", ncols=3
    )
    _save(figure, path)


def draw_course(trained: Trained, chance_recall: float, path: str | os.PathLike) -> None:
    """Accuracy and association over the steps: mean of the seeds, and the band from the least to the greatest."""
    figure = _figure(6.4, 3.4)
    axis = figure.subplots()
    steps = [point["step"] for point in trained.course]
    names = {"accuracy": "test accuracy", "recall": "top-C recall", "exact": "rows with the exact set"}
    for (name, label), colour, marker in zip(names.items(), COLOURS, MARKERS, strict=False):
        values = torch.tensor([point[name] for point in trained.course])
        axis.plot(steps, values.mean(1).numpy(), color=colour, marker=marker, markersize=4, label=label)
        axis.fill_between(steps, values.amin(1).numpy(), values.amax(1).numpy(), color=colour, alpha=0.15, linewidth=0)
    axis.axhline(chance_recall, color="grey", linestyle=":", label="recall by chance")
    axis.set(xlabel="step of gradient descent", ylabel="share", ylim=(0, 1.02))
    axis.set_title(f"{len(trained.worlds)} seeds: mean, least to greatest", fontsize=10)
    axis.legend(fontsize=8, loc="lower right")
    _save(figure, path)


def draw_idealised(course: Sequence[Mapping[str, float]], diagonal: float, path: str | os.PathLike) -> None:
    """The three numbers of the idealised setting over the steps."""
    figure = _figure(7.2, 3.0)
    left, right = figure.subplots(1, 2)
    steps = [point["step"] for point in course]
    names = {"within": "within the sets", "across": "across the sets"}
    for (name, label), colour, marker in zip(names.items(), COLOURS, MARKERS, strict=False):
        left.plot(steps, [p[name] for p in course], color=colour, marker=marker, markersize=4, label=label)
    left.axhline(diagonal, color="grey", linestyle=":", label="diagonal, fixed")
    left.set(xlabel="step of gradient descent", ylabel="entry of A")
    left.legend(fontsize=8)
    right.plot(steps, [p["alpha"] for p in course], color=COLOURS[2], marker="^", markersize=4)
    right.set(xlabel="step of gradient descent", ylabel="length of v", ylim=(0, None))
    _save(figure, path)


def draw_controls(found: Mapping[str, Solution], path: str | os.PathLike) -> None:
    """Attention of the first seed of each solution, above its accuracy and recall."""
    figure = _figure(2.1 * len(found), 2.7)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    top = max(float(solution.logits_DD.softmax(-1).max()) for solution in found.values())
    for axis, (name, solution) in zip(axes, found.items(), strict=True):
        image = _attention(axis, solution.logits_DD, solution.set_of_D, name, top)
        mean, recall = (sum(v) / len(v) for v in (solution.accuracy, solution.recall))
        axis.set_xlabel(f"accuracy {mean:.3f}\nrecall {recall:.2f}", fontsize=9)
    figure.colorbar(image, ax=axes, label="attention")
    _save(figure, path)


def draw_transfer(
    accuracies: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[int], path: str | os.PathLike
) -> None:
    """Accuracy on the new feature against the number of images, with 95 % intervals over the seeds."""
    figure = _figure(6.0, 3.8)
    axis = figure.subplots()
    for (name, rows), colour, marker in zip(accuracies.items(), COLOURS, MARKERS, strict=True):
        columns = list(zip(*rows, strict=True))
        mean = [sum(column) / len(column) for column in columns]
        axis.plot(sizes, mean, color=colour, marker=marker, markersize=5, label=name)
        bands = [band for column in columns if (band := interval(column)) is not None]
        if bands:
            axis.fill_between(sizes, *zip(*bands, strict=True), color=colour, alpha=0.18, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set(xlabel="images of the new task", ylabel="test accuracy")
    seeds = len(next(iter(accuracies.values())))
    axis.set_title(f"{seeds} seeds: mean, 95 % interval" if seeds > 1 else "1 seed", fontsize=10)
    axis.legend(title="attention", fontsize=8)
    axis.grid(alpha=0.3)
    _save(figure, path)
