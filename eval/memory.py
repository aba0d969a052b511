"""Peak memory of a step, over what is held before it: weights, inputs and libraries are not counted.

On a CPU the step runs in a fresh process, because a process that has run other models keeps their freed memory and
would hide the next model's need. On CUDA the allocator counts exactly, so the process at hand is good enough.
"""

import contextlib
import gc
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from timm_locat.errors import UserError
from timm_locat.memory import resident_peak

__all__ = ["cpu_peak", "cuda_peak"]

Step = Callable[[], object]

PASSES = 2
MIB = 2**20


def cuda_peak(step: Step) -> float:
    """Most MiB of tensors that a step holds at once on the current CUDA device, over those held before it."""
    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(PASSES):
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / MIB


def cpu_peak(make_step: Callable[[], Step], what: str) -> float | None:
    """Growth of resident memory in MiB from after a warm-up pass to the peak of the next ones.

    Args:
        make_step: Builds model, input and step; it is called in the fresh process, so it must be picklable.
        what: Name of what is measured, for the message when the process dies.

    Returns:
        None on a system that does not tell a process its memory (Windows).
    """
    # With a fixed threshold, glibc hands every larger tensor back when it is freed. Its default moves up to 32 MiB,
    # and what the warm-up pass freed would then be kept and hide the need of the next pass.
    with (
        _environment(MALLOC_MMAP_THRESHOLD_="65536"),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        try:
            return pool.submit(_peak_growth, make_step).result()
        except BrokenProcessPool as err:
            raise UserError(
                f"the process that measures the memory of {what} was killed, most likely for want of memory; "
                "lower --batch or --img-size"
            ) from err


def _peak_growth(make_step: Callable[[], Step]) -> float | None:
    step = make_step()
    step()
    gc.collect()
    before = _status_bytes("VmRSS") or resident_peak()
    is_reset = _reset_peak()
    for _ in range(PASSES):
        step()
    after = _status_bytes("VmHWM") if is_reset else resident_peak()
    return None if before is None or after is None else max(0.0, (after - before) / MIB)


def _reset_peak() -> bool:
    """Set the peak back to what is resident now; where that is not allowed, the peak is the process's whole life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _status_bytes("VmHWM") is not None


def _status_bytes(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


@contextlib.contextmanager
def _environment(**names: str) -> Iterator[None]:
    """Environment for processes started inside; the names are put back afterwards."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
