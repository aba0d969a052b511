"""Patch representation refinement (PRR): self-attention without parameters over the final tokens.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892.
timm's `AttentionPoolPrr` is the same attention followed by pooling; this layer returns the tokens, because dense tasks
want all of them, and can be asked for some queries only, because class-token pooling wants one.

Shape letters in this file:
    B batch   T tokens   Q queries   C channels
"""

import torch
from timm.layers import use_fused_attn
from torch import Tensor, nn

__all__ = ["PatchRefinement"]


class PatchRefinement(nn.Module):
    """softmax(x_h x_h^T / sqrt(d)) x_h for each head h of width d, heads concatenated; no residual.

    Args:
        num_heads: Heads that the channels are cut into; the backbone's number.
    """

    fused_attn: torch.jit.Final[bool]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fused_attn = use_fused_attn()

    def forward(self, query: Tensor, tokens: Tensor) -> Tensor:
        """Refine `query` (B, Q, C), which are some or all of the (B, T, C) `tokens`; returns (B, Q, C)."""
        q = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.fused_attn:
            x = nn.functional.scaled_dot_product_attention(q, kv, kv)
        else:
            attn = (q * kv.shape[-1] ** -0.5) @ kv.transpose(-2, -1)
            x = attn.softmax(dim=-1) @ kv
        return x.transpose(1, 2).flatten(2)
