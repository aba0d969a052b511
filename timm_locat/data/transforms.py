"""From images to uint8 tensors of one size: padding small grey images, the evaluation transform, decoding a whole set.

Nothing here normalises: pixels stay 8 bit until they are on the device that runs the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from timm_locat.errors import UserError, require

if TYPE_CHECKING:
    from timm_locat.data.datasets import ImageData

__all__ = ["MAX_DECODED_BYTES", "EvalTransform", "decode_all", "eval_transform", "pad32_rgb", "permute_patches"]

MAX_DECODED_BYTES = 4 * 2**30
"""`decode_all` refuses sets that would take more memory than this."""


def pad32_rgb(images: Tensor) -> Tensor:
    """Images of 28x28 as 32x32 RGB: two black pixels on each side, grey copied to three channels, nothing rescaled.

    Args:
        images: uint8, (..., 1, 28, 28) grey or (..., 3, 28, 28) RGB; or without channels (28, 28) or (..., 28, 28),
            grey. The third axis from the end is taken for channels where its size is 1 or 3: a batch of one or three
            grey images needs its channel axis.

    Returns:
        uint8 (..., 3, 32, 32), in memory of its own.

    Raises:
        UserError: Another size or dtype.
    """
    if images.dtype != torch.uint8 or images.ndim < 2 or images.shape[-2:] != (28, 28):
        raise UserError(
            f"expected uint8 images of 28x28, got {str(images.dtype).removeprefix('torch.')} of shape "
            f"{tuple(images.shape)}; give the pixels as they are stored"
        )
    if images.ndim == 2 or images.shape[-3] not in (1, 3):
        images = images.unsqueeze(-3)
    padded = F.pad(images, [2, 2, 2, 2], fill=0)
    return padded.expand(*padded.shape[:-3], 3, 32, 32).contiguous()


def permute_patches(images: Tensor, order: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """The patches of every image in another order, the same for all.

    Args:
        images: (B, C, H, W), H and W multiples of the patch.
        order: (N,) int64: patch i of the result, counted row by row, is patch `order[i]` of the image.
        patch_size: Height and width of a patch in pixels.

    Returns:
        Images of the same shape.
    """
    height, width = images.shape[-2] // patch_size[0], images.shape[-1] // patch_size[1]
    patches = images.unflatten(-2, (height, patch_size[0])).unflatten(-1, (width, patch_size[1]))
    patches = patches.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)[order.to(images.device)]
    return patches.unflatten(0, (height, width)).permute(2, 3, 0, 4, 1, 5).flatten(4).flatten(2, 3)


@dataclass(frozen=True)
class EvalTransform:
    """An image to uint8 (3, H, W) of one size, always the same way; see `eval_transform`."""

    img_size: tuple[int, int]
    crop_pct: float
    interpolation: str
    native_transform: Callable[[Tensor], Tensor] | None = None
    _resize: Callable[[Image.Image], Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.img_size) != 2 or min(self.img_size) < 1:
            raise UserError(f"img_size must be two positive numbers (height, width), got {self.img_size}")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must lie in (0, 1], got {self.crop_pct}")
        known = [mode.value for mode in InterpolationMode if not mode.value.endswith("exact")]
        if self.interpolation not in known:
            raise UserError(f"interpolation must be one of {', '.join(known)}, got {self.interpolation!r}")
        resize = create_transform(
            (3, *self.img_size), interpolation=self.interpolation, crop_pct=self.crop_pct, normalize=False
        )
        object.__setattr__(self, "_resize", resize)

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform one RGB image to uint8 (3, H, W)."""
        pixels = F.pil_to_tensor(image)
        if self.native_transform is not None:
            pixels = self.native_transform(pixels)
        if tuple(pixels.shape[-2:]) == tuple(self.img_size):
            return pixels
        return self._resize(image if self.native_transform is None else F.to_pil_image(pixels))


def eval_transform(
    img_size: tuple[int, int],
    crop_pct: float,
    interpolation: str,
    *,
    native_transform: Callable[[Tensor], Tensor] | None = None,
) -> EvalTransform:
    """timm's evaluation transform without the normalisation: resize the short side, crop the centre.

    An image that already has the size is left as it is, without the resize and crop that `crop_pct` asks for.

    Args:
        img_size: Height and width of the result, in pixels.
        crop_pct: Share of the resized image's side that the crop keeps, in (0, 1].
        interpolation: `nearest`, `bilinear`, `bicubic`, `box`, `hamming` or `lanczos`.
        native_transform: Applied to the pixels as read, uint8 (3, h, w), before anything else; a data set's
            `DatasetEntry.native_transform`.

    Returns:
        A picklable callable from a PIL RGB image to uint8 (3, H, W).

    Raises:
        UserError: A size, crop or interpolation outside the ranges above.
    """
    return EvalTransform(tuple(img_size), crop_pct, interpolation, native_transform)


def decode_all(
    data: "ImageData", transform: Callable[[Image.Image], Tensor], progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Decode a whole set into one tensor, for sets that fit into memory.

    Args:
        data: Images and labels.
        transform: From a PIL RGB image to a uint8 (C, H, W) tensor of one size, such as `eval_transform(...)`.
        progress: Show a progress bar.

    Returns:
        images: uint8 (N, C, H, W), in the order of `data`.
        labels: int64 (N,).

    Raises:
        UserError: The images would take more than `MAX_DECODED_BYTES`, judged by the first one; or one of them cannot
            be read or comes out in another shape or dtype than uint8 like the first.
    """
    first = transform(data[0][0])
    size = len(data) * first.numel()
    if size > MAX_DECODED_BYTES:
        raise UserError(
            f"{len(data)} images of shape {tuple(first.shape)} take {size / 2**30:.1f} GiB, more than the "
            f"{MAX_DECODED_BYTES / 2**30:g} GiB allowed; use a DataLoader, a smaller size or fewer images"
        )
    images = torch.empty((len(data), *first.shape), dtype=torch.uint8)
    indices = range(len(data))
    if progress:
        tqdm = require("tqdm", "data", "a progress bar")
        indices = tqdm.tqdm(indices, desc=f"decoding {data.name}", unit="image")
    for i in indices:
        pixels = transform(data[i][0])
        if pixels.shape != first.shape or pixels.dtype != torch.uint8:
            raise UserError(
                f"{data.source(i)} becomes {pixels.dtype} of shape {tuple(pixels.shape)}, expected torch.uint8 of "
                f"{tuple(first.shape)} as the first image; use a transform that gives all images one size"
            )
        images[i] = pixels
    return images, data.labels.clone()
