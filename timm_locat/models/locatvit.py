"""LocAtViT: a Vision Transformer whose patch tokens keep their place.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892. Two additions to a plain ViT:
GAug, a learned Gaussian bias in every attention layer, and PRR, parameter-free self-attention before the head.

Differs from the paper's code:
    * PRR sits in `pool()`, so that `forward(x) == forward_head(forward_features(x))`; for class-token pooling only the
      class row is computed. Same logits, same gradients.
    * The grid is passed down in each forward. `set_input_size`, `dynamic_img_size` and `patch_drop_rate` work.
    * State-dict keys are the same, so the paper's weights load.
"""

from typing import Any

import torch
from timm.layers import Attention, PatchDropoutWithIndices, to_2tuple
from timm.models import checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices  # timm has no public name for it
from timm.models.vision_transformer import Block, VisionTransformer, global_pool_nlc
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn

from timm_locat.layers import GaussianAttention, GaussianBlock, GaussianGrid, PatchRefinement, gaussian_grid
from timm_locat.models._build import build_vit, check_img_size, register_model

__all__ = ["LocAtViT", "checkpoint_filter_fn"]


class LocAtViT(VisionTransformer):
    """timm's `VisionTransformer` with GAug and PRR; every argument of the base class works as it does there.

    `global_pool` keeps timm's meaning. With `prr`, the tokens are refined before they are pooled: `token` is final
    norm, PRR, class row; `avg` is PRR, mean over the patch tokens, `fc_norm`; an empty `global_pool` returns all
    refined tokens. `global_pool="prr"` is timm's own pooling, and PRR then runs once, there.

    Args:
        img_size: Image height and width in pixels, a multiple of `patch_size`.
        patch_size: Patch height and width in pixels.
        gaug: Add the Gaussian bias in every attention layer.
        prr: Refine the tokens before pooling.
        no_pos_emb: Leave out position embeddings (the paper's "no pos. enc." ablation); same as `pos_embed="none"`.
        gaug_grid: Patch rows and columns for which the Gaussians were learned; None means those of `img_size`. The
            unit in which learned variances are read. Loading weights that were trained at another size sets it, and
            it is exported with the model.
        patch_drop_rate: Share of patches to drop while training.
    """

    dynamic_img_size: torch.jit.Final[bool]
    gaug: torch.jit.Final[bool]
    prr: torch.jit.Final[bool]
    drops_patches: torch.jit.Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        *,
        gaug: bool = True,
        prr: bool = True,
        no_pos_emb: bool = False,
        gaug_grid: tuple[int, int] | None = None,
        num_heads: int = 12,
        patch_drop_rate: float = 0.0,
        pool_include_prefix: bool = False,
        **kwargs: Any,
    ) -> None:
        check_img_size(img_size, patch_size, pad=kwargs.get("dynamic_img_pad", False))
        if gaug and kwargs.get("attn_layer") is not GaussianAttention:
            if kwargs.get("block_fn", Block) is not Block or kwargs.get("attn_layer", Attention) is not Attention:
                raise ValueError("gaug=True brings its own block and attention; drop block_fn/attn_layer or gaug")
            kwargs |= {"block_fn": GaussianBlock, "attn_layer": GaussianAttention}
        if no_pos_emb:
            kwargs["pos_embed"] = "none"
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            num_heads=num_heads,
            patch_drop_rate=patch_drop_rate,
            pool_include_prefix=pool_include_prefix,
            **kwargs,
        )
        self.gaug = gaug
        self.prr = prr
        self.drops_patches = patch_drop_rate > 0
        if self.drops_patches:
            # A patch's bias depends on where it was, so the indices of the kept ones are needed, too.
            self.patch_drop = PatchDropoutWithIndices(patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
        self.refine = PatchRefinement(num_heads)
        self._pool_include_prefix = pool_include_prefix
        self._gaug_grid_given = gaug_grid is not None
        self.gaug_grid = to_2tuple(gaug_grid) if gaug_grid is not None else tuple(self.patch_embed.grid_size)

    @torch.jit.ignore
    def set_gaug_grid(self, gaug_grid: tuple[int, int]) -> None:
        """State the grid on which the Gaussians were learned; recorded, so that an export keeps it."""
        self.gaug_grid = tuple(gaug_grid)
        self._model_args = dict(getattr(self, "_model_args", {}), gaug_grid=self.gaug_grid)

    def set_input_size(
        self,
        img_size: tuple[int, int] | None = None,
        patch_size: tuple[int, int] | None = None,
    ) -> None:
        """Change the input size; position embeddings are resampled, learned Gaussians keep their meaning.

        Args:
            img_size: New height and width in pixels, None to keep.
            patch_size: New patch height and width in pixels, None to keep.
        """
        new_size = self.patch_embed.img_size if img_size is None else img_size
        new_patch = self.patch_embed.patch_size if patch_size is None else patch_size
        check_img_size(new_size, new_patch, pad=self.patch_embed.dynamic_img_pad)
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        if self.gaug:
            self.set_gaug_grid(self.gaug_grid)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head; leaving timm's `prr` pooling also restores whether prefix tokens count in an average."""
        if self.global_pool == "prr" and global_pool not in (None, "prr"):
            self.pool_include_prefix = self._pool_include_prefix
        super().reset_classifier(num_classes, global_pool)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Keep what the chosen blocks need, as timm does; without a head, PRR goes with it."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.prr = False
            self.refine = PatchRefinement(self.refine.num_heads)
        return taken

    def _embed(self, x: Tensor) -> tuple[Tensor, GaussianGrid | None]:
        """Tokens that enter the first block, and the positions of the patches among them (None without GAug)."""
        x = self.patch_embed(x)
        if self.dynamic_img_size:
            height, width = x.shape[1], x.shape[2]
        else:
            height, width = self.patch_embed.grid_size
        x = self._pos_embed(x)
        keep: Tensor | None = None
        if self.drops_patches:
            x, keep = self.patch_drop(x)
        x = self.norm_pre(x)
        grid: GaussianGrid | None = None
        if self.gaug:
            grid = gaussian_grid(x, (height, width), self.gaug_grid, self.num_prefix_tokens, keep)
        return x, grid

    def _blocks(
        self,
        x: Tensor,
        grid: GaussianGrid | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: list[int],
        stop: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run blocks 0..stop; returns the last output and those of the blocks in `take`."""
        taken: list[Tensor] = []
        for i, blk in enumerate(self.blocks):
            if i <= stop:
                if self.gaug:
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        x = checkpoint(blk, x, grid, attn_mask, is_causal)
                    else:
                        x = blk(x, grid, attn_mask=attn_mask, is_causal=is_causal)
                elif self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(blk, x, attn_mask, is_causal)
                else:
                    x = blk(x, attn_mask=attn_mask, is_causal=is_causal)
                if i in take:
                    taken.append(x)
        return x, taken

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, T, C) tokens after the final norm and before PRR, prefix tokens first."""
        x, grid = self._embed(x)
        x, _ = self._blocks(x, grid, attn_mask, is_causal, [], len(self.blocks) - 1)
        return self._norm(x)

    def _norm(self, x: Tensor) -> Tensor:
        """The final norm, of (B, T, C) tokens."""
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
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ):
        """Outputs of chosen blocks; arguments and return values as in timm's `VisionTransformer`."""
        assert output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC."
        take, last = feature_take_indices(len(self.blocks), indices)
        height, width = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x, grid = self._embed(x)
        x, taken = self._blocks(x, grid, attn_mask, is_causal, take, last if stop_early else len(self.blocks) - 1)
        if norm:
            taken = [self._norm(y) for y in taken]
        prefix = [y[:, : self.num_prefix_tokens] for y in taken]
        taken = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            taken = [y.transpose(1, 2).unflatten(2, (height, width)).contiguous() for y in taken]

        has_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": taken}
            if has_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self._norm(x)
            return result
        if has_prefix and not torch.jit.is_scripting():
            taken = list(zip(taken, prefix, strict=True))
        if intermediates_only:
            return taken
        return self._norm(x), taken

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Refine (B, T, C) tokens where `prr` is on, then pool as timm does."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if self.prr and self.global_pool != "prr":
            if self.attn_pool is None and pool_type == "token":
                return self.refine(x[:, :1], x)[:, 0]  # the other rows would be thrown away
            x = self.refine(x, x)
        # From here as in the base class, whose method TorchScript cannot reach through super().
        if self.attn_pool is not None:
            return self.attn_pool(x if self.pool_include_prefix else x[:, self.num_prefix_tokens :])
        return global_pool_nlc(x, pool_type, self.num_prefix_tokens, self.pool_include_prefix)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionTransformer) -> dict[str, Tensor]:
    """Fit a checkpoint to `model`: timm's ViT filter, and Gaussians keep the meaning that they were trained with.

    A state dict does not tell on which grid its Gaussians were learned; the model's `pretrained_model_args` and
    `pretrained_cfg` do. Unless the model was built with an explicit `gaug_grid`, it takes over that grid.
    """
    out = vit_checkpoint_filter_fn(state_dict, model)
    adopt_trained_grid(model, state_dict, out)
    return out


def adopt_trained_grid(model: nn.Module, state_dict: dict[str, Any], fitted: dict[str, Tensor]) -> None:
    """Let a model with GAug take over the grid of a checkpoint, unless it was built with one.

    Args:
        model: A ViT-like model.
        state_dict: The checkpoint as it was read.
        fitted: The same, fitted to the model.
    """
    if getattr(model, "gaug", False) and not model._gaug_grid_given:
        source = state_dict.get("model", state_dict)
        source = source.get("state_dict", source)
        grid = trained_grid(source, model)
        if grid is not None and any(".gaug." in key for key in fitted):
            model.set_gaug_grid(grid)


def trained_grid(state_dict: dict[str, Tensor], model: nn.Module) -> tuple[int, int] | None:
    """Patch grid that a checkpoint was trained on, or None where its size is not known for certain."""
    args = getattr(model, "pretrained_model_args", {})
    if args.get("gaug_grid") is not None:
        return to_2tuple(args["gaug_grid"])
    patch_weight = state_dict.get("patch_embed.proj.weight")
    size = args.get("img_size") or getattr(model, "pretrained_cfg", {}).get("input_size", (0, 0, 0))[-2:]
    if patch_weight is None or patch_weight.ndim != 4:
        return None
    grid = tuple(s // p for s, p in zip(to_2tuple(size), patch_weight.shape[-2:], strict=True))
    pos_embed = state_dict.get("pos_embed")
    if pos_embed is not None:
        num_prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        if pos_embed.shape[1] - num_prefix != grid[0] * grid[1]:
            return None
    return grid


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        # The paper's supervised training takes 0.5 from timm's ViT defaults; its dense evaluations normalise with
        # ImageNet statistics instead.
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
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
        "locatvit_tiny.in1k": _cfg(hf_hub_id="sinahmr/locatvit_tiny"),
        "locatvit_small.untrained": _cfg(),
        "locatvit_base.in1k": _cfg(hf_hub_id="sinahmr/locatvit_base"),
        "locatvit_tiny_reg4.untrained": _cfg(),
        "locatvit_base_reg4.untrained": _cfg(),
    }
)


def create_locatvit(variant: str, pretrained: bool = False, **kwargs) -> LocAtViT:
    """Build a LocAtViT of any shape under the default configuration of `variant`."""
    return build_vit(LocAtViT, variant, pretrained, checkpoint_filter_fn, **kwargs)


@register_model
def locatvit_tiny(pretrained: bool = False, **kwargs) -> LocAtViT:
    """LocAtViT-Ti/16 at 224: 12 blocks, width 192, 3 heads; 5.7 M parameters."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return create_locatvit("locatvit_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def locatvit_small(pretrained: bool = False, **kwargs) -> LocAtViT:
    """LocAtViT-S/16 at 224: 12 blocks, width 384, 6 heads; 22.1 M parameters. No published weights."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return create_locatvit("locatvit_small", pretrained, **dict(model_args, **kwargs))


@register_model
def locatvit_base(pretrained: bool = False, **kwargs) -> LocAtViT:
    """LocAtViT-B/16 at 224: 12 blocks, width 768, 12 heads; 86.6 M parameters."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return create_locatvit("locatvit_base", pretrained, **dict(model_args, **kwargs))


# The paper's code has registers as an argument only and does not tell how many its results used: names and the count
# of four (that of arXiv:2309.16588) are our choice.


@register_model
def locatvit_tiny_reg4(pretrained: bool = False, **kwargs) -> LocAtViT:
    """LocAtViT-Ti/16 at 224 with four registers. No published weights."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3, reg_tokens=4)
    return create_locatvit("locatvit_tiny_reg4", pretrained, **dict(model_args, **kwargs))


@register_model
def locatvit_base_reg4(pretrained: bool = False, **kwargs) -> LocAtViT:
    """LocAtViT-B/16 at 224 with four registers. No published weights."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, reg_tokens=4)
    return create_locatvit("locatvit_base_reg4", pretrained, **dict(model_args, **kwargs))
