"""Jumbo: a ViT whose class tokens form one wide token with an MLP of its own; and the same with GAug and PRR.

Sources: "Simpler Fast Vision Transformers with a Jumbo CLS Token", arXiv:2502.15021, and "Locality-Attending Vision
Transformer" (ICLR 2026), arXiv:2603.04892, whose code adds GAug, PRR and a norm for the patches.

In a block all tokens attend to each other one by one. Then the J class tokens, side by side, go through an MLP of width
J * C that all blocks share, and the patches through the block's own.

Differs from the paper's code:
    * The shared MLP is stored once, as `jumbo_mlp`. The copies that the paper's code lists under every block are read
      if they agree with it.
    * A block returns what its attention and its patches give; the model adds the shared MLP right behind it. A hook on
      a block therefore sees the patches as the next block gets them, and the class tokens before their MLP.
    * Any number of classes: the head starts with weights of zero and the logarithm of 1 / classes as bias, which is
      rounded there for the three numbers of classes that it knows.

Shape letters in this file:
    B batch   T tokens   J class tokens   C channels
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import Attention, DropPath, LayerScale, Mlp, get_act_layer
from timm.models import checkpoint, generate_default_cfgs
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.layers import GaussianAttention, GaussianGrid
from timm_locat.models._build import build_vit, register_model
from timm_locat.models.locatvit import LocAtViT, checkpoint_filter_fn

__all__ = ["JumboBlock", "JumboViT"]


class JumboBlock(Block):
    """timm's pre-norm `Block` whose MLP is for the patches, plus what surrounds the MLP of the wide token.

    Args:
        dim: C.
        num_heads: Attention heads.
        jumbo_tokens: J, the class tokens in front.
        init_values: Start of all three layer scales; None for none.
        drop_path: Rate of stochastic depth of all three branches.
        attn_layer: timm's attention, or `GaussianAttention`.
        kwargs: As for `Block`.
    """

    gaug: torch.jit.Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        jumbo_tokens: int,
        init_values: float | None = None,
        drop_path: float = 0.0,
        attn_layer: Any = Attention,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        shared = dict(init_values=init_values, drop_path=drop_path, attn_layer=attn_layer)
        super().__init__(dim, num_heads, **shared, **kwargs, **dd)
        self.gaug = attn_layer is GaussianAttention
        self.jumbo_tokens = jumbo_tokens
        wide = jumbo_tokens * dim
        self.norm3 = nn.LayerNorm(wide, **dd)
        self.ls3 = LayerScale(wide, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path3 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention of all (B, T, C) tokens and the MLP of the patches; `grid` is for `GaussianAttention` alone."""
        y = self.norm1(x)
        if self.gaug:
            if grid is None:
                raise ValueError(
                    "a JumboBlock with GAug needs the positions of the patches: pass grid=gaussian_grid(...)"
                )
            y = self.attn(y, grid, attn_mask=attn_mask, is_causal=is_causal)
        else:
            y = self.attn(y, attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(y))
        patches = x[:, self.jumbo_tokens :]
        patches = patches + self.drop_path2(self.ls2(self.mlp(self.norm2(patches))))
        return torch.cat([x[:, : self.jumbo_tokens], patches], dim=1)

    def wide(self, x: Tensor) -> Tensor:
        """(B, J * C) input of the shared MLP."""
        return self.norm3(x[:, : self.jumbo_tokens].flatten(1))

    def add_wide(self, x: Tensor, wide: Tensor) -> Tensor:
        """Add the (B, J * C) output of the shared MLP to the class tokens."""
        wide = self.drop_path3(self.ls3(wide)).unflatten(1, (self.jumbo_tokens, -1))
        return torch.cat([x[:, : self.jumbo_tokens] + wide, x[:, self.jumbo_tokens :]], dim=1)


class JumboViT(LocAtViT):
    """Jumbo, and with `gaug` and `prr` LocAtJumbo; further arguments are those of `LocAtViT`.

    The classifier reads the class tokens side by side (J * C features), so `global_pool` is `token`, or empty for all
    tokens. Class tokens have no positions (`no_embed_class=True`), and registers and `fc_norm` have no place here.
    Without `gaug` or `prr` the final norm leaves the patches as they are, as in the paper's code.

    Args:
        jumbo_tokens: J.
        jumbo_mlp_ratio: Hidden width of the shared MLP over J * C.
        gaug: Add the Gaussian bias in every attention layer.
        prr: Refine the tokens before pooling.
        kwargs: As for `LocAtViT`.
    """

    def __init__(
        self,
        *args: Any,
        jumbo_tokens: int = 6,
        jumbo_mlp_ratio: float = 4.0,
        gaug: bool = False,
        prr: bool = False,
        global_pool: Literal["", "token"] = "token",
        no_embed_class: bool = True,
        weight_init: Literal["skip", "reset", "jax", "jax_nlhb", "moco", ""] = "",
        **kwargs: Any,
    ) -> None:
        check_jumbo(global_pool, jumbo_tokens, no_embed_class, kwargs)
        kwargs["block_fn"] = partial(JumboBlock, jumbo_tokens=jumbo_tokens)
        if gaug:
            kwargs["attn_layer"] = GaussianAttention
        super().__init__(
            *args, gaug=gaug, prr=prr, global_pool=global_pool, no_embed_class=True, weight_init="skip", **kwargs
        )
        dd = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.num_prefix_tokens = jumbo_tokens
        self.head_hidden_size = wide = jumbo_tokens * self.embed_dim
        if self.drops_patches:
            self.patch_drop.num_prefix_tokens = jumbo_tokens
        self.cls_token = nn.Parameter(torch.empty(1, jumbo_tokens, self.embed_dim, **dd))
        if kwargs.get("final_norm", True):
            self.norm = nn.LayerNorm(wide, **dd)
        refined = (gaug or prr) and kwargs.get("final_norm", True)
        self.norm_patches = nn.LayerNorm(self.embed_dim, **dd) if refined else nn.Identity()
        self.jumbo_mlp = Mlp(
            wide,
            int(wide * jumbo_mlp_ratio),
            act_layer=get_act_layer(kwargs.get("act_layer")) or nn.GELU,
            drop=kwargs.get("proj_drop_rate", 0.0),
            **dd,
        )
        self.head = jumbo_head(wide, self.num_classes, **dd)
        self.register_load_state_dict_pre_hook(fold_copies)
        if weight_init != "skip":
            self.weight_init_mode = weight_init
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initialisation, then that of the class tokens and the head."""
        super().init_weights(mode, needs_reset)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        init_head(self.head)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups; the MLP of all blocks goes with the final norm, which timm puts beside the last block."""
        groups = super().group_matcher(coarse)
        return dict(groups, blocks=[groups["blocks"][0], (r"^norm|^jumbo_mlp", (99999,))])

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head, which starts as at construction."""
        check_pool(self.global_pool if global_pool is None else global_pool)
        super().reset_classifier(num_classes, global_pool)
        like = self.cls_token
        self.head = jumbo_head(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
        self.head.train(self.training)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As in timm's `VisionTransformer`; both final norms go together."""
        if prune_norm:
            self.norm_patches = nn.Identity()
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)

    def _norm(self, x: Tensor) -> Tensor:
        wide = self.norm(x[:, : self.num_prefix_tokens].flatten(1)).unflatten(1, (self.num_prefix_tokens, -1))
        return torch.cat([wide, self.norm_patches(x[:, self.num_prefix_tokens :])], dim=1)

    def _blocks(
        self,
        x: Tensor,
        grid: GaussianGrid | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: list[int],
        stop: int,
    ) -> tuple[Tensor, list[Tensor]]:
        taken: list[Tensor] = []
        for i, blk in enumerate(self.blocks):
            if i <= stop:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    x = checkpoint(blk, x, grid, attn_mask, is_causal)
                else:
                    x = blk(x, grid, attn_mask=attn_mask, is_causal=is_causal)
                x = blk.add_wide(x, self.jumbo_mlp(blk.wide(x)))
                if i in take:
                    taken.append(x)
        return x, taken

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Refine (B, T, C) tokens where `prr` is on; (B, J * C) for `token`, all of them for an empty `pool_type`."""
        pool_type = self.global_pool if pool_type is None else pool_type
        check_pool(pool_type)
        query = x[:, : self.num_prefix_tokens] if pool_type == "token" else x
        if self.prr:
            query = self.refine(query, x)
        return query.flatten(1) if pool_type == "token" else query


def check_pool(global_pool: str) -> None:
    """Refuse a pooling whose result the wide head cannot read."""
    if global_pool not in ("", "token"):
        raise ValueError(f"Jumbo pools its class tokens: global_pool must be 'token' or '', got '{global_pool}'")


def check_jumbo(global_pool: str, jumbo_tokens: int, no_embed_class: bool, kwargs: dict[str, Any]) -> None:
    """Refuse arguments of a plain ViT that mean nothing here."""
    check_pool(global_pool)
    if jumbo_tokens < 1:
        raise ValueError(f"jumbo_tokens must be at least 1, got {jumbo_tokens}")
    if not no_embed_class:
        raise ValueError("Jumbo's class tokens have no positions: drop no_embed_class=False")
    wrong = [
        f"{key}={kwargs[key]!r}"
        for key, default in dict(reg_tokens=0, class_token=True, fc_norm=False, pool_include_prefix=False).items()
        if kwargs.get(key) not in (None, default)
    ]
    wrong += [
        key
        for key, default in (("block_fn", Block), ("attn_layer", Attention))
        if kwargs.get(key, default) is not default
    ]
    if wrong:
        raise ValueError(f"Jumbo has its own tokens, blocks and head: drop {', '.join(wrong)}")


def jumbo_head(wide: int, num_classes: int, *, device=None, dtype=None) -> nn.Module:
    """Classifier of the wide token, or none."""
    if num_classes <= 0:
        return nn.Identity()
    head = nn.Linear(wide, num_classes, device=device, dtype=dtype)
    init_head(head)
    return head


def init_head(head: nn.Module) -> None:
    """Every class starts with the probability 1 / classes, whatever the image."""
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, -math.log(head.out_features))


def fold_copies(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Drop the copies of the shared MLP under every block, as the paper's code lists them; they must agree.

    Raises:
        UserError: Two copies differ, so that it is not known which one was trained.
    """
    marker = ".jumbo_mlp."
    for key in [k for k in state_dict if k.startswith(f"{prefix}blocks.") and marker in k]:
        copy, shared = state_dict.pop(key), f"{prefix}jumbo_mlp.{key.partition(marker)[2]}"
        if not torch.equal(state_dict.setdefault(shared, copy), copy):
            raise UserError(
                f"the checkpoint stores Jumbo's shared MLP more than once, and {key} differs from {shared}; delete the "
                "copies that were not trained"
            )


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
        "paper_ids": "arXiv:2502.15021",
        "paper_name": "Simpler Fast Vision Transformers with a Jumbo CLS Token",
        **kwargs,
    }


_LOCAT = dict(
    paper_ids="arXiv:2603.04892",
    paper_name="Locality-Attending Vision Transformer",
    origin_url="https://github.com/sinahmr/LocAtViT",
)

default_cfgs = generate_default_cfgs(
    {
        "jumbo_tiny.untrained": _cfg(),
        "jumbo_base.untrained": _cfg(),
        "locatjumbo_tiny.untrained": _cfg(**_LOCAT),
        "locatjumbo_base.untrained": _cfg(**_LOCAT),
    }
)

_TINY = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3, init_values=1e-4)
_BASE = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, init_values=1e-4)
_PARTS = dict(gaug=True, prr=True)


def _create(variant: str, pretrained: bool, **kwargs) -> JumboViT:
    return build_vit(JumboViT, variant, pretrained, checkpoint_filter_fn, **kwargs)


@register_model
def jumbo_tiny(pretrained: bool = False, **kwargs) -> JumboViT:
    """Jumbo-Ti/16 at 224: 12 blocks, width 192, 3 heads, 6 class tokens; 17.3 M parameters. No published weights."""
    return _create("jumbo_tiny", pretrained, **dict(_TINY, **kwargs))


@register_model
def jumbo_base(pretrained: bool = False, **kwargs) -> JumboViT:
    """Jumbo-B/16 at 224: 12 blocks, width 768, 12 heads, 6 class tokens; 260.5 M parameters. No published weights."""
    return _create("jumbo_base", pretrained, **dict(_BASE, **kwargs))


@register_model
def locatjumbo_tiny(pretrained: bool = False, **kwargs) -> JumboViT:
    """`jumbo_tiny` with GAug, PRR and a final norm for the patches; 17.3 M parameters. No published weights."""
    return _create("locatjumbo_tiny", pretrained, **dict(_TINY, **(_PARTS | kwargs)))


@register_model
def locatjumbo_base(pretrained: bool = False, **kwargs) -> JumboViT:
    """`jumbo_base` with GAug, PRR and a final norm for the patches; 260.5 M parameters. No published weights."""
    return _create("locatjumbo_base", pretrained, **dict(_BASE, **(_PARTS | kwargs)))
