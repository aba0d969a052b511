"""Augmentation protocols by name: what happens to a batch of training images, every value visible here.

A protocol works on whole batches of uint8 images on whatever device they are, and draws from one generator that the
trainer seeds from (seed, epoch, batch): the same batch is augmented the same way however often a run was resumed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PROTOCOLS", "Protocol"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Random changes to a batch of images; the default changes nothing."""

    crop_padding: float = 0.0
    """Black border as a share of the image side, from which a crop of the original size is cut at random."""
    flip: float = 0.0
    """Probability of a horizontal flip."""

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be a probability in [0, 1], got {self.flip}")
        if not 0 <= self.crop_padding < 1:
            raise ValueError(f"crop_padding must be a share of the image side in [0, 1), got {self.crop_padding}")

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment (B, C, H, W) images of any dtype; a new tensor of the same shape, dtype and device."""
        if self.crop_padding:
            images = random_shift(images, self.crop_padding, generator)
        if self.flip:
            draw = torch.rand(len(images), generator=generator, device=images.device)
            images = torch.where((draw < self.flip).view(-1, 1, 1, 1), images.flip(-1), images)
        return images


def random_shift(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Move each image by up to `share` of its sides, black where it leaves a gap: padding followed by a crop."""
    count, _, height, width = images.shape
    pad_h, pad_w = round(height * share), round(width * share)
    padded = torch.nn.functional.pad(images, (pad_w, pad_w, pad_h, pad_h))
    top = torch.randint(2 * pad_h + 1, (count, 1), generator=generator, device=images.device)
    left = torch.randint(2 * pad_w + 1, (count, 1), generator=generator, device=images.device)
    rows = top + torch.arange(height, device=images.device)
    cols = left + torch.arange(width, device=images.device)
    batch = torch.arange(count, device=images.device)
    return padded[batch[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2).contiguous()


PROTOCOLS: dict[str, Protocol] = {
    "none": Protocol(),
    "flip": Protocol(flip=0.5),
    # 4 pixels on a 32-pixel image; the usual choice for CIFAR, as arXiv:2605.16390 does not print its value.
    "baseline": Protocol(crop_padding=0.125, flip=0.5),
}
