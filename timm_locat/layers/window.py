"""Window attention with a Gaussian bias, for Swin Transformers.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892. The grid of a bump is the window, so
nothing has to be passed in; it comes on top of the relative position bias and the mask of shifted windows.

Shape letters in this file:
    B images times windows   h heads   N patches of a window   C channels   D head dim
"""

import torch
from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from timm_locat.layers.gaussian import GaussianBias, gaussian_grid, gaussian_mask

__all__ = ["GaussianWindowAttention", "gaussian_window_attention"]


class GaussianWindowAttention(WindowAttention):
    """timm's `WindowAttention` plus a Gaussian bias that each query computes from itself.

    Made of a `WindowAttention` by `gaussian_window_attention`. `gaug_grid` is the window, in patches, for which the
    Gaussians were learned; `set_window_size` leaves it, and variances are rescaled.
    """

    gaug_grid: tuple[int, int]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows.

        Args:
            x: (B, N, C) patches of each window.
            mask: (windows, N, N), 0 or -inf, for shifted windows; B is a multiple of its length.
        """
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        rows, cols = self.gaug(q, gaussian_grid(q, self.window_size, self.gaug_grid, 0))
        bias = gaussian_mask(rows, cols, 0).to(q.dtype) + self._get_rel_pos_bias().to(q.dtype)
        if mask is not None:
            windows = mask.shape[0]
            bias = bias.view(-1, windows, self.num_heads, N, N) + mask.to(q.dtype).unsqueeze(1).unsqueeze(0)
            bias = bias.view(-1, self.num_heads, N, N)

        if self.fused_attn:
            dropout_p = self.attn_drop.p if self.training else 0.0
            x = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1) + bias
            attn = self.softmax(attn)
            attn = self.attn_drop(attn)
            x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, -1)
        x = self.proj(x)
        return self.proj_drop(x)


def gaussian_window_attention(
    attn: WindowAttention, *, gate: float | None = None, gaug_grid: tuple[int, int] | None = None
) -> None:
    """Turn a `WindowAttention` into a `GaussianWindowAttention` in place; its weights stay.

    Args:
        attn: Attention of exactly timm's class.
        gate: As in `GaussianBias`.
        gaug_grid: Window for which the Gaussians were learned; the layer's own when None.
    """
    weight = attn.qkv.weight
    head_dim = attn.qkv.out_features // 3 // attn.num_heads
    attn.gaug = GaussianBias(head_dim, gate=gate, device=weight.device, dtype=weight.dtype)
    attn.gaug.reset_parameters()
    attn.gaug_grid = tuple(attn.window_size) if gaug_grid is None else tuple(gaug_grid)
    attn.__class__ = GaussianWindowAttention
