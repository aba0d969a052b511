"""How many CPU threads a training process uses."""

import os
from pathlib import Path

import torch

__all__ = ["choose_threads", "user_chose_threads"]


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
    parent = Path("/proc") / str(os.getppid())
    try:
        environment = (parent / "environ").read_bytes().split(b"\0")
        flags = (parent / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment) or any(
        flag.replace(b"-", b"_").startswith(b"__num_cpu_threads_per_process") for flag in flags
    )


def choose_threads(local_processes: int) -> int:
    """Give this process its share of the cores, unless the user said otherwise; returns the number of threads."""
    if not user_chose_threads():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_processes))
    return torch.get_num_threads()
