"""Put the best weights of the study `embedded` into the package, where timm finds them without a network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import Positional

from timm_locat.errors import UserError, require
from timm_locat.hub.card import shipped_card
from timm_locat.models.weights import LABELS, TAG, WEIGHTS
from timm_locat.record import atomic_write
from timm_locat.study.results import Row, read_rows

__all__ = ["ShipConfig", "run"]

SHIPPED = ("plain", "locat", "posattn")
"""Conditions of the study `embedded` whose models are shipped."""
LARGEST = 5_000_000
"""Bytes that a shipped file may have."""


@dataclass(frozen=True)
class ShipConfig:
    """Copy the best run of each shipped model of the study `embedded` into the package, in half precision."""

    folder: Annotated[Path, Positional]
    """Study folder of `python -m timm_locat.study embedded`."""
    to: Path = WEIGHTS
    """Folder for the weights."""
    cards: Path = Path("hub_cards")
    """Folder for the model cards."""


def run(config: ShipConfig) -> str:
    """Copy weights, records and cards; returns what was copied.

    Raises:
        UserError: The folder has no finished run at all.
    """
    rows = read_rows(config.folder)
    told: list[str] = []
    for condition in SHIPPED:
        mine = [row for row in rows if row.condition == condition]
        if not mine:
            told.append(f"{condition}: no finished run, nothing shipped")
            continue
        best = max(mine, key=lambda row: row.value("test_accuracy"))
        name = f"{best.model}.{TAG}"
        record = best.record | {"accuracy_of_all_seeds": [row.value("test_accuracy") for row in mine]}
        size = ship(best, record, config.to, name)
        atomic_write(config.cards / f"{name}.md", shipped_card(name, record))
        told.append(f"{name}: seed {best.seed}, {best.value('test_accuracy'):.1f} %, {size / 1e6:.1f} MB")
    return "\n".join(told)


def ship(row: Row, record: dict[str, Any], folder: Path, name: str) -> int:
    """Write weights in half precision, and the record of their run beside them; returns the size of the file.

    Raises:
        UserError: They are too large, or their classes are not those that the package gives to them.
    """
    safetensors = require("safetensors.torch", "hub", "shipping weights")
    labels = json.loads((row.folder / "config.json").read_text(encoding="utf-8")).get("label_names")
    if tuple(labels or ()) != LABELS:
        raise UserError(f"{row.folder} was trained on the classes {labels}, shipped weights have {list(LABELS)}")
    state = safetensors.load_file(row.folder / "model.safetensors")
    data = safetensors.save({key: value.to(torch.float16) for key, value in state.items()}, {"format": "pt"})
    if len(data) > LARGEST:
        raise UserError(f"{name} takes {len(data):,} bytes, more than the {LARGEST:,} that a shipped file may have")
    atomic_write(folder / f"{name}.safetensors", data)
    atomic_write(folder / f"{name}.json", json.dumps(record, indent=2) + "\n")
    return len(data)
