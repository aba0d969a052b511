"""Train the cells of a study that are not done yet. Any number of processes may work on one folder."""

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from tqdm import tqdm

from timm_locat.errors import UserError
from timm_locat.record import atomic_write, plain_json, read_record
from timm_locat.study.grid import Cell, Settings
from timm_locat.train.engine import train
from timm_locat.train.run_folder import check_same_run

try:
    import fcntl
except ImportError:  # Windows: processes are not kept apart, and have to be given shards
    fcntl = None

__all__ = ["cell_folder", "is_done", "open_study", "parse_shard", "read_settings", "run_cells"]

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


def read_settings(out: Path) -> Settings:
    """The settings that a study folder was made with.

    Raises:
        UserError: It is no study folder, or one of another version.
    """
    try:
        return Settings.from_json(json.loads((out / SETTINGS).read_text(encoding="utf-8")))
    except OSError as err:
        raise UserError(f"{out} is no study folder: cannot read its {SETTINGS} ({err.strerror}); pass another") from err
    except (TypeError, ValueError, AttributeError) as err:
        raise UserError(f"cannot use {out / SETTINGS}: {err}; pass another study folder") from err


def open_study(out: Path, settings: Settings) -> None:
    """Make the study folder, or find in it the same study.

    Raises:
        UserError: It holds another study, or cannot be made.
    """
    path = out / SETTINGS
    if path.exists():
        found = read_settings(out)
        # More seeds and conditions may be asked for later, and the data may have moved.
        differ = [
            f"{field.name} was {getattr(found, field.name)!r}, is {getattr(settings, field.name)!r}"
            for field in fields(Settings)
            if field.name not in ("seeds", "more_seeds", "conditions", "root")
            and getattr(found, field.name) != getattr(settings, field.name)
        ]
        if differ:
            raise UserError(f"{out} holds another study: {'; '.join(differ)}; give the same settings, or another --out")
    try:
        atomic_write(path, json.dumps(plain_json(settings), indent=2) + "\n")
    except OSError as err:
        raise UserError(f"cannot use the study folder {out}: {err.strerror}; pass another --out") from err


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

    Raises:
        UserError: A cell cannot be trained; the cells behind it are left.
        Interrupted: The process was asked to stop; its cell has saved its state.
    """
    left = [cell for cell in todo if not is_done(out, cell)]
    trained = 0
    bar = tqdm(left, "cells", len(todo), unit="cell", initial=len(todo) - len(left), disable=None if progress else True)
    for cell in bar:
        with claim(out, cell) as mine:
            if not mine:
                _logger.info(f"{cell.name}: another process is at it")
            elif not is_done(out, cell):  # another process may have done it since
                _logger.info(f"{cell.name}: starts")
                train(replace(cell.config, out=cell_folder(out, cell), resume="auto"), f"study {cell.condition}")
                trained += 1
    return trained


@contextlib.contextmanager
def claim(out: Path, cell: Cell) -> Iterator[bool]:
    """Keep other processes of this machine from a cell; the system lets go of it when the process dies."""
    path = out / "cells" / f"{cell.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield True
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
