"""What a number about attention means: the choices that public code makes differently, each with a name.

A result carries its conventions, because "mean attention distance 0.02" says nothing without them.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from timm_locat.errors import UserError

__all__ = ["PRESETS", "Conventions"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How prefix tokens, distances and entropies are counted. The masses do not depend on it.

    Raises:
        UserError: A value that is not one of those listed.
    """

    prefix: Literal["renormalise", "drop", "include"] = "renormalise"
    """What becomes of the attention that a patch pays to class token and registers, which have no place: `renormalise`
    scales the rest of the row to sum to 1; `drop` leaves the rest as it is; `include` counts it at distance 0. Without
    the self term, `drop` and `include` differ: what a patch pays to itself is spread over what is left."""
    unit: Literal["fraction", "patches", "pixels", "sides"] = "fraction"
    """Of distances. A fraction is of the longest distance between two patch centres, so its range is [0, 1]. For
    `sides`, rows and columns are each divided by the way from first to last, so its range is [0, 1.414]."""
    entropy: Literal["patches", "tokens"] = "patches"
    """Keys that entropy and effective number are taken over: patches (rows scaled to sum to 1), or all tokens. Entropy
    is divided by the logarithm of their number, so its range is [0, 1]."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name])
            if value not in allowed:
                raise UserError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}")


PRESETS = {
    "probing-vits": Conventions(prefix="drop", unit="pixels"),
    "cl-vs-mim": Conventions(prefix="renormalise", unit="pixels"),
    "vit-analysis": Conventions(prefix="renormalise", unit="sides"),
    "convit": Conventions(prefix="drop", unit="patches"),
}
"""What public code counts, by the name of its repository, so that its `mad` can be computed again.

`probing-vits` (sayakpaul/probing-vits, and the Keras example "Investigating Vision Transformer Representations") cuts
the prefix tokens off and does not rescale. `cl-vs-mim` (naver-ai/cl-vs-mim) and `vit-analysis`
(mwalmer-umd/vit_analysis) rescale what is left; the latter puts the image into a unit square. `convit`
(facebookresearch/convit, and timm's port) is called non-locality there, of layers that have no class token.
"""
