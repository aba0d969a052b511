"""What the launcher did, and what was asked of it: CPU threads and number of processes."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.commands.config import config_args

from timm_locat.errors import UserError

__all__ = ["check_processes", "choose_threads", "user_chose_threads"]


def user_chose_threads() -> bool:
    """Whether OMP_NUM_THREADS is the user's wish rather than a launcher's default.

    `accelerate launch` and `torchrun` set it to 1 when it is not set, and then a lone process on a CPU leaves all
    other cores idle. What the user had set shows in the environment (or the flags) of the launcher, our parent; where
    that cannot be read, a 1 under a launcher counts as the launcher's.
    """
    value = os.environ.get("OMP_NUM_THREADS")
    launched = any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)
    if value is None or value != "1" or not launched:
        return value is not None
    environment, flags = launcher_words("environ"), launcher_words("cmdline")
    return any(entry.startswith("OMP_NUM_THREADS=") for entry in environment) or any(
        flag.replace("-", "_").startswith("__num_cpu_threads_per_process") for flag in flags
    )


def launcher_words(file: str) -> list[str]:
    """Environment or command line of our parent process; nothing where the system does not show them."""
    try:
        return (Path("/proc") / str(os.getppid()) / file).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def check_processes(running: int, words: Sequence[str] | None = None) -> None:
    """Refuse to run as fewer processes than the launcher was asked for.

    On a machine without an accelerator `accelerate launch` starts a single process in silence, whatever
    `--num_processes` or its configuration file says, or several that do not look for each other.

    Args:
        running: Processes that found each other.
        words: The launcher's command line; our parent's when not given.

    Raises:
        UserError: More were asked for, by a flag, a configuration file or the launcher's environment.
    """
    words = launcher_words("cmdline") if words is None else words
    asked = {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        asked["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "")
    if any("accelerate" in word for word in words):
        flags = {name: flag(words, f"--{name}") for name in ("num_processes", "num_machines")}
        file = configuration(words)
        asked |= {f"--{name}": value or getattr(file, name, "") for name, value in flags.items()}
    for name, value in asked.items():
        if str(value).isdigit() and int(value) > running:
            raise UserError(
                f"{name} {value} was asked for, {running} process runs: accelerate starts lone ones where there is no "
                "accelerator; use ACCELERATE_USE_CPU=true torchrun --nproc_per_node N -m timm_locat.train ..."
            )


def flag(words: Sequence[str], name: str) -> str:
    """Value of a flag on a command line, which may spell it with dashes and an equals sign; empty where it is not."""
    for i, word in enumerate(words):
        spelt, _, value = word.partition("=")
        if spelt.replace("-", "_") == name.replace("-", "_"):
            return value or (words[i + 1] if i + 1 < len(words) else "")
    return ""


def configuration(words: Sequence[str]) -> object | None:
    """What `accelerate launch` read besides its command line: `--config_file`, or the file of `accelerate config`."""
    path = flag(words, "--config_file") or None
    if path is None and ("--cpu" in words or not Path(config_args.default_config_file).is_file()):
        return None
    try:
        return config_args.load_config_from_file(path)
    except (OSError, ValueError):  # the launcher has said so, or this process stands in another folder
        return None


def choose_threads() -> int:
    """Give this process its share of the cores, unless the user said otherwise; returns the number of threads."""
    if not user_chose_threads():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return torch.get_num_threads()
