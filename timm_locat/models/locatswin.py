"""LocAtSwin: GAug in every window of a Swin Transformer, PRR over the patches of the last stage.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892. The Gaussian's grid is the window; PRR
has the heads of the last stage, and average pooling follows it.

Differs from the paper's code: PRR sits in `forward_head`, so that `forward(x) == forward_head(forward_features(x))`,
and windows that change with the input size keep the meaning of the Gaussians.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import checkpoint_filter_fn as swin_checkpoint_filter_fn
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.layers import GaussianWindowAttention, PatchRefinement, gaussian_window_attention
from timm_locat.models._build import register_model

__all__ = ["LocAtSwin", "checkpoint_filter_fn", "swin_with_locat"]


def swin_with_locat(
    model: SwinTransformer,
    *,
    gaug: bool,
    prr: bool,
    gaug_grid: Sequence[tuple[int, int]] | None = None,
    blocks: Sequence[int] | None = None,
    gate: float | None = None,
    mix: float | None = None,
) -> None:
    """Give the layers of a `SwinTransformer` what `LocAtSwin.forward_head` needs; its weights stay.

    Args:
        model: Made of timm's own blocks.
        gaug: Add the Gaussian bias.
        prr: Refine the patches of the last stage before pooling.
        gaug_grid: For each stage the window, in patches, for which the Gaussians were learned; None means its own.
        blocks: Indices of the blocks that get a Gaussian, counted through all stages; all when None.
        gate: As in `GaussianBias`.
        mix: As in `PatchRefinement`.

    Raises:
        UserError: Another number of windows than of stages.
    """
    if gaug_grid is not None and len(gaug_grid) != len(model.layers):
        raise UserError(f"gaug_grid needs one window for each of {len(model.layers)} stages, got {list(gaug_grid)}")
    count = 0
    for i, stage in enumerate(model.layers if gaug else []):
        for block in stage.blocks:
            if blocks is None or count in blocks:
                window = None if gaug_grid is None else to_2tuple(gaug_grid[i])
                gaussian_window_attention(block.attn, gate=gate, gaug_grid=window)
            count += 1
    last = model.layers[-1].blocks[-1].attn
    weight = last.qkv.weight
    model.refine = PatchRefinement(last.num_heads, mix=mix if prr else None, device=weight.device, dtype=weight.dtype)
    model.gaug = gaug
    model.prr = prr
    model._gaug_grid_given = gaug_grid is not None
    own = [stage.blocks[0].attn.window_size for stage in model.layers]
    model.gaug_grid = [to_2tuple(window) for window in (own if gaug_grid is None else gaug_grid)]


class LocAtSwin(SwinTransformer):
    """timm's `SwinTransformer` with GAug and PRR; every argument of the base class works as it does there.

    Args:
        gaug: Add the Gaussian bias in every attention layer.
        prr: Refine the patches of the last stage before pooling.
        gaug_grid: For each stage the window, in patches, for which the Gaussians were learned; None means its own.
            Loading weights that were trained with other windows sets it, and it is exported with the model.
    """

    gaug: torch.jit.Final[bool]
    prr: torch.jit.Final[bool]

    def __init__(
        self,
        *args: Any,
        gaug: bool = True,
        prr: bool = True,
        gaug_grid: Sequence[tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        swin_with_locat(self, gaug=gaug, prr=prr, gaug_grid=gaug_grid)

    @torch.jit.ignore
    def set_gaug_grid(self, gaug_grid: Sequence[tuple[int, int]]) -> None:
        """State the windows for which the Gaussians were learned; recorded, so that an export keeps them."""
        for stage, window in zip(self.layers, gaug_grid, strict=True):
            for block in stage.blocks:
                if isinstance(block.attn, GaussianWindowAttention):
                    block.attn.gaug_grid = tuple(window)
        self.gaug_grid = [tuple(window) for window in gaug_grid]
        self._model_args = dict(getattr(self, "_model_args", {}), gaug_grid=self.gaug_grid)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Change image and window size, with timm's arguments; learned Gaussians keep their meaning."""
        super().set_input_size(*args, **kwargs)
        if self.gaug:
            self.set_gaug_grid(self.gaug_grid)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Keep what the chosen stages need, as timm does; without a head, PRR goes with it."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if isinstance(self.head.fc, nn.Identity):
            self.prr = False
            self.gaug_grid = self.gaug_grid[: len(self.layers)]
            self.refine = PatchRefinement(self.refine.num_heads)
        return taken

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Refine (B, H, W, C) patches where `prr` is on, then pool and classify as timm does."""
        if self.prr:
            patches = x.flatten(1, 2)
            x = self.refine(patches, patches).view_as(x)
        return self.head(x, pre_logits=True) if pre_logits else self.head(x)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: SwinTransformer) -> dict[str, Tensor]:
    """Fit a checkpoint to `model`: timm's Swin filter, and Gaussians keep the meaning that they were trained with.

    Unless the model was built with an explicit `gaug_grid`, it takes over the windows of the checkpoint: those that it
    was exported with, or else the square ones that its position bias tables were made for.
    """
    out = swin_checkpoint_filter_fn(state_dict, model)
    if getattr(model, "gaug", False) and not model._gaug_grid_given and any(".gaug." in key for key in out):
        source = state_dict.get("model", state_dict)
        source = source.get("state_dict", source)
        grid = getattr(model, "pretrained_model_args", {}).get("gaug_grid") or trained_windows(source, model)
        model.set_gaug_grid([to_2tuple(window) for window in grid])
    return out


def trained_windows(state_dict: dict[str, Tensor], model: LocAtSwin) -> list[tuple[int, int]]:
    """For each stage the square window that fits a checkpoint's table of relative positions, else the model's own."""
    windows = []
    for i, own in enumerate(model.gaug_grid):
        table = state_dict.get(f"layers.{i}.blocks.0.attn.relative_position_bias_table")
        side = 0 if table is None else math.isqrt(table.shape[0])
        square = side > 0 and side * side == table.shape[0] and table.shape[0] != (2 * own[0] - 1) * (2 * own[1] - 1)
        windows.append(((side + 1) // 2,) * 2 if square else tuple(own))
    return windows


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head.fc",
        "license": "mit",
        "paper_ids": "arXiv:2603.04892",
        "paper_name": "Locality-Attending Vision Transformer",
        "origin_url": "https://github.com/sinahmr/LocAtViT",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({"locatswin_tiny.untrained": _cfg(), "locatswin_base.untrained": _cfg()})


def _create(variant: str, pretrained: bool, **kwargs) -> LocAtSwin:
    out_indices = kwargs.pop("out_indices", tuple(range(len(kwargs["depths"]))))
    return build_model_with_cfg(
        LocAtSwin,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"flatten_sequential": True, "out_indices": out_indices},
        **kwargs,
    )


@register_model
def locatswin_tiny(pretrained: bool = False, **kwargs) -> LocAtSwin:
    """LocAtSwin-T, patch 4, window 7, at 224. No published weights."""
    model_args = dict(patch_size=4, window_size=7, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
    return _create("locatswin_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def locatswin_base(pretrained: bool = False, **kwargs) -> LocAtSwin:
    """LocAtSwin-B, patch 4, window 7, at 224. No published weights."""
    model_args = dict(patch_size=4, window_size=7, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
    return _create("locatswin_base", pretrained, **dict(model_args, **kwargs))
