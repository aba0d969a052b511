"""Paired timings: pure functions of seconds, made up or measured.

A round times three runs back to back: the model, the one it is held against, and a second instance of that one.
"""

import itertools
import random
import statistics
from collections.abc import Sequence

__all__ = ["QUIET_CPU_SHARE", "SIDES", "judge", "noise", "paired_ratios", "round_orders", "spread"]

SIDES = ("model", "against", "again")

# On a quiet machine the timing thread computes all the time. With other programs on the 2 cores, its share fell from
# 1.00 to 0.50 and a ratio of 0.31 read 1.00, at a noise of only 0.011: both models then mostly wait for their own
# threads to get a core. One thread waits for no other: at a share of 0.66 the ratio still read 0.30.
QUIET_CPU_SHARE = 0.9


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles (linear between the two nearest values) and ends of at least two numbers."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "min": min(values), "max": max(values)}


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratio of each round; the machine's mood at that moment is in both of its parts and falls out."""
    return [a / b for a, b in zip(above, below, strict=True)]


def noise(plain: dict[str, float]) -> float:
    """How far a model strays from itself: distance of the median from 1, plus half of the interquartile range."""
    return abs(plain["median"] - 1) + (plain["q3"] - plain["q1"]) / 2


def judge(ratio: dict[str, float], plain: dict[str, float], bar: float) -> dict[str, float | str]:
    """The verdict on a bar.

    Args:
        ratio: `spread` of model / against.
        plain: `spread` of again / against.
        bar: Largest ratio allowed.

    Returns:
        The bar, the noise, their sum as `limit`, and `outcome`: `"met"` when the median ratio is at most the limit,
        else `"missed"`.
    """
    limit = bar + noise(plain)
    return {
        "bar": bar,
        "noise": noise(plain),
        "limit": limit,
        "outcome": "met" if ratio["median"] <= limit else "missed",
    }


def round_orders(rounds: int, seed: int) -> list[tuple[str, ...]]:
    """Order of the three runs in each round: all six orders, shuffled, over and over, so that no run gains by place."""
    shuffler = random.Random(seed)
    orders: list[tuple[str, ...]] = []
    while len(orders) < rounds:
        orders += shuffler.sample(list(itertools.permutations(SIDES)), 6)
    return orders[:rounds]
