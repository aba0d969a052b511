"""python -m timm_locat.theory association|transfer|controls [--seeds N] [--out FOLDER] [--help]"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from timm_locat.errors import UserError, require, run_cli
from timm_locat.record import write_record
from timm_locat.theory import plots
from timm_locat.theory.association import chance
from timm_locat.theory.controls import solutions
from timm_locat.theory.data import Structure
from timm_locat.theory.descent import Descent, idealised, realistic
from timm_locat.theory.transfer import transfer

tyro = require("tyro", "train", "python -m timm_locat.theory")


@dataclass(frozen=True, kw_only=True)
class _Common:
    seeds: int = 20
    """Number of seeds, counted from 0; each has its own sets, feature, images and start."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the record and the pictures; results/theory/EXPERIMENT when not given."""
    structure: Structure = field(default_factory=Structure)
    descent: Descent = field(default_factory=Descent)
    samples: int = 1000
    """Training images of a seed."""

    def __post_init__(self) -> None:
        for name in ("seeds", "samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path("results") / "theory" / type(self).__name__.lower() if self.out is None else self.out


@dataclass(frozen=True, kw_only=True)
class Association(_Common):
    """Train on many seeds and ask which of them found the hidden sets; and the same on the exact expectation."""


@dataclass(frozen=True, kw_only=True)
class Controls(_Common):
    """Solutions that classify equally well side by side: with association and without."""

    seeds: int = 10


@dataclass(frozen=True, kw_only=True)
class Transfer(_Common):
    """Keep the attention, change the feature, learn from few images, in a regime with a visible gap."""

    seeds: int = 8
    structure: Structure = field(default_factory=lambda: Structure(num_sets=16, features=64, noise=0.3, clutter=0.1))
    descent: Descent = field(default_factory=lambda: Descent(steps=300, lr_v=0.001, lr_attention=40.0))
    samples: int = 2000
    refit_steps: int = 300
    """Steps of learning v in the new task; the rest is as in `descent`."""
    sizes: tuple[int, ...] = (5, 10, 20, 40, 80, 160, 320, 640)
    """Numbers of images of the new task."""
    search: bool = False
    """Try the other regimes too, with two seeds, and put them into the record."""

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        if not self.sizes or min(self.sizes) < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise UserError(f"sizes must be increasing numbers of at least 1, got {self.sizes}")
        if self.refit_steps < 1:
            raise UserError(f"refit_steps must be at least 1, got {self.refit_steps}")


def regimes() -> dict[str, tuple[Structure, Descent]]:
    """What else was tried for the transfer experiment, from the sizes of the association run upwards."""
    small = Descent()
    large = Transfer().descent
    wide = dict(num_sets=16, features=64)
    return {
        "association run": (Structure(), small),
        "less clutter": (Structure(clutter=0.083), small),
        "more noise": (Structure(noise=0.5), small),
        "D 64, noise 0.125": (Structure(**wide, clutter=0.1), large),
        "D 64, noise 0.5": (Structure(**wide, noise=0.5, clutter=0.1), large),
        "D 64, noise 0.3, clutter 0.3": (Structure(**wide, noise=0.3, clutter=0.3), large),
    }


@contextmanager
def _bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    tqdm = require("tqdm", "train", "the progress bar").tqdm
    # disable=None: a bar with the time left on a terminal, nothing in a log file
    with tqdm(total=total, desc=title, unit="step", leave=False, disable=None) as bar:
        yield lambda count: (bar.update(count), None)[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"mean": _mean(values), "least": min(values), "greatest": max(values)}


def _write(config: _Common, results: dict[str, Any]) -> None:
    name = type(config).__name__.lower()
    seeds = list(range(config.seeds))
    path = config.folder / f"theory-{name}-v1__{config.seeds}_seeds.json"
    write_record(path, protocol=f"theory-{name}/v1", results=results, config=config, seed=seeds)


def run_association(config: Association) -> str:
    """Train, measure, write the folder, and return what to print."""
    structure, descent = config.structure, config.descent
    with _bar(config.seeds * descent.steps, "association") as bar:
        trained = realistic(structure, descent, range(config.seeds), samples=config.samples, bar=bar)
    by_chance = chance(structure.patches, structure.set_size, diagonal_first=descent.diagonal > 0)
    values = {"accuracy": trained.test_accuracy, "exact": trained.exact, "recall": trained.recall}
    try:
        exact_course, why_not = idealised(structure, descent), ""
    except UserError as err:  # too many kinds of image; the rest of the experiment does not need it
        exact_course, why_not = None, str(err)
    _write(
        config,
        {
            **{name: {**_summary(v), "seeds": v} for name, v in values.items()},
            "chance": dict(zip(("exact", "recall"), by_chance, strict=True)),
            "course": trained.course,
            "idealised": exact_course,
        },
    )
    plots.draw_growth(trained, config.folder / "growth.png")
    plots.animate_growth(trained, config.folder / "growth.gif")
    plots.draw_sets(trained, config.folder / "sets.png")
    plots.draw_course(trained, by_chance[1], config.folder / "course.png")
    lines = [f"{config.seeds} seeds, D = {structure.patches}", f"{'':<26}{'mean':>8}{'least':>8}{'chance':>8}"]
    levels = {"accuracy": 0.5, "exact": by_chance[0], "recall": by_chance[1]}
    names = {"accuracy": "test accuracy", "exact": "rows with the exact set", "recall": "top-C recall"}
    for name, title in names.items():
        lines.append(f"{title:<26}{_mean(values[name]):>8.3f}{min(values[name]):>8.3f}{levels[name]:>8.3f}")
    if exact_course is None:
        lines.append(why_not)
    else:
        plots.draw_idealised(exact_course, descent.diagonal, config.folder / "idealised.png")
        end = exact_course[-1]
        lines.append(
            f"idealised: accuracy {end['accuracy']:.3f}, "
            f"A within the sets {end['within']:.2f}, across {end['across']:.2f}"
        )
    return "\n".join(lines)


def run_controls(config: Controls) -> str:
    """Train the solutions, write the folder, and return what to print."""
    structure, descent = config.structure, config.descent
    with _bar(3 * config.seeds * descent.steps, "controls") as bar:
        found = solutions(structure, descent, range(config.seeds), samples=config.samples, bar=bar)
    results, lines = {}, [f"{'':<18}{'accuracy':>10}{'exact':>8}{'recall':>8}{'chance':>8}"]
    for name, one in found.items():
        favoured = descent.diagonal > 0 and name in ("trained", "frozen diagonal")
        by_chance = chance(structure.patches, structure.set_size, diagonal_first=favoured)[1]
        values = {"accuracy": one.accuracy, "exact": one.exact, "recall": one.recall}
        results[name] = {**{k: {**_summary(v), "seeds": v} for k, v in values.items()}, "chance_recall": by_chance}
        means = "".join(f"{_mean(v):>{width}.3f}" for v, width in zip(values.values(), (10, 8, 8), strict=True))
        lines.append(f"{name:<18}{means}{by_chance:>8.3f}")
    _write(config, {"solutions": results})
    plots.draw_controls(found, config.folder / "controls.png")
    return "\n".join(lines)


def run_transfer(config: Transfer) -> str:
    """Pretrain, refit, write the folder, and return what to print."""

    def measured(structure: Structure, descent: Descent, seeds: int, title: str) -> dict[str, Any]:
        refitting = replace(descent, steps=config.refit_steps)
        with _bar(seeds * descent.steps, title) as bar:
            return transfer(structure, descent, refitting, range(seeds), config.sizes, samples=config.samples, bar=bar)

    found = measured(config.structure, config.descent, config.seeds, "transfer")
    curves = {
        name: [
            {"images": size, "mean": _mean(column), "interval": plots.interval(column)}
            for size, column in zip(config.sizes, zip(*rows, strict=True), strict=True)
        ]
        for name, rows in found["accuracy"].items()
    }
    results = {**found, "curves": curves}
    if config.search:
        results["tried"] = {
            name: {
                "structure": asdict(structure),
                "descent": asdict(descent),
                "seeds": 2,
                **measured(structure, descent, 2, name),
            }
            for name, (structure, descent) in regimes().items()
        }
    _write(config, results)
    plots.draw_transfer(found["accuracy"], config.sizes, config.folder / "transfer.png")
    lines = [
        f"pretraining: accuracy {_mean(found['source_accuracy']):.3f}, "
        f"top-C recall {_mean(found['source_recall']):.3f}",
        f"{'images':<12}" + "".join(f"{size:>8}" for size in config.sizes),
    ]
    for name, rows in found["accuracy"].items():
        lines.append(f"{name:<12}" + "".join(f"{_mean(column):>8.3f}" for column in zip(*rows, strict=True)))
    return "\n".join(lines)


EXPERIMENTS = {
    "association": (Association, run_association),
    "controls": (Controls, run_controls),
    "transfer": (Transfer, run_transfer),
}


def run(config: _Common) -> str:
    """Run one experiment and return what to print."""
    if config.folder.exists() and not config.folder.is_dir():
        raise UserError(f"--out must name a folder, and {config.folder} is a file")
    _, experiment = EXPERIMENTS[type(config).__name__.lower()]
    return f"{experiment(config)}\nnumbers and pictures: {config.folder}"


def _usage() -> str:
    lines = [f"  {name:<12}{' '.join(kind.__doc__.split())}" for name, (kind, _) in EXPERIMENTS.items()]
    return "\n".join(
        [
            "usage: python -m timm_locat.theory EXPERIMENT [OPTIONS]",
            "",
            "A laboratory of patch association; docs/theory.md tells what it shows.",
            "",
            "experiments:",
            *lines,
            "",
            "python -m timm_locat.theory EXPERIMENT --help explains one.",
        ]
    )


def main() -> None:
    """Read the command line, run, print."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(_usage())
        return
    if not words or words[0] not in EXPERIMENTS:
        got = f"got {words[0]!r}" if words else "got none"
        print(f"error: expected an experiment, {' or '.join(EXPERIMENTS)}, {got}", file=sys.stderr)
        raise SystemExit(2)
    for module, extra in (("tyro", "train"), ("matplotlib", "plots"), ("tqdm", "train"), ("PIL", "data")):
        require(module, extra, "python -m timm_locat.theory")
    # One parser for each experiment: in tyro's own subcommands, errors name an argument of tyro's.
    config = tyro.cli(
        EXPERIMENTS[words[0]][0],
        prog=f"python -m timm_locat.theory {words[0]}",
        args=words[1:],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    # The matrices are small: more threads are slower.
    torch.set_num_threads(1)
    print(run(config))


if __name__ == "__main__":
    run_cli(main)
