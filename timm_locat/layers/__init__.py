"""Layers: the Gaussian attention bias, the attentions and blocks that use it, and patch representation refinement."""

from timm_locat.layers.attention import GaussianAttention, GaussianBlock, GridlessBlock
from timm_locat.layers.gaussian import GaussianBias, GaussianGrid, add_gaussian, gaussian_grid, gaussian_mask
from timm_locat.layers.prr import PatchRefinement
from timm_locat.layers.rope import (
    GaussianEvaAttention,
    GaussianEvaBlock,
    GaussianEvaBlockPostNorm,
    GaussianRopeAttention,
    GridlessEvaBlock,
    GridlessEvaBlockPostNorm,
)
from timm_locat.layers.window import GaussianWindowAttention, gaussian_window_attention

__all__ = [
    "GaussianAttention",
    "GaussianBias",
    "GaussianBlock",
    "GaussianEvaAttention",
    "GaussianEvaBlock",
    "GaussianEvaBlockPostNorm",
    "GaussianGrid",
    "GaussianRopeAttention",
    "GaussianWindowAttention",
    "GridlessBlock",
    "GridlessEvaBlock",
    "GridlessEvaBlockPostNorm",
    "PatchRefinement",
    "add_gaussian",
    "gaussian_grid",
    "gaussian_mask",
    "gaussian_window_attention",
]
