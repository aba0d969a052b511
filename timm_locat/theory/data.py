"""The spatially structured distribution: images whose label lies in one hidden group of patches.

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. The paper's text was
not available to us: the distribution follows second-hand descriptions, and every default value is our choice.

Shape letters in this file:
    N images   D patches (= L * C)   L sets   C patches of a set   F features of a patch
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from timm_locat.errors import UserError

__all__ = ["Structure", "World"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """Sizes of the distribution; see `World` for what they mean."""

    num_sets: int = 6
    """Number L of disjoint sets of patches."""
    set_size: int = 4
    """Patches C of a set."""
    features: int = 16
    """Length of a patch's vector."""
    noise: float | None = None
    """Standard deviation of the noise in each direction; None is 1 / sqrt(features)."""
    clutter: float = 0.3
    """Probability q that a patch outside the informative set carries the feature, with a random sign."""

    def __post_init__(self) -> None:
        for name, least in (("num_sets", 2), ("set_size", 2), ("features", 2)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.clutter <= 1:
            raise UserError(f"clutter is a probability in [0, 1], got {self.clutter}")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise UserError(f"noise must be a finite number of at least 0, got {self.noise}")

    @property
    def patches(self) -> int:
        """Patches D of an image."""
        return self.num_sets * self.set_size

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each direction."""
        return self.features**-0.5 if self.noise is None else self.noise


class World:
    """One draw of the hidden sets and the feature, from which images are sampled.

    An image has a label y, +1 or -1 with equal chance, and one informative set, uniform over the sets. A patch of that
    set is y * w + noise. Any other patch is s * w + noise, s = +1 or -1 with probability q / 2 each and 0 otherwise.
    The noise is Gaussian and orthogonal to w.

    Args:
        structure: Sizes.
        seed: Of the sets, the feature and everything sampled later.
    """

    def __init__(self, structure: Structure, seed: int) -> None:
        self.structure = structure
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(structure.patches, generator=self.generator)
        self.set_of_D = torch.empty_like(order)
        """(D,) int64: the set of each patch. Sets are scattered over the image on purpose."""
        self.set_of_D[order] = torch.arange(structure.patches) // structure.set_size
        self.feature_F: Tensor = self._unit()
        """(F,) float32 of length 1."""

    def _unit(self) -> Tensor:
        vector = torch.randn(self.structure.features, generator=self.generator)
        return vector / vector.norm()

    def new_feature(self) -> None:
        """Replace the feature by a fresh one and keep the sets: the target task of the transfer experiment."""
        self.feature_F = self._unit()

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw images.

        Returns:
            images_NDF: (N, D, F) float32.
            labels_N: (N,) float32, +1 or -1.
        """
        s, draw = self.structure, self.generator
        labels_N = torch.randint(2, (count,), generator=draw) * 2.0 - 1
        informative_N = torch.randint(s.num_sets, (count,), generator=draw)
        present_ND = torch.rand(count, s.patches, generator=draw) < s.clutter
        signs_ND = torch.randint(2, (count, s.patches), generator=draw) * 2.0 - 1
        strength_ND = torch.where(
            informative_N[:, None] == self.set_of_D, labels_N[:, None], signs_ND * present_ND.float()
        )
        noise_NDF = s.sigma * torch.randn(count, s.patches, s.features, generator=draw)
        noise_NDF -= (noise_NDF @ self.feature_F)[..., None] * self.feature_F
        return strength_ND[..., None] * self.feature_F + noise_NDF, labels_N
