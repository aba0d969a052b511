"""Write a model as `model.safetensors` + `config.json`, the format of timm's `local-dir:` and `hf-hub:`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from timm.models import save_for_hf
from torch import nn

from timm_locat.record import atomic_write

__all__ = ["export"]


def export(model: nn.Module, folder: str | Path, *, label_names: Sequence[str] | None = None) -> None:
    """Save a model so that `timm.create_model("local-dir:FOLDER", pretrained=True)` gives it back.

    transformers' `AutoModelForImageClassification` loads the folder too, after `import timm_locat`.

    Args:
        model: Built by `timm.create_model`, which records the arguments that the config needs.
        folder: Created when missing; files of the same names are replaced, each by a rename.
        label_names: Class names in the order of the logits.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"label_names": list(label_names)} if label_names is not None else None
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
        save_for_hf(model, scratch, model_config=config, safe_serialization=True)
        written = json.loads(Path(scratch, "config.json").read_text())
        # timm 1.0.31 states the number of classes twice, and transformers' wrapper then passes it twice: a TypeError.
        written.get("model_args", {}).pop("num_classes", None)
        # Weights first: a folder with a config is a complete one.
        Path(scratch, "model.safetensors").replace(folder / "model.safetensors")
        atomic_write(folder / "config.json", json.dumps(written, indent=2) + "\n")
