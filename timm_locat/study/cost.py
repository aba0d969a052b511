"""What the cells of a study will cost, before they are trained."""

import statistics
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional as F

from timm_locat.data import load
from timm_locat.record import read_record
from timm_locat.study.grid import Cell
from timm_locat.study.run import cell_folder, is_done
from timm_locat.train.bare import synchronize
from timm_locat.train.build import build_model
from timm_locat.train.launched import choose_threads
from timm_locat.train.samples import input_size
from timm_locat.train.session import new_accelerator

__all__ = ["image_passes", "plan", "seconds_per_image"]

BATCH = 16
"""Images of a pass that is timed."""
REPEATS = 3
"""Timed passes; the median counts."""


@lru_cache
def _facts(name: str, root: str | None) -> tuple[int, int]:
    """Number of training images and of classes."""
    data = load(name, "train", root=root)
    return len(data), len(data.classes)


def image_passes(cell: Cell) -> int:
    """Images that the run of a cell sees."""
    config = cell.config
    images, _ = _facts(config.data.name, config.data.root)
    return config.epochs * (images // config.global_batch_size * config.global_batch_size)


def seconds_per_image(cell: Cell) -> float:
    """Time of a forward and a backward pass of a cell's model, by a few of them on noise, on this machine right now."""
    config = cell.config
    accelerator = new_accelerator(config)
    if accelerator.device.type == "cpu":
        choose_threads()
    fused = not (accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16")
    model = build_model(config, _facts(config.data.name, config.data.root)[1], fused=fused)
    images = torch.randn(BATCH, 3, *input_size(model, config.model), device=accelerator.device)
    labels = torch.zeros(BATCH, dtype=torch.long, device=accelerator.device)
    model = accelerator.prepare(model)
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        start = time.perf_counter()
        F.cross_entropy(model(images).float(), labels).backward()
        synchronize(accelerator.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / BATCH


def plan(out: Path, todo: Sequence[Cell]) -> str:
    """The cells, which of them are done, and what the others will cost a single process.

    The time comes from finished cells of the same model where there are any, else from `seconds_per_image`.
    """
    done = {cell.name for cell in todo if is_done(out, cell)}
    lines = [
        f"{'done' if cell.name in done else 'to do':5}  {cell.name}, {image_passes(cell):,} image passes"
        for cell in todo
    ]
    left = [cell for cell in todo if cell.name not in done]
    if not left:
        return "\n".join([*lines, "all are done"])
    known = {k: v for k, v in _finished(out, (c for c in todo if c.name in done)).items() if k in map(_kind, left)}
    measured = {_kind(cell): seconds_per_image(cell) for cell in _one_of_each(left) if _kind(cell) not in known}
    seconds = sum(image_passes(cell) * {**measured, **known}[_kind(cell)] for cell in left)
    sources = [name for name, used in (("finished cells", known), ("a few passes measured now", measured)) if used]
    lines.append(
        f"{len(left)} of {len(todo)} to do: {sum(map(image_passes, left)):,} image passes, about {_duration(seconds)} "
        f"of training for one process (by {' and '.join(sources)}; testing and measuring come on top)"
    )
    return "\n".join(lines)


def _kind(cell: Cell) -> tuple[str, ...]:
    """What the time of an image depends on."""
    config = cell.config
    return config.model, config.model_kwargs, config.mixed_precision


def _one_of_each(todo: Iterable[Cell]) -> list[Cell]:
    return list({_kind(cell): cell for cell in todo}.values())


def _finished(out: Path, done: Iterable[Cell]) -> dict[tuple[str, ...], float]:
    """Median seconds of an image over finished cells of each kind."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for cell in done:
        results = read_record(cell_folder(out, cell) / "record.json")["results"]
        seconds.setdefault(_kind(cell), []).append(results["seconds"] / results["image_passes"])
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
