"""Protocols of retrieval by name: every setting that changes the score, and a short hash of them all."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args, get_origin

from timm_locat.metrics import Average, Match

__all__ = ["PRESETS", "Protocol"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How features are read, kept, searched and scored. Scores of two protocols never belong in one column."""

    img_size: tuple[int, int] = (512, 512)
    """Height and width that every image is resized to, whatever its shape."""
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized; masks always take the nearest pixel."""
    pixels: Literal["model", "std-0.255"] = "model"
    """Mean and standard deviation of pixels: the model's own, or ImageNet's with 0.255 for the blue 0.225, a slip of
    the public code that has become part of published numbers."""
    features: Literal["before_prr", "after_prr"] = "before_prr"
    """Before or after patch representation refinement; see `timm_locat.models.features`."""
    layer: int = -1
    """Block, or stage of a hierarchical model, whose output is taken; negative counts from the end."""
    norm: bool = True
    """Apply the model's final norm."""
    augment: bool = True
    """Jitter colours and crop the images of the bank (not those of the queries)."""
    epochs: int = 2
    """Passes over the training images, each with other crops."""
    bank_size: int | None = 102_400
    """Rows of the bank; None takes every patch."""
    quota: Literal["spread", "floor"] = "spread"
    """Rows per image: shares that add up to `bank_size`, or its whole part for every image."""
    draws: Literal["seeded", "global"] = "seeded"
    """Random numbers of the patch choice: by (seed, epoch, image), or torch's global generator in reading order."""
    seed: int = 0
    """Seed of crops and patch choice."""
    ignored: Literal["drop", "class-0"] = "drop"
    """Ignored pixels of the bank: not counted, or counted as class 0, another slip of the public code."""
    min_valid: float = 0.5
    """Least share of a patch's pixels that must count for it to enter the bank (our choice). One pixel at least."""
    standardise: bool = False
    """Shift and scale every feature to mean 0 and deviation 1 over the training patches."""
    distance: Literal["cosine", "l2"] = "cosine"
    """Order of the neighbours: cosine similarity, or squared distance of the features as they are."""
    k: int = 30
    """Neighbours of a query."""
    beta: float = 0.02
    """Temperature of the softmax over the neighbours' cosine similarities."""
    decode: Literal["soft", "vote"] = "soft"
    """Soft patch labels, bilinearly upsampled; or the commonest label of the neighbours at every place in a patch."""
    tune: bool = False
    """Choose k (of 1, 3, 10, 30) and the distance on a tenth of the training images, which leave the bank."""
    average: Average = "present"
    """Classes that the mean is over; see `timm_locat.metrics.mean_iou`."""
    match: Match = "identity"
    """Whether predicted classes keep their names."""
    precision: Literal["float32", "float16"] = "float32"
    """How features are kept; products are always summed in float32."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                raise ValueError(f"{field.name} must be one of {', '.join(get_args(field.type))}, got {value!r}")
        least = {"epochs": 1, "k": 1, "bank_size": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")
        if len(self.img_size) != 2 or min(self.img_size) < 1:
            raise ValueError(f"img_size must be height and width in pixels, got {self.img_size}")
        if not self.beta > 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")
        if not 0 <= self.min_valid <= 1:
            raise ValueError(f"min_valid is a share from 0 to 1, got {self.min_valid}")

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


# The public code writes ignored pixels into the bank as class 0, keeps every patch, floors the quota and scores after a
# Hungarian match over all classes. DIP and CAPI are described by their own code (MIT and Apache-2.0), read, not run.
_PUBLIC = Protocol(
    pixels="std-0.255",
    quota="floor",
    draws="global",
    ignored="class-0",
    min_valid=0.0,
    average="all",
    match="hungarian",
)


def _changed(base: Protocol, **changes: object) -> Protocol:
    return Protocol(**{**asdict(base), **changes})


PRESETS: dict[str, Protocol] = {
    "hbird": Protocol(),
    "ohe-2.0": _PUBLIC,
    "locatvit": _changed(_PUBLIC, img_size=(224, 224), norm=False, bank_size=None, epochs=1),
    "dip": _changed(
        _PUBLIC,
        img_size=(504, 504),
        bank_size=10_240_000,
        distance="l2",
        beta=0.07,
        precision="float16",
        average="finite",
        match="identity",
    ),
    "capi-knn": Protocol(
        img_size=(224, 224),
        resize="bicubic",
        augment=False,
        epochs=1,
        bank_size=None,
        standardise=True,
        decode="vote",
        average="finite",
        tune=True,
    ),
}
"""`hbird` is clean: classes keep their names, ignored pixels are left out, the mean is over the classes present.
`ohe-2.0` is open-hummingbird-eval 2.0.0 with all its quirks, `locatvit` that code as the LocAtViT paper's repository
calls it, `dip` its fork in DIP, `capi-knn` the k-NN probe of CAPI."""
