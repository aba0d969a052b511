"""The cells of a study: which runs it is made of. A cell is a complete `TrainConfig` with a name.

Source: "Inducing Spatial Locality in Vision Transformers through the Training Protocol", arXiv:2605.16390, for the
question and for the eight protocols. Seeds, dose, controls, pooling and sizes are ours.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from timm_locat.data import DATASETS, load
from timm_locat.errors import UserError
from timm_locat.train import TrainConfig
from timm_locat.train.recipes import compact, demo

__all__ = ["FACTORS", "STUDIES", "Cell", "Settings", "StudyName", "cells"]

StudyName = Literal["protocol", "dose", "controls", "pooling", "scale", "embedded"]

EMBEDDED = "fashion_mnist_mini"


@dataclass(frozen=True)
class Condition:
    """What is changed in the common run."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    """Fields of `DataConfig`."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Build arguments of the model, on top of those of the common run."""
    model: str | None = None
    """Another model than the study's."""


@dataclass(frozen=True)
class Study:
    """A question, and the conditions that answer it, in the order in which they are run and reported."""

    about: str
    conditions: tuple[Condition, ...]
    seeds: int = 1
    """Seeds of every condition when none are asked for."""


def _protocols(*names: str) -> tuple[Condition, ...]:
    return tuple(Condition(name, data={"protocol": name}) for name in names)


# timm's tiny, small and base with the patches of the compact ViT.
SIZES: dict[str, dict[str, Any]] = {
    "compact": {},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_ratio": 4.0},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 4.0},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0},
}
MEAN = {"global_pool": "avg", "class_token": False}

STUDIES: dict[StudyName, Study] = {
    "protocol": Study(
        "All eight combinations of AutoAugment (aa), CutMix (cm) and label smoothing (ls), arXiv:2605.16390.",
        _protocols("baseline", "modern", "cm", "aa", "ls", "aa+cm", "cm+ls", "aa+ls"),
    ),
    "dose": Study(
        "CutMix on a growing share of the batches.",
        tuple(Condition(f"cm{p}", data={"protocol": "cm", "mix_prob": p}) for p in (0.0, 0.25, 0.5, 0.75, 1.0)),
    ),
    "controls": Study(
        "What it is about CutMix: mixing without boxes, boxes without mixing, boxes of another image without its "
        "label, and patches left out, each beside baseline and CutMix.",
        (
            *_protocols("baseline", "cm", "mixup", "cutout", "erasing", "cm_pixels"),
            Condition("dropped", data={"protocol": "baseline"}, model_kwargs={"patch_drop_rate": 0.25}),
        ),
    ),
    "pooling": Study(
        "Class token against the mean over patches, which has no class token to look at.",
        tuple(
            Condition(f"{name}-{pool}", data={"protocol": name}, model_kwargs=kwargs)
            for name in ("baseline", "modern")
            for pool, kwargs in (("token", {}), ("mean", MEAN))
        ),
    ),
    "scale": Study(
        "Larger models on the same patches, with and without the modern protocol.",
        tuple(
            Condition(f"{name}-{size}", data={"protocol": name}, model_kwargs=kwargs)
            for size, kwargs in SIZES.items()
            for name in ("baseline", "modern")
        ),
    ),
    "embedded": Study(
        "The compact models on the images that the package carries: plain, LocAt, each half of LocAt "
        "alone, and positional attention, also with the patches of all images in one other order.",
        (
            Condition("plain"),
            Condition("locat", model="locatvit_compact_patch4_32"),
            Condition("gaug", model="locatvit_compact_patch4_32", model_kwargs={"prr": False}),
            Condition("prr", model="locatvit_compact_patch4_32", model_kwargs={"gaug": False}),
            Condition("posattn", model="vit_posattn_compact_patch4_32"),
            Condition("permuted", data={"permute_patches": 0}, model="vit_posattn_compact_patch4_32"),
        ),
        seeds=3,
    ),
}
"""The studies by name."""

FACTORS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "protocol": {
        "baseline": (),
        "aa": ("aa",),
        "cm": ("cm",),
        "ls": ("ls",),
        "aa+cm": ("aa", "cm"),
        "aa+ls": ("aa", "ls"),
        "cm+ls": ("cm", "ls"),
        "modern": ("aa", "cm", "ls"),
    },
    "pooling": {
        "baseline-token": (),
        "baseline-mean": ("mean",),
        "modern-token": ("modern",),
        "modern-mean": ("mean", "modern"),
    },
    "embedded": {"plain": (), "gaug": ("gaug",), "prr": ("prr",), "locat": ("gaug", "prr")},
}
"""Study -> condition -> what is switched on in it, for the studies that hold every combination of a few components."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runs of a study have in common. A study folder holds one set of them."""

    study: StudyName
    data: tuple[str, ...] = (EMBEDDED,)
    """Data sets, each by name, or an image folder, parquet files, a `save_to_disk` folder or a Hub id."""
    root: tuple[str, ...] = ()
    """For data sets by name, the paths of their files, as many as there are in `data`."""
    conditions: tuple[str, ...] = ()
    """Only these conditions; all of the study when none is given."""
    models: tuple[str, ...] = ()
    """timm names; the compact ViT that fits the data when none is given."""
    seeds: int | None = None
    """Seeds of every condition: 0, 1, ...; one, or three for `embedded`, when not given."""
    more_seeds: str | None = None
    """Another number of seeds for some conditions, such as `baseline,modern,cm=3`."""
    image_passes: int | None = None
    """Images that a run sees, rounded up to whole epochs; that of the recipe when not given. An epoch leaves out what
    does not fill its last update."""
    global_batch_size: int | None = None
    """Images per update; that of the recipe when not given."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        if self.study not in get_args(StudyName):
            raise UserError(f"there is no study {self.study!r}; choose from {', '.join(STUDIES)}")
        if isinstance(self.data, str) or isinstance(self.root, str):
            raise UserError(f"data and root must be tuples of text, got {self.data!r} and {self.root!r}")
        if self.study == "embedded" and (self.data != (EMBEDDED,) or self.models):
            raise UserError(
                f"the study embedded has its own models, on {EMBEDDED}; leave out data={self.data} models={self.models}"
            )
        if not self.data or len(self.root) not in (0, len(self.data)):
            raise UserError(f"root must be one path for each of data, or none, got {self.data} and {self.root}")
        known = [condition.name for condition in STUDIES[self.study].conditions]
        unknown = [name for name in self.conditions if name not in known]
        if unknown:
            raise UserError(f"{self.study} has no condition {unknown[0]!r}; choose from {', '.join(known)}")
        for name in ("seeds", "image_passes", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.seeds_of("")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """Settings as a study folder holds them, or held them when a study had one data set.

        Raises:
            TypeError: A field is unknown.
        """
        lists = {name: [values[name]] for name in ("data", "root") if isinstance(values.get(name), str)}
        plain = {name: value for name, value in {**values, **lists}.items() if value is not None}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()})

    def seeds_of(self, condition: str) -> int:
        """Number of seeds of a condition."""
        least = self.seeds or STUDIES[self.study].seeds
        if self.more_seeds is None:
            return least
        names, _, count = self.more_seeds.partition("=")
        known = [c.name for c in STUDIES[self.study].conditions]
        wrong = [name for name in names.split(",") if name not in known]
        if wrong or not count.isdigit() or int(count) < least:
            raise UserError(
                f"more_seeds must be conditions out of {', '.join(known)} and a number of at least seeds={least}, "
                f"such as {known[0]}=3, got {self.more_seeds!r}"
            )
        return int(count) if condition in names.split(",") else least


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    model: str
    data: str
    condition: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """Name of its run folder."""
        return f"{last_part(self.model)}__{last_part(self.data)}__{self.condition}__seed{self.seed}"


def last_part(path: str) -> str:
    """A name that may be a path, without the folders that it lies in."""
    return path.rstrip("/").rpartition("/")[2]


def cells(settings: Settings, *, fitted: bool = True) -> list[Cell]:
    """The cells in the order in which they are run: every condition once before any second seed.

    Args:
        settings: Of the study.
        fitted: Fit the epochs to `image_passes`, for which the data is opened. False is for names alone.

    Raises:
        UserError: The data cannot be opened, has too few images for one update, or two cells would share a folder.
    """
    conditions = [c for c in STUDIES[settings.study].conditions if c.name in (settings.conditions or (c.name,))]
    roots = settings.root or (None,) * len(settings.data)
    bases = [common_run(settings, data, root, fitted) for data, root in zip(settings.data, roots, strict=True)]
    most = max(settings.seeds_of(condition.name) for condition in conditions)
    found = [
        cell(replace(base, model=model), condition, seed)
        for seed in range(most)
        for base in bases
        for model in settings.models or (base.model,)
        for condition in conditions
        if seed < settings.seeds_of(condition.name)
    ]
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"two cells are named {twice}: data sets and models must differ in the last part of their names"
        )
    return found


def cell(base: TrainConfig, condition: Condition, seed: int) -> Cell:
    """The common run with the changes of one condition."""
    kwargs = json.dumps({**json.loads(base.model_kwargs), **condition.model_kwargs})
    config = replace(
        base,
        model=condition.model or base.model,
        model_kwargs=kwargs,
        data=replace(base.data, **condition.data),
        seed=seed,
    )
    return Cell(config.model, config.data.name, condition.name, seed, config)


def recipe(settings: Settings, data: str) -> TrainConfig:
    """The recipe that a study changes."""
    if settings.study == "embedded":
        return replace(demo(), model="vit_compact_patch4_32")
    return compact("vit", data if data in DATASETS else "cifar10", "baseline")


def common_run(settings: Settings, data: str, root: str | None, fitted: bool) -> TrainConfig:
    """The run that all conditions change: the recipe, its epochs fitted to `image_passes`."""
    base = recipe(settings, data)
    batch = settings.global_batch_size or base.global_batch_size
    epochs, warmup = base.epochs, base.warmup_epochs
    if settings.image_passes is not None and fitted:
        images = len(load(data, "train", root=root))
        if images < batch:
            raise UserError(f"{data} has {images} training images, fewer than global_batch_size={batch}; lower it")
        epochs = math.ceil(settings.image_passes / images)
        warmup = epochs * base.warmup_epochs / base.epochs
    return replace(
        base,
        data=replace(base.data, name=data, root=root),
        epochs=epochs,
        warmup_epochs=warmup,
        global_batch_size=batch,
        mixed_precision=settings.mixed_precision,
        eval_every=max(1, epochs // 10),
        record_locality="0" if settings.study == "embedded" else "log",  # 0: at the start and at the end
    )
