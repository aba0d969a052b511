"""What augmentation costs: time of each protocol on a batch, as a share of a training step on the same batch.

Every round times all protocols, the step and the step once more back to back, in an order of its own. A round gives one
share for each protocol, in which the machine's mood at that moment falls out; step / step shows how much of it is left.
"""

import itertools
import math
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from timm.data import resolve_model_data_config
from torch.nn import functional as F

from eval import speed
from eval.paired import QUIET_CPU_SHARE, noise, paired_ratios, spread
from timm_locat.data import PROTOCOLS, Protocol, eval_transform, load
from timm_locat.errors import UserError, require
from timm_locat.record import write_record
from timm_locat.train import RECIPES, TrainConfig
from timm_locat.train.build import build_model, build_optimizer
from timm_locat.train.samples import input_size, native_transform, normaliser, seed_for

PROTOCOL = "augment-speed/v1"
DATA = "fashion_mnist_mini"
STEP, AGAIN = "step", "step again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Time of augmentation on a CPU, per protocol, as a share of a training step of a recipe, interleaved with it.

    A step is normalisation, forward and backward pass and optimizer on one batch of the recipe, in its precision.
    Reported are the median share over the rounds with its middle half, and whether it is within the bar.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")] = "vit_compact_fashion_mnist_modern"
    """Recipe of timm_locat.train that gives the step: its model, batch size, precision and optimizer."""
    protocols: tuple[str, ...] = tuple(name for name in PROTOCOLS if name != "none")
    """Names of the protocols; each as it is for the data set of the recipe."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Images per batch; the recipe's when left out."""
    rounds: int = 15
    """Rounds, each of which gives one share for each protocol; at least 3."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads of torch; torch's own choice when left out."""
    bar: float = 0.05
    """Largest share allowed. No noise is added to it."""
    strict: bool = False
    """Leave with status 1 if a protocol misses the bar."""
    seed: int = 0
    """Seed of weights, draws and orders."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the record; a name made of the settings, in ./results, when left out."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"there is no recipe {self.recipe!r}; python -m timm_locat.train --help names them")
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"--protocols takes {', '.join(PROTOCOLS)}, got {', '.join(unknown)}")
        for name, least in (("batch", 2), ("rounds", 3), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
        if not self.protocols:
            raise ValueError("--protocols names no protocol")
        if not (math.isfinite(self.bar) and self.bar > 0):
            raise ValueError(f"--bar must be a share above 0, such as 0.05, got {self.bar}")

    def run(self) -> TrainConfig:
        """The recipe, with its own batch size or the one asked for."""
        recipe = RECIPES[self.recipe]()
        return recipe if self.batch is None else replace(recipe, global_batch_size=self.batch)


def make_steps(config: Config) -> dict[str, speed.Step]:
    """What is timed, by name: the training step, the same once more, and each protocol; all on the same images.

    Raises:
        UserError: The batch is larger than the set of images.
    """
    run, data = config.run(), load(DATA)
    count, num_classes = run.global_batch_size, len(data.classes)
    if count > len(data):
        raise UserError(f"{DATA} has {len(data):,} images, fewer than a batch of {count:,}; lower --batch")
    torch.manual_seed(config.seed)
    half = run.mixed_precision == "bf16"  # fp16 is not there on a CPU, where training falls back to float32 as well
    model = build_model(replace(run, pretrained=False), num_classes, fused=not half).train()
    size, facts, native = input_size(model, run.model), resolve_model_data_config(model), native_transform(data)
    images = [data[i][0] for i in range(count)]
    transform = eval_transform(size, facts["crop_pct"], facts["interpolation"], native_transform=native)
    pixels, labels = torch.stack([transform(image) for image in images]), data.labels[:count]
    targets = F.one_hot(labels, num_classes).float()
    optimizer, prepare = build_optimizer(run, model), normaliser(facts, torch.device("cpu"))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits = model(prepare(pixels)).float()
        F.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def augmentation(protocol: Protocol) -> speed.Step:
        per_image, calls = protocol.per_image(size, native_transform=native), itertools.count()

        def augment() -> None:
            generator = torch.Generator().manual_seed(seed_for(config.seed, next(calls)))  # other draws at each call
            batch = pixels
            if per_image is not None:  # of images that have been read: reading is not timed
                batch = torch.stack([per_image(image, generator) for image in images])
            protocol.apply(batch, labels, num_classes, generator)

        return augment

    return {STEP: step, AGAIN: step} | {
        name: augmentation(PROTOCOLS[name].for_data(run.data.name)) for name in config.protocols
    }


def time_rounds(steps: dict[str, speed.Step], config: Config) -> tuple[dict[str, list[float]], float]:
    """Seconds of one pass of each step in each round, and the part of the time that this thread had a core, 0 to 1."""
    passes = {}
    for name, step in steps.items():
        step()
        once = statistics.median(speed.seconds(step, 1, "cpu") for _ in range(3))
        passes[name] = max(1, math.ceil(speed.MIN_SAMPLE_S / once))
    found: dict[str, list[float]] = {name: [] for name in steps}
    orders = random.Random(config.seed)
    tqdm = require("tqdm", "eval", "the progress bar of python -m eval speed augment").tqdm
    with speed.paused_collection():
        wall, own = time.perf_counter(), time.thread_time()
        for _ in tqdm(range(config.rounds), desc="rounds", leave=False, disable=None):
            for name in orders.sample(list(steps), len(steps)):
                found[name].append(speed.seconds(steps[name], passes[name], "cpu") / passes[name])
        share = (time.thread_time() - own) / (time.perf_counter() - wall)
    return found, min(1.0, share)


def measure(config: Config) -> dict[str, Any]:
    """The results of a record."""
    seconds, cpu_share = time_rounds(make_steps(config), config)
    images = config.run().global_batch_size
    again = spread(paired_ratios(seconds[AGAIN], seconds[STEP]))
    protocols = {}
    for name in config.protocols:
        share = spread(paired_ratios(seconds[name], seconds[STEP]))
        protocols[name] = {
            "us_per_image": 1e6 * statistics.median(seconds[name]) / images,
            "share": share,
            "outcome": "met" if share["median"] <= config.bar else "missed",
        }
    return {
        "protocols": protocols,
        "step_us_per_image": 1e6 * statistics.median(seconds[STEP]) / images,
        "step_again": again,
        "noise": noise(again),
        "images": images,
        "threads": torch.get_num_threads(),
        "cpu_share": cpu_share,
        "seconds": seconds,
    }


def report(config: Config, results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    run, width = config.run(), max(map(len, config.protocols))
    again = results["step_again"]
    lines = [
        f"step of {config.recipe}: {run.model}, batch {results['images']}, precision {run.mixed_precision}, "
        f"{results['threads']} threads: {results['step_us_per_image']:.0f} us/image",
        f"step / step {again['median']:.3f} ({again['q1']:.3f} .. {again['q3']:.3f})",
        "",
        f"{'protocol':<{width}}  us/image  share of a step (middle half)  bar of {100 * config.bar:g} %",
    ]
    for name, row in results["protocols"].items():
        median, q1, q3 = (f"{100 * row['share'][key]:.2f}" for key in ("median", "q1", "q3"))
        lines.append(
            f"{name:<{width}}  {row['us_per_image']:>8.0f}  {f'{median} % ({q1} .. {q3})':<29}  {row['outcome']}"
        )
    if results["cpu_share"] < QUIET_CPU_SHARE:
        lines.append(
            f"warning: other programs were running; the timing thread had a core only {results['cpu_share']:.0%} of "
            "the time, so the times are too long; with --threads 1 the shares hold all the same"
        )
    return "\n".join(lines)


def run(config: Config) -> tuple[str, int]:
    """Measure, write the record, and return the report with the exit status."""
    name = f"{PROTOCOL.replace('/', '-')}__{config.recipe}__b{config.run().global_batch_size}.json"
    path = Path("results") / name if config.out is None else config.out
    if path.is_dir():
        raise UserError(f"--out must name a file, and {path} is a folder")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.threads or threads)
        results = measure(config)
        write_record(path, protocol=PROTOCOL, results=results, config=config, seed=config.seed)
    finally:
        torch.set_num_threads(threads)
    missed = any(row["outcome"] == "missed" for row in results["protocols"].values())
    return f"{report(config, results)}\nrecord: {path}", int(config.strict and missed)
