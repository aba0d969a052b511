"""Small models with positional attention, and images for them."""

import copy

import timm
import torch

SMALL = dict(depth=2, embed_dim=48, num_heads=4)


def model(**kwargs):
    torch.manual_seed(0)
    return timm.create_model("vit_posattn_compact_patch4_32", **{**SMALL, **kwargs}).eval()


def images(count=2, size=(32, 32), seed=0):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def fresh(net, x):
    """What a copy that has computed nothing yet says."""
    with torch.no_grad():
        return copy.deepcopy(net)(x)


@torch.no_grad()
def spread(net):
    """Give positions and weights a size at which they matter."""
    for name, p in net.named_parameters():
        if name in ("pos_embed", "layer_pos", "attn_logits") or "qkv.weight" in name:
            p.normal_(generator=torch.Generator().manual_seed(len(name)))
    return net
