"""ViTs whose attention depends on positions only: the same matrix for every image.

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. The ImageNet host of
the paper is tiny, patch 16, and its small one has 7 layers, 12 heads and width and MLP width 384 (both known from
summaries). The text on how positions enter a deep model was not available: every default below is our choice.

The attention is computed once per forward pass. In evaluation without gradients it is kept until a weight that it
depends on changes.
"""

from typing import Any, Literal

import torch
from timm.layers import Attention, PatchDropoutWithIndices, resample_abs_pos_embed
from timm.models import checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices  # timm has no public name for it
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional as F

from timm_locat.layers.positional import (
    PositionalAttention,
    PositionalBlock,
    conv_init_,
    masked_logits,
    mimetic_init_,
    sincos_positions,
)
from timm_locat.models._build import build_vit, check_img_size, register_model

__all__ = ["PosAttnViT", "checkpoint_filter_fn"]

torch.fx.wrap("masked_logits")  # masks of a traced call are not known yet

CACHE_BYTES = 2**28
"""Attention that takes more than this is not kept between forward passes."""


class PosAttnViT(VisionTransformer):
    """timm's `VisionTransformer` with positional attention; every argument of the base class works as it does there.

    Args:
        img_size: Image height and width in pixels, a multiple of `patch_size`.
        patch_size: Patch height and width in pixels.
        pos_shared: One position table for all layers, `pos_embed`. Otherwise each layer attends by its own, row i of
            `layer_pos`, and `pos_embed` is only added to the tokens.
        pos_added: Add `pos_embed` to the tokens as well, as a plain ViT does.
        pos_norm: Normalise each position (layer norm without weights) before queries and keys. Without it a table of
            small numbers makes attention all but uniform.
        free_logits: Learn the logits themselves, (heads, tokens, tokens) per layer, instead of P Wq Wk^T P^T.
        attn_init: How queries and keys start. `default` as timm has it; `mimetic` as noise plus identity; `conv` makes
            each head look at one patch of a 3 x 3 window, on positions of sines and cosines.
        patch_drop_rate: Share of patches to drop while training.
    """

    dynamic_img_size: torch.jit.Final[bool]
    drops_patches: torch.jit.Final[bool]
    pos_shared: torch.jit.Final[bool]
    pos_added: torch.jit.Final[bool]
    pos_norm: torch.jit.Final[bool]
    free_logits: torch.jit.Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        *,
        pos_shared: bool = True,
        pos_added: bool = True,
        pos_norm: bool = True,
        free_logits: bool = False,
        attn_init: Literal["default", "mimetic", "conv"] = "default",
        patch_drop_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_img_size(img_size, patch_size, pad=kwargs.get("dynamic_img_pad", False))
        if kwargs.get("block_fn", Block) is not Block or kwargs.get("attn_layer", Attention) is not Attention:
            raise ValueError("positional attention brings its own block and attention; drop block_fn and attn_layer")
        if kwargs.get("pos_embed", "learn") != "learn":
            raise ValueError(f"positional attention needs pos_embed='learn', got {kwargs['pos_embed']!r}")
        if kwargs.get("no_embed_class", False):
            raise ValueError("positional attention needs a position for every token: drop no_embed_class")
        if attn_init not in ("default", "mimetic", "conv"):
            raise ValueError(f"attn_init must be 'default', 'mimetic' or 'conv', got {attn_init!r}")
        kwargs |= {"block_fn": PositionalBlock, "attn_layer": PositionalAttention}
        self.attn_init = attn_init
        super().__init__(img_size=img_size, patch_size=patch_size, patch_drop_rate=patch_drop_rate, **kwargs)
        self.drops_patches = patch_drop_rate > 0
        if self.drops_patches:
            self.patch_drop = PatchDropoutWithIndices(patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
        self.pos_shared, self.pos_added = pos_shared, pos_added
        self.pos_norm, self.free_logits = pos_norm, free_logits
        depth, (_, tokens, dim) = len(self.blocks), self.pos_embed.shape
        dd = dict(device=self.pos_embed.device, dtype=self.pos_embed.dtype)
        if not pos_shared:
            self.layer_pos = nn.Parameter(torch.empty(depth, tokens, dim, **dd))
        if free_logits:
            heads = self.blocks[0].attn.num_heads
            self.attn_logits = nn.Parameter(torch.empty(depth, heads, tokens, tokens, **dd))
        if not self.pos_embed.is_meta:
            self.init_positions()
        self._kept: tuple[Any, ...] | None = None

    @torch.jit.ignore
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initialisation, then that of positions, queries and keys."""
        super().init_weights(mode, needs_reset)
        if hasattr(self, "pos_shared"):
            self.init_positions()

    @torch.jit.ignore
    @torch.no_grad()
    def init_positions(self) -> None:
        """Start values of what this class adds, and of queries and keys as `attn_init` says."""
        if not self.pos_shared:
            nn.init.trunc_normal_(self.layer_pos, std=0.02)
        if self.free_logits:
            nn.init.zeros_(self.attn_logits)
        if self.attn_init == "conv":
            dim = self.pos_embed.shape[-1]
            if dim % 4 or self.blocks[0].attn.head_dim % 4:
                raise ValueError(f"attn_init='conv' needs widths of model and heads that 4 divides, got {dim}")
            table = sincos_positions(self.patch_embed.grid_size, dim).to(self.pos_embed)
            for positions in self.pos_embed if self.pos_shared else self.layer_pos:
                positions[self.num_prefix_tokens :] = table
        if self.attn_init != "default" and not self.free_logits:
            for i, block in enumerate(self.blocks):
                if self.attn_init == "mimetic":
                    mimetic_init_(block.attn)
                else:
                    conv_init_(block.attn, first=i * block.attn.num_heads)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"layer_pos", "attn_logits"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups; what this class adds goes with the embeddings."""
        return dict(
            stem=r"^cls_token|pos_embed|patch_embed|reg_token|layer_pos|attn_logits",
            blocks=super().group_matcher(coarse)["blocks"],
        )

    def set_input_size(
        self,
        img_size: tuple[int, int] | None = None,
        patch_size: tuple[int, int] | None = None,
    ) -> None:
        """Change the input size; every table of positions is resampled."""
        new_size = self.patch_embed.img_size if img_size is None else img_size
        new_patch = self.patch_embed.patch_size if patch_size is None else patch_size
        check_img_size(new_size, new_patch, pad=self.patch_embed.dynamic_img_pad)
        before = self.patch_embed.grid_size
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        after = self.patch_embed.grid_size
        if after != before and not self.pos_shared:
            table = resample_positions(self.layer_pos, after, before, self.num_prefix_tokens)
            self.layer_pos = nn.Parameter(table, requires_grad=self.layer_pos.requires_grad)
        if after != before and self.free_logits:
            table = resample_logits(self.attn_logits, after, before, self.num_prefix_tokens)
            self.attn_logits = nn.Parameter(table, requires_grad=self.attn_logits.requires_grad)

    def _logits(self, grid: tuple[int, int]) -> list[Tensor]:
        """Attention logits (h, T, T) of each layer for a grid of patches."""
        own = self.patch_embed.grid_size
        own_size = grid[0] == own[0] and grid[1] == own[1]
        if self.free_logits:
            table = self.attn_logits
            if not own_size:
                table = resample_logits(table, grid, own, self.num_prefix_tokens)
            return list(table.unbind(0))
        positions = self.pos_embed if self.pos_shared else self.layer_pos
        if not own_size:
            positions = resample_positions(positions, grid, own, self.num_prefix_tokens)
        if self.pos_norm:
            positions = F.layer_norm(positions, (positions.shape[-1],))
        return [block.attn.logits(positions[0 if self.pos_shared else i]) for i, block in enumerate(self.blocks)]

    @torch.jit.ignore
    def attention_maps(self, img_size: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Attention of every layer, which no image changes.

        Args:
            img_size: Height and width in pixels; None for those that the model was built for.

        Returns:
            Name of the attention layer -> (h, T, T) after softmax.
        """
        grid = self.patch_embed.grid_size if img_size is None else self.patch_embed.dynamic_feat_size(img_size)
        return {f"blocks.{i}.attn": logits.softmax(dim=-1) for i, logits in enumerate(self._logits(tuple(grid)))}

    @torch.jit.ignore
    def _fresh_weights(self, grid: tuple[int, int]) -> list[Tensor]:
        return [logits.softmax(dim=-1).unsqueeze(0) for logits in self._logits(grid)]

    @torch.jit.ignore
    def _kept_weights(self, grid: tuple[int, int]) -> list[Tensor]:
        """Attention weights, from the last pass if nothing that they depend on has changed since.

        What tells a change: the version, storage, dtype and device of each parameter, the grid, and autocast. The
        storages are held, so that no other tensor can take their place in memory. Writing through `Tensor.data` in
        place is the one change that PyTorch itself does not notice.
        """
        parameters = [p for name, p in self.named_parameters() if name in ("pos_embed", "layer_pos", "attn_logits")]
        for block in self.blocks:
            parameters += [
                *block.attn.qkv.parameters(),
                *block.attn.q_norm.parameters(),
                *block.attn.k_norm.parameters(),
            ]
        device = self.pos_embed.device.type
        try:
            state = tuple((p._version, p.data_ptr(), p.dtype, p.device, tuple(p.shape)) for p in parameters)
        except RuntimeError:  # made in inference mode, or without a storage
            return self._fresh_weights(grid)
        key = (
            state,
            grid,
            self.patch_embed.grid_size,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
        kept = self._kept
        if kept is not None and kept[0] == key:
            return kept[1]
        weights = self._fresh_weights(grid)
        if sum(w.numel() * w.element_size() for w in weights) <= CACHE_BYTES:
            self._kept = (key, weights, [p.detach() for p in parameters])
        return weights

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which keep attention of their own."""
        return {**self.__dict__, "_kept": None}

    def _attention(
        self, x: Tensor, grid: tuple[int, int], keep: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[list[Tensor], bool]:
        """Attention of each layer for the tokens at hand, and whether it has been through the softmax."""
        # A traced x is no plain tensor; what was kept would become a constant of the trace.
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript prunes the outer condition only
            if type(x) is Tensor:
                simple = keep is None and attn_mask is None and not is_causal
                tracing = torch.jit.is_tracing() or torch.compiler.is_compiling() or x.is_meta
                if simple and not self.training and not torch.is_grad_enabled() and not tracing:
                    return self._kept_weights(grid), True
        return [masked_logits(logits, keep, attn_mask, is_causal) for logits in self._logits(grid)], False

    def _embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """Tokens that enter the first block, the grid, and which tokens are left (None: all)."""
        x = self.patch_embed(x)
        if self.dynamic_img_size:
            height, width = x.shape[1], x.shape[2]
        else:
            height, width = self.patch_embed.grid_size
        if self.pos_added:
            x = self._pos_embed(x)
        else:
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            if self.reg_token is not None:
                x = torch.cat((self.reg_token.expand(x.shape[0], -1, -1), x), dim=1)
            if self.cls_token is not None:
                x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
            x = self.pos_drop(x)
        keep: Tensor | None = None
        if self.drops_patches:
            x, keep = self.patch_drop(x)
            if keep is not None:  # indices of patches: prefix tokens come first
                prefix = torch.arange(self.num_prefix_tokens, device=keep.device).expand(keep.shape[0], -1)
                keep = torch.cat((prefix, keep + self.num_prefix_tokens), dim=1)
        return self.norm_pre(x), (height, width), keep

    def _blocks(
        self, x: Tensor, attention: list[Tensor], normalised: bool, take: list[int], stop: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run blocks 0..stop; returns the last output and those of the blocks in `take`."""
        taken: list[Tensor] = []
        for i, blk in enumerate(self.blocks):
            if i <= stop:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(blk, x, attention[i], normalised)
                else:
                    x = blk(x, attention[i], normalised)
                if i in take:
                    taken.append(x)
        return x, taken

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, T, C) tokens after the final norm, prefix tokens first."""
        x, grid, keep = self._embed(x)
        attention, normalised = self._attention(x, grid, keep, attn_mask, is_causal)
        x, _ = self._blocks(x, attention, normalised, [], len(self.blocks) - 1)
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
        x, grid, keep = self._embed(x)
        attention, normalised = self._attention(x, grid, keep, attn_mask, is_causal)
        x, taken = self._blocks(x, attention, normalised, take, last if stop_early else len(self.blocks) - 1)
        if norm:
            taken = [self.norm(y) for y in taken]
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
                result["image_features"] = self.norm(x)
            return result
        if has_prefix and not torch.jit.is_scripting():
            taken = list(zip(taken, prefix, strict=True))
        if intermediates_only:
            return taken
        return self.norm(x), taken


def resample_positions(table: Tensor, new: tuple[int, int], old: tuple[int, int], num_prefix: int) -> Tensor:
    """(L, T, C) positions for another grid; timm's resampling, table by table."""
    tables = [
        resample_abs_pos_embed(t.unsqueeze(0), new_size=new, old_size=old, num_prefix_tokens=num_prefix)
        for t in table.unbind(0)
    ]
    return torch.cat(tables)


def resample_logits(table: Tensor, new: tuple[int, int], old: tuple[int, int], num_prefix: int) -> Tensor:
    """(L, h, T, T) logits for another grid: keys first, then queries, as if the others were channels."""
    layers, heads, tokens, _ = table.shape
    by_query = table.reshape(layers * heads, tokens, tokens)
    for _ in range(2):
        by_query = resample_positions(by_query.transpose(1, 2), new, old, num_prefix)
    return by_query.view(layers, heads, by_query.shape[1], by_query.shape[2])


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionTransformer) -> dict[str, Tensor]:
    """Fit a checkpoint to `model`: timm's ViT filter, and the tables of each layer are resampled like `pos_embed`."""
    out = vit_checkpoint_filter_fn(state_dict, model)
    grid = tuple(model.patch_embed.grid_size)
    tokens = model.pos_embed.shape[1]
    for name, resample in (("layer_pos", resample_positions), ("attn_logits", resample_logits)):
        if name in out and out[name].shape[-2] != tokens:
            side = round((out[name].shape[-2] - model.num_prefix_tokens) ** 0.5)
            out[name] = resample(out[name], grid, (side, side), model.num_prefix_tokens)
    return out


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2210.09221",
        "paper_name": "Vision Transformers provably learn spatial structure",
        **kwargs,
    }


_SMALL = dict(input_size=(3, 32, 32), num_classes=10, crop_pct=1.0)

default_cfgs = generate_default_cfgs(
    {
        "vit_posattn.untrained": _cfg(),
        "vit_posattn_small_patch16_224.untrained": _cfg(),
        "vit_posattn_base_patch16_224.untrained": _cfg(),
        "vit_posattn_patch4_32.untrained": _cfg(**_SMALL),
        "vit_posattn_compact_patch4_32.untrained": _cfg(**_SMALL),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> PosAttnViT:
    return build_vit(PosAttnViT, variant, pretrained, checkpoint_filter_fn, **kwargs)


@register_model
def vit_posattn(pretrained: bool = False, **kwargs) -> PosAttnViT:
    """The ImageNet host of arXiv:2210.09221: ViT-Ti/16 at 224 with positional attention."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create("vit_posattn", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_posattn_small_patch16_224(pretrained: bool = False, **kwargs) -> PosAttnViT:
    """ViT-S/16 at 224 with positional attention; a size that the paper does not have."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create("vit_posattn_small_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_posattn_base_patch16_224(pretrained: bool = False, **kwargs) -> PosAttnViT:
    """ViT-B/16 at 224 with positional attention; a size that the paper does not have."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create("vit_posattn_base_patch16_224", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_posattn_patch4_32(pretrained: bool = False, **kwargs) -> PosAttnViT:
    """The paper's model for CIFAR and SVHN: 7 layers, 12 heads, width and MLP width 384, 8 x 8 patches of 4."""
    model_args = dict(img_size=32, patch_size=4, embed_dim=384, depth=7, num_heads=12, mlp_ratio=1.0)
    return _create("vit_posattn_patch4_32", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_posattn_compact_patch4_32(pretrained: bool = False, **kwargs) -> PosAttnViT:
    """`vit_compact_patch4_32` with positional attention."""
    model_args = dict(img_size=32, patch_size=4, embed_dim=192, depth=8, num_heads=8, mlp_ratio=2.0)
    return _create("vit_posattn_compact_patch4_32", pretrained, **dict(model_args, **kwargs))
