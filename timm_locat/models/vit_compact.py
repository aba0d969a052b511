"""Compact ViTs on an 8 x 8 grid: a plain one, and the same with GAug and PRR.

Source: "Inducing Spatial Locality in Vision Transformers through the Training Protocol", arXiv:2605.16390: depth 8,
width 192, 8 heads, 64 patches, no dropout, about 2.4 M parameters. The text of the paper's method section was not
available; our choices are the MLP ratio of 2 (the only whole one that gives 2.4 M parameters), the class token with
learned positions, and the normalisation in the default configurations.
"""

from typing import Any

from timm.models import generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from timm_locat.models._build import build_vit, register_model
from timm_locat.models.locatvit import LocAtViT, create_locatvit
from timm_locat.models.weights import shipped

__all__: list[str] = []  # timm's registry adds each entrypoint


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2605.16390",
        "paper_name": "Inducing Spatial Locality in Vision Transformers through the Training Protocol",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "vit_compact_patch4_32.fashion_mnist": _cfg(input_size=(3, 32, 32), **shipped("vit_compact_patch4_32")),
        "vit_compact_patch8_64.untrained": _cfg(input_size=(3, 64, 64), num_classes=200),
        "locatvit_compact_patch4_32.fashion_mnist": _cfg(
            input_size=(3, 32, 32), **shipped("locatvit_compact_patch4_32")
        ),
        "locatvit_compact_patch8_64.untrained": _cfg(input_size=(3, 64, 64), num_classes=200),
    }
)

_SHAPE = dict(embed_dim=192, depth=8, num_heads=8, mlp_ratio=2.0)
_PATCH4_32 = dict(_SHAPE, img_size=32, patch_size=4)
_PATCH8_64 = dict(_SHAPE, img_size=64, patch_size=8)


@register_model
def vit_compact_patch4_32(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """Compact ViT for 32-pixel images (CIFAR): 8 x 8 patches of 4; 2,400,586 parameters with 10 classes."""
    model_args = dict(_PATCH4_32, **kwargs)
    return build_vit(VisionTransformer, "vit_compact_patch4_32", pretrained, checkpoint_filter_fn, **model_args)


@register_model
def vit_compact_patch8_64(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """Compact ViT for 64-pixel images (Tiny-ImageNet): 8 x 8 patches of 8; 2,464,904 parameters with 200 classes."""
    model_args = dict(_PATCH8_64, **kwargs)
    return build_vit(VisionTransformer, "vit_compact_patch8_64", pretrained, checkpoint_filter_fn, **model_args)


@register_model
def locatvit_compact_patch4_32(pretrained: bool = False, **kwargs) -> LocAtViT:
    """`vit_compact_patch4_32` with GAug and PRR."""
    return create_locatvit("locatvit_compact_patch4_32", pretrained, **dict(_PATCH4_32, **kwargs))


@register_model
def locatvit_compact_patch8_64(pretrained: bool = False, **kwargs) -> LocAtViT:
    """`vit_compact_patch8_64` with GAug and PRR."""
    return create_locatvit("locatvit_compact_patch8_64", pretrained, **dict(_PATCH8_64, **kwargs))
