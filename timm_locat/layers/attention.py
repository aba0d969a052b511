"""Self-attention with a Gaussian bias, and the transformer block around it.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892. Both classes are timm's with one more
argument, `grid`; everything that they do not need to change is inherited.

Shape letters in this file:
    B batch   h heads   T tokens   P prefix tokens   K patches   C channels   D head dim
"""

import torch
from timm.layers import Attention, maybe_add_mask, register_notrace_function, resolve_self_attn_mask
from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F

from timm_locat.layers.gaussian import GaussianBias, GaussianGrid, add_gaussian, gaussian_mask

__all__ = ["GaussianAttention", "GaussianBlock", "GridlessBlock", "fused_gaussian_attention"]


class GaussianAttention(Attention):
    """timm's `Attention` plus a Gaussian bias that each patch query computes from itself."""

    def __init__(self, dim: int, num_heads: int = 8, *, device=None, dtype=None, **kwargs) -> None:
        super().__init__(dim, num_heads=num_heads, device=device, dtype=dtype, **kwargs)
        self.gaug = GaussianBias(self.head_dim, device=device, dtype=dtype)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.q_norm(q), self.k_norm(k), v

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

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend over (B, T, C) tokens.

        Args:
            x: Tokens, P prefix tokens first, then the K patches that `grid` describes.
            grid: From `gaussian_grid`.
            attn_mask: Boolean (True = may attend) or additive float mask that broadcasts to (B, h, T, T).
            is_causal: Mask everything behind the query; takes precedence over `attn_mask`, as in timm.
        """
        B, T, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self._qkv(x)
        rows, cols = self.gaug(q[:, :, grid.num_prefix :], grid)

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

        y = y.transpose(1, 2).reshape(B, T, self.attn_dim)
        y = self.norm(y)
        if gate is not None:
            y = y * gate
        y = self.proj(y)
        return self.proj_drop(y)


CHUNK_BYTES = 4 * 2**20
"""Size of the mask buffer in evaluation on a CPU. Larger masks leave the cache, and glibc maps each one afresh."""


@torch.fx.wrap
@register_notrace_function
def fused_gaussian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    cols: Tensor,
    num_prefix: int,
    keep: Tensor | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Tensor:
    """Scaled dot-product attention with the Gaussian bias as its additive mask; (B, h, T, D) in and out."""
    if q.device.type == "cpu":
        if torch.is_grad_enabled():
            # The CPU's fused kernel cannot differentiate its mask and falls back to plain attention on a full one.
            return plain_gaussian_attention(q, k, v, rows, cols, num_prefix, keep, attn_mask, dropout_p, is_causal)
        simple = keep is None and attn_mask is None and not is_causal and dropout_p == 0.0
        # A loop over images would be unrolled to the batch size at hand by whatever traces it.
        if simple and not torch.jit.is_scripting():  # noqa: SIM102  TorchScript prunes the outer condition only
            if not (torch.jit.is_tracing() or torch.compiler.is_compiling()):
                return chunked_gaussian_attention(q, k, v, rows, cols, num_prefix)
    bias = gaussian_mask(rows, cols, num_prefix, keep).to(q.dtype)
    mask = maybe_add_mask(bias, resolve_self_attn_mask(q.shape[2], bias, attn_mask, is_causal))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)


def plain_gaussian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    cols: Tensor,
    num_prefix: int,
    keep: Tensor | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Tensor:
    """The same without a fused kernel; the bias is added to the logits in place.

    `GaussianAttention.forward` has these steps once more: there softmax and dropout are visible to hooks and FX traces.
    """
    attn = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    attn = add_gaussian(attn, rows, cols, num_prefix, keep)
    attn = maybe_add_mask(attn, resolve_self_attn_mask(q.shape[2], attn, attn_mask, is_causal))
    attn = attn.softmax(dim=-1)
    if dropout_p > 0.0:
        attn = F.dropout(attn, dropout_p)
    return attn @ v


@torch.jit.unused
def chunked_gaussian_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cols: Tensor, num_prefix: int) -> Tensor:
    """The same without gradients, with one small mask buffer that serves all queries of all images in turn."""
    batch, heads, tokens, _ = q.shape
    patches = tokens - num_prefix
    step = min(patches, max(1, CHUNK_BYTES // (heads * tokens * q.element_size())))
    buffer = q.new_zeros(1, heads, num_prefix + step, tokens)  # rows and columns of prefix tokens stay zero
    bias = buffer[0, :, num_prefix:, num_prefix:].unflatten(-1, (rows.shape[-1], cols.shape[-1]))
    # Token-major, so that joining the heads afterwards needs no copy.
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    for i in range(batch):
        for start in range(0, patches, step):
            stop = min(start + step, patches)
            size = stop - start
            torch.mul(rows[i, :, start:stop].unsqueeze(-1), cols[i, :, start:stop].unsqueeze(-2), out=bias[:, :size])
            skip = 0 if start == 0 else num_prefix  # prefix queries go with the first chunk
            here = slice(start + skip, stop + num_prefix)
            mask = buffer[:, :, skip : num_prefix + size]
            out[i : i + 1, :, here] = F.scaled_dot_product_attention(
                q[i : i + 1, :, here], k[i : i + 1], v[i : i + 1], attn_mask=mask
            )
    return out


class GaussianBlock(Block):
    """timm's pre-norm `Block` around a `GaussianAttention`; `forward` takes the positions as well.

    They have a default only because blocks sit in an `nn.Sequential`, whose own `forward` TorchScript compiles.
    """

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if grid is None:
            raise ValueError("GaussianBlock needs the positions of the patches: pass grid=gaussian_grid(...)")
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid, attn_mask=attn_mask, is_causal=is_causal)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class GridlessBlock(Block):
    """timm's `Block` among `GaussianBlock`s: takes the positions and makes nothing of them."""

    def forward(
        self,
        x: Tensor,
        grid: GaussianGrid | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
