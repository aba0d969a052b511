"""Data sets of the Hub, fetched by `datasets` and kept in its cache."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from timm_locat.data._folders import Found
from timm_locat.data._tables import SavedTable, choose_table
from timm_locat.errors import UserError, require

_WHY = "reading data sets of the Hub"
_ID = re.compile(r"(?P<repo>\w[\w-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?")


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hub and the names that its splits have there."""

    repo: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    """Names of splits there that differ from those here."""

    def __str__(self) -> str:
        return self.repo if self.config is None else f"{self.repo}:{self.config}"


def parse_hub_id(name: str) -> HubSource | None:
    """The data set that `owner/name` or `owner/name:config` stands for; None for anything else."""
    match = _ID.fullmatch(name)
    return HubSource(match["repo"], match["config"]) if match else None


def open_hub(hub: HubSource, split: str, classes: tuple[str, ...] | None, instead: str) -> Found:
    """One split of a data set of the Hub with an image and a label column.

    Args:
        hub: Which data set.
        split: Any name of a split but `all`, or any name that the data set gives one of its splits.
        classes: Class names in the order of their labels; those of the training split when None.
        instead: What the user can do where it cannot be fetched.
    """
    splits = _fetch(hub, instead)
    tables = {name: SavedTable(table, f"split {name} of {hub} on the Hub") for name, table in splits.items()}
    split = hub.splits.get(split, split)
    return choose_table(tables, f"{hub} on the Hub", split, classes, f"a split named {split}")


def _fetch(hub: HubSource, instead: str) -> Mapping[str, Any]:
    """All splits by name."""
    datasets = require("datasets", "data", _WHY)
    try:
        return datasets.load_dataset(hub.repo, hub.config)
    # Whatever is raised here comes from the network, the Hub's answers or the files there, in the errors of several
    # libraries whose HTTP client differs between versions; none of it is a fault of ours.
    except Exception as err:
        cause = " ".join(str(err).split()) or type(err).__name__
        cause = cause if len(cause) <= 200 else f"{cause[:200]}..."
        raise UserError(f"cannot fetch {hub} from the Hub ({cause}); {instead}") from err
