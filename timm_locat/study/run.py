"""Train the cells of a study that are not done yet. Any number of processes may work on one folder."""

import contextlib
import fcntl
import json
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from timm_locat.errors import UserError
from timm_locat.record import atomic_write, plain_json, read_record
from timm_locat.study.grid import Cell, Settings
from timm_locat.train.engine import train
from timm_locat.train.run_folder import check_same_run

__all__ = ["cell_folder", "is_done", "open_study", "parse_shard", "plan", "run_cells"]

_logger = logging.getLogger(__name__)

SETTINGS = "study.json"


def cell_folder(out: Path, cell: Cell) -> Path:
    """The run folder of a cell."""
    return out / "cells" / cell.name


def is_done(out: Path, cell: Cell) -> bool:
    """Whether a cell has been trained to its end, with the configuration that it has now.

    Raises:
        UserError: Its folder holds the record of another configuration.
    """
    path = cell_folder(out, cell) / "record.json"
    if not path.exists():
        return False
    check_same_run(read_record(path)["config"], plain_json(cell.config), path.parent)
    return True


def open_study(out: Path, settings: Settings) -> None:
    """Make the study folder, or find in it the same study.

    Raises:
        UserError: It holds another study, or cannot be made.
    """
    path, mine = out / SETTINGS, plain_json(settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as err:
        raise UserError(f"cannot use the study folder {out}: {err}; pass another --out") from err
    if found is None:
        atomic_write(path, json.dumps(mine, indent=2) + "\n")
        return
    # More seeds and conditions may be asked for later.
    differ = [
        f"{name} was {found.get(name)!r}, is {mine.get(name)!r}"
        for name in sorted(found.keys() | mine.keys())
        if name not in ("seeds", "more_seeds", "conditions") and found.get(name) != mine.get(name)
    ]
    if differ:
        raise UserError(f"{out} holds another study: {'; '.join(differ)}; give the same settings, or another --out")
    atomic_write(path, json.dumps(mine, indent=2) + "\n")


def parse_shard(text: str | None) -> tuple[int, int]:
    """`i/n` as numbers, i from 1; the whole where nothing is given.

    Raises:
        UserError: `text` is something else.
    """
    if text is None:
        return 1, 1
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise UserError(f"shard must be i/n with i from 1 to n, such as 1/4, got {text!r}")
    return int(first), int(count)


def run_cells(out: Path, todo: Sequence[Cell], *, progress: bool = True) -> int:
    """Train every cell that is not done and that no other process is at; a killed one goes on from its checkpoint.

    Args:
        out: The study folder.
        todo: Cells in order.
        progress: Show a bar on a terminal.

    Returns:
        Number of cells that were trained here.
    """
    trained = 0
    for cell in tqdm(todo, desc="cells", unit="cell", disable=None if progress else True):
        with claim(out, cell) as mine:
            if not mine:
                _logger.info(f"{cell.name}: another process is at it")
                continue
            if is_done(out, cell):
                continue
            _logger.info(f"{cell.name}: starts")
            train(replace(cell.config, out=cell_folder(out, cell), resume="auto"), f"study {cell.condition}")
            trained += 1
    return trained


def plan(out: Path, todo: Sequence[Cell]) -> str:
    """The cells, which of them are done, and how long the others will take by those that are."""
    done = [cell for cell in todo if is_done(out, cell)]
    names = {cell.name for cell in done}
    lines = [f"{'done' if cell.name in names else 'to do':6} {cell.name}, {cell.config.epochs} epochs" for cell in todo]
    left = len(todo) - len(done)
    if done and left:
        seconds = [read_record(cell_folder(out, cell) / "record.json")["results"]["seconds"] for cell in done]
        minutes = left * statistics.median(seconds) / 60
        lines.append(f"{left} to do, about {minutes:.0f} minutes of training for one process, by those that are done")
    else:
        lines.append(f"{left} to do; the cost is known once a cell is done" if left else "all are done")
    return "\n".join(lines)


@contextlib.contextmanager
def claim(out: Path, cell: Cell) -> Iterator[bool]:
    """Keep other processes of this machine from a cell; the system lets go of it when the process dies."""
    path = out / "cells" / f"{cell.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
