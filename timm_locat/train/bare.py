"""How fast a run is beside the least that training can cost: forward and backward passes of its model alone."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BareLoop"]

EVERY = 20
"""Updates between two comparisons, which then cost about a twentieth of the run."""


class BareLoop:
    """Times, after every 20th update, the same number of passes on a batch that is ready: no reading, no augmentation,
    no clipping, no optimizer, no statistics.

    The update and the passes that follow it meet the same machine, however busy: their ratios mean something where the
    seconds do not.

    Args:
        passes: Forward and backward passes of one update.
        forward: The model in the run's precision, from normalised images to logits.
        quiet: Context in which a backward pass does not wait for other processes.
    """

    def __init__(
        self,
        passes: int,
        forward: Callable[[Tensor], Tensor],
        quiet: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self.passes, self.forward, self.quiet = passes, forward, quiet
        self.seconds: list[float] = []
        self.shares: list[float] = []

    def after(self, update: int, seconds: float, images: Tensor) -> float:
        """Compare an update that took `seconds`; `images` are those of one normalised micro-batch.

        The gradients that this leaves are the caller's to clear, and the global random generator moves on.

        Returns:
            Seconds spent here.
        """
        if (update + 1) % EVERY:
            return 0.0
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        synchronize(images.device)
        start = time.perf_counter()
        for _ in range(self.passes):
            with self.quiet():
                F.cross_entropy(self.forward(images).float(), labels).backward()
        synchronize(images.device)
        spent = time.perf_counter() - start
        self.seconds.append(spent)
        self.shares.append(spent / seconds)
        return time.perf_counter() - start

    def results(self, images: int) -> dict[str, Any]:
        """Medians for the record.

        Args:
            images: Images of one update, of this process.

        Returns:
            `bare_images_per_second`; `share_of_bare`, the run's speed as a share of the bare loop's, in (0, 1] but for
            noise; `bare_comparisons`, how many updates were compared. Empty if none was.
        """
        if not self.shares:
            return {}
        return {
            "bare_images_per_second": images / statistics.median(self.seconds),
            "share_of_bare": statistics.median(self.shares),
            "bare_comparisons": len(self.shares),
        }


def synchronize(device: torch.device) -> None:
    """Wait for the device: on CUDA a call returns before its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
