"""What a published repository holds, and how a folder from outside is read without trusting it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from timm_locat.errors import UserError, require

__all__ = ["CARD", "CONFIG", "FILES", "PROBE", "RECORD", "WEIGHTS", "check_names", "load_folder"]

WEIGHTS, CONFIG, CARD, RECORD, PROBE = (
    "model.safetensors",
    "config.json",
    "README.md",
    "record.json",
    "probe.safetensors",
)
FILES = (WEIGHTS, CONFIG, CARD, RECORD, PROBE)
"""Everything that is published. The Hub adds `.gitattributes`."""
LARGEST_TEXT = 2**20
"""Bytes that a configuration may have; more is not a configuration."""


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse a listing with anything in it that a model of this package does not consist of.

    Raises:
        UserError: A pickle, a path that leaves the folder, or another file; the sentence names it.
    """
    for name in sorted(names):
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or name.startswith(("/", "\\")) or ":" in name:
            raise UserError(f"{where} holds {name!r}, a path that leads out of the folder; nothing was read")
        if name in FILES or name == ".gitattributes":
            continue
        if name.endswith(
            (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".joblib", ".msgpack", ".h5")
        ):
            raise UserError(
                f"{where} holds {name}, which may run code when it is read; expected weights as {WEIGHTS} alone"
            )
        raise UserError(
            f"{where} holds {name}, which is no part of a published model ({', '.join(FILES)}); "
            "write the folder anew with `python -m timm_locat.hub export SOURCE FOLDER`"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder, checked before anything is built from it.

    Raises:
        UserError: There is none, it is not timm's, or it names a model that is not registered.
    """
    path = folder / CONFIG
    try:
        if path.stat().st_size > LARGEST_TEXT:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes, which no configuration has")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}; expected a folder that export wrote") from err
    except (ValueError, RecursionError) as err:
        raise UserError(f"{path} is not valid JSON ({err}); get the folder again") from err
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise UserError(
            f"{path} has no `architecture`, so it was not written by timm; the paper's own repositories load by name, "
            'as timm.create_model("locatvit_base", pretrained=True)'
        )
    if not timm.is_model(config["architecture"]):
        raise UserError(
            f"{path} names the model {config['architecture']!r}, which timm {timm.__version__} and this package do not "
            "have; a newer version may"
        )
    args = config.get("model_args", {})
    if not isinstance(args, dict) or any(key.startswith("pretrained") or key == "checkpoint_path" for key in args):
        raise UserError(f"{path} has model_args that are no plain build arguments; nothing was built")
    return config


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file.

    Raises:
        UserError: It is missing, cut short, or no such file.
    """
    safetensors = require("safetensors", "hub", "reading weights")
    torch_format = require("safetensors.torch", "hub", "reading weights")
    try:
        return torch_format.load_file(path)
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}; expected a folder that export wrote") from err
    # A dtype that torch lacks is a KeyError.
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as err:
        raise UserError(f"{path} is damaged ({err}); get the folder again") from err


def load_folder(folder: Path) -> nn.Module:
    """The model of a folder that nobody vouches for, in evaluation mode; no code of the folder runs.

    Raises:
        UserError: A file is missing or damaged, or the weights are not those of the model that the config describes.
    """
    config = read_config(folder)
    name, state = config["architecture"], read_tensors(folder / WEIGHTS)
    try:
        # Shapes first, without memory for them: a config can ask for more than the machine has.
        with torch.device("meta"):
            expected = timm.create_model(f"local-dir:{folder}", pretrained=False).state_dict()
    except Exception as err:  # whatever a constructor answers to arguments from outside
        reason = str(err).strip() or type(err).__name__
        raise UserError(f"{folder / CONFIG} does not describe a {name} that can be built: {reason}") from err
    check_keys(state, expected, folder / WEIGHTS, name)
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as err:
        reason = str(err).strip() or type(err).__name__
        raise UserError(f"cannot load {folder / WEIGHTS} into {name}: {reason}") from err
    bad = [key for key, value in state.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if bad:
        raise UserError(f"{folder / WEIGHTS} holds numbers that are not finite, in {bad[0]}; get the folder again")
    return model.eval()


def check_keys(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], path: Path, name: str) -> None:
    """Refuse weights whose names or shapes are not the model's."""
    # The only copies that a model reads and does not list: Jumbo's.
    given = {key for key in state if not (key.startswith("blocks.") and ".jumbo_mlp." in key)}
    missing, extra = sorted(expected.keys() - given), sorted(given - expected.keys())
    shapes = [k for k in sorted(given & expected.keys()) if state[k].shape != expected[k].shape]
    if missing or extra or shapes:
        parts = [
            f"{len(keys)} {what} ({keys[0]})"
            for keys, what in ((missing, "missing"), (extra, "unknown"), (shapes, "of another shape"))
            if keys
        ]
        raise UserError(f"{path} does not fit {name}: of {len(expected)} tensors {', '.join(parts)}")
