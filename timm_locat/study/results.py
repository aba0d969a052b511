"""What the cells of a study found, one row per finished run, and what that says about each condition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from timm_locat.errors import UserError, require
from timm_locat.locality import Locality
from timm_locat.record import read_record

__all__ = [
    "Effect",
    "Interval",
    "Row",
    "course",
    "effects",
    "interval",
    "measured_after",
    "precision_name",
    "read_rows",
]


@dataclass(frozen=True)
class Row:
    """One finished run."""

    model: str
    data: str
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
    """The finished runs of a study folder, in the order of their names; `record.json` and `locality` of each suffice.

    Raises:
        UserError: There is none.
    """
    rows = []
    for path in sorted((out / "cells").glob("*/record.json")):
        record = read_record(path)
        config, condition = record["config"], record["recipe"].removeprefix("study ")
        rows.append(Row(config["model"], config["data"]["name"], condition, record["seed"], record, path.parent))
    if not rows:
        raise UserError(f"there is no finished run in {out}/cells; run the study first")
    return rows


@dataclass(frozen=True)
class Interval:
    """A mean over runs, and how sure it is."""

    mean: float
    """NaN where no run has the number."""
    half: float | None
    """Half the 95 % confidence interval of the mean by Student's t; None for a single run."""
    count: int

    def text(self, digits: int = 3) -> str:
        """For a table."""
        if not self.count:
            return "none"
        if self.half is None:
            return f"{self.mean:.{digits}f} (one seed)"
        return f"{self.mean:.{digits}f} ± {self.half:.{digits}f}"


def interval(values: Sequence[float | None]) -> Interval:
    """Mean of the values that are known, and its 95 % confidence interval."""
    array = np.asarray([value for value in values if value is not None], dtype=float)
    if len(array) < 2:
        return Interval(float(array[0]) if len(array) else math.nan, None, len(array))
    stats = require("scipy.stats", "data", "a confidence interval")
    half = stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return Interval(float(array.mean()), float(half), len(array))


@dataclass(frozen=True)
class Effect:
    """What switching on a component changes, averaged over the settings of the others; or how two of them interact."""

    name: str
    """`cm`, or `aa x cm`: half the difference between the effect of one with and without the other."""
    value: float
    half: float
    """Half its 95 % confidence interval."""

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.value) > self.half


def effects(rows: Sequence[Row], name: str, factors: Mapping[str, tuple[str, ...]]) -> tuple[list[Effect], str]:
    """Main effects and interactions in a full factorial, by ordinary least squares on -1 and +1.

    Args:
        rows: Runs; those whose condition is not in `factors` are left out.
        name: The number to explain; see `Row.value`.
        factors: Condition -> the components that are on in it, for every combination of them.

    Returns:
        The effects; and a sentence that says where their error comes from. The effects are empty where a combination
        has no run.

    Every term is estimated. The error comes from the scatter of seeds within conditions, taken to be the same in all.
    Where no condition has two, the interaction of all components is taken for error: one degree of freedom.
    """
    used = [(row.condition, row.value(name)) for row in rows if row.condition in factors]
    used = [(condition, value) for condition, value in used if value is not None]
    seeds = {condition: [c for c, _ in used].count(condition) for condition in factors}
    if missing := [condition for condition, count in seeds.items() if not count]:
        return [], f"No run yet of {', '.join(missing)}: effects cannot be told apart."
    components = sorted({component for on in factors.values() for component in on})
    terms = [term for size in range(len(components) + 1) for term in combinations(components, size)]
    repeated = [condition for condition, count in seeds.items() if count > 1]
    if not repeated:
        terms.remove(tuple(components))
    signs = [[math.prod(1 if c in factors[condition] else -1 for c in term) for term in terms] for condition, _ in used]
    design, answer = np.array(signs, float), np.array([value for _, value in used])
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
        f"The error is the scatter of seeds in {', '.join(repeated)}, taken to be the same in all conditions "
        f"({freedom} degrees of freedom)."
        if repeated
        else "There is one seed per condition: the interaction of all components is taken for error, which leaves one "
        "degree of freedom and wide intervals."
    )
    return found, source


def precision_name(mixed_precision: str) -> str:
    """accelerate's word for a precision as people say it."""
    return "float32" if mixed_precision == "no" else mixed_precision


def course(rows: Sequence[Row], name: str) -> dict[int, Interval]:
    """A number of `Locality.summary` by update, over the runs that were measured there."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for path in sorted((row.folder / "locality").glob("update_*.json")):
            value = Locality.load(path).summary()[name]
            if value is not None:
                found.setdefault(int(path.stem.removeprefix("update_")), []).append(value)
    return {update: interval(values) for update, values in sorted(found.items())}


def measured_after(rows: Sequence[Row]) -> list[int]:
    """The updates after which any of the runs was measured."""
    paths = (path for row in rows for path in (row.folder / "locality").glob("update_*.json"))
    return sorted({int(path.stem.removeprefix("update_")) for path in paths})
