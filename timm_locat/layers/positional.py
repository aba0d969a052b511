"""Self-attention in which queries and keys come from the positions alone, and values from the tokens.

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. Its text says that the
attention is a function of the position encodings; how that enters a deep ViT was not available to us. Each head here
has softmax((P Wq)(P Wk)^T / sqrt(d)), P being the normalised position table: our reading.

Shape letters in this file:
    B batch   h heads   T tokens   C channels   D head dim
"""

import math

import torch
from timm.layers import (
    Attention,
    maybe_add_mask,
    register_notrace_function,
    resample_abs_pos_embed,
    resolve_self_attn_mask,
)
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "PositionalAttention",
    "PositionalBlock",
    "conv_init_",
    "has_plain_weights",
    "mimetic_init_",
    "resample_logits",
    "resample_positions",
    "sincos_positions",
]


def has_plain_weights(linear: nn.Module) -> bool:
    """Whether the result of a layer is its weight times its input plus its bias, and nothing else.

    It is not with an adapter (LoRA), quantisation, a parametrisation, pruning or offloading, which replace the module,
    its forward, or hook into it.
    """
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return False
    return not (linear._forward_pre_hooks or linear._forward_hooks or linear._backward_hooks)


class PositionalAttention(Attention):
    """timm's `Attention`, state-dict keys included: two thirds of `qkv` read positions, the last third reads tokens.

    Args:
        dim: C.
        num_heads: h.
        kwargs: As for timm's `Attention`.
    """

    def _project(self, x: Tensor, first: int, last: int) -> Tensor:
        """Columns `first` to `last` of `qkv(x)`, without computing the others where that is possible."""
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript prunes the outer condition only
            if not has_plain_weights(self.qkv):
                return self.qkv(x)[..., first:last]
        bias = None if self.qkv.bias is None else self.qkv.bias[first:last]
        return F.linear(x, self.qkv.weight[first:last], bias)

    def logits(self, positions: Tensor) -> Tensor:
        """(h, T, T) attention logits of (T, C) normalised positions."""
        qk = self._project(positions, 0, 2 * self.attn_dim).view(-1, 2, self.num_heads, self.head_dim)
        q, k = qk.permute(1, 2, 0, 3).unbind(0)
        return (self.q_norm(q) * self.scale) @ self.k_norm(k).transpose(-2, -1)

    def attention(self, positions: Tensor) -> Tensor:
        """(h, T, T) attention of (T, C) normalised positions; rows sum to 1."""
        return self.logits(positions).softmax(dim=-1)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        logits: Tensor | None = None,
        weights: Tensor | None = None,
        keep: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Mix the tokens of each image.

        Args:
            x: (B, T', C), the tokens that are left.
            positions: (T, C) normalised positions of all tokens.
            logits: (h, T, T), where they do not come from positions.
            weights: (1, h, T, T) attention of all tokens if it is known already; then no mask is applied.
            keep: (B, T') int64 indices of the tokens that are left in each image; None for all.
            attn_mask: Boolean (True = may attend) or additive float mask that broadcasts to (B, h, T', T').
            is_causal: Mask everything behind the query; takes precedence over `attn_mask`, as in timm.

        Raises:
            ValueError: None of `positions`, `logits` and `weights` was given.
        """
        B, T, _ = x.shape
        if weights is None:
            if logits is None:
                if positions is None:
                    raise ValueError("positional attention needs positions, logits or weights, got none of them")
                logits = self.logits(positions)
            weights = masked_logits(logits, keep, attn_mask, is_causal).softmax(dim=-1)
        if self.training and self.attn_drop.p > 0.0:
            weights = weights.expand(B, -1, -1, -1)  # each image drops its own
        weights = self.attn_drop(weights)
        v = self._project(x, 2 * self.attn_dim, 3 * self.attn_dim).view(B, T, self.num_heads, self.head_dim)
        y = mix(weights, v)
        y = self.norm(y.reshape(B, T, self.attn_dim))
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))


@torch.fx.wrap
@register_notrace_function
def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Values mixed by attention weights.

    Args:
        weights: (1, h, T, T) for all images or (B, h, T, T).
        v: (B, T, h, D).

    Returns:
        (B, T, h, D).
    """
    B, T, heads, dim = v.shape
    if weights.shape[0] > 1:
        return (weights @ v.transpose(1, 2)).transpose(1, 2)
    # All images in one product per head: the weights are read once.
    y = weights[0] @ v.permute(2, 1, 0, 3).reshape(heads, T, B * dim)
    return y.view(heads, T, B, dim).permute(2, 1, 0, 3)


class PositionalBlock(Block):
    """timm's pre-norm `Block` around a `PositionalAttention`, whose arguments its `forward` takes."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        logits: Tensor | None = None,
        weights: Tensor | None = None,
        keep: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        y = self.attn(self.norm1(x), positions, logits, weights, keep, attn_mask, is_causal)
        x = x + self.drop_path1(self.ls1(y))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@torch.fx.wrap  # masks of a traced call are not known yet
def masked_logits(logits: Tensor, keep: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Logits of the tokens that are left, with masks applied.

    Args:
        logits: (h, T, T) of all tokens.
        keep: As for `PositionalAttention.forward`.
        attn_mask: The same.
        is_causal: The same.

    Returns:
        (1, h, T, T), or (B, h, T', T') where images differ.
    """
    if keep is None:  # noqa: SIM108  TorchScript narrows the type in a statement
        logits = logits.unsqueeze(0)
    else:
        logits = logits[:, keep.unsqueeze(-1), keep.unsqueeze(1)].transpose(0, 1)
    return maybe_add_mask(logits, resolve_self_attn_mask(logits.shape[-1], logits, attn_mask, is_causal))


def resample_positions(table: Tensor, new: tuple[int, int], old: tuple[int, int], num_prefix: int) -> Tensor:
    """(L, T, C) positions for another grid; timm's resampling, table by table."""
    tables = [
        resample_abs_pos_embed(t.unsqueeze(0), new_size=new, old_size=old, num_prefix_tokens=num_prefix)
        for t in table.unbind(0)
    ]
    return torch.cat(tables)


def resample_logits(table: Tensor, new: tuple[int, int], old: tuple[int, int], num_prefix: int) -> Tensor:
    """(L, h, T, T) logits for another grid: keys first, then queries, as if the others were channels."""
    layers, heads, tokens, _ = table.shape
    by_query = table.reshape(layers * heads, tokens, tokens)
    for _ in range(2):
        by_query = resample_positions(by_query.transpose(1, 2), new, old, num_prefix)
    return by_query.view(layers, heads, by_query.shape[1], by_query.shape[2])


@torch.no_grad()
def mimetic_init_(attn: PositionalAttention, alpha: float = 0.7, beta: float = 0.7) -> None:
    """Make each head's Wq^T Wk close to `alpha` times noise plus `beta` times the identity.

    After Trockman and Kolter (ICML 2023), arXiv:2305.09828: positions that resemble each other attend to each other.
    """
    dim = attn.qkv.in_features
    weight = attn.qkv.weight[: 2 * attn.attn_dim].view(2, attn.num_heads, attn.head_dim, dim)
    for head in range(attn.num_heads):
        product = alpha * torch.randn(dim, dim) / math.sqrt(dim) + beta * torch.eye(dim)
        left, values, right = torch.linalg.svd(product)
        root = values[: attn.head_dim].sqrt()
        weight[0, head] = (left[:, : attn.head_dim] * root).T
        weight[1, head] = right[: attn.head_dim] * root.unsqueeze(1)
    if attn.qkv.bias is not None:
        attn.qkv.bias[: 2 * attn.attn_dim] = 0


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """(rows * columns, dim) table: sines and cosines of the row, then of the column, in neighbouring pairs.

    Args:
        grid: Patch rows and columns.
        dim: A multiple of 4.
    """
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    parts = []
    for place in (rows.flatten(), columns.flatten()):
        angle = place.unsqueeze(1) * _frequencies(dim)
        parts.append(torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1))
    return torch.cat(parts, dim=1)


def _frequencies(dim: int) -> Tensor:
    """Radians per patch, from half a turn to a slow drift."""
    return math.pi * torch.logspace(0, -1.5, dim // 4)


OFFSETS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]


@torch.no_grad()
def conv_init_(attn: PositionalAttention, first: int, gain: float = 6.0) -> None:
    """Make each head look at the patch beside the query in one direction of a 3 x 3 window, as a convolution would.

    Needs positions from `sincos_positions`: the logit of a head is then a sum of cosines of the distance from the patch
    that it looks at, which is largest there. The idea is that of impulse initialisation (arXiv:2401.12511), solved
    instead of fitted.

    Args:
        attn: Its head dim is a multiple of 4.
        first: Which direction the first head looks in; the next heads take the next ones.
        gain: Largest logit over all others' mean.
    """
    dim, pairs = attn.qkv.in_features, attn.head_dim // 4
    weight = attn.qkv.weight[: 2 * attn.attn_dim].view(2, attn.num_heads, attn.head_dim, dim)
    weight.zero_()
    if attn.qkv.bias is not None:
        attn.qkv.bias[: 2 * attn.attn_dim] = 0
    frequencies = _frequencies(dim)
    chosen = torch.linspace(0, len(frequencies) - 1, pairs).round().long()
    size = math.sqrt(gain / (2 * pairs * attn.scale))
    for head in range(attn.num_heads):
        offset = OFFSETS[(first + head) % len(OFFSETS)]
        for axis in range(2):
            for slot, f in enumerate(chosen.tolist()):
                source, target = axis * dim // 2 + 2 * f, axis * 2 * pairs + 2 * slot
                turn = float(frequencies[f]) * offset[axis]
                rotation = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
                weight[0, head, target : target + 2, source : source + 2] = size * rotation
                weight[1, head, target : target + 2, source : source + 2] = size * torch.eye(2)
