"""What retrieval costs: exact search against `faiss.knn` on the same arrays, and all of it against a naive reading.

Each round runs everything once, in an order of its own, and gives one ratio for each comparison. Times are CPU seconds
of the process: other programs on the machine lengthen them far less than time on the wall clock.
"""

import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from eval.hummingbird import ArraySource, FaissExact, Protocol, RunningTopK, Segmentation, TorchExact, evaluate
from eval.hummingbird.naive import naive_miou
from eval.memory import cpu_peak
from eval.paired import spread
from timm_locat.errors import UserError, require
from timm_locat.record import write_record

RECORD = "hummingbird-speed/v1"
BARS = {"torch": 1.6, "faiss": 1.05, "evaluation": 0.5, "memory": 0.25}
"""Largest ratios allowed: search by each engine over `faiss.knn`, and time and peak memory over the naive reading's."""

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Time and memory of retrieval, without any model.

    Search: QUERIES against ROWS random vectors, by both exact engines, over `faiss.knn` on the same arrays. Evaluation:
    bank, search, transfer and metric on kept features of made-up scenes, over a naive reading of the protocol.
    """

    rows: int = 102_400
    """Rows of the bank in the comparison of searches."""
    queries: int = 1024
    """Queries in it."""
    width: int = 384
    """Features of a vector, in both comparisons."""
    k: int = 30
    """Neighbours."""
    scenes: tuple[int, int] = (60, 20)
    """Images of the bank and of the queries in the evaluation."""
    img_size: int = 224
    """Side of their masks in pixels."""
    patch: int = 16
    """Side of a patch in pixels."""
    classes: int = 151
    """Number of classes."""
    rounds: int = 7
    """Rounds, each of which gives one ratio for each comparison; at least 3."""
    threads: int = 1
    """CPU threads of torch and faiss."""
    seed: int = 0
    """Seed of arrays and order."""
    strict: bool = False
    """Leave with status 1 if a bar is missed."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the record; ./results/hummingbird-speed-v1.json when left out."""

    def __post_init__(self) -> None:
        least = {"rows": self.k, "queries": 1, "width": 1, "k": 1, "rounds": 3, "threads": 1, "classes": 2, "patch": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name} must be at least {bound}, got {getattr(self, name)}")
        if min(self.scenes) < 1 or self.img_size % self.patch:
            raise ValueError(f"--scenes must be above 0, --patch divide --img-size, got {self.scenes}, {self.patch}")


def search_steps(config: Config) -> dict[str, Step]:
    """The three searches of the same arrays."""
    faiss = require("faiss", "faiss", "python -m eval speed hummingbird")
    faiss.omp_set_num_threads(config.threads)
    g = torch.Generator().manual_seed(config.seed)
    shapes = (config.rows, config.width), (config.queries, config.width)
    bank, queries = (F.normalize(torch.randn(shape, generator=g), dim=1) for shape in shapes)
    ids = torch.arange(config.rows)

    def ours(knn: Any) -> Step:
        def step() -> object:
            best = RunningTopK(queries, config.k, knn)
            best.add(bank, ids)
            return best.result()

        return step

    def plain() -> object:
        return faiss.knn(queries.numpy(), bank.numpy(), config.k, metric=faiss.METRIC_INNER_PRODUCT)

    return {"torch": ours(TorchExact()), "faiss": ours(FaissExact()), "faiss.knn": plain}


def made_up_scenes(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Features and masks of both splits: rectangles of 12 classes in each image, a look for each class, and noise."""
    g = torch.Generator().manual_seed(config.seed)
    looks = torch.randn(config.classes, config.width, generator=g)
    side, grid = config.img_size, config.img_size // config.patch
    splits = []
    for images in config.scenes:
        masks = torch.zeros(images, side, side, dtype=torch.long)
        for mask in masks:
            for _ in range(12):
                top, left = torch.randint(0, side * 3 // 4, (2,), generator=g).tolist()
                mask[top : top + side // 3, left : left + side // 3] = torch.randint(0, config.classes, (), generator=g)
        centres = masks[:, config.patch // 2 :: config.patch, config.patch // 2 :: config.patch]
        maps = looks[centres].permute(0, 3, 1, 2) + torch.randn(images, config.width, grid, grid, generator=g)
        splits.append((maps.contiguous(), masks))
    return splits


def evaluation_step(config: Config) -> Step:
    """Our evaluation; gives the mean IoU."""
    train, val = (ArraySource(*split, batch=10) for split in made_up_scenes(config))
    protocol = Protocol(bank_size=None, epochs=1, k=config.k, min_valid=0.0)
    task = Segmentation(protocol, [str(c) for c in range(config.classes)])
    return lambda: evaluate(protocol, task, train, val)[0]["miou"]


def naive_step(config: Config) -> Step:
    """The same by the naive reading."""
    train, val = made_up_scenes(config)
    return lambda: naive_miou(train, val, config.classes, k=config.k)


def in_child(make: Callable[[Config], Step], config: Config) -> Step:
    """A step for a fresh process, which starts with threads of its own."""
    torch.set_num_threads(config.threads)
    return make(config)


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def time_rounds(steps: dict[str, Step], config: Config) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one round that does not count."""
    tqdm = require("tqdm", "eval", "the progress bar of python -m eval speed hummingbird").tqdm
    shuffler, samples = random.Random(config.seed), {name: [] for name in steps}
    for number in tqdm(range(config.rounds + 1), desc="rounds", leave=False, disable=None):
        for name in shuffler.sample(list(steps), len(steps)):
            seconds = cpu_seconds(steps[name])
            if number:
                samples[name].append(seconds)
    return samples


def ratio(samples: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Spread over the rounds of one step's time over another's."""
    return spread([a / b for a, b in zip(samples[above], samples[below], strict=True)])


def measure(config: Config) -> dict[str, Any]:
    """The results of a record."""
    searches = time_rounds(search_steps(config), config)
    steps = {"evaluation": evaluation_step(config), "naive": naive_step(config)}
    scores = {name: step() for name, step in steps.items()}
    if abs(scores["evaluation"] - scores["naive"]) > 1e-5:
        raise UserError(f"both readings must give one score, got {scores}; this is a fault, do not believe the times")
    whole = time_rounds(steps, config)
    makers = {"evaluation": evaluation_step, "naive": naive_step}
    peaks = {name: cpu_peak(functools.partial(in_child, make, config), name) for name, make in makers.items()}
    ratios = {
        "torch": ratio(searches, "torch", "faiss.knn"),
        "faiss": ratio(searches, "faiss", "faiss.knn"),
        "evaluation": ratio(whole, "evaluation", "naive"),
    }
    memory = peaks["evaluation"] / peaks["naive"] if all(peaks.values()) else None
    medians = {name: one["median"] for name, one in ratios.items()} | {"memory": memory}
    return {
        "ratios": ratios,
        "memory_ratio": memory,
        "outcomes": {
            name: "unknown" if value is None else "met" if value <= BARS[name] else "missed"
            for name, value in medians.items()
        },
        "bars": BARS,
        "miou": scores["evaluation"],
        "cpu_seconds": {name: statistics.median(values) for name, values in {**searches, **whole}.items()},
        "peak_memory_mib": peaks,
        "samples": {**searches, **whole},
    }


def report(config: Config, results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    names = {
        "torch": "search by torch / faiss.knn",
        "faiss": "search by faiss / faiss.knn",
        "evaluation": "evaluation / naive reading",
    }
    lines = [
        f"{config.queries:,} queries against {config.rows:,} x {config.width}; {config.scenes[0]} + {config.scenes[1]} "
        f"scenes of {config.img_size} pixels, {config.classes} classes; {config.rounds} rounds, "
        f"{config.threads} threads, CPU seconds",
        "",
        f"{'':<30} {'median':>7} {'middle half':>15} {'bar':>6}",
    ]
    for key, name in names.items():
        row = results["ratios"][key]
        half = f"{row['q1']:.3f} .. {row['q3']:.3f}"
        lines.append(f"{name:<30} {row['median']:>7.3f} {half:>15} {BARS[key]:>6g} {results['outcomes'][key]}")
    peaks, memory = results["peak_memory_mib"], results["memory_ratio"]
    if memory is not None:
        told, outcome = f"{peaks['evaluation']:.0f} / {peaks['naive']:.0f} MiB", results["outcomes"]["memory"]
        lines.append(f"{'peak memory, same':<30} {memory:>7.3f} {told:>15} {BARS['memory']:>6g} {outcome}")
    return "\n".join(lines)


def run(config: Config) -> tuple[str, int]:
    """Measure, write the record, and return the report with the exit status."""
    path = Path("results") / f"{RECORD.replace('/', '-')}.json" if config.out is None else config.out
    if path.is_dir():
        raise UserError(f"--out must name a file, and {path} is a folder")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        results = measure(config)
    finally:
        torch.set_num_threads(threads)
    write_record(path, protocol=RECORD, results=results, config=config, seed=config.seed)
    missed = "missed" in results["outcomes"].values()
    return f"{report(config, results)}\nrecord: {path}", int(config.strict and missed)
