"""Locality for any pretrained ViT of timm: `add_locat` upgrades a built model in place, `remove_locat` takes it back.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892, whose code trains its own models from
scratch. Starting at the pretrained model (`init="identity"`) is our addition: a gate of nearly zero on the Gaussian's
strength, which training raises to 1, and a learned mix of nearly zero between a token and its refinement.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import timm
from timm.layers import Attention, AttentionRope, PatchDropoutWithIndices
from timm.models import build_model_with_cfg, model_entrypoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.layers import GaussianAttention, GaussianBias, GaussianBlock, GridlessBlock, PatchRefinement
from timm_locat.models import locatswin, locatvit, locatvit_rope
from timm_locat.models._build import register_model
from timm_locat.models.locatswin import LocAtSwin
from timm_locat.models.locatvit import LocAtViT
from timm_locat.models.locatvit_rope import LocAtEva

__all__ = ["add_locat", "locat_parameters", "remove_locat"]

_log = logging.getLogger(__name__)

GATE_START = 1e-5
"""Factor on the Gaussian's strength at an identity start; the strength itself starts near 0.7. Our choice."""
MIX_START = 1e-5
"""Share of PRR at an identity start. Not zero: through PRR alone the last block's Gaussians reach a class token, and
with a share of zero they would have no gradient in the first step. Our choice."""

SUPPORTED = (
    "timm's VisionTransformer (ViT, DeiT with and without distillation, DeiT-3, AugReg, CLIP and SigLIP image towers, "
    "DINO, DINOv2, with and without registers), Eva (EVA-02, RoPE-ViT, DINOv3, PE) and SwinTransformer (v1)"
)


class LocAtViTDistilled(LocAtViT, VisionTransformerDistilled):
    """A distilled DeiT with GAug and PRR: both of its heads read refined tokens."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Refine class and distillation token where `prr` is on; then as in timm."""
        if self.prr:
            x = self.refine(x[:, :2], x)
        return VisionTransformerDistilled.forward_head(self, x, pre_logits)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New heads, as in timm."""
        VisionTransformerDistilled.reset_classifier(self, num_classes, global_pool)


@dataclass(frozen=True, slots=True)
class _Family:
    """How one class of timm becomes its LocAt version."""

    locat: type[nn.Module]
    blocks: tuple[type[nn.Module], ...]
    attentions: tuple[type[nn.Module], ...]
    give: Callable[..., None]
    """Changes the layers of a model of the base class."""
    filter_fn: Callable[[dict[str, Any], nn.Module], dict[str, Tensor]]


def vit_with_locat(
    model: VisionTransformer,
    *,
    gaug: bool,
    prr: bool,
    gaug_grid: tuple[int, int] | None,
    blocks: Sequence[int] | None,
    gate: float | None,
    mix: float | None,
) -> None:
    """Give the layers of a `VisionTransformer` what `LocAtViT.forward` needs; arguments as in `eva_with_locat`."""
    for i, block in enumerate(model.blocks if gaug else []):
        chosen = blocks is None or i in blocks
        if chosen:
            attn = block.attn
            weight = attn.proj.weight
            attn.gaug = GaussianBias(attn.head_dim, gate=gate, device=weight.device, dtype=weight.dtype)
            attn.gaug.reset_parameters()
            attn.__class__ = GaussianAttention
        block.__class__ = GaussianBlock if chosen else GridlessBlock
    weight = model.patch_embed.proj.weight
    model.refine = PatchRefinement(
        model.blocks[0].attn.num_heads, mix=mix if prr else None, device=weight.device, dtype=weight.dtype
    )
    dropout = model.patch_drop
    model.drops_patches = not isinstance(dropout, nn.Identity)
    if model.drops_patches:
        # A patch's bias depends on where it was, so the indices of the kept ones are needed, too.
        model.patch_drop = PatchDropoutWithIndices(dropout.prob, num_prefix_tokens=model.num_prefix_tokens)
    model.gaug = gaug
    model.prr = prr
    model._pool_include_prefix = model.pool_include_prefix
    model._gaug_grid_given = gaug_grid is not None
    model.gaug_grid = tuple(model.patch_embed.grid_size if gaug_grid is None else gaug_grid)


_VIT = ((Block,), (Attention,), vit_with_locat, locatvit.checkpoint_filter_fn)
FAMILIES: dict[type[nn.Module], _Family] = {
    VisionTransformer: _Family(LocAtViT, *_VIT),
    VisionTransformerDistilled: _Family(LocAtViTDistilled, *_VIT),
    Eva: _Family(
        LocAtEva,
        (EvaBlock, EvaBlockPostNorm),
        (AttentionRope, EvaAttention),
        locatvit_rope.eva_with_locat,
        locatvit_rope.checkpoint_filter_fn,
    ),
    SwinTransformer: _Family(
        LocAtSwin,
        (SwinTransformerBlock,),
        (WindowAttention,),
        locatswin.swin_with_locat,
        locatswin.checkpoint_filter_fn,
    ),
}


def _blocks(model: nn.Module) -> list[nn.Module]:
    """All transformer blocks in the order in which they run."""
    return [b for s in model.layers for b in s.blocks] if isinstance(model, SwinTransformer) else list(model.blocks)


def _check(model: nn.Module) -> _Family:
    """The model's family.

    Raises:
        UserError: It has LocAt already, or is of no family that can get it.
    """
    if isinstance(model, tuple(family.locat for family in FAMILIES.values())):
        raise UserError(
            f"{type(model).__name__} has LocAt already; remove_locat(model) first where add_locat made it, "
            "or build another with other arguments"
        )
    family = FAMILIES.get(type(model))
    if family is None:
        hint = ""
        if hasattr(model, "_orig_mod") or hasattr(model, "module"):
            hint = "; of a compiled or wrapped model, pass the one inside"
        elif hasattr(model, "return_layers") or type(model).__name__.startswith("Feature"):
            hint = "; for feature maps use timm.create_model('locat_any', base=..., features_only=True)"
        raise UserError(f"add_locat takes {SUPPORTED}, got {type(model).__name__}{hint}")
    for block in _blocks(model):
        if type(block) not in family.blocks or type(block.attn) not in family.attentions:
            raise UserError(
                f"add_locat takes {SUPPORTED} with timm's usual blocks, got a {type(model).__name__} made of "
                f"{type(block).__name__} with {type(getattr(block, 'attn', None)).__name__}"
            )
    return family


def _indices(blocks: str | Sequence[int], depth: int) -> list[int] | None:
    """Block indices from 0 to depth - 1, sorted, or None for all.

    Raises:
        UserError: Neither `all` nor indices of blocks that exist.
    """
    if isinstance(blocks, str):
        if blocks == "all":
            return None
    elif blocks and all(isinstance(i, int) and -depth <= i < depth for i in blocks):
        return sorted({i % depth for i in blocks})
    raise UserError(f"blocks must be 'all' or indices from {-depth} to {depth - 1}, at least one, got {blocks!r}")


def _pool_type(model: nn.Module) -> str:
    """`token` or `avg` where the head reads the class token or the patch mean, else whatever it does."""
    return "map" if getattr(model, "attn_pool", None) is not None else model.global_pool


def add_locat(
    model: nn.Module,
    gaug: bool = True,
    prr: bool = True,
    blocks: Literal["all"] | Sequence[int] = "all",
    init: Literal["identity", "paper"] = "identity",
    *,
    freeze_base: bool = False,
    gaug_grid: Any = None,
) -> nn.Module:
    """Turn a built timm model into its LocAt version in place, keep all of its weights, and return it.

    The model stays the same object with the same parameters, so optimizers and references to it go on working; an
    optimizer has to be told of the new parameters. `hub.export` writes it as `locat_any` with the base model's name,
    and `timm.create_model("local-dir:FOLDER", pretrained=True)` builds it again.

    Args:
        model: Of a supported family, built by `timm.create_model`, with or without weights.
        gaug: Add the Gaussian bias, 3 x (head dim + 1) parameters a layer, and with `init="identity"` one more.
        prr: Refine the tokens before the head pools them. It is left out, and `model.prr` is False, where the head
            pools otherwise than by class token or patch mean (attention pooling, max), for which it was not made.
        blocks: `all`, or the indices of the blocks that get a Gaussian, counted through all stages of a Swin. PRR does
            not depend on it.
        init: `identity` starts so close to the base that its outputs move by less than 1e-4, relatively: each
            strength gets a gate that starts at 1e-5 and rises in training (state-dict key `gaug.gate`), and PRR a
            learned mix that starts there (`refine.mix`). `paper` has neither; the strength starts near 0.7 and PRR
            whole, as in the paper, which a pretrained model does not survive without training. Its state dict has the
            paper's keys.
        freeze_base: Switch off the gradient of everything but the new parameters, the head included.
        gaug_grid: Patch rows and columns for which the Gaussians are learned (of a Swin: the window of each stage);
            the model's present ones when None.

    Raises:
        UserError: Another kind of model, one that has LocAt already, or arguments without sense.
    """
    family = _check(model)
    if init not in ("identity", "paper"):
        raise UserError(f"init must be 'identity' or 'paper', got {init!r}")
    if not gaug and not prr:
        raise UserError("gaug=False with prr=False would add nothing; leave one of them on")
    chosen = _indices(blocks, len(_blocks(model)))
    refined = prr and _pool_type(model) in ("token", "avg")
    if prr and not refined:
        _log.info("PRR is left out: the head pools by %r, not by class token or patch mean", _pool_type(model))
        if not gaug:
            raise UserError(
                f"gaug=False leaves PRR alone, which needs a head that pools the class token or the patch mean, "
                f"and this one pools by {_pool_type(model)!r}"
            )
    gate, mix = (GATE_START, MIX_START) if init == "identity" else (None, None)
    before = {id(p) for p in model.parameters()}
    family.give(model, gaug=gaug, prr=refined, gaug_grid=gaug_grid, blocks=chosen, gate=gate, mix=mix)
    model.__class__ = family.locat
    _rename(model, gaug=gaug, prr=prr, blocks=blocks if isinstance(blocks, str) else list(blocks), init=init)
    model.train(model.training)
    if freeze_base:
        for p in model.parameters():
            if id(p) in before:
                p.requires_grad_(False)
    return model


OPTIONS = ("gaug", "prr", "blocks", "init")


def _rename(model: nn.Module, **options: Any) -> None:
    """Record under which name and arguments timm can build the model."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    model._locat_base = cfg.get("architecture", "")
    model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": "locat_any"}
    args = dict(getattr(model, "_model_args", {}), base=model._locat_base, **options)
    if model._gaug_grid_given:
        args["gaug_grid"] = model.gaug_grid
    model._model_args = args


def remove_locat(model: nn.Module) -> nn.Module:
    """Take away what `add_locat` added, in place; the base's weights stay as they are by now.

    Raises:
        UserError: A model that `add_locat` did not make.
    """
    base = next((b for b, family in FAMILIES.items() if type(model) is family.locat), None)
    if base is None or not hasattr(model, "_locat_base"):
        raise UserError(f"remove_locat takes a model that add_locat made, got {type(model).__name__}")
    for block in _blocks(model):
        if hasattr(block.attn, "gaug"):
            del block.attn.gaug
            vars(block.attn).pop("gaug_grid", None)
            block.attn.__class__ = _timms(type(block.attn), FAMILIES[base].attentions)
        block.__class__ = _timms(type(block), FAMILIES[base].blocks)
    if getattr(model, "drops_patches", False):
        model.patch_drop = timm.layers.PatchDropout(model.patch_drop.prob, num_prefix_tokens=model.num_prefix_tokens)
    del model.refine
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": model._locat_base}
    dropped = ("base", "gaug_grid", *OPTIONS)
    model._model_args = {k: v for k, v in model._model_args.items() if k not in dropped}
    for name in (
        "gaug",
        "prr",
        "gaug_grid",
        "drops_patches",
        "_gaug_grid_given",
        "_pool_include_prefix",
        "_locat_base",
    ):
        vars(model).pop(name, None)
    model.__class__ = base
    return model


def _timms(cls: type[nn.Module], candidates: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    """timm's own class that `cls` is, or was derived from."""
    return next(c for c in candidates if issubclass(cls, c))


def locat_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that LocAt added, for an optimizer group of their own."""
    for name, p in model.named_parameters():
        if ".gaug." in name or name.startswith("refine."):
            yield name, p


@register_model
def locat_any(pretrained: bool = False, **kwargs) -> nn.Module:
    """Any supported model of timm with LocAt: `create_model("locat_any", base="vit_base_patch16_224")`.

    Args:
        pretrained: Load the weights of `base`, or, from a folder or the Hub, those of the LocAt model.
        base: Name of the base model, with or without a tag.
        gaug, prr, blocks, init, gaug_grid: As in `add_locat`.
        kwargs: Arguments of the base model.
    """
    base = kwargs.pop("base", None)
    if not base or not timm.is_model(base):
        raise UserError(
            f"locat_any needs the name of a timm model as base, such as base='vit_base_patch16_224', got {base!r}"
        )
    options = {key: kwargs.pop(key) for key in (*OPTIONS, "gaug_grid") if key in kwargs}
    exported = kwargs.get("pretrained_cfg") is not None

    if not exported:
        cfg = timm.get_pretrained_cfg(base)
        kwargs["pretrained_cfg"] = {**(cfg.to_dict() if cfg else {}), "architecture": "locat_any"}
        source = {key: kwargs.pop(key, None) for key in ("pretrained_cfg_overlay", "cache_dir")}
    else:
        source = {}

    def build(**args: Any) -> nn.Module:
        return add_locat(timm.create_model(base, pretrained=pretrained and not exported, **source, **args), **options)

    stages = model_entrypoint(base).__module__.endswith("swin_transformer")
    return build_model_with_cfg(
        build,
        "locat_any",
        pretrained and exported,
        pretrained_filter_fn=_fit_checkpoint,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3) if stages else 3), "feature_cls": "getter"},
        **kwargs,
    )


def _fit_checkpoint(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Fit a checkpoint to a model that `add_locat` made, by the filter of its family."""
    family = next(family for family in FAMILIES.values() if type(model) is family.locat)
    return family.filter_fn(state_dict, model)
