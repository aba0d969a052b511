"""Maps of features from any timm model, or from the pixels themselves, over a data set of images and masks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from eval.hummingbird.labels import draw
from eval.hummingbird.protocol import Protocol
from eval.hummingbird.sources import Batch
from timm_locat.errors import UserError
from timm_locat.models import create_model, dense_features

__all__ = ["RAW_PIXELS", "Extractor", "ModelSource"]

RAW_PIXELS = "raw-pixels"
STD_WITH_THE_SLIP = (0.229, 0.224, 0.255)
INTERPOLATION = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


class Extractor:
    """Images in 0..1 to (B, D, H, W) float32 maps.

    Args:
        name: A timm model name, as for `create_model`; or `raw-pixels:P`, the normalised pixels of patches of P x P.
        protocol: Size, layer, norm, pixel statistics.
        pretrained: Load the weights; without, the model is as its initialisation and the protocol's seed make it.
        device: Where the model runs.
        kwargs: Build arguments of the model.

    Raises:
        UserError: No such model or weights, a size that it cannot take, or a model without intermediate features.
    """

    def __init__(
        self,
        name: str,
        protocol: Protocol,
        *,
        pretrained: bool = True,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        self.name, self.protocol, self.device = name, protocol, device
        mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
        if name.startswith(RAW_PIXELS):
            self._model = _raw_pixels(name, protocol.img_size)
        else:
            torch.manual_seed(protocol.seed)
            model = create_model(name, pretrained=pretrained, img_size=protocol.img_size, **kwargs)
            if not hasattr(model, "forward_intermediates"):
                usable = ", ".join(timm.list_models("vit_tiny*")[:2])
                raise UserError(
                    f"{name} has no forward_intermediates, which gives the features; take one such as {usable}"
                )
            self._model = model
            if protocol.pixels == "model":
                config = resolve_model_data_config(model)
                mean, std = config["mean"], config["std"]
        if protocol.pixels == "std-0.255":
            std = STD_WITH_THE_SLIP
        self._model = self._model.to(device).eval().requires_grad_(False)
        self._mean, self._std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (mean, std))

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        x = (images.to(self.device) - self._mean) / self._std
        if self.name.startswith(RAW_PIXELS):
            maps = self._model(x)
        elif self.protocol.layer == -1:
            try:
                maps = dense_features(self._model, x, self.protocol.features, norm=self.protocol.norm)
            except ValueError as err:
                raise UserError(f"{self.name}: {err}") from err
        else:
            maps = self._layer(x)
        return maps.float()

    def _layer(self, x: Tensor) -> Tensor:
        if self.protocol.features == "after_prr":
            raise UserError(f"features after PRR are the last layer's, got layer {self.protocol.layer}; leave it at -1")
        indices = [self.protocol.layer]
        try:
            return self._model.forward_intermediates(
                x, indices=indices, norm=self.protocol.norm, intermediates_only=True
            )[0]
        except (AssertionError, IndexError) as err:
            raise UserError(f"{self.name} has no layer {self.protocol.layer}; choose one nearer to -1") from err


def _raw_pixels(name: str, size: tuple[int, int]) -> nn.Module:
    _, _, text = name.partition(":")
    if not text.isdecimal() or int(text) < 1 or any(side % int(text) for side in size):
        raise UserError(
            f"expected {RAW_PIXELS}:P with a patch of P pixels that divides {size[0]}x{size[1]}, such as "
            f"{RAW_PIXELS}:4, got {name!r}"
        )
    return nn.PixelUnshuffle(int(text))


def _read(data: Any, place: int) -> tuple[Image.Image, Tensor]:
    image, mask = data[place]
    if (image.height, image.width) != tuple(mask.shape):
        raise UserError(
            f"image {data.source(place)} is {image.height}x{image.width} and its mask "
            f"{mask.shape[0]}x{mask.shape[1]}; they must have one size"
        )
    return image, mask


class _Masks(Dataset[Tensor]):
    """Masks as they are, their images read and of the same size."""

    def __init__(self, data: Any, order: list[int]) -> None:
        self.data, self.order = data, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Tensor:
        return _read(self.data, self.order[index])[1]


class _Prepared(Dataset[tuple[int, Tensor, Tensor]]):
    """Images resized or cropped to one size, in 0..1, with their masks."""

    def __init__(self, data: Any, order: list[int], indices: list[int], protocol: Protocol, epoch: int | None) -> None:
        self.data, self.order, self.indices, self.protocol, self.epoch = data, order, indices, protocol, epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, Tensor, Tensor]:
        index = self.indices[place]
        image, mask = _read(self.data, self.order[index])
        pair = F.to_dtype(F.to_image(image), torch.float32, scale=True), tv_tensors.Mask(mask)
        transform = _changes(self.protocol, self.protocol.augment and self.epoch is not None)
        # The draws belong to the image and the pass, whatever process or worker makes them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw(self.protocol.seed, self.epoch or 0, index, "crop"))
            image, mask = transform(*pair)
        return index, image.as_subclass(Tensor), mask.as_subclass(Tensor)


@functools.lru_cache
def _changes(protocol: Protocol, augment: bool) -> v2.Transform:
    """What happens to an image and its mask together.

    torchvision crops at most the whole image, so that an area of (0.5, 2) means 0.5 to 1.
    The jitter is the public code's.
    """
    mode = INTERPOLATION[protocol.resize]
    if not augment:
        return v2.Resize(protocol.img_size, interpolation=mode, antialias=True)
    names = ("brightness", "contrast", "saturation", "hue")
    jitter = [v2.RandomApply([v2.ColorJitter(**{name: 0.1})], p=0.5) for name in names]
    return v2.Compose(
        [*jitter, v2.RandomResizedCrop(protocol.img_size, (0.5, 2.0), interpolation=mode, antialias=True)]
    )


class ModelSource:
    """Features of a model over a data set.

    Args:
        data: `data[i]` is a PIL image and its (height, width) mask; `data.source(i)` is what errors call it.
        extractor: The model.
        batch: Images at a time.
        workers: Processes that read images; 0 reads in this one.
    """

    def __init__(self, data: Any, extractor: Extractor, *, batch: int = 16, workers: int = 0) -> None:
        self.data, self.extractor, self.batch, self.workers = data, extractor, batch, workers
        # By name, so that the order of files does not count.
        self.order = sorted(range(len(data)), key=data.source)

    def __len__(self) -> int:
        return len(self.order)

    def name(self, index: int) -> str:
        return self.data.source(self.order[index])

    def batches(self, indices: Sequence[int], epoch: int | None) -> Iterator[Batch]:
        for numbers, images, masks in self._load(indices, epoch, self.batch):
            yield Batch(numbers.tolist(), self.extractor(images), masks)

    def masks(self, indices: Sequence[int]) -> Iterator[Tensor]:
        for _, _, masks in self._load(indices, None, 1):
            yield masks[0]

    def check(self, task: Any, progress: Callable[[Any, str], Any]) -> None:
        """Read every image and mask once, and refuse what the evaluation would refuse hours later."""
        pairs = DataLoader(_Masks(self.data, self.order), None, num_workers=self.workers)
        for index, mask in enumerate(progress(pairs, "check of images and masks")):
            task.check(mask, self.name(index))

    def picture(self, index: int, epoch: int | None) -> tuple[Tensor, Tensor]:
        """(3, height, width) image in 0..1 and its mask, as the features saw them."""
        _, image, mask = _Prepared(self.data, self.order, [index], self.extractor.protocol, epoch)[0]
        return image, mask

    def _load(self, indices: Sequence[int], epoch: int | None, batch: int) -> DataLoader:
        prepared = _Prepared(self.data, self.order, list(indices), self.extractor.protocol, epoch)
        return DataLoader(prepared, batch, num_workers=self.workers)
