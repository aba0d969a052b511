"""The folder of a run: which one it is, whether it may be continued, and its metrics as text."""

import csv
import io
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from timm_locat.errors import UserError
from timm_locat.record import plain_json
from timm_locat.train.config import DataConfig, TrainConfig

__all__ = ["COLUMNS", "check_same_run", "choose_folder", "counted", "describe", "dotted", "to_csv"]

COLUMNS = (
    "epoch",
    "lr",
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "ema_accuracy",
    "grad_norm",
    "images_per_second",
    "seconds",
    "data_seconds",
    "peak_memory_mib",
)
"""Of `metrics.csv`. `grad_norm` is the mean over updates before clipping; `data_seconds` were waits for images;
`peak_memory_mib` is the most that any process has held, tensors on CUDA and resident memory on a CPU."""

FREE_TO_CHANGE = (
    *("out", "resume", "checkpoint_every", "show_batch", "compare_bare", "skip_broken", "tracker", "push_to_hub"),
    *("data.root", "data.workers", "data.in_memory"),
)
"""Settings that may differ from those of the run that is continued: they change nothing that it computes."""


def choose_folder(config: TrainConfig, recipe: str) -> Path | UserError:
    """Make the run folder; a mistake is returned, since all processes have to hear of it."""
    if config.out is None:
        base = Path("runs") / recipe
        folder, number = base, 2
        while config.resume == "never" and folder.exists():
            folder, number = base.with_name(f"{recipe}-{number}"), number + 1
    else:
        folder = config.out
    if folder.exists() and not folder.is_dir():
        return UserError(f"the run folder {folder} is a file; pass another --out")
    if config.resume == "never" and folder.exists() and any(folder.iterdir()):
        return UserError(f"the run folder {folder} is not empty; pass --resume auto to go on there, or another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        return UserError(f"cannot make the run folder {folder}: {err.strerror}; pass another --out")
    return folder


def check_same_run(saved: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    """Refuse to continue a run under another configuration; the sentence names each field that differs."""
    saved, asked = dotted(with_defaults(saved)), dotted(asked)
    differ = [
        f"{name} was {saved.get(name)!r}, is {asked.get(name)!r}"
        for name in sorted(saved.keys() | asked.keys())
        if name not in FREE_TO_CHANGE and saved.get(name) != asked.get(name)
    ]
    if differ:
        raise UserError(
            f"{folder} holds another run: {'; '.join(differ)}; give the same settings, or another --out for a new run"
        )


def dotted(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under names such as `data.root`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it was saved, with the fields that have been added since: they stand at their defaults."""
    run, data = (
        {field.name: plain_json(field.default) for field in fields(kind) if field.default is not MISSING}
        for kind in (TrainConfig, DataConfig)
    )
    return {**run, **saved, "data": {**data, **saved["data"]}}


def counted(images: int | None) -> str:
    """How many images there are, for people."""
    return "an unstated number of" if images is None else f"{images:,}"


def describe(row: dict[str, Any], epochs: int) -> str:
    """One line about an epoch."""
    test = (
        "" if row["test_accuracy"] is None else f", test loss {row['test_loss']:.4f} acc {row['test_accuracy']:.2f} %"
    )
    if row["ema_accuracy"] is not None:
        test += f" (average {row['ema_accuracy']:.2f} %)"
    return (
        f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f} acc {row['train_accuracy']:.2f} %{test}; "
        f"lr {row['lr']:.2e}, grad norm {row['grad_norm']:.2f}, {row['images_per_second']:.0f} images/s, "
        f"{row['seconds']:.0f} s ({100 * row['data_seconds'] / row['seconds']:.0f} % waiting for images)"
        + ("" if row["peak_memory_mib"] is None else f", peak memory {row['peak_memory_mib']:.0f} MiB")
    )


def to_csv(rows: list[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    """The metrics of a run as CSV text; an epoch without evaluation has empty test columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
