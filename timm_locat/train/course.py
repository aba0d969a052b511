"""The course of locality over a training run: attention measured at chosen updates, without disturbing the run.

Nothing random is drawn and the model's mode is put back, so a run ends with the same weights, bit for bit, whether it
was measured or not. A measurement is a function of the weights, so a resumed run writes the same files again.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.locality import Locality, record
from timm_locat.locality.plots import draw_course
from timm_locat.locality.watch import attention_layers
from timm_locat.train.samples import Samples, batches

__all__ = ["Course", "check_when", "chosen_updates"]

_logger = logging.getLogger(__name__)

IMAGES = 512
"""Test images that are measured: always the same, spread evenly over the set; all, where there are fewer."""
BATCH_SIZE = 64


def check_when(when: str | None) -> None:
    """Refuse what `chosen_updates` does not understand.

    Raises:
        UserError: `when` is not of one of its forms.
    """
    if when is not None and not re.fullmatch(r"log|every:0*[1-9]\d*|\d+(,\d+)*", when, re.ASCII):
        raise UserError(f"record_locality must be log, every:N, or updates such as 0,10,100, got {when!r}")


def chosen_updates(when: str | None, last: int) -> list[int]:
    """Updates after which to measure, in order; 0 is before the first.

    Args:
        when: `log` for 0, 1, 2, 4, 8, ...; `every:N` for 0, N, 2N, ...; or numbers such as `0,10,100`. The last update
            always belongs to them. None for none at all.
        last: Number of updates of the run.

    Raises:
        UserError: `when` is something else, or names an update that the run does not have.
    """
    check_when(when)
    if when is None:
        return []
    if when == "log":
        updates = [0, *(2**i for i in range(last.bit_length()))]
    elif when.startswith("every:"):
        updates = list(range(0, last, int(when.removeprefix("every:"))))
    else:
        updates = [int(word) for word in when.split(",")]
        if max(updates) > last:
            raise UserError(f"record_locality names update {max(updates)}, the run has {last}; leave it out")
    return sorted({*updates, last})


class Course:
    """Measures the attention of a model in training and keeps the results in its run folder.

    Args:
        when: See `chosen_updates`; None measures nothing.
        last: Number of updates of the run.
        folder: The run folder; one file per measurement goes into its folder `locality`.
        model: The model itself, without wrappers. It is measured in float32, whatever precision it trains in.
        samples: The test images.
        prepare: Moves 8-bit images to the device and normalises them.
        is_main: Whether this process measures. The others wait for it at their next update.
    """

    def __init__(
        self,
        when: str | None,
        last: int,
        *,
        folder: Path,
        model: nn.Module,
        samples: Samples,
        prepare: Callable[[Tensor], Tensor],
        is_main: bool = True,
    ) -> None:
        self.updates = chosen_updates(when, last)
        if self.updates:
            attention_layers(model)  # a model that cannot be read is refused before anything is trained
        self.folder = folder
        self.model = model
        self.samples = samples
        self.prepare = prepare
        self.is_main = is_main

    def path(self, update: int) -> Path:
        return self.folder / "locality" / f"update_{update:07d}.json"

    def visit(self, update: int) -> float:
        """Measure if `update` is one of those chosen; returns the seconds that it took."""
        if update not in self.updates or not self.is_main:
            return 0.0
        start = time.perf_counter()
        count = min(IMAGES, len(self.samples))
        ids = [i * len(self.samples) // count for i in range(count)]
        parts = [ids[i : i + BATCH_SIZE] for i in range(0, count, BATCH_SIZE)]
        # `record` calls `forward_features`, which the autocast that accelerate puts round `forward` does not reach.
        result = record(self.model, (self.prepare(images) for images, _ in batches(self.samples, parts)))
        result.save(self.path(update))
        found = result.summary()
        shown = {name: "none" if value is None else f"{value:.4f}" for name, value in found.items()}
        _logger.info(
            f"locality after update {update}: least distance of a head {shown['min_mad_over_heads']} (of it self "
            f"{shown['min_mad_self_mass']}, neighbours {shown['min_mad_neighbour_mass']}, prefix "
            f"{shown['min_mad_prefix_mass']}), mean {shown['mean_mad']}, entropy {shown['mean_entropy']}"
        )
        return time.perf_counter() - start

    def finish(self, title: str) -> dict[str, Any]:
        """Draw the course into `locality.png`; returns what the record of the run says about it."""
        if not self.updates or not self.is_main:
            return {}
        if not self.path(self.updates[-1]).exists():  # somebody deleted it from a finished run
            self.visit(self.updates[-1])
        course = {u: Locality.load(self.path(u)) for u in self.updates if self.path(u).exists()}
        draw_course(course, self.folder / "locality.png", title)
        return {"locality": course[self.updates[-1]].summary()}
