"""What all families share when they register and build their models."""

import warnings
from collections.abc import Callable
from pathlib import Path

import timm
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, model_entrypoint, resolve_pretrained_cfg
from timm.models import register_model as timm_register_model
from timm.models.vision_transformer import VisionTransformer

from timm_locat.errors import UserError

__all__ = ["build_vit", "check_img_size", "register_model"]


def register_model(fn: Callable) -> Callable:
    """timm's `register_model`, except that a name which timm itself has by now stays timm's.

    timm lets the last one to register a name win, in silence for whoever used the other.
    """
    name = fn.__name__
    if timm.is_model(name) and model_entrypoint(name).__module__.startswith("timm.models."):
        warnings.warn(f"timm has a model named {name!r} by now; timm-locat leaves it in place", stacklevel=2)
        return fn
    return timm_register_model(fn)


def check_img_size(img_size: int | tuple[int, int] | None, patch_size: int | tuple[int, int], *, pad: bool) -> None:
    """Refuse an image size of which the patch embedding would drop the last rows or columns.

    Raises:
        UserError: `img_size` is no multiple of `patch_size`, and the model does not pad.
    """
    if img_size is None or pad:
        return
    size, patch = to_2tuple(img_size), to_2tuple(patch_size)
    if any(s < p or s % p for s, p in zip(size, patch, strict=True)):
        low = tuple(max(p, s // p * p) for s, p in zip(size, patch, strict=True))
        high = tuple(-(-s // p) * p for s, p in zip(size, patch, strict=True))
        raise UserError(
            f"img_size must be a multiple of the {patch[0]}x{patch[1]} patch, got {size[0]}x{size[1]}; "
            f"use {low[0]}x{low[1]} or {high[0]}x{high[1]}, or pass dynamic_img_size=True, dynamic_img_pad=True"
        )


def build_vit(cls: type[VisionTransformer], variant: str, pretrained: bool, filter_fn: Callable, **kwargs):
    """Build a ViT-like model the way timm's own ViT entrypoints do.

    Raises:
        UserError: An image size that the patch does not divide, or weights in a file that is not there.
        TypeError: A keyword that `cls` does not have; from Python itself, as for timm's own models.
    """
    out_indices = kwargs.pop("out_indices", 3)
    check_img_size(kwargs.get("img_size"), kwargs.get("patch_size", 16), pad=kwargs.get("dynamic_img_pad", False))
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
    packaged = bool(cfg.file) and not cfg.source
    if pretrained and packaged and not Path(cfg.file).is_file():
        # timm's own error does not name the file.
        raise UserError(
            f"cannot load weights into {variant}: there is no file {cfg.file}; weights of this package come with its "
            "installation, or from `python -m timm_locat.study ship` in a checkout; pretrained=False does without"
        )
    model = build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
    if packaged and not pretrained:
        # A model that is trained on other images must not carry the class names of ours into its export.
        model.pretrained_cfg.pop("label_names", None)
    return model
