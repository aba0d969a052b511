"""Data sets of the Hub, fetched by `datasets` and kept in its cache."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from timm_locat.data._columns import classes_of_training, image_and_label, label_kind
from timm_locat.data._folders import Found
from timm_locat.data._shards import HubShard, Shard
from timm_locat.data._tables import Reader, SavedTable, choose_table, not_decoding, read_table
from timm_locat.errors import UserError, require

if TYPE_CHECKING:
    import datasets

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


@dataclass(frozen=True)
class HubTable:
    """One split as `datasets` streams it."""

    table: "datasets.IterableDataset"
    where: str

    @property
    def features(self) -> "datasets.Features":
        if self.table.features is None:
            raise UserError(f"{self.where} does not state its columns, as streaming needs; load it without streaming")
        return self.table.features


@dataclass(frozen=True)
class HubLabels:
    """From a value in the label column to a label.

    Args:
        names: Name of each value that is a number; None where values are names.
        labels: Label of each name.
    """

    names: tuple[str, ...] | None
    labels: Mapping[str, int]

    def __call__(self, value: int | str | None) -> int:
        name = value
        if self.names is not None and value is not None:
            if not 0 <= value < len(self.names):
                raise UserError(
                    f"has label {value}, but those of {len(self.names)} classes are 0..{len(self.names) - 1}"
                )
            name = self.names[value]
        if name not in self.labels:
            raise UserError(
                f"has label {name!r}, which is none of the {len(self.labels)} classes of the training split or of "
                "classes=...; load another split, or add it there"
            )
        return self.labels[name]


@dataclass(frozen=True)
class HubRows:
    """Undecoded images of a split, read from start to end as they are fetched."""

    table: "datasets.IterableDataset"
    where: str
    columns: tuple[str, str]
    label: HubLabels

    @property
    def num_rows(self) -> int | None:
        """As the data set's card states it."""
        stated = (self.table.info.splits or {}).get(str(self.table.split))
        return None if stated is None else stated.num_examples or None

    def shards(self, labels: None) -> list[Shard]:
        table = not_decoding(self.table.select_columns(list(self.columns)), self.columns[0])
        return [HubShard(table, self.where, self.columns, i, self.label) for i in range(table.num_shards)]

    def ordered(self, order: tuple[int, ...]) -> "HubRows":
        """With the label `order[i]` in the place of i; rows whose label becomes -1 are refused."""
        labels = {name: order[label] for name, label in self.label.labels.items() if order[label] >= 0}
        return replace(self, label=replace(self.label, labels=labels))


def open_hub(
    hub: HubSource,
    split: str,
    classes: tuple[str, ...] | None,
    instead: str,
    *,
    streaming: bool = False,
    read: Reader = read_table,
) -> Found:
    """One split of a data set of the Hub with an image and a label column.

    Args:
        hub: Which data set.
        split: Any name of a split but `all`, or any name that the data set gives one of its splits.
        classes: Class names in the order of their labels; those of the training split when None.
        instead: What the user can do where it cannot be fetched.
        streaming: Fetch rows when they are read, and keep nothing.
        read: What is made of the table that is found, unless it is streamed.
    """
    splits = _fetch(hub, instead, streaming)
    kind, read = (HubTable, stream_hub_table) if streaming else (SavedTable, read)
    tables = {name: kind(table, f"split {name} of {hub} on the Hub") for name, table in splits.items()}
    split = hub.splits.get(split, split)
    return choose_table(tables, f"{hub} on the Hub", split, classes, f"a split named {split}", read)


def stream_hub_table(table: HubTable, trained: HubTable | None, split: str, classes: tuple[str, ...] | None) -> Found:
    """`stream_table` for a table of which nothing is read yet: the labels come with the rows."""
    columns = image_and_label(table)
    kind = label_kind(table, columns[1])
    if classes is None and kind != "names":
        raise UserError(
            f"{table.where} has {kind} as labels, which streaming does not read ahead to tell which classes there are; "
            "give the class names in the order of their labels (classes=...), or load it without streaming"
        )
    if classes is None:
        classes = classes_of_training(table, trained, columns[1], split, kind, [])
    names = tuple(table.features[columns[1]].names) if kind == "names" else classes if kind == "whole numbers" else None
    labels = HubLabels(names, {name: label for label, name in enumerate(classes)})
    return Found(HubRows(table.table, table.where, columns, labels), None, classes, {})


def _fetch(hub: HubSource, instead: str, streaming: bool) -> Mapping[str, Any]:
    """All splits by name."""
    datasets = require("datasets", "data", _WHY)
    options = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(hub.repo, hub.config, **options)
    # Whatever is raised here comes from the network, the Hub's answers or the files there, in the errors of several
    # libraries whose HTTP client differs between versions; none of it is a fault of ours.
    except Exception as err:
        cause = " ".join(str(err).split()) or type(err).__name__
        cause = cause if len(cause) <= 200 else f"{cause[:200]}..."
        raise UserError(f"cannot fetch {hub} from the Hub ({cause}); {instead}") from err
