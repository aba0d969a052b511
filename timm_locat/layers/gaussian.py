"""Gaussian augmentation (GAug): a learned, query-dependent Gaussian bump that is added to the attention logits.

Source: "Locality-Attending Vision Transformer" (ICLR 2026), arXiv:2603.04892.

For a query patch i at row y(i), column x(i), and a key patch j, each head adds

    S_ij = alpha_i * exp(E(y(i) - y(j)) / (var_i,y + eps)) * exp(E(x(i) - x(j)) / (var_i,x + eps)),
    E(d) = max(-d**2 / 2, -limit),  alpha_i = softplus(log_alpha(q_i)),  var_i = M * sigmoid(log_var(q_i) - ln(M - 1)).

Distances are in patches. Prefix tokens (class, registers) neither get nor give a bias.

Differs from the paper's code: the bump is the product of one table over rows and one over columns, so that nothing of
shape N x N x 2 exists; tables are float32 under every autocast (they are float16 there, which is why `eps` and `limit`
exist); there is no half-rate path in training, no running statistic and nothing is cached between two forwards.

Shape letters in this file:
    B batch   h heads   N patches of the grid (= H * W, row-major)   K patches kept by patch dropout (N without it)
    P prefix tokens   T tokens (= P + K)   D head dim
"""

import math
from typing import NamedTuple

import torch
from timm.layers import register_notrace_function, trunc_normal_
from torch import Tensor, nn

__all__ = ["GaussianBias", "GaussianGrid", "add_gaussian", "gaussian_grid", "gaussian_mask"]


class GaussianGrid(NamedTuple):
    """Everything about positions that a Gaussian bias needs for one forward; the same for all layers.

    It is an argument of the call, not state of a module, so that one model can run at two sizes in two threads.
    """

    rows: Tensor
    """(K, H) or (B, 1, K, H): E of the row distance of each query patch to each grid row; float32, in [-limit, 0]."""
    cols: Tensor
    """(K, W) or (B, 1, K, W): the same over columns."""
    keep: Tensor | None
    """(B, K) indices of the patches that patch dropout kept, or None when all are there."""
    num_prefix: int
    """Number P of tokens in front of the patches."""
    max_var: float
    """M, the upper end of the variance: longest side of the initial grid, squared; patches squared."""
    var_scale: float
    """Factor on the variance: shortest side of this grid over shortest side of the initial one."""
    eps: float
    """Added to the variance; patches squared."""


GATE_UNIT = 8.0
"""What the stored gate is multiplied with: Adam moves a parameter by about the learning rate a step, and a few hundred
steps of fine-tuning at 1e-3 have to take the strength from nothing to where the paper's starts. Our choice."""


@torch.fx.wrap
@register_notrace_function
def axis_exponents(like: Tensor, length: int, limit: float) -> Tensor:
    """E between every two positions of one axis: (length, length) float32 on the device of `like`."""
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    offset = position.unsqueeze(1) - position.unsqueeze(0)
    return (-0.5 * offset * offset).clamp(min=-limit)


@torch.fx.wrap
@register_notrace_function
def variance_scale(height: int, width: int, initial_height: int, initial_width: int) -> float:
    """Ratio of the shortest sides. Linear in the size although it multiplies a variance: as in the paper's code."""
    return min(height, width) / min(initial_height, initial_width)


def distance_limit(initial_side: int) -> float:
    """Largest half squared distance that still counts: that across the initial grid, and at most 6550."""
    return min(0.5 * (initial_side - 1) ** 2, 6550.0)


def variance_eps(initial_side: int) -> float:
    """0.1, doubled until the steepest exponent of the initial grid fits float16: 0.2 from 27 patches, 0.4 from 52."""
    eps = 0.1
    while 0.5 * (initial_side - 1) ** 2 / eps**2 > 32500.0:
        eps *= 2.0
    return eps


def gaussian_grid(
    like: Tensor,
    grid: tuple[int, int],
    initial_grid: tuple[int, int],
    num_prefix: int = 1,
    keep: Tensor | None = None,
) -> GaussianGrid:
    """Describe the positions of one forward.

    Args:
        like: Any tensor on the device that the model runs on.
        grid: Patch rows and columns (H, W) of the images at hand.
        initial_grid: Grid on which the Gaussians were learned. It alone sets the variance's range, `eps` and the
            distance limit; on another grid the variance is rescaled, so trained weights keep their meaning.
        num_prefix: Number of tokens before the patches.
        keep: (B, K) row-major indices of the patches that are left, or None for all.
    """
    side = max(initial_grid[0], initial_grid[1])
    limit = distance_limit(side)
    # Row-major: a patch's row changes every W patches, its column with each of them.
    rows = axis_exponents(like, grid[0], limit).repeat_interleave(grid[1], dim=0)
    cols = axis_exponents(like, grid[1], limit).repeat(grid[0], 1)
    if keep is not None:
        rows = rows[keep].unsqueeze(1)
        cols = cols[keep].unsqueeze(1)
    return GaussianGrid(
        rows=rows,
        cols=cols,
        keep=keep,
        num_prefix=num_prefix,
        max_var=float(side * side),
        var_scale=variance_scale(grid[0], grid[1], initial_grid[0], initial_grid[1]),
        eps=variance_eps(side),
    )


@torch.fx.wrap
@register_notrace_function
def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; wider types stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Rise(torch.autograd.Function):
    """The identity, whose gradient is minus its size: every descent raises the number, as fast as it can learn.

    A schedule that needs neither the length of the training nor a state of its own: it is exact under resume,
    recomputed blocks and accumulated gradients, and where nothing depends on the number it stays.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return -grad.abs()


class GaussianBias(nn.Module):
    """Learned strength and width of the bump of each query; both linear maps are shared by all heads of a layer.

    Despite their names (which are the paper's code's, so that its weights load) neither output is exponentiated.
    Weights are initialised by the host model: with a timm ViT's they start at a variance of about 1 patch squared and
    a strength of about ln 2.

    Args:
        head_dim: Size D of one head's query.
        gate: None is the paper's layer. A number adds one factor on the strength, which starts at that number: next to
            zero, a trained model changes by next to nothing when it gets the layer. Training raises it to 1, whatever
            the loss says about it (`Rise`), and then the layer is the paper's. Our addition, after ReZero
            (arXiv:2003.04887), whose factor the loss would move: it went below zero in most layers.
    """

    def __init__(self, head_dim: int, *, gate: float | None = None, device=None, dtype=None) -> None:
        super().__init__()
        self.log_var = nn.Linear(head_dim, 2, device=device, dtype=dtype)
        self.log_alpha = nn.Linear(head_dim, 1, device=device, dtype=dtype)
        self.gate_start = gate
        if gate is None:
            self.register_parameter("gate", None)
        else:
            self.gate = nn.Parameter(torch.full((1,), gate / GATE_UNIT, device=device, dtype=dtype))

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """The weights that a timm ViT would give the two maps, and the gate's own start."""
        for linear in (self.log_var, self.log_alpha):
            trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        if self.gate is not None:
            nn.init.constant_(self.gate, self.gate_start / GATE_UNIT)

    def _shape(self, q: Tensor, grid: GaussianGrid) -> tuple[Tensor, Tensor]:
        """(B, h, K, 1) strength, and (B, h, K, 2) inverse variance along rows and columns."""
        # One product instead of two; the weights stay apart because the reference's state dict has them apart.
        weight = torch.cat([self.log_var.weight, self.log_alpha.weight])
        bias = torch.cat([self.log_var.bias, self.log_alpha.bias])
        # float32 on purpose: 63**2 / 2 / 0.1 overflows float16, and the gradient is then inf * 0 = nan.
        raw = at_least_float32(nn.functional.linear(q, weight, bias))
        shift = math.log(grid.max_var - 1.0) if grid.max_var > 2.0 else 0.0
        inv = 1.0 / (torch.sigmoid(raw[..., :2] - shift) * (grid.max_var * grid.var_scale) + grid.eps)
        alpha = nn.functional.softplus(raw[..., 2:])
        if self.gate is not None:
            gate = at_least_float32(self.gate) * GATE_UNIT
            if self.training and not torch.jit.is_scripting():
                gate = Rise.apply(gate)
            alpha = alpha * gate.clamp(max=1.0)
        return alpha, inv

    @torch.jit.ignore
    def gaussians(self, q: Tensor, grid: GaussianGrid) -> tuple[Tensor, Tensor, Tensor]:
        """What the bumps look like, for inspection; arguments as for `forward`.

        Returns:
            (B, h, K) strength, and standard deviation along rows and along columns in patches, `eps` included.
        """
        alpha, inv = self._shape(q, grid)
        sigma = inv.rsqrt()
        return alpha[..., 0], sigma[..., 0], sigma[..., 1]

    def forward(self, q: Tensor, grid: GaussianGrid) -> tuple[Tensor, Tensor]:
        """Tables whose outer product, per query, is the bias over the patches.

        Args:
            q: (B, h, K, D) queries of the patches, after their norm, before scaling and rotation.
            grid: From `gaussian_grid`, for the same K patches.

        Returns:
            (B, h, K, H) over grid rows, strength included, and (B, h, K, W) over grid columns; float32 or wider.
        """
        alpha, inv = self._shape(q, grid)
        rows = alpha * torch.exp(grid.rows * inv[..., 0:1])
        cols = torch.exp(grid.cols * inv[..., 1:2])
        return rows, cols


def outer(rows: Tensor, cols: Tensor, keep: Tensor | None = None) -> Tensor:
    """(B, h, K, K) bias between patches from its two tables."""
    if keep is None:
        return (rows.unsqueeze(-1) * cols.unsqueeze(-2)).flatten(-2)
    width = cols.shape[-1]
    index = keep.unsqueeze(1).unsqueeze(1).expand(-1, rows.shape[1], keep.shape[1], -1)
    return rows.gather(-1, index // width) * cols.gather(-1, index % width)


@torch.fx.wrap
@register_notrace_function
def gaussian_mask(
    rows: Tensor,
    cols: Tensor,
    num_prefix: int,
    keep: Tensor | None = None,
) -> Tensor:
    """(B, h, T, T) bias over all tokens: zero in the rows and columns of the P prefix tokens."""
    return nn.functional.pad(outer(rows, cols, keep), (num_prefix, 0, num_prefix, 0))


@torch.fx.wrap
@register_notrace_function
def add_gaussian(
    attn: Tensor,
    rows: Tensor,
    cols: Tensor,
    num_prefix: int,
    keep: Tensor | None = None,
) -> Tensor:
    """Add the bias to (B, h, T, T) logits in place and return them; nothing of the prefix tokens changes.

    A leaf of FX traces: there an in-place operation on a slice has no user and would be removed as dead code.
    """
    # The product is made in float32 and cast once: a broadcast multiply in bfloat16 is several times slower on a CPU.
    attn[:, :, num_prefix:, num_prefix:] += outer(rows, cols, keep).to(attn.dtype)
    return attn
