"""Trackers beside `metrics.csv`: tensorboard, wandb or trackio, through accelerate."""

import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from timm_locat.errors import require
from timm_locat.record import atomic_write, plain_json
from timm_locat.train.config import TrainConfig
from timm_locat.train.run_folder import dotted

__all__ = ["check_tracker", "start_tracker"]

PROJECT = "timm-locat"


def check_tracker(config: TrainConfig) -> None:
    """Refuse a tracker that is not there, before anything is read or written.

    Raises:
        MissingExtra: The tracker's package is not installed.
    """
    if config.tracker != "none":
        require(config.tracker, "trackers", f"--tracker {config.tracker}")


def start_tracker(accelerator: Accelerator, config: TrainConfig, folder: Path) -> None:
    """Make `accelerator.log` write to the tracker that the run names; nothing where it names none.

    A resumed run goes on in the tracker's run: its id is kept in the run folder.
    """
    if config.tracker == "none" or not accelerator.is_main_process:
        return  # only the main process tells a tracker anything, and only it may choose the run's id
    accelerator.project_configuration.set_directories(str(folder))
    accelerator.project_configuration.logging_dir = str(folder)
    accelerator.log_with = filter_trackers([config.tracker], accelerator.logging_dir)
    options: dict[str, dict[str, Any]] = {}
    if config.tracker == "wandb":
        options["wandb"] = {"name": folder.name, "id": run_id(folder), "resume": "allow", "dir": str(folder)}
    if config.tracker == "trackio":
        options["trackio"] = {"name": f"{folder.name}-{run_id(folder)}", "resume": "allow"}
    plain = (int, float, str, bool)  # what every tracker takes
    settings = {name: v if isinstance(v, plain) else str(v) for name, v in dotted(plain_json(config)).items()}
    accelerator.init_trackers(PROJECT, settings, options)


def run_id(folder: Path) -> str:
    """The id under which a tracker knows the run of a folder: made once, then read."""
    path = folder / "tracker_id"
    if not path.exists():
        atomic_write(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()
