"""What surrounds a run: the accelerator, the signals that stop it, and switches of torch that are put back."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from timm_locat.memory import resident_peak
from timm_locat.train.config import TrainConfig

__all__ = ["Interrupted", "StopRequest", "deterministic", "new_accelerator", "peak_memory_mib"]

_logger = logging.getLogger(__name__)

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Interrupted(Exception):
    """The run was asked to stop and has saved its state; the text says how to go on."""


def new_accelerator(config: TrainConfig) -> Accelerator:
    """An accelerator in the precision of the launcher if it names one, else in that of the config.

    A config's bf16 is float32 on a CPU without instructions for it, where it would take tens of times longer.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = config.mixed_precision if launched == "no" else launched
    if launched == "no" and precision == "bf16" and PartialState().device.type == "cpu" and not cpu_has_bf16():
        _logger.warning(
            "this CPU has no instructions for bf16: this run is in float32; accelerate launch --mixed_precision bf16 "
            "insists, and is tens of times slower"
        )
        precision = "no"
    # accelerate leaves fp16 out on a CPU, and still says fp16.
    if precision == "fp16" and PartialState().device.type == "cpu":
        _logger.warning("fp16 needs a GPU: this run is in float32")
        precision = "no"
    # accelerate keeps the first precision of a process for good; a second run in it may want another.
    AcceleratorState._reset_state(reset_partial_state=False)
    return Accelerator(mixed_precision=precision)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 itself; torch has no public question for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class StopRequest:
    """Turns SIGTERM and Ctrl-C into a wish to stop after the current update; a second one stops at once."""

    def __init__(self) -> None:
        self.made = False
        self.agreed = False  # whether any process knew of one when all of them last asked each other

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Listen inside; the handlers that were there are put back."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def stop(number: int, frame: object) -> None:
            self.made = True
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch takes algorithms that give the same bits each time, or raises where it has none.

    On CUDA also without TF32 and without cuDNN's choice by timing, both of which vary from run to run or card to card.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.flags
    # cuBLAS reads it when its first handle is made; torch refuses to multiply matrices without it.
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    try:
        with cudnn(enabled=torch.backends.cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_float32_matmul_precision(precision)
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]


def peak_memory_mib(accelerator: Accelerator) -> float | None:
    """Most MiB that any process has held so far: tensors on CUDA, resident memory on a CPU, None where not told."""
    device = accelerator.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()
    if peak is None:
        return None
    return float(accelerator.gather(torch.tensor([peak / 2**20], dtype=torch.float64, device=device)).max())
