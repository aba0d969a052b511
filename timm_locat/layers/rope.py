"""Self-attention with rotary positions and a Gaussian bias, and the transformer blocks around it, for timm's `Eva`.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892. The bump is computed from the query
before its rotation, so that what a query says about its neighbourhood does not depend on where it stands.

Shape letters in this file:
    B batch   h heads   T tokens   P prefix tokens   K patches   C channels   D head dim
"""

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat, maybe_add_mask, resolve_self_attn_mask
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor
from torch.nn import functional as F

from timm_locat.layers.attention import fused_gaussian_attention
from timm_locat.layers.gaussian import GaussianGrid, add_gaussian, gaussian_mask

__all__ = [
    "GaussianEvaAttention",
    "GaussianEvaBlock",
    "GaussianEvaBlockPostNorm",
    "GaussianRopeAttention",
    "GridlessEvaBlock",
    "GridlessEvaBlockPostNorm",
]


class _RotaryGaussian:
    """What the two attentions share; they differ in how q, k and v are made. `gaug` is a `GaussianBias`."""

    @torch.jit.ignore
    def bias(self, x: Tensor, grid: GaussianGrid) -> Tensor:
        """The additive bias itself, for inspection: (B, h, T, T), zero in prefix rows and columns.

        Args:
            x: (B, T, C) input of this layer, that is, after the block's first norm.
            grid: From `gaussian_grid`.
        """
        q, _, _ = self._qkv(x)
        rows, cols = self.gaug(q[:, :, grid.num_prefix :], grid)
        return gaussian_mask(rows, cols, grid.num_prefix, grid.keep)

    def _rotate(self, x: Tensor, rope: Tensor, like: Tensor) -> Tensor:
        """(B, h, T, D) with its patches rotated."""
        P = self.num_prefix_tokens
        patches = apply_rot_embed_cat(x[:, :, P:, :], rope, half=self.rotate_half)
        return torch.cat([x[:, :, :P, :], patches], dim=2).type_as(like)

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend over (B, T, C) tokens.

        Args:
            x: Tokens, P prefix tokens first, then the K patches that `grid` describes.
            grid: From `gaussian_grid`.
            rope: Rotary embedding of the patches, as timm's attention takes it; None rotates nothing.
            attn_mask: Boolean (True = may attend) or additive float mask that broadcasts to (B, h, T, T).
            is_causal: Mask everything behind the query; takes precedence over `attn_mask`, as in timm.
        """
        B, T, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self._qkv(x)
        rows, cols = self.gaug(q[:, :, grid.num_prefix :], grid)
        if rope is not None:
            q = self._rotate(q, rope, v)
            k = self._rotate(k, rope, v)

        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            y = fused_gaussian_attention(
                q, k, v, rows, cols, grid.num_prefix, grid.keep, attn_mask, dropout_p, is_causal
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = add_gaussian(attn, rows, cols, grid.num_prefix, grid.keep)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(T, attn, attn_mask, is_causal))
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            y = attn @ v

        y = y.transpose(1, 2).reshape(B, T, -1)
        y = self.norm(y)
        if gate is not None:
            y = y * gate
        y = self.proj(y)
        return self.proj_drop(y)


class GaussianRopeAttention(_RotaryGaussian, AttentionRope):
    """timm's `AttentionRope` plus a Gaussian bias; made of one by `timm_locat.add_locat` or a named model."""

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        if self.qkv is not None:
            qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
        else:
            q = self.q_proj(x).reshape(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            k = self.k_proj(x).reshape(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
            v = self.v_proj(x).reshape(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.num_kv_groups > 1:
            k = k.repeat_interleave(self.num_kv_groups, dim=1)
            v = v.repeat_interleave(self.num_kv_groups, dim=1)
        return q, k, v


class GaussianEvaAttention(_RotaryGaussian, EvaAttention):
    """timm's `EvaAttention` (biases of q and v only) plus a Gaussian bias."""

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        if self.qkv is not None:
            if self.q_bias is None:
                qkv = self.qkv(x)
            else:
                qkv_bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
                qkv = F.linear(x, weight=self.qkv.weight, bias=qkv_bias)
            q, k, v = qkv.reshape(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q = self.q_proj(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
            k = self.k_proj(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
            v = self.v_proj(x).reshape(B, T, self.num_heads, -1).transpose(1, 2)
        return self.q_norm(q), self.k_norm(k), v


class GaussianEvaBlock(EvaBlock):
    """timm's pre-norm `EvaBlock` around an attention with a Gaussian bias; `forward` takes the positions as well."""

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if grid is None:
            raise ValueError("GaussianEvaBlock needs the positions of the patches: pass grid=gaussian_grid(...)")
        y = self.attn(self.norm1(x), grid, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        if self.gamma_1 is not None:
            y = self.gamma_1 * y
        x = x + self.drop_path1(y)
        y = self.mlp(self.norm2(x))
        if self.gamma_2 is not None:
            y = self.gamma_2 * y
        return x + self.drop_path2(y)


class GaussianEvaBlockPostNorm(EvaBlockPostNorm):
    """timm's `EvaBlockPostNorm` around an attention with a Gaussian bias."""

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if grid is None:
            raise ValueError("GaussianEvaBlockPostNorm needs the patches' positions: pass grid=gaussian_grid(...)")
        y = self.attn(x, grid, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.norm1(y))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class GridlessEvaBlock(EvaBlock):
    """timm's `EvaBlock` among `GaussianEvaBlock`s: takes the positions and makes nothing of them."""

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return super().forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)


class GridlessEvaBlockPostNorm(EvaBlockPostNorm):
    """timm's `EvaBlockPostNorm` among `GaussianEvaBlockPostNorm`s."""

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return super().forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
