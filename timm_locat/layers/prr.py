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
        mix: None is the paper's layer. A number adds one learned scalar that starts there, and the layer returns
            x + mix * (refined - x): next to zero, a trained model hardly changes when it gets the layer. Our addition.
    """

    fused_attn: torch.jit.Final[bool]

    def __init__(self, num_heads: int, *, mix: float | None = None, device=None, dtype=None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fused_attn = use_fused_attn()
        self.mix_start = mix
        if mix is None:
            self.register_parameter("mix", None)
        else:
            self.mix = nn.Parameter(torch.full((1,), mix, device=device, dtype=dtype))

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """The mix's own start."""
        if self.mix is not None:
            nn.init.constant_(self.mix, self.mix_start)

    def forward(self, query: Tensor, tokens: Tensor) -> Tensor:
        """Refine `query` (B, Q, C), which are some or all of the (B, T, C) `tokens`; returns (B, Q, C)."""
        q = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.fused_attn:
            x = nn.functional.scaled_dot_product_attention(q, kv, kv)
        else:
            attn = (q * kv.shape[-1] ** -0.5) @ kv.transpose(-2, -1)
            x = attn.softmax(dim=-1) @ kv
        x = x.transpose(1, 2).flatten(2)
        if self.mix is not None:
            x = query + self.mix * (x - query)
        return x
