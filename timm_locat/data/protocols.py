"""Augmentation protocols by name: what happens to a batch of training images, every value visible here.

A protocol works on whole batches of uint8 images on whatever device they are, and draws from one generator that the
trainer seeds from (seed, epoch, batch): the same batch is augmented the same way however often a run was resumed.
`timm_locat.data.augment` has the mechanics.

The `baseline` and `modern` protocols and the eight combinations between them are those of arXiv:2605.16390, which
names their parts and prints none of their values: values marked "our choice" are not the paper's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from timm_locat.data import augment as mechanics
from timm_locat.data.augment import LoaderTransform, SubPolicy

__all__ = ["POLICIES", "PROTOCOLS", "Protocol"]

POLICIES: dict[str, tuple[SubPolicy, ...]] = {
    "cifar10": (
        (("Invert", 0.1, None), ("Contrast", 0.2, 6)),
        (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
        (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
        (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.5, None), ("Equalize", 0.9, None)),
        (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
        (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
        (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
        (("Equalize", 0.6, None), ("Equalize", 0.5, None)),
        (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
        (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
        (("Equalize", 0.3, None), ("AutoContrast", 0.4, None)),
        (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
        (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
        (("Solarize", 0.5, 2), ("Invert", 0.0, None)),
        (("Equalize", 0.2, None), ("AutoContrast", 0.6, None)),
        (("Equalize", 0.2, None), ("Equalize", 0.6, None)),
        (("Color", 0.9, 9), ("Equalize", 0.6, None)),
        (("AutoContrast", 0.8, None), ("Solarize", 0.2, 8)),
        (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
        (("Solarize", 0.4, 5), ("AutoContrast", 0.9, None)),
        (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.9, None), ("Solarize", 0.8, 3)),
        (("Equalize", 0.8, None), ("Invert", 0.1, None)),
        (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None)),
    ),
    "svhn": (
        (("ShearX", 0.9, 4), ("Invert", 0.2, None)),
        (("ShearY", 0.9, 8), ("Invert", 0.7, None)),
        (("Equalize", 0.6, None), ("Solarize", 0.6, 6)),
        (("Invert", 0.9, None), ("Equalize", 0.6, None)),
        (("Equalize", 0.6, None), ("Rotate", 0.9, 3)),
        (("ShearX", 0.9, 4), ("AutoContrast", 0.8, None)),
        (("ShearY", 0.9, 8), ("Invert", 0.4, None)),
        (("ShearY", 0.9, 5), ("Solarize", 0.2, 6)),
        (("Invert", 0.9, None), ("AutoContrast", 0.8, None)),
        (("Equalize", 0.6, None), ("Rotate", 0.9, 3)),
        (("ShearX", 0.9, 4), ("Solarize", 0.3, 3)),
        (("ShearY", 0.8, 8), ("Invert", 0.7, None)),
        (("Equalize", 0.9, None), ("TranslateY", 0.6, 6)),
        (("Invert", 0.9, None), ("Equalize", 0.6, None)),
        (("Contrast", 0.3, 3), ("Rotate", 0.8, 4)),
        (("Invert", 0.8, None), ("TranslateY", 0.0, 2)),
        (("ShearY", 0.7, 6), ("Solarize", 0.4, 8)),
        (("Invert", 0.6, None), ("Rotate", 0.8, 4)),
        (("ShearY", 0.3, 7), ("TranslateX", 0.9, 3)),
        (("ShearX", 0.1, 6), ("Invert", 0.6, None)),
        (("Solarize", 0.7, 2), ("TranslateY", 0.6, 7)),
        (("ShearY", 0.8, 4), ("Invert", 0.8, None)),
        (("ShearX", 0.7, 9), ("TranslateY", 0.8, 3)),
        (("ShearY", 0.8, 5), ("AutoContrast", 0.7, None)),
        (("ShearX", 0.7, 2), ("Invert", 0.1, None)),
    ),
}
"""AutoAugment's policies (arXiv:1805.09501): two operations with probability and magnitude; an image draws a line."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Random changes to a batch of images, in the order of these fields; the default changes nothing.

    With `crop_area` set, the steps up to `color_jitter` are done image by image in the loader (`per_image`), and
    `augment` and `apply` do the rest. Otherwise everything is done by `augment` and `apply`.
    """

    crop_area: tuple[float, float] | None = None
    """Smallest and largest share of the image's area that is cut out at random and resized. None: no such crop."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of that crop."""
    crop_interpolation: str = "random"
    """How it is resized; `random` draws bilinear or bicubic."""
    crop_padding: float = 0.0
    """Black border as a share of the image side, from which a crop of the original size is cut at random."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    auto_augment: Literal["cifar10", "svhn"] | None = None
    """AutoAugment policy, a name in `POLICIES`; every image draws its own sub-policy."""
    rand_augment: str | None = None
    """RandAugment in timm's notation; needs `crop_area`."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Largest change of brightness, contrast, saturation (each around 1) and hue (in turns)."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution, one draw per batch; 0 does none."""
    cutmix: float = 0.0
    """Alpha of CutMix's Beta distribution, one draw and one box per batch; 0 does none."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    mix_labels: bool = True
    """Mix the targets as the images are mixed. False: pixels of another image and the label of this one alone."""
    switch_prob: float = 0.5
    """Probability that a mixed batch gets CutMix and not mixup, where both are on."""
    label_smoothing: float = 0.0
    """Share s of the target that is spread over all K classes, s / K each, as in PyTorch and timm."""
    cutout: float = 0.0
    """Sides of a box that is filled with `pixel_mean`, as a share of the image's sides."""
    erase_prob: float = 0.0
    """Probability that an image has a box filled with noise: random erasing in pixel mode."""
    erase_area: tuple[float, float] = (0.02, 1 / 3)
    """Smallest and largest share of the image's area that is erased."""
    erase_ratio: tuple[float, float] = (0.3, 1 / 0.3)
    """Smallest and largest height / width of that box."""
    pixel_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Colour of cutout, of RandAugment's borders and of the noise, where 1 is full brightness; ImageNet's mean."""
    pixel_std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of the noise: one after normalisation by the model's mean and deviation, ImageNet's."""

    def __post_init__(self) -> None:
        for name in ("flip", "mix_prob", "switch_prob", "erase_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability in [0, 1], got {getattr(self, name)}")
        for name in ("crop_padding", "cutout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                what = "the target" if name == "label_smoothing" else "the image side"
                raise ValueError(f"{name} must be a share of {what} in [0, 1), got {getattr(self, name)}")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be an alpha above 0, or 0 for none, got {getattr(self, name)}")
        if min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter must be 0 or more, its hue at most 0.5, got {self.color_jitter}")
        if self.auto_augment is not None and self.auto_augment not in POLICIES:
            raise ValueError(f"auto_augment must be one of {', '.join(POLICIES)} or None, got {self.auto_augment!r}")
        if self.crop_area is None and self.rand_augment is not None:
            raise ValueError(f"rand_augment must come with crop_area, got {self.rand_augment!r} without")
        if self.crop_area is not None and (self.crop_padding or self.auto_augment):
            raise ValueError("crop_area must come without crop_padding and auto_augment, got both")

    @property
    def soft_targets(self) -> bool:
        """Whether `apply` returns a row of class weights per image, and not its label."""
        return bool(self.mixup or self.cutmix or self.label_smoothing)

    def per_image(
        self, img_size: tuple[int, int], *, native_transform: Callable[[Tensor], Tensor] | None = None
    ) -> LoaderTransform | None:
        """The steps for the loader, or None where there are none and images are decoded as for evaluation.

        Args:
            img_size: Height and width of the result.
            native_transform: Applied to the pixels as read, before all else; a data set's.

        Returns:
            A picklable callable: PIL RGB image and `torch.Generator` to uint8 (3, H, W). Whoever calls it seeds the
            generator from (seed, epoch, sample), so that the work may be shared in any way.
        """
        if self.crop_area is None:
            return None
        names = ("crop_area", "crop_ratio", "crop_interpolation", "flip", "rand_augment", "color_jitter", "pixel_mean")
        values = {name: getattr(self, name) for name in names}
        return LoaderTransform(img_size=tuple(img_size), native_transform=native_transform, **values)

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The image-only steps: `apply` without mixing.

        Args:
            images: uint8 (B, 3, H, W); any channels and dtype for `crop_padding` and `flip` alone. Left as they are.
            generator: Draws happen on its device; one on the CPU spares a GPU the waiting, and gives the same draws.

        Returns:
            Images of the same shape, dtype and device.
        """
        return self._erase(self._change(images, generator), generator)

    def apply(
        self, images: Tensor, labels: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Augment a batch and make its targets.

        Args:
            images: As for `augment`.
            labels: int64 (B,) on the same device.
            num_classes: K.
            generator: As for `augment`.

        Returns:
            The images; and the labels as they came, or, where `soft_targets` says so, float32 (B, K) rows that sum
            to 1.
        """
        images, targets = self._change(images, generator), labels
        if self.soft_targets:
            targets = mechanics.soft_targets(labels, num_classes, self.label_smoothing)
        if self.mixup or self.cutmix:
            images, targets = self._mix(images, targets, generator)
        return self._erase(images, generator), targets

    def for_data(self, name: str) -> "Protocol":
        """This protocol for a data set: the changes that `FOR_DATA` lists under its name, or itself."""
        plain = name.lower().replace("-", "_")
        for known, changes in FOR_DATA.items():
            if plain == known or plain.startswith(f"{known}_"):
                # Jitter takes the place of AutoAugment: both are for the protocols that have AutoAugment.
                skipped = ("auto_augment", "color_jitter") if self.auto_augment is None else ()
                return replace(self, **{key: value for key, value in changes.items() if key not in skipped})
        return self

    def _change(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Everything before mixing."""
        jitter = any(self.color_jitter) and self.crop_area is None
        changes_pixels = jitter or self.auto_augment or self.mixup or self.cutmix or self.cutout or self.erase_prob
        if changes_pixels and (images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3):
            raise ValueError(f"images must be uint8 (B, 3, H, W), got {images.dtype} of shape {tuple(images.shape)}")
        if self.crop_padding:
            images = mechanics.random_shift(images, self.crop_padding, generator)
        if self.flip and self.crop_area is None:
            images = mechanics.random_flip(images, self.flip, generator)
        if self.auto_augment:
            images = mechanics.auto_augment(images, POLICIES[self.auto_augment], generator)
        if jitter:
            images = mechanics.color_jitter(images, self.color_jitter, generator)
        return images

    def _mix(self, images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mix the batch with a permutation of itself, images and targets by the same weights."""
        mixed, switch = mechanics.uniform(2, generator=generator).tolist()
        if mixed >= self.mix_prob:
            return images, targets
        partner = torch.randperm(len(images), generator=generator, device=generator.device).to(images.device)
        if self.cutmix and (not self.mixup or switch < self.switch_prob):
            kept = mechanics.draw_beta(self.cutmix, generator)
            images, kept = mechanics.cutmix(images, partner, kept, generator)
        else:
            kept = mechanics.draw_beta(self.mixup, generator)
            images = mechanics.mixup(images, partner, kept)
        if not self.mix_labels:
            return images, targets
        return images, kept * targets + (1 - kept) * targets[partner]

    def _erase(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Boxes, last of all and after mixing, as timm's training script has it."""
        size = (images.shape[-2], images.shape[-1])
        fill = {"mean": self.pixel_mean, "generator": generator}
        if self.cutout:
            boxes = mechanics.cutout_boxes(len(images), size, self.cutout, generator)
            images = mechanics.erase(images, boxes, std=None, **fill)
        if self.erase_prob:
            boxes = mechanics.erasing_boxes(
                len(images),
                size,
                probability=self.erase_prob,
                area=self.erase_area,
                ratio=self.erase_ratio,
                generator=generator,
            )
            images = mechanics.erase(images, boxes, std=self.pixel_std, **fill)
        return images


# The parts of the baseline and of the eight combinations. Every value is our choice.
BASELINE: dict[str, Any] = {"crop_padding": 0.125, "flip": 0.5}  # 4 pixels of 32, 8 of 64
AA: dict[str, Any] = {"auto_augment": "cifar10"}  # for every data set but SVHN, see FOR_DATA
CM: dict[str, Any] = {"cutmix": 1.0, "mix_prob": 0.5}  # the probability may well move a result: report it
LS: dict[str, Any] = {"label_smoothing": 0.1}
JITTER: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.4, 0.1)}

PROTOCOLS: dict[str, Protocol] = {
    "none": Protocol(),
    "flip": Protocol(flip=0.5),
    # arXiv:2605.16390: random crop and horizontal flip, and all combinations of AutoAugment, CutMix, label smoothing.
    "baseline": Protocol(**BASELINE),
    "aa": Protocol(**BASELINE, **AA),
    "cm": Protocol(**BASELINE, **CM),
    "ls": Protocol(**BASELINE, **LS),
    "aa+cm": Protocol(**BASELINE, **AA, **CM),
    "aa+ls": Protocol(**BASELINE, **AA, **LS),
    "cm+ls": Protocol(**BASELINE, **CM, **LS),
    "aa+cm+ls": Protocol(**BASELINE, **AA, **CM, **LS),
    "modern": Protocol(**BASELINE, **AA, **CM, **LS),
    # The same with colour jitter for AutoAugment, as the paper does on Tiny-ImageNet.
    "modern_jitter": Protocol(**BASELINE, **JITTER, **CM, **LS),
    # Controls for CutMix, our choice throughout: mixing without boxes, as often as `cm`, and boxes without mixing.
    "mixup": Protocol(**BASELINE, mixup=1.0, mix_prob=0.5),
    "cutout": Protocol(**BASELINE, cutout=0.5),
    "erasing": Protocol(**BASELINE, erase_prob=0.5),
    # CutMix's pixels, and the label of the image that most of them may no longer come from.
    "cm_pixels": Protocol(**BASELINE, **CM, mix_labels=False),
    # ImageNet recipe of LocAtViT (arXiv:2603.04892, its training script), which is that of DeiT. The colour jitter is
    # in the recipe and does nothing: timm leaves it out wherever RandAugment is on.
    "deit": Protocol(
        crop_area=(0.08, 1.0),
        crop_ratio=(3 / 4, 4 / 3),
        crop_interpolation="random",
        flip=0.5,
        rand_augment="rand-m9-mstd0.5-inc1",
        color_jitter=(0.4, 0.4, 0.4, 0.0),
        mixup=0.8,
        cutmix=1.0,
        mix_prob=1.0,
        switch_prob=0.5,
        label_smoothing=0.1,
        erase_prob=0.25,
    ),
}
"""The protocols by name."""

FOR_DATA: Mapping[str, Mapping[str, Any]] = {
    # A mirrored digit or letter is another one, or none. SVHN has an AutoAugment policy of its own.
    "svhn": {"flip": 0.0, "auto_augment": "svhn"},
    "mnist": {"flip": 0.0},
    "emnist": {"flip": 0.0},
    "kmnist": {"flip": 0.0},
    # arXiv:2605.16390: ColorJitter in the place of AutoAugment.
    "tiny_imagenet": {"auto_augment": None, **JITTER},
}
"""Changes of every protocol by data set (exactly this name, or this name, `_` and more). What concerns AutoAugment,
and the jitter in its place, changes only the protocols that have AutoAugment."""
