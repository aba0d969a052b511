"""Training images that cannot be read: named, counted, and stood in for, up to as many as the user tolerates."""

import logging
from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from torch import Tensor

from timm_locat.data import ImageData
from timm_locat.errors import UserError
from timm_locat.record import atomic_write

__all__ = ["Broken", "Standby"]

_logger = logging.getLogger(__name__)


class Standby:
    """A data set in which the next readable image, in the order of the set, stands in for one that cannot be read.

    Which one that is depends on the files alone, so that a resumed run sees the same. Looks like `ImageData` to those
    who read it.

    Args:
        data: Images and labels.
        limit: Unreadable images in a row that are tolerated.
    """

    def __init__(self, data: ImageData, limit: int) -> None:
        self.data, self.limit = data, limit
        self.name, self.source = data.name, data.source
        self.labels: Tensor = data.labels.clone()
        self.found: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        for step in range(self.limit + 1):
            j = (i + step) % len(self.data)
            try:
                image, label = self.data[j]
            except UserError as err:
                self.found[self.data.source(j)] = str(err)
                continue
            self.labels[i] = label
            return image, label
        raise UserError(
            f"{self.limit + 1} images in a row cannot be read, skip_broken={self.limit} was asked for; the last: "
            f"{self.found[self.data.source(j)]}"
        )

    def take_found(self) -> dict[str, str]:
        """What was found broken since the last call: name of the image, and what is wrong with it."""
        found, self.found = self.found, {}
        return found


class Broken:
    """The broken images that a run has met.

    Args:
        limit: How many are tolerated.
        folder: Where `broken.txt` names them, one sentence per line; None in processes that write nothing.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self.limit, self.folder = limit, folder
        self.files: dict[str, str] = {}

    def note(self, found: dict[str, str]) -> None:
        """Take note of images, known or new.

        Raises:
            UserError: There are more than are tolerated.
        """
        new = {name: reason for name, reason in found.items() if name not in self.files}
        self._add(new)
        for reason in new.values():
            _logger.warning(f"{reason}; another image stands in for it")

    def merge(self, others: Iterable[dict[str, str]]) -> None:
        """Know also what other processes have met.

        Raises:
            UserError: Together there are more than are tolerated.
        """
        self._add({name: reason for files in others for name, reason in files.items() if name not in self.files})

    def _add(self, new: dict[str, str]) -> None:
        if not new:
            return
        self.files |= new
        if self.folder is not None:
            atomic_write(self.folder / "broken.txt", "".join(f"{self.files[name]}\n" for name in sorted(self.files)))
        if len(self.files) > self.limit:
            raise UserError(
                f"{next(iter(new.values()))}; with it {len(self.files)} images cannot be read, more than "
                f"skip_broken={self.limit} tolerates: mend or remove it, or raise skip_broken"
            )
