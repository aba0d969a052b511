"""Two large and several small crops of an image, each changed by itself; arXiv:2104.14294, by lightly's transforms."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightly.transforms.dino_transform import DINOViewTransform
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from timm_locat.data.augment import borrowed_global_rngs
from timm_locat.record import atomic_write
from timm_locat.train.dino.config import DinoConfig

__all__ = ["GLOBAL_CROPS", "MultiCrop", "draw_crops"]

GLOBAL_CROPS = 2


@dataclass(frozen=True, kw_only=True)
class MultiCrop:
    """A PIL RGB image and a generator to its crops, packed into one row of 8-bit values; `split` unpacks a batch.

    Can be pickled. Seed the generator from (seed, epoch, sample), and no worker's past matters.
    """

    img_size: tuple[int, int]
    """Height and width of the global crops."""
    config: DinoConfig
    native_transform: Callable[[Tensor], Tensor] | None = None
    _views: tuple[Callable[[Image.Image], Tensor], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        c = self.config
        common = dict(
            hf_prob=c.flip,
            cj_prob=c.color_jitter,
            cj_strength=0.5,  # halves lightly's own values to the paper's
            random_gray_scale=c.grayscale,
            sigmas=c.blur_sigma,
            normalize=None,
        )
        large = dict(crop_size=self.img_size, crop_scale=c.global_area)
        small = dict(crop_size=(c.local_size, c.local_size), crop_scale=c.local_area)
        first = DINOViewTransform(**large, gaussian_blur=c.blur[0], solarization_prob=0.0, **common)
        second = DINOViewTransform(**large, gaussian_blur=c.blur[1], solarization_prob=c.solarize, **common)
        local = DINOViewTransform(**small, gaussian_blur=c.blur[2], solarization_prob=0.0, **common)
        object.__setattr__(self, "_views", (first, second, *[local] * c.local_crops))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each crop, the global ones first."""
        local = (self.config.local_size, self.config.local_size)
        return [self.img_size] * GLOBAL_CROPS + [local] * self.config.local_crops

    def __call__(self, image: Image.Image, generator: torch.Generator) -> Tensor:
        """Crop one image; uint8 (P,)."""
        if self.native_transform is not None:
            image = F.to_pil_image(self.native_transform(F.pil_to_tensor(image)))
        with borrowed_global_rngs(generator):
            views = [view(image) for view in self._views]
        return torch.cat([(view * 255).round().to(torch.uint8).flatten() for view in views])

    def split(self, packed: Tensor) -> list[Tensor]:
        """From uint8 (B, P) to one (B, 3, H, W) for each crop."""
        parts = packed.split([3 * height * width for height, width in self.sizes], dim=1)
        return [part.unflatten(1, (3, *size)) for part, size in zip(parts, self.sizes, strict=True)]

    def apply(self, images: Tensor, labels: Tensor, num_classes: int, generator: torch.Generator) -> tuple:
        """In the place of `Protocol.apply`: everything was done while the images were read."""
        return images, labels


def draw_crops(crops: list[Tensor], path: Path, title: str) -> None:
    """Draw the crops of the first images of a batch as a PNG: a row for each image, a column for each crop.

    Args:
        crops: From `MultiCrop.split`.
        path: Ends in `.png`.
        title: Says which data it is.
    """
    from matplotlib.figure import Figure

    rows = min(6, len(crops[0]))
    figure = Figure(figsize=(1.1 * len(crops), 1.1 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, len(crops), squeeze=False)
    for column, crop in enumerate(crops):
        kind = f"global {column + 1}" if column < GLOBAL_CROPS else f"local {column - GLOBAL_CROPS + 1}"
        axes[0][column].set_title(f"{kind}\n{crop.shape[-2]} x {crop.shape[-1]}", fontsize=7)
        for row in range(rows):
            axes[row][column].imshow(crop[row].permute(1, 2, 0).cpu().numpy())
            axes[row][column].axis("off")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    atomic_write(path, png.getvalue())
