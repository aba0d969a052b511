"""python -m timm_locat.locality MODEL [--data ...] [--help]"""

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from timm_locat.data import load
from timm_locat.errors import UserError, require, run_cli
from timm_locat.locality import PRESETS, Conventions, Locality, chance_recall, record
from timm_locat.locality.maps import draw_maps, query_maps
from timm_locat.locality.plots import draw_distances, draw_gaussians, draw_plane
from timm_locat.locality.watch import attention_layers
from timm_locat.models import create_model, parse_kwargs
from timm_locat.record import write_record
from timm_locat.train.launched import choose_threads
from timm_locat.train.samples import Samples, batches, input_size, normaliser, num_patches, patch_order, permuted

tyro = require("tyro", "train", "python -m timm_locat.locality")

PROTOCOL = "locality/v1"


@dataclass(frozen=True, kw_only=True)
class Config:
    """How local the attention of a model is: a table, and a folder with numbers and pictures."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Any timm model name, `local-dir:RUN_FOLDER` or `hf-hub:OWNER/NAME`."""
    against: str | None = None
    """A second model, measured on the same images and put beside the first."""
    untrained: bool = False
    """Leave the models at their random start instead of loading their published weights."""
    data: str | None = None
    """A data set by name, a path, or a Hub id; not needed for attention that does not depend on the image."""
    root: str | None = None
    """For a data set by name, the path of its files."""
    split: str = "test"
    images: int = 512
    """Number of images, spread evenly over the split; all of them, where there are fewer."""
    preset: Literal["none", "probing-vits", "cl-vs-mim", "vit-analysis", "convit"] = "none"
    """Count as this public code does, instead of the conventions below."""
    conventions: Conventions = field(default_factory=Conventions)
    recall: bool = False
    """Measure how well each head finds the true neighbours of a patch, too."""
    permute_patches: Annotated[int | None, tyro.conf.arg(metavar="SEED")] = None
    """For models trained with `--data.permute-patches SEED`: show patches in that order, and let `--recall` ask for
    neighbours in the image as it was. Distances are those between the patches as shown."""
    model_kwargs: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Further arguments of the models as a JSON object."""
    img_size: int | None = None
    """Height and width in pixels; None takes the model's own."""
    batch_size: int = 32
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    """Of the weights of an untrained model."""
    out: Path | None = None
    """Folder of the results; results/locality/MODEL when not given."""

    def __post_init__(self) -> None:
        for name in ("images", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        parse_kwargs(self.model_kwargs, "--model-kwargs")
        if self.permute_patches is not None and not self.recall:
            raise ValueError("--permute-patches says where the true neighbours are, so it needs --recall")

    @property
    def counting(self) -> Conventions:
        """The conventions asked for."""
        return self.conventions if self.preset == "none" else PRESETS[self.preset]

    @property
    def folder(self) -> Path:
        words = [self.model] + ([self.against] if self.against else [])
        name = "__vs__".join(re.sub(r"[^\w.-]+", "_", word) for word in words)
        return Path("results") / "locality" / name if self.out is None else self.out


class Images:
    """The images that a model is measured on, as it wants them.

    Args:
        config: Names the data.
        name: Name of the model.
        model: The model.
    """

    def __init__(self, config: Config, name: str, model: nn.Module) -> None:
        data = load(config.data, config.split, root=config.root)
        facts = resolve_model_data_config(model)
        size = input_size(model, name)
        options = dict(crop_pct=facts["crop_pct"], interpolation=facts["interpolation"])
        self.samples = Samples(data, size, in_memory=False, **options)
        self.prepare = normaliser(facts, torch.device(config.device))
        if config.permute_patches is not None:
            self.prepare = permuted(self.prepare, model, config.permute_patches)
        count = min(config.images, len(data))
        self.ids = [i * len(data) // count for i in range(count)]
        self.batch_size = config.batch_size
        self.title = f"reading {name}"

    def __iter__(self) -> Iterator[Tensor]:
        tqdm = require("tqdm", "train", "the progress bar").tqdm
        parts = [self.ids[i : i + self.batch_size] for i in range(0, len(self.ids), self.batch_size)]
        # disable=None: a bar with the time left on a terminal, nothing in a log file
        with tqdm(total=len(self.ids), desc=self.title, unit="image", leave=False, disable=None) as bar:
            for images, _ in batches(self.samples, parts):
                yield self.prepare(images)
                bar.update(len(images))

    def first(self) -> Tensor:
        """uint8 (3, height, width) of the first image."""
        return next(batches(self.samples, [self.ids[:1]]))[0][0]


def measure_model(config: Config, name: str) -> tuple[Locality, nn.Module, Images | None]:
    """Build a model, find its images, and measure it."""
    size = None if config.img_size is None else (config.img_size, config.img_size)
    kwargs = parse_kwargs(config.model_kwargs, "--model-kwargs")
    if not config.untrained and timm.is_model(name) and not timm.is_model_pretrained(name):
        raise UserError(f"{name} has no published weights; give a run folder as local-dir:FOLDER, or --untrained")
    torch.manual_seed(config.seed)
    model = create_model(name, pretrained=not config.untrained, img_size=size, **kwargs).eval().to(config.device)
    order = None
    if config.permute_patches is not None:
        order = patch_order(num_patches(model), config.permute_patches)
    images = None
    if not all(layer.fixed for layer in attention_layers(model)):
        if config.data is None:
            raise UserError(f"the attention of {name} depends on the image; say with --data which images to measure")
        images = Images(config, name, model)
    return record(model, images or (), config.counting, recall=config.recall, permutation=order), model, images


def run(config: Config) -> str:
    """Measure, write the folder, and return what to print."""
    if config.folder.exists() and not config.folder.is_dir():
        raise UserError(f"--out must name a folder, and {config.folder} is a file")
    if config.device == "cpu":
        choose_threads()
    elif not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; use --device cpu")
    result, model, images = measure_model(config, config.model)
    results = [result]
    if config.against is not None:
        results.append(measure_model(config, config.against)[0])
    folder = config.folder
    extra: dict[str, Any] = {"against": results[1].to_dict()} if len(results) == 2 else {}
    write_record(
        folder / "locality.json",
        protocol=PROTOCOL,
        results=result.to_dict(),
        config=config,
        seed=config.seed if config.untrained else None,
        **extra,
    )
    draw_distances(results, folder / "distances.png")
    draw_plane(results, folder / "plane.png")
    if result.gaussians is not None:
        draw_gaussians(result, folder / "gaussians.png")
    if images is not None and not any(layer.windowed for layer in attention_layers(model)):
        high, wide = result.grids[0]
        queries = sorted({(high // 2, wide // 2), (high // 4, wide // 4), (3 * high // 4, wide // 4)})
        pixels = images.first()
        title = f"{result.model}: attention of a patch, mean of heads"
        draw_maps(
            query_maps(model, images.prepare(pixels[None])[0], queries),
            pixels,
            queries,
            folder / "maps.png",
            title=title,
        )
    text = "\n\n".join(table(r) for r in results)
    if len(results) == 2:
        text += "\n\n" + comparison(*results)
    return f"{text}\n\nnumbers and pictures: {folder}"


COLUMNS = {
    "mad": "distance",
    "mad_without_self": "without self",
    "entropy": "entropy",
    "effective_tokens": "keys",
    "self_mass": "self",
    "neighbour_mass": "neighbours",
    "prefix_mass": "prefix",
    "neighbourhood_recall": "recall",
    "alpha": "alpha",
    "sigma_rows": "sigma rows",
    "sigma_columns": "sigma cols",
}
"""Measures of the table, and their heads; those that a result lacks are left out."""


def table(result: Locality) -> str:
    """A row for each layer: means over its heads, and the least distance of one."""
    counting = result.conventions
    names = [name for name in COLUMNS if name in result.tables]
    heads = ["layer", "least", *(COLUMNS[name] for name in names)]
    lines = [
        f"{result.model}: {result.images:,} images, distance in {counting.unit}, prefix tokens: {counting.prefix}",
        "  ".join(f"{head:>12}" for head in heads),
    ]
    for i, row in enumerate(result.values["mad"]):
        means = [result.layer_means(name)[i] for name in names]
        least = min((value for value in row if value is not None), default=None)
        lines.append("  ".join([f"{i:>12}", *(_shown(value) for value in (least, *means))]))
    found = result.summary()
    if found["min_mad_over_heads"] is not None:
        lines.append(
            f"least distance of a head {found['min_mad_over_heads']:.4f} (layer {found['min_mad_layer']}, head "
            f"{found['min_mad_head']}: self {found['min_mad_self_mass']:.3f}, neighbours "
            f"{found['min_mad_neighbour_mass']:.3f}, prefix {found['min_mad_prefix_mass']:.3f}); of a layer "
            f"{found['min_mad_over_layers']:.4f}"
        )
    if found["mean_empty_rows"]:
        lines.append(f"{100 * found['mean_empty_rows']:.2f} % of the rows have no attention left for patches")
    if "neighbourhood_recall" in names:
        lines.append(f"recall of true neighbours by chance: {chance_recall(result.grids[0]):.3f}")
    return "\n".join(lines)


def comparison(a: Locality, b: Locality) -> str:
    """The summaries of two models side by side."""
    found = a.compare(b)
    width = max(map(len, found["summary"]))
    lines = [f"{'':<{width}}  {found['models'][0]:>28}  {found['models'][1]:>28}  {'difference':>12}"]
    for name, (mine, other, difference) in found["summary"].items():
        lines.append(f"{name:<{width}}  {_shown(mine):>28}  {_shown(other):>28}  {_shown(difference)}")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return f"{'-':>12}"
    return f"{value:>12d}" if isinstance(value, int) else f"{value:>12.4f}"


def main() -> None:
    """Read the command line, measure, print."""
    for module in ("datasets", "matplotlib", "tqdm"):
        require(module, "train", "python -m timm_locat.locality")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    config = tyro.cli(Config, prog="python -m timm_locat.locality", config=(tyro.conf.FlagCreatePairsOff,))
    print(run(config))


if __name__ == "__main__":
    run_cli(main)
