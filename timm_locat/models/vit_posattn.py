"""ViTs whose attention depends on positions only: the same matrix for every image.

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. The ImageNet host of
the paper is tiny, patch 16, and its small one has 7 layers, 12 heads and width and MLP width 384 (both known from
summaries). The text on how positions enter a deep model was not available: every default below is our choice.

Each layer computes its attention once per forward pass, whatever the number of images. In evaluation without gradients
it is kept until a weight that it depends on changes.
"""

from typing import Any, Literal

import torch
from timm.layers import Attention, PatchDropoutWithIndices
from timm.models import checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices  # timm has no public name for it
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional as F

from timm_locat.layers.kept import Kept
from timm_locat.layers.positional import (
    PositionalAttention,
    PositionalBlock,
    conv_init_,
    has_plain_weights,
    mimetic_init_,
    resample_logits,
    resample_positions,
    sincos_positions,
)
from timm_locat.models._build import build_vit, check_img_size, register_model
from timm_locat.models.weights import shipped

__all__ = ["PosAttnViT", "checkpoint_filter_fn"]

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
        free_logits: Learn the logits themselves, `attn_logits` of (layers, heads, tokens, tokens), instead of
            P Wq Wk^T P^T. The parts of `qkv` that make queries and keys are then without use.
        attn_init: How the attention starts. `default` as timm has it, or at uniform attention with `free_logits`;
            `mimetic` as noise plus identity; `conv` makes each head look at one patch of a 3 x 3 window, on positions
            of sines and cosines.
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
        if free_logits and not pos_shared:
            raise ValueError("with free_logits no layer reads a position table: drop pos_shared")
        # A table that nobody reads would be a parameter without a gradient, which distributed training refuses.
        reads_pos_embed = pos_added or (pos_shared and not free_logits)
        kwargs |= {"block_fn": PositionalBlock, "attn_layer": PositionalAttention}
        kwargs["pos_embed"] = "learn" if reads_pos_embed else "none"
        self.attn_init = attn_init
        super().__init__(img_size=img_size, patch_size=patch_size, patch_drop_rate=patch_drop_rate, **kwargs)
        self.drops_patches = patch_drop_rate > 0
        if self.drops_patches:
            self.patch_drop = PatchDropoutWithIndices(patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
        self.pos_shared, self.pos_added = pos_shared, pos_added
        self.pos_norm, self.free_logits = pos_norm, free_logits
        depth, tokens = len(self.blocks), self._num_tokens(self.patch_embed.grid_size)
        like = self.patch_embed.proj.weight
        if not pos_shared:
            self.layer_pos = nn.Parameter(like.new_empty(depth, tokens, self.embed_dim))
        if free_logits:
            self.attn_logits = nn.Parameter(like.new_empty(depth, self.blocks[0].attn.num_heads, tokens, tokens))
        if not like.is_meta:
            self.init_positions()
        self._kept = Kept()

    def _num_tokens(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1] + self.num_prefix_tokens

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
        if self.attn_init == "default":
            return
        tables = self.pos_embed if self.pos_shared else self.layer_pos
        if self.free_logits:  # start where a model with positions would
            tables = self.attn_logits.new_empty(1, self.attn_logits.shape[-1], self.embed_dim)
            nn.init.trunc_normal_(tables, std=0.02)
        if self.attn_init == "conv":
            widths = (self.embed_dim, self.blocks[0].attn.head_dim)
            if widths[0] % 4 or widths[1] % 4:
                raise ValueError(f"attn_init='conv' needs widths of model and heads that 4 divides, got {widths}")
            patches = sincos_positions(self.patch_embed.grid_size, self.embed_dim)
            tables[:, self.num_prefix_tokens :] = patches.to(tables)
        for i, block in enumerate(self.blocks):
            if self.attn_init == "mimetic":
                mimetic_init_(block.attn)
            else:
                conv_init_(block.attn, first=i * block.attn.num_heads)
            if self.free_logits:
                self.attn_logits[i] = block.attn.logits(self._normalise(tables)[0])

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

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks behind the last of `indices`, as in timm, and what belongs to them."""
        taken = super().prune_intermediate_layers(indices, prune_norm=prune_norm, prune_head=prune_head)
        for name in ("layer_pos", "attn_logits"):
            if hasattr(self, name):
                table = getattr(self, name)
                rest = table.detach()[: len(self.blocks)].clone()
                setattr(self, name, nn.Parameter(rest, requires_grad=table.requires_grad))
        return taken

    def _normalise(self, tables: Tensor) -> Tensor:
        return F.layer_norm(tables, (tables.shape[-1],)) if self.pos_norm else tables

    def _tables(self, grid: tuple[int, int]) -> Tensor:
        """What layers attend by: normalised positions (1 or layers, T, C), or free logits (layers, h, T, T)."""
        own = self.patch_embed.grid_size
        own_size = grid[0] == own[0] and grid[1] == own[1]
        if self.free_logits:
            table = self.attn_logits
            return table if own_size else resample_logits(table, grid, own, self.num_prefix_tokens)
        positions = self.pos_embed if self.pos_shared else self.layer_pos
        if not own_size:
            positions = resample_positions(positions, grid, own, self.num_prefix_tokens)
        return self._normalise(positions)

    @torch.jit.ignore
    def attention_maps(self, img_size: tuple[int, int] | None = None) -> dict[str, Tensor]:
        """Attention of every layer, which no image changes.

        Args:
            img_size: Height and width in pixels; None for those that the model was built for.

        Returns:
            Name of the attention layer -> (h, T, T) after softmax, prefix tokens first.
        """
        grid = self.patch_embed.grid_size if img_size is None else self.patch_embed.dynamic_feat_size(img_size)
        return {f"blocks.{i}.attn": weights[0] for i, weights in enumerate(self._all_weights(tuple(grid)))}

    @torch.jit.ignore
    def _all_weights(self, grid: tuple[int, int]) -> list[Tensor]:
        """(1, h, T, T) attention of each layer."""
        tables = self._tables(grid)
        if self.free_logits:
            return list(tables.softmax(dim=-1).unsqueeze(1).unbind(0))
        found = [blk.attn.attention(tables[0 if self.pos_shared else i]) for i, blk in enumerate(self.blocks)]
        return [weights.unsqueeze(0) for weights in found]

    @torch.jit.ignore
    def _kept_weights(self, x: Tensor, grid: tuple[int, int]) -> list[Tensor] | None:
        """`_all_weights` where they may be kept from pass to pass; None where each layer has to compute its own."""
        traced = (
            type(x) is not Tensor
            or x.is_meta
            or torch.jit.is_tracing()
            or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0  # make_fx; there is no public name for it
        )
        if self.training or torch.is_grad_enabled() or traced:
            return None
        attention = [blk.attn for blk in self.blocks]
        num_bytes = 4 * len(attention) * attention[0].num_heads * self._num_tokens(grid) ** 2
        if num_bytes > CACHE_BYTES or not all(has_plain_weights(attn.qkv) for attn in attention):
            return None
        device = x.device.type
        context = [grid, self.patch_embed.grid_size, torch.is_autocast_enabled(device)]
        context.append(torch.get_autocast_dtype(device))
        if x.is_cuda:
            if torch.cuda.is_current_stream_capturing():  # a graph that is replayed reads the weights anew
                return None
            context.append(torch.cuda.current_stream(x.device))  # another one might read before it is written
        parameters = [self.attn_logits if self.free_logits else self.pos_embed if self.pos_shared else self.layer_pos]
        parameters += [p for attn in attention for m in (attn.qkv, attn.q_norm, attn.k_norm) for p in m.parameters()]
        return self._kept.get(parameters, tuple(context), lambda: self._all_weights(grid))

    @torch.jit.ignore
    def train(self, mode: bool = True) -> "PosAttnViT":
        """As in every module; kept attention is dropped, in whatever way weights have been changed meanwhile."""
        self._kept.drop()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> "PosAttnViT":
        """What `to`, `half` and their like go through; kept attention would stay on the old device."""
        self._kept.drop()
        return super()._apply(*args, **kwargs)

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
        self,
        x: Tensor,
        grid: tuple[int, int],
        keep: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: list[int],
        stop: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run blocks 0..stop; returns the last output and those of the blocks in `take`."""
        kept: list[Tensor] | None = None
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript prunes the outer condition only
            if keep is None and attn_mask is None and not is_causal:
                kept = self._kept_weights(x, grid)
        tables = x if kept is not None else self._tables(grid)  # x: TorchScript wants a tensor
        taken: list[Tensor] = []
        for i, blk in enumerate(self.blocks):
            if i <= stop:
                positions: Tensor | None = None
                logits: Tensor | None = None
                weights: Tensor | None = None
                if kept is not None:
                    weights = kept[i]
                elif self.free_logits:
                    logits = tables[i]
                else:
                    positions = tables[0 if self.pos_shared else i]
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(blk, x, positions, logits, weights, keep, attn_mask, is_causal)
                else:
                    x = blk(x, positions, logits, weights, keep, attn_mask, is_causal)
                if i in take:
                    taken.append(x)
        return x, taken

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, T, C) tokens after the final norm, prefix tokens first."""
        x, grid, keep = self._embed(x)
        x, _ = self._blocks(x, grid, keep, attn_mask, is_causal, [], len(self.blocks) - 1)
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
        stop = last if stop_early else len(self.blocks) - 1
        x, taken = self._blocks(x, grid, keep, attn_mask, is_causal, take, stop)
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


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionTransformer) -> dict[str, Tensor]:
    """Fit a checkpoint to `model`: timm's ViT filter, and the tables of each layer are resampled like `pos_embed`."""
    out = vit_checkpoint_filter_fn(state_dict, model)
    grid = tuple(model.patch_embed.grid_size)
    tokens = model._num_tokens(grid)
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
        "vit_posattn_compact_patch4_32.fashion_mnist": _cfg(**{**_SMALL, **shipped("vit_posattn_compact_patch4_32")}),
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
