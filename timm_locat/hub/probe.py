"""A picture and what the model said to it, kept beside the weights: who gets them can tell that they are the same."""

import hashlib
from pathlib import Path

import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from timm_locat.errors import UserError, require
from timm_locat.hub.contents import PROBE, WEIGHTS, read_tensors
from timm_locat.record import atomic_write

__all__ = ["check_probe", "write_probe"]

TOLERANCE = 1e-3
"""Of the largest logit. Another machine, thread count or fused kernel moves single-precision logits less than this."""


def picture(channels: int, height: int, width: int) -> Tensor:
    """(1, channels, height, width) uint8: waves in each channel's own direction, so that no axis can be mistaken."""
    y = torch.linspace(0, 1, height, dtype=torch.float64).unsqueeze(1)
    x = torch.linspace(0, 1, width, dtype=torch.float64).unsqueeze(0)
    waves = [torch.sin(9 * (c + 1) * y + 5 * x + c) * torch.cos(7 * x - 3 * c * y) for c in range(channels)]
    return ((torch.stack(waves) + 1) * 127.5).round().to(torch.uint8).unsqueeze(0)


@torch.inference_mode()
def answer(model: nn.Module, image: Tensor) -> Tensor:
    """Logits of a uint8 (1, C, H, W) image, normalised as the model's configuration says."""
    data = resolve_model_data_config(model)
    mean, std = (torch.tensor(data[key]) for key in ("mean", "std"))
    if len(mean) != image.shape[1]:  # a model for grey pictures keeps the three numbers of its first weights
        mean, std = mean.mean().expand(image.shape[1]), std.mean().expand(image.shape[1])
    mean, std = mean.view(-1, 1, 1), std.view(-1, 1, 1)
    parameter = next(model.parameters())
    x = ((image.float() / 255 - mean) / std).to(parameter.device, parameter.dtype)
    return model.eval()(x).float().cpu()


def write_probe(model: nn.Module, folder: Path) -> None:
    """Keep a picture, its logits and the digest of the weights' file in `folder/probe.safetensors`."""
    safetensors = require("safetensors.torch", "hub", "export")
    image = picture(*resolve_model_data_config(model)["input_size"])
    kept = {"image": image, "logits": answer(model, image).contiguous(), "weights_sha256": digest(folder)}
    atomic_write(folder / PROBE, safetensors.save(kept))


def digest(folder: Path) -> Tensor:
    """(32,) uint8: SHA-256 of the file of weights. A flipped bit may move no logit that can be seen."""
    return torch.tensor(list(hashlib.sha256((folder / WEIGHTS).read_bytes()).digest()), dtype=torch.uint8)


def check_probe(model: nn.Module, folder: Path) -> float | None:
    """Largest difference from the kept logits over the largest of them; None where nothing was kept.

    Raises:
        UserError: The model says something else by now.
    """
    if not (folder / PROBE).exists():
        return None
    kept = read_tensors(folder / PROBE)
    image = kept.get("image", torch.empty(0))
    if kept.keys() != {"image", "logits", "weights_sha256"} or image.dtype != torch.uint8 or image.ndim != 4:
        raise UserError(
            f"{folder / PROBE} is not a probe: expected an `image` in uint8, its `logits` and `weights_sha256`"
        )
    if not torch.equal(kept["weights_sha256"], digest(folder)):
        raise UserError(f"{folder / WEIGHTS} is not the file that was exported (SHA-256 differs); get the folder again")
    try:
        logits = answer(model, image)
    except (RuntimeError, AssertionError, ValueError) as err:
        raise UserError(f"{folder / PROBE} holds an image that the model cannot take: {err}") from err
    if not torch.isfinite(logits).all():
        raise UserError(f"the model in {folder} gives logits that are not finite; get the folder again")
    if logits.shape != kept["logits"].shape:
        raise UserError(
            f"the model in {folder} gives {tuple(logits.shape)} logits, {tuple(kept['logits'].shape)} were kept"
        )
    off = float((logits - kept["logits"]).abs().max() / kept["logits"].abs().max().clamp(min=1e-12))
    if not off <= TOLERANCE:
        raise UserError(
            f"the model in {folder} does not say what it said when it was exported (logits differ by {off:.2g} of "
            "their largest); weights or configuration were changed, get the folder again"
        )
    return off
