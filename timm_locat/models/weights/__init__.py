"""Weights that come with the package, as half-precision safetensors; a record lies beside each file."""

from pathlib import Path
from typing import Any

__all__ = ["TAG", "WEIGHTS", "shipped"]

WEIGHTS = Path(__file__).parent
TAG = "fashion_mnist"
LABELS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def shipped(name: str) -> dict[str, Any]:
    """The part of timm's pretrained configuration of `NAME.fashion_mnist` that says where its weights are."""
    return {"file": str(WEIGHTS / f"{name}.{TAG}.safetensors"), "num_classes": len(LABELS), "label_names": LABELS}
