"""LocAtViT with rotary positions: GAug and PRR in timm's `Eva`, which EVA-02, RoPE-ViT and DINOv3 are instances of.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892; positions are those of "Rotary Position
Embedding for Vision Transformer" (ECCV 2024), arXiv:2403.13298, mixed frequencies.

Differs from the paper's code as `locatvit.py` does; the Gaussian comes from the query before its rotation, as there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import AttentionRope, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices  # timm has no public name for it
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm, global_pool_nlc
from timm.models.eva import checkpoint_filter_fn as eva_checkpoint_filter_fn
from torch import Tensor

from timm_locat.errors import UserError
from timm_locat.layers import (
    GaussianBias,
    GaussianEvaAttention,
    GaussianEvaBlock,
    GaussianEvaBlockPostNorm,
    GaussianGrid,
    GaussianRopeAttention,
    GridlessEvaBlock,
    GridlessEvaBlockPostNorm,
    PatchRefinement,
    gaussian_grid,
)
from timm_locat.models._build import check_img_size, register_model
from timm_locat.models.locatvit import adopt_trained_grid

__all__ = ["LocAtEva", "checkpoint_filter_fn", "eva_with_locat"]

ATTENTIONS = {AttentionRope: GaussianRopeAttention, EvaAttention: GaussianEvaAttention}
BLOCKS = {
    EvaBlock: (GaussianEvaBlock, GridlessEvaBlock),
    EvaBlockPostNorm: (GaussianEvaBlockPostNorm, GridlessEvaBlockPostNorm),
}
"""timm's block, and what it becomes with and without a Gaussian."""


def eva_with_locat(
    model: Eva,
    *,
    gaug: bool,
    prr: bool,
    gaug_grid: tuple[int, int] | None = None,
    blocks: Sequence[int] | None = None,
    gate: float | None = None,
    mix: float | None = None,
) -> None:
    """Give the layers of an `Eva` what `LocAtEva.forward` needs; its weights stay.

    Args:
        model: Made of timm's own blocks.
        gaug: Add the Gaussian bias.
        prr: Refine the tokens before pooling.
        gaug_grid: Patch rows and columns for which the Gaussians were learned; those of the model when None.
        blocks: Indices of the blocks that get a Gaussian; all when None.
        gate: As in `GaussianBias`.
        mix: As in `PatchRefinement`.

    Raises:
        UserError: The model drops patches while training. It does not tell which, and the Gaussian would be wrong.
    """
    if gaug and model.patch_drop is not None:
        raise UserError(
            "GAug needs the places of all patches, and an Eva model with patch_drop_rate > 0 does not tell which it "
            "dropped; build it with patch_drop_rate=0, or use gaug=False"
        )
    for i, block in enumerate(model.blocks if gaug else []):
        chosen = blocks is None or i in blocks
        if chosen:
            attn = block.attn
            weight = attn.proj.weight
            attn.gaug = GaussianBias(attn.head_dim, gate=gate, device=weight.device, dtype=weight.dtype)
            attn.gaug.reset_parameters()
            attn.__class__ = ATTENTIONS[type(attn)]
        block.__class__ = BLOCKS[type(block)][0 if chosen else 1]
    weight = model.patch_embed.proj.weight
    model.refine = PatchRefinement(
        model.blocks[0].attn.num_heads, mix=mix if prr else None, device=weight.device, dtype=weight.dtype
    )
    model.gaug = gaug
    model.prr = prr
    model._gaug_grid_given = gaug_grid is not None
    model.gaug_grid = tuple(model.patch_embed.grid_size) if gaug_grid is None else to_2tuple(gaug_grid)


class LocAtEva(Eva):
    """timm's `Eva` with GAug and PRR; every argument of the base class but `patch_drop_rate` works as it does there.

    `global_pool` keeps timm's meaning. With `prr`, the tokens are refined before they are pooled.

    Args:
        img_size: Image height and width in pixels, a multiple of `patch_size`.
        patch_size: Patch height and width in pixels.
        gaug: Add the Gaussian bias in every attention layer.
        prr: Refine the tokens before pooling.
        gaug_grid: Patch rows and columns for which the Gaussians were learned; None means those of `img_size`.
    """

    dynamic_img_size: torch.jit.Final[bool]
    gaug: torch.jit.Final[bool]
    prr: torch.jit.Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        *,
        gaug: bool = True,
        prr: bool = True,
        gaug_grid: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_img_size(img_size, patch_size, pad=kwargs.get("dynamic_img_pad", False))
        super().__init__(img_size=img_size, patch_size=patch_size, **kwargs)
        eva_with_locat(self, gaug=gaug, prr=prr, gaug_grid=gaug_grid)

    @torch.jit.ignore
    def set_gaug_grid(self, gaug_grid: tuple[int, int]) -> None:
        """State the grid on which the Gaussians were learned; recorded, so that an export keeps it."""
        self.gaug_grid = tuple(gaug_grid)
        self._model_args = dict(getattr(self, "_model_args", {}), gaug_grid=self.gaug_grid)

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the input size, in pixels; learned Gaussians keep their meaning."""
        new_size = self.patch_embed.img_size if img_size is None else img_size
        new_patch = self.patch_embed.patch_size if patch_size is None else patch_size
        check_img_size(new_size, new_patch, pad=self.patch_embed.dynamic_img_pad)
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        if self.gaug:
            self.set_gaug_grid(self.gaug_grid)

    def _embed(self, x: Tensor) -> tuple[Tensor, GaussianGrid | None, Tensor | None]:
        """Tokens that enter the first block, the positions of the patches (None without GAug), rotary embeddings."""
        x = self.patch_embed(x)
        if self.dynamic_img_size:
            height, width = x.shape[1], x.shape[2]
        else:
            height, width = self.patch_embed.grid_size
        x, rope = self._pos_embed(x)
        x = self.norm_pre(x)
        grid: GaussianGrid | None = None
        if self.gaug:
            grid = gaussian_grid(x, (height, width), self.gaug_grid, self.num_prefix_tokens)
        return x, grid, rope

    def _blocks(
        self,
        x: Tensor,
        grid: GaussianGrid | None,
        rope: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: list[int],
        stop: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run blocks 0..stop; returns the last output and those of the blocks in `take`."""
        taken: list[Tensor] = []
        for i, blk in enumerate(self.blocks):
            if i <= stop:
                # Mixed frequencies differ from block to block.
                turn = rope[i] if self.rope_mixed and rope is not None else rope
                if self.gaug:
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        x = checkpoint(blk, x, grid, turn, attn_mask, is_causal)
                    else:
                        x = blk(x, grid, rope=turn, attn_mask=attn_mask, is_causal=is_causal)
                elif self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(blk, x, turn, attn_mask, is_causal)
                else:
                    x = blk(x, rope=turn, attn_mask=attn_mask, is_causal=is_causal)
                if i in take:
                    taken.append(x)
        return x, taken

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, T, C) tokens after the final norm and before PRR, prefix tokens first."""
        x, grid, rope = self._embed(x)
        x, _ = self._blocks(x, grid, rope, attn_mask, is_causal, [], len(self.blocks) - 1)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ):
        """Outputs of chosen blocks; arguments and return values as in timm's `Eva`."""
        assert output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC."
        take, last = feature_take_indices(len(self.blocks), indices)
        height, width = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x, grid, rope = self._embed(x)
        stop = last if stop_early else len(self.blocks) - 1
        x, taken = self._blocks(x, grid, rope, attn_mask, is_causal, take, stop)
        if norm:
            taken = [self.norm(y) for y in taken]
        prefix = [y[:, : self.num_prefix_tokens] for y in taken]
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            taken = [y.transpose(1, 2).unflatten(2, (height, width)).contiguous() for y in taken]
        if return_prefix_tokens and self.num_prefix_tokens > 0 and not torch.jit.is_scripting():
            taken = list(zip(taken, prefix, strict=True))
        if intermediates_only:
            return taken
        return self.norm(x), taken

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Keep what the chosen blocks need, as timm does; without a head, PRR goes with it."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.prr = False
            self.refine = PatchRefinement(self.refine.num_heads)
        return taken

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Refine (B, T, C) tokens where `prr` is on, then pool as timm does."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if self.prr:
            if self.attn_pool is None and pool_type == "token":
                return self.refine(x[:, :1], x)[:, 0]  # the other rows would be thrown away
            x = self.refine(x, x)
        # From here as in the base class, whose method TorchScript cannot reach through super().
        if self.attn_pool is not None:
            return self.attn_pool(x)
        return global_pool_nlc(x, pool_type=pool_type, num_prefix_tokens=self.num_prefix_tokens)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Eva) -> dict[str, Tensor]:
    """Fit a checkpoint to `model`: timm's filter, and Gaussians keep the meaning that they were trained with."""
    out = eva_checkpoint_filter_fn(state_dict, model)
    adopt_trained_grid(model, state_dict, out)
    return out


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2603.04892",
        "paper_name": "Locality-Attending Vision Transformer",
        "origin_url": "https://github.com/sinahmr/LocAtViT",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "locatvit_tiny_rope_mixed.untrained": _cfg(),
        "locatvit_base_rope_mixed.untrained": _cfg(),
        "vit_tiny_patch16_rope_mixed_224.untrained": _cfg(
            paper_ids="arXiv:2403.13298",
            paper_name="Rotary Position Embedding for Vision Transformer",
            origin_url="https://github.com/naver-ai/rope-vit",
        ),
    }
)

_MIXED = dict(
    patch_size=16,
    mlp_ratio=4,
    attn_type="rope",
    qkv_bias=True,
    init_values=1e-5,
    class_token=True,
    global_pool="token",
    use_abs_pos_emb=False,
    use_rot_pos_emb=True,
    rope_grid_indexing="xy",
    rope_temperature=10.0,
    rope_type="mixed",
)
"""A ViT with mixed rotary frequencies, no other positions, and layer scale."""
_TINY = dict(_MIXED, embed_dim=192, depth=12, num_heads=3)
_BASE = dict(_MIXED, embed_dim=768, depth=12, num_heads=12)


def _create(cls: type[Eva], variant: str, pretrained: bool, filter_fn, **kwargs) -> Eva:
    feature_cfg = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
    return build_model_with_cfg(
        cls, variant, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=feature_cfg, **kwargs
    )


@register_model
def locatvit_tiny_rope_mixed(pretrained: bool = False, **kwargs) -> LocAtEva:
    """LocAtViT-Ti/16 with mixed RoPE at 224: 12 blocks, width 192, 3 heads. No published weights."""
    model_args = dict(_TINY, **kwargs)
    return _create(LocAtEva, "locatvit_tiny_rope_mixed", pretrained, checkpoint_filter_fn, **model_args)


@register_model
def locatvit_base_rope_mixed(pretrained: bool = False, **kwargs) -> LocAtEva:
    """LocAtViT-B/16 with mixed RoPE at 224: 12 blocks, width 768, 12 heads. No published weights."""
    model_args = dict(_BASE, **kwargs)
    return _create(LocAtEva, "locatvit_base_rope_mixed", pretrained, checkpoint_filter_fn, **model_args)


@register_model
def vit_tiny_patch16_rope_mixed_224(pretrained: bool = False, **kwargs) -> Eva:
    """RoPE-ViT-Ti/16, the plain control of `locatvit_tiny_rope_mixed`: timm has the other sizes only."""
    model_args = dict(_TINY, **kwargs)
    return _create(Eva, "vit_tiny_patch16_rope_mixed_224", pretrained, eva_checkpoint_filter_fn, **model_args)
