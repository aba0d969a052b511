"""Checkpoints of a run: one file, replaced by a rename, so that a killed run finds the last complete one."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from timm_locat.errors import UserError

__all__ = ["CHECKPOINT", "load_checkpoint", "save_checkpoint"]

CHECKPOINT = "checkpoint.pt"


def save_checkpoint(folder: Path, state: dict[str, Any], name: str = CHECKPOINT) -> None:
    """Write `state` to `folder/name`; the previous one stays until the new one is complete on disk.

    Raises:
        UserError: The disk refuses, because it is full for example. The previous checkpoint is untouched.
    """
    target = folder / name
    scratch = target.with_suffix(".pt.partial")
    try:
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    # torch.save turns some failures of the disk into a RuntimeError of its own.
    except (OSError, RuntimeError) as err:
        scratch.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the checkpoint {target}: {err}; free some space, then go on with --resume auto "
            "from the previous checkpoint"
        ) from err


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last complete checkpoint of a run folder, on the CPU, or None when there is none.

    Only tensors and plain values are read; a pickle with anything else in it is refused.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as err:
        reason = str(err).splitlines()[0]
        raise UserError(
            f"cannot read the checkpoint {path}: {reason}; expected one written by timm_locat.train, "
            "delete it to start again"
        ) from err
