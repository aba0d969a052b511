"""Small timm models of every kind whose attention can be read, and their attention maps."""

import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": (48, 64)}
WINDOWS = {"embed_dim": 24, "depths": (2, 1), "num_heads": (3, 3), "img_size": (24, 32), "window_size": (3, 4)}
MODELS = {
    "plain": ("vit_tiny_patch16_224", SMALL),
    "registers": ("vit_tiny_patch16_224", SMALL | {"reg_tokens": 4}),
    "no class token": ("vit_tiny_patch16_224", SMALL | {"class_token": False, "global_pool": "avg"}),
    "locatvit": ("locatvit_tiny", SMALL),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "clip": ("vit_base_patch16_clip_224", SMALL),
    "dinov2": ("vit_small_patch14_reg4_dinov2", SMALL | {"patch_size": 16}),
    "rope": ("vit_small_patch16_rope_224", SMALL),
    "dinov3": ("vit_small_patch16_dinov3", SMALL),
    "eva": ("eva02_tiny_patch14_224", SMALL | {"patch_size": 16}),
    "beit": ("beit_base_patch16_224", SMALL),
    "relative": ("vit_relpos_small_patch16_224", SMALL),
    "parallel": ("vit_tiny_patch16_224", SMALL | {"block_fn": ParallelScalingBlock}),
    "swin": ("swin_tiny_patch4_window7_224", WINDOWS),
    "swin v2": ("swinv2_tiny_window8_256", WINDOWS),
}
"""Kinds of models: two layers (Swin: three) on a grid of 3 x 4 patches, which is the window of the Swin models."""


def build(kind, *, fused=True, **changes):
    """A small model with attention that is far from uniform."""
    name, kwargs = MODELS[kind]
    timm.layers.set_fused_attn(fused)
    torch.manual_seed(0)
    model = timm.create_model(name, **(kwargs | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "in_proj.weight")):
            parameter.data *= 10
        if name.endswith("relative_position_bias_table"):
            parameter.data = torch.randn_like(parameter)
    return model


def images(count=5, kind="plain"):
    return torch.randn(count, 3, *MODELS[kind][1]["img_size"], generator=torch.Generator().manual_seed(1))


def stored_maps(model, x):
    """Attention maps of every layer of an unfused model, whole."""
    maps, handles = [], []
    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            handles.append(module.register_forward_hook(lambda m, args, out: maps.append(out)))
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return maps
