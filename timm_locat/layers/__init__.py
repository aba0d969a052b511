"""Layers: the Gaussian attention bias, the attention and block that use it, and patch representation refinement."""

from timm_locat.layers.attention import GaussianAttention, GaussianBlock
from timm_locat.layers.gaussian import GaussianBias, GaussianGrid, add_gaussian, gaussian_grid, gaussian_mask
from timm_locat.layers.prr import PatchRefinement

__all__ = [
    "GaussianAttention",
    "GaussianBias",
    "GaussianBlock",
    "GaussianGrid",
    "PatchRefinement",
    "add_gaussian",
    "gaussian_grid",
    "gaussian_mask",
]
