"""The mechanics of augmentation; `timm_locat.data.protocols` has the names and the values.

Every function draws from the generator that it is given and from nothing else, on the generator's device. With a
generator on the CPU the draws are the same wherever the images are, and nothing waits for a GPU. The input stays
as it is.

Shape letters in this file:
    B batch   C channels   H, W height and width in pixels   K classes
"""

import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms.v2 import functional as F

__all__ = [
    "LoaderTransform",
    "auto_augment",
    "borrowed_global_rngs",
    "color_jitter",
    "cutmix",
    "cutout_boxes",
    "draw_beta",
    "erase",
    "erasing_boxes",
    "mixup",
    "random_flip",
    "random_shift",
    "soft_targets",
]

SubPolicy = tuple[tuple[str, float, int | None], tuple[str, float, int | None]]
"""Two operations in order, each with its probability and its magnitude from 0 to 9 (None where it has none)."""


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


# Geometry


def random_shift(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Move each image by up to `share` of its sides, black where it leaves a gap: padding followed by a crop."""
    count, _, height, width = images.shape
    pad_h, pad_w = round(height * share), round(width * share)
    padded = torch.nn.functional.pad(images, (pad_w, pad_w, pad_h, pad_h))
    draw = {"generator": generator, "device": generator.device}
    top = torch.randint(2 * pad_h + 1, (count, 1), **draw).to(images.device)
    left = torch.randint(2 * pad_w + 1, (count, 1), **draw).to(images.device)
    rows = top + torch.arange(height, device=images.device)
    cols = left + torch.arange(width, device=images.device)
    batch = torch.arange(count, device=images.device)
    return padded[batch[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2).contiguous()


def random_flip(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with the given probability."""
    flipped = (uniform(len(images), generator=generator) < probability).to(images.device)
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images)


# AutoAugment. Largest magnitudes of arXiv:1805.09501; torchvision's operations, nearest neighbour, black borders.

_LARGEST = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateX": 150 / 331,  # of the width
    "TranslateY": 150 / 331,  # of the height
    "Rotate": 30.0,  # degrees
    "Brightness": 0.9,
    "Color": 0.9,
    "Contrast": 0.9,
    "Sharpness": 0.9,
}
"""Operations whose magnitude has a random sign, and the value of magnitude 9."""


def _affine(images: Tensor, *, shift: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    degrees = [math.degrees(math.atan(slope)) for slope in shear]
    corner = [0.0, 0.0] if any(shear) else None  # AutoAugment shears about the corner
    return F.affine(images, angle=0.0, translate=list(shift), scale=1.0, shear=degrees, center=corner)


_OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "ShearX": lambda x, value: _affine(x, shear=(value, 0.0)),
    "ShearY": lambda x, value: _affine(x, shear=(0.0, value)),
    "TranslateX": lambda x, value: _affine(x, shift=(int(value * x.shape[-1]), 0)),
    "TranslateY": lambda x, value: _affine(x, shift=(0, int(value * x.shape[-2]))),
    "Rotate": lambda x, value: F.rotate(x, value),
    "Brightness": lambda x, value: F.adjust_brightness(x, 1 + value),
    "Color": lambda x, value: F.adjust_saturation(x, 1 + value),
    "Contrast": lambda x, value: F.adjust_contrast(x, 1 + value),
    "Sharpness": lambda x, value: F.adjust_sharpness(x, 1 + value),
    "Posterize": lambda x, value: F.posterize(x, int(value)),
    "Solarize": lambda x, value: F.solarize(x, value),
    "AutoContrast": lambda x, value: F.autocontrast(x),
    "Equalize": lambda x, value: F.equalize(x),
    "Invert": lambda x, value: F.invert(x),
}


def operation_value(name: str, magnitude: int | None, negative: bool) -> float:
    """The argument of an AutoAugment operation: what magnitude 0 to 9 means to it."""
    if name in _LARGEST:
        return _LARGEST[name] * magnitude / 9 * (-1 if negative else 1)
    if name == "Posterize":
        return 8 - round(magnitude * 4 / 9)  # bits that are kept
    if name == "Solarize":
        return 255 * (1 - magnitude / 9)  # values from here on are inverted
    return 0.0


def auto_augment(images: Tensor, policy: Sequence[SubPolicy], generator: torch.Generator) -> Tensor:
    """Give each image of a batch one of the sub-policies, drawn for itself.

    Each image draws its sub-policy, whether each of the two operations happens, and its sign, as AutoAugment does.
    Images that drew the same operation and value are then changed together, which is what makes it cheap.

    Args:
        images: uint8 (B, 3, H, W).
        policy: Sub-policies, all equally likely.
    """
    count = len(images)
    chosen = torch.randint(len(policy), (count,), generator=generator, device=generator.device).tolist()
    draws = uniform(count, 2, 2, generator=generator).tolist()
    images = images.clone()
    for stage in range(2):
        groups: dict[tuple[str, float], list[int]] = defaultdict(list)
        for i in range(count):
            name, probability, magnitude = policy[chosen[i]][stage]
            happens, sign = draws[i][stage]
            if happens < probability:
                groups[name, operation_value(name, magnitude, sign < 0.5)].append(i)
        for (name, value), ids in groups.items():
            index = torch.tensor(ids, device=images.device)
            images[index] = _OPERATIONS[name](images[index], value)
    return images


# Colour jitter


def _blend(images: Tensor, other: Tensor | float, factor: Tensor) -> Tensor:
    """factor * images + (1 - factor) * other in 8 bit; a factor above 1 leads away from `other`."""
    return (images * factor + other * (1 - factor)).clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Brightness of each pixel (ITU-R 601), float (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor_().unsqueeze(1)


def _shift_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a part of the full circle; value and saturation stay."""
    high, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    chroma = (high - low).float()
    red, green, blue = (images.float() / chroma.clamp(min=1)).split(1, dim=1)
    # The hue in sixths of the circle, counted from the colour that is highest; red first, as in Pillow.
    hue = torch.where(images[:, 1:2] == high, 2 + blue - red, 4 + red - green)
    hue = torch.where(images[:, :1] == high, green - blue, hue) + 6 * turn
    sixth = (hue + torch.tensor([5.0, 3.0, 1.0], device=images.device).view(1, 3, 1, 1)) % 6
    pixels = high - chroma * torch.minimum(sixth, 4 - sixth).clamp(0, 1)
    return pixels.round_().to(torch.uint8)


_JITTERS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, factor: _blend(x, 0.0, factor),
    lambda x, factor: _blend(x, _grey(x).mean((1, 2, 3), keepdim=True), factor),
    lambda x, factor: _blend(x, _grey(x), factor),
    lambda x, factor: _shift_hue(x, factor - 1),
)
"""Brightness, contrast, saturation, hue; each takes a factor per image, 1 for no change."""


def color_jitter(images: Tensor, strengths: Sequence[float], generator: torch.Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image by factors of its own, in an order of its own.

    Args:
        images: uint8 (B, 3, H, W).
        strengths: Largest change of the four; a factor lies in [1 - strength, 1 + strength] and not below 0, hue
            turns by up to `strength` of the full circle.
    """
    draws = uniform(len(images), 4, generator=generator)
    span = torch.tensor(strengths, device=draws.device)
    factors = (1 + (2 * draws - 1) * span).clamp(min=0).to(images.device)
    order = uniform(len(images), 4, generator=generator).argsort(1)
    images = images.clone()
    for step in range(4):
        for kind, change in enumerate(_JITTERS):
            index = (order[:, step] == kind).nonzero().squeeze(1).to(images.device)
            if len(index) and strengths[kind]:
                images[index] = change(images[index], factors[index, kind].view(-1, 1, 1, 1))
    return images


# Boxes


def cutout_boxes(count: int, size: tuple[int, int], share: float, generator: torch.Generator) -> Tensor:
    """One box per image around a pixel drawn at random, cut off at the border of the image.

    Args:
        count: B.
        size: Height and width of the images.
        share: Sides of the box as a share of the image's.

    Returns:
        int64 (B, 4): first row, row after the last, first column, column after the last.
    """
    edges = []
    for side in size:
        length = round(side * share)
        first = torch.randint(side, (count,), generator=generator, device=generator.device) - length // 2
        edges += [first.clamp(min=0), (first + length).clamp(max=side)]
    return torch.stack(edges, 1)


def erasing_boxes(
    count: int,
    size: tuple[int, int],
    *,
    probability: float,
    area: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """The boxes of random erasing (arXiv:1708.04896); one that does not fit is drawn again, ten times at most.

    Args:
        count: B.
        size: Height and width of the images.
        probability: That an image gets a box.
        area: Smallest and largest share of the image's area.
        ratio: Smallest and largest height / width, uniform in its logarithm.

    Returns:
        int64 (B, 4) as in `cutout_boxes`; empty boxes for the images without.
    """
    draws = uniform(count, 10, 2, generator=generator)
    pixels = (area[0] + (area[1] - area[0]) * draws[..., 0]) * (size[0] * size[1])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = (low + (high - low) * draws[..., 1]).exp()
    lengths = torch.stack([(pixels * aspect).sqrt(), (pixels / aspect).sqrt()]).round().long()
    fits = (lengths[0] < size[0]) & (lengths[1] < size[1])
    erased = fits.any(1) & (uniform(count, generator=generator) < probability)
    first_fit = fits.int().argmax(1, keepdim=True)
    edges = []
    for side, length in zip(size, lengths, strict=True):
        taken = length.gather(1, first_fit).squeeze(1) * erased
        first = (uniform(count, generator=generator) * (side - taken + 1)).long()
        edges += [first, first + taken]
    return torch.stack(edges, 1)


def erase(
    images: Tensor,
    boxes: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float] | None,
    generator: torch.Generator,
) -> Tensor:
    """Fill a box of each image with one colour or with noise.

    Args:
        images: uint8 (B, C, H, W).
        boxes: From `cutout_boxes` or `erasing_boxes`.
        mean: The colour, one number per channel where full brightness is 1.
        std: Standard deviation of noise around it that each pixel and channel draws for itself, cut off where 8 bit
            end. None: no noise.
    """
    top, bottom, left, right = (edge.view(-1, 1, 1) for edge in boxes.unbind(1))
    rows = torch.arange(images.shape[-2], device=boxes.device).view(1, -1, 1)
    cols = torch.arange(images.shape[-1], device=boxes.device)
    mask = (rows >= top) & (rows < bottom) & (cols >= left) & (cols < right)
    values = torch.tensor(mean, device=boxes.device)
    if std is not None:
        shape = (int(mask.sum()), len(mean))
        noise = torch.randn(shape, generator=generator, device=generator.device)
        values = values + noise * torch.tensor(std, device=noise.device)
    images = images.clone()
    values = (255 * values).round().clamp(0, 255).to(torch.uint8)
    images.movedim(1, -1)[mask.to(images.device)] = values.to(images.device)
    return images


# Mixing and targets


def draw_beta(alpha: float, generator: torch.Generator) -> float:
    """A number of Beta(alpha, alpha), which torch cannot draw from a given generator; NumPy draws it."""
    seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
    return float(np.random.default_rng(int(seed)).beta(alpha, alpha))


def cutmix(images: Tensor, partner: Tensor, kept: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """Put a box of each image's partner into the image, the same place for the whole batch (arXiv:1905.04899).

    Args:
        images: (B, C, H, W).
        partner: int64 (B,), the image that each takes its box from.
        kept: Share of the pixels that stay. The box has the image's shape and is centred on a pixel drawn at random;
            what leaves the image is lost.

    Returns:
        The images, and the share of their pixels that did stay.
    """
    edges = []
    for side in images.shape[-2:]:
        length = int(side * math.sqrt(1 - kept))
        first = int(torch.randint(side, (), generator=generator, device=generator.device)) - length // 2
        edges.append((max(first, 0), min(first + length, side)))
    (top, bottom), (left, right) = edges
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right][partner]
    return mixed, 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])


def mixup(images: Tensor, partner: Tensor, kept: float) -> Tensor:
    """kept * image + (1 - kept) * partner in 8 bit, rounded to the nearest (arXiv:1710.09412)."""
    return (kept * images.float() + (1 - kept) * images[partner].float()).round_().to(torch.uint8)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """float32 (B, K) rows, as in PyTorch and timm: `smoothing` / K everywhere, 1 - `smoothing` more for the label."""
    targets = torch.full((len(labels), num_classes), smoothing / num_classes, device=labels.device)
    return targets.scatter_(1, labels.unsqueeze(1), 1 - smoothing + smoothing / num_classes)


# In the loader


@contextlib.contextmanager
def borrowed_global_rngs(generator: torch.Generator) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch from `generator`, and put them back as they were.

    For libraries that draw from nothing else. CUDA's generators are left alone.
    """
    seed = int(torch.randint(2**32, (), generator=generator, device=generator.device))
    torch_global = torch.random.default_generator  # torch.manual_seed would reach the GPUs too
    before = random.getstate(), np.random.get_state(), torch_global.get_state()
    random.seed(seed)
    np.random.seed(seed)
    torch_global.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch_global.set_state(before[2])


@dataclass(frozen=True, kw_only=True)
class LoaderTransform:
    """A PIL RGB image and a generator to uint8 (3, H, W): random crop of any size, flip, RandAugment, by timm.

    Can be pickled. Seed the generator from (seed, epoch, sample), and no worker's past matters.
    """

    img_size: tuple[int, int]
    crop_area: tuple[float, float]
    crop_ratio: tuple[float, float]
    crop_interpolation: str
    flip: float
    rand_augment: str | None
    color_jitter: tuple[float, float, float, float]
    pixel_mean: tuple[float, float, float]
    native_transform: Callable[[Tensor], Tensor] | None = None
    _transform: Callable[[Image.Image], Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        transform = create_transform(
            (3, *self.img_size),
            is_training=True,
            scale=self.crop_area,
            ratio=self.crop_ratio,
            interpolation=self.crop_interpolation,
            hflip=self.flip,
            auto_augment=self.rand_augment,
            color_jitter=self.color_jitter if any(self.color_jitter) else None,
            mean=self.pixel_mean,
            normalize=False,
        )
        object.__setattr__(self, "_transform", transform)

    def __call__(self, image: Image.Image, generator: torch.Generator) -> Tensor:
        """Transform one image."""
        if self.native_transform is not None:
            image = F.to_pil_image(self.native_transform(F.pil_to_tensor(image)))
        with borrowed_global_rngs(generator):
            return self._transform(image)
