"""What the cells of a study found, one row per finished run, and what that says about each condition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from timm_locat.errors import UserError, require
from timm_locat.locality import Locality
from timm_locat.record import read_record

__all__ = ["Effect", "Interval", "Row", "course", "effects", "interval", "read_rows"]


@dataclass(frozen=True)
class Row:
    """One finished run."""

    model: str
    condition: str
    seed: int
    record: dict[str, Any]
    folder: Path

    def value(self, name: str) -> float | None:
        """A number of the run: one of `results`, or one of its locality as `locality.NAME`."""
        kind, _, key = name.rpartition(".")
        return self.record["results"][kind][key] if kind else self.record["results"][key]

    def locality(self) -> Locality:
        """Every head, at the end of the run."""
        return Locality.load(max((self.folder / "locality").glob("update_*.json")))


def read_rows(out: Path) -> list[Row]:
    """The finished runs of a study folder, in the order of their names.

    Raises:
        UserError: There is none.
    """
    rows = []
    for path in sorted((out / "cells").glob("*/record.json")):
        model, _, condition, seed = path.parent.name.rsplit("__", 3)
        rows.append(Row(model, condition, int(seed.removeprefix("seed")), read_record(path), path.parent))
    if not rows:
        raise UserError(f"there is no finished run in {out}/cells; run the study first")
    return rows


@dataclass(frozen=True)
class Interval:
    """A mean over runs, and how sure it is."""

    mean: float
    half: float | None
    """Half the 95 % confidence interval of the mean by Student's t; None for a single run."""
    count: int

    def text(self, digits: int = 3) -> str:
        """For a table."""
        if self.half is None:
            return f"{self.mean:.{digits}f} (one seed)"
        return f"{self.mean:.{digits}f} ± {self.half:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean of values and its 95 % confidence interval."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        return Interval(float(array.mean()), None, len(array))
    stats = require("scipy.stats", "data", "a confidence interval")
    half = stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return Interval(float(array.mean()), float(half), len(array))


@dataclass(frozen=True)
class Effect:
    """What switching on a component changes, averaged over the settings of the others; or how two of them interact."""

    name: str
    """`cm`, or `aa x cm`: half the difference between the effect of one with and without the other."""
    value: float
    half: float | None
    """Half its 95 % confidence interval; None where nothing is left to estimate an error from."""


def effects(rows: Sequence[Row], name: str, components: Sequence[str] = ("aa", "cm", "ls")) -> tuple[list[Effect], str]:
    """Main effects and interactions in a full factorial, by ordinary least squares on -1 and +1.

    Args:
        rows: Runs whose conditions are `baseline`, `modern` (all components), or components joined by `+`.
        name: The number to explain; see `Row.value`.
        components: Which there are.

    Returns:
        The effects; and a sentence that says where their error comes from. The effects are empty where a combination
        has no run.

    Every term is estimated. The error comes from the scatter of seeds within conditions; where no condition has two,
    the interaction of all components is taken for error, which leaves one degree of freedom.
    """
    used = [(switched_on(row.condition, components), row.value(name)) for row in rows]
    used = [(on, value) for on, value in used if on is not None and value is not None]
    missing = 2 ** len(components) - len({on for on, _ in used})
    if missing:
        return (
            [],
            f"{missing} of the {2 ** len(components)} combinations have no run yet: effects cannot be told apart.",
        )
    terms = [term for size in range(len(components) + 1) for term in combinations(components, size)]
    replicated = len(used) > 2 ** len(components)
    if not replicated:
        terms.remove(tuple(components))
    design = np.array([[math.prod(1 if c in on else -1 for c in term) for term in terms] for on, _ in used], float)
    answer = np.array([value for _, value in used])
    weights, *_ = np.linalg.lstsq(design, answer, rcond=None)
    freedom = len(answer) - len(terms)
    stats = require("scipy.stats", "data", "a confidence interval")
    variance = ((answer - design @ weights) ** 2).sum() / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    width = stats.t.ppf(0.975, freedom)
    found = [
        Effect(" x ".join(term), float(2 * weight), float(2 * width * error))
        for term, weight, error in zip(terms, weights, errors, strict=True)
        if term
    ]
    source = (
        f"The error comes from seeds of the same condition ({freedom} degrees of freedom)."
        if replicated
        else "There is one seed per condition: the interaction of all three components is taken for error, which "
        "leaves one degree of freedom and wide intervals."
    )
    return found, source


def switched_on(condition: str, components: Sequence[str]) -> frozenset[str] | None:
    """The components of a condition by its name; None where it is none of their combinations."""
    if condition == "baseline":
        return frozenset()
    if condition == "modern":
        return frozenset(components)
    on = frozenset(condition.split("+"))
    return on if on <= set(components) else None


def course(rows: Sequence[Row], name: str) -> dict[int, Interval]:
    """A number of `Locality.summary` by update, over the runs that were measured there."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for path in sorted((row.folder / "locality").glob("update_*.json")):
            value = Locality.load(path).summary()[name]
            if value is not None:
                found.setdefault(int(path.stem.removeprefix("update_")), []).append(value)
    return {update: interval(values) for update, values in sorted(found.items())}
