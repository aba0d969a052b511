"""Any timm model by name, with one sentence for each way in which the request cannot be met."""

import difflib
import json
from typing import Any

import timm
from torch import nn

from timm_locat.errors import UserError
from timm_locat.models._build import check_img_size

__all__ = ["create_any_size", "create_model", "parse_kwargs"]


def parse_kwargs(text: str, flag: str) -> dict[str, Any]:
    """Build arguments of a model from a command line: a JSON object such as `{"depth": 2}`.

    Raises:
        UserError: `text` is something else; the sentence names `flag`.
    """
    example = f"{flag} must be a JSON object such as '{{\"depth\": 2}}'"
    try:
        kwargs = json.loads(text)
    except ValueError as err:
        raise UserError(f"{example}, got {text!r}: {err}") from err
    if not isinstance(kwargs, dict):
        raise UserError(f"{example}, got {text!r}")
    if "img_size" in kwargs:
        raise UserError(f"{flag} may not hold img_size: give it as --img-size")
    return kwargs


def create_model(
    name: str, *, pretrained: bool = False, img_size: tuple[int, int] | None = None, **kwargs: Any
) -> nn.Module:
    """`timm.create_model` for command lines.

    Args:
        name: A timm model name, with or without a tag, or `local-dir:FOLDER`, or `hf-hub:OWNER/NAME`.
        pretrained: Load the weights that the name stands for.
        img_size: Height and width of the images to come; None means the model's own. A model of any size is not told.
        kwargs: Further arguments of the model.

    Raises:
        UserError: No such model or weights, an argument that it does not have, or a size that it cannot take.
    """
    if ":" not in name and not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
        raise UserError(f"there is no model {name!r} in timm or here; {hint}")
    sized = kwargs if img_size is None or own_size(name) == img_size else {**kwargs, "img_size": img_size}
    try:
        try:
            model = timm.create_model(name, pretrained=pretrained, **sized)
        except TypeError as err:
            if "img_size" in kwargs or "img_size" not in str(err):
                raise
            model = timm.create_model(name, pretrained=pretrained, **kwargs)
    except UserError:
        raise
    # What timm raises for a wrong argument, size or source is not of one type.
    except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as err:
        asked = "".join(f", {key}={value!r}" for key, value in sized.items())
        reason = str(err).strip() or type(err).__name__
        raise UserError(f"cannot build {name} with pretrained={pretrained}{asked}: {reason}") from err
    embed = getattr(model, "patch_embed", None)
    if img_size is not None and hasattr(embed, "patch_size"):
        check_img_size(img_size, embed.patch_size, pad=getattr(embed, "dynamic_img_pad", False))
    return model


def create_any_size(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`create_model` for images of any size, where the model's class can take them.

    Raises:
        UserError: See `create_model`.
    """
    # ViTs and Eva know the first switch, Swin the second, BEiT none.
    for switch in ({"dynamic_img_size": True}, {"strict_img_size": False}, {}):
        try:
            return create_model(name, pretrained=pretrained, **{**switch, **kwargs})
        except UserError as err:
            if not switch or not isinstance(err.__cause__, TypeError) or next(iter(switch)) not in str(err.__cause__):
                raise
    raise AssertionError("the last try returns or raises")


def own_size(name: str) -> tuple[int, int] | None:
    """Height and width that a registered model is built for when nothing is said, or None where that is not known."""
    if ":" in name:
        return None
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError as err:
        raise UserError(f"{name} has a weights tag that timm does not know; leave out what follows the dot") from err
    return tuple(cfg.input_size[1:]) if cfg and cfg.input_size else None
