"""What was measured about the attention of a model: numbers per layer and head, and how they were counted."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm_locat.errors import UserError, require
from timm_locat.locality.conventions import Conventions
from timm_locat.record import atomic_write, plain_json

__all__ = ["Locality"]

FORMAT = "locality/v1"

Table = list[list[float | None]]


@dataclass(frozen=True)
class Locality:
    """Locality of the attention of one model on some images."""

    model: str
    """timm name of the model."""
    conventions: Conventions
    images: int
    """Number of images that the means are over."""
    size: tuple[int, int] | None
    """Height and width of the images in pixels; None where attention does not depend on them."""
    layers: tuple[str, ...]
    """Module name of each attention layer, in order."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of what a query of each layer can attend to."""
    num_prefix: int
    """Number of class tokens and registers."""
    values: dict[str, Table]
    """Measure -> [layer][head]; None where it is not defined. `MEASURES` says what each one is."""
    gaussians: dict[str, Table] | None = None
    """The same for the learned Gaussians (`GAUSSIANS`); None for a model without any."""

    def summary(self) -> dict[str, float | int | None]:
        """A few numbers for a table: extremes and means over heads.

        `min_mad_over_heads` is the smallest mad of a single head, `min_mad_over_layers` the smallest mean over the
        heads of a layer; `min_mad_layer` and `min_mad_head` (from 0) name that head, and `min_mad_self_mass`,
        `min_mad_prefix_mass`, `min_mad_neighbour_mass` say where its attention goes. `mean_...` is over all heads.
        """
        found: dict[str, float | int | None] = {}
        for name in ("mad", "mad_dropped"):
            heads = [(v, i, j) for i, row in enumerate(self.values[name]) for j, v in enumerate(row) if v is not None]
            least = min(heads, default=(None, None, None))
            found[f"min_{name}_over_heads"], layer, head = least
            found[f"min_{name}_layer"], found[f"min_{name}_head"] = layer, head
            for mass in ("self_mass", "prefix_mass", "neighbour_mass"):
                found[f"min_{name}_{mass}"] = None if layer is None else self.values[mass][layer][head]
            means = [m for m in self.layer_means(name) if m is not None]
            found[f"min_{name}_over_layers"] = min(means, default=None)
        for name, table in self.values.items():
            found[f"mean_{name}"] = _mean([value for row in table for value in row])
        return found

    @property
    def tables(self) -> dict[str, Table]:
        """Measures and learned Gaussians together."""
        return self.values | (self.gaussians or {})

    def layer_means(self, name: str) -> list[float | None]:
        """Mean of a measure, or of a learned Gaussian, over the heads of each layer."""
        return [_mean(heads) for heads in self.tables[name]]

    def compare(self, other: "Locality") -> dict[str, Any]:
        """This result beside another one, counted the same way.

        Returns:
            `models`: the two names. `summary`: each number of `summary` as `[this, other, other - this]`, without the
            places of heads, since heads of two models have nothing to do with each other. `layers`: the same for the
            mean of each measure over the heads of each layer; None for models of unequal depth.

        Raises:
            UserError: The conventions differ.
        """
        if self.conventions != other.conventions:
            raise UserError(f"only what was counted alike can be compared: {self.conventions} and {other.conventions}")
        mine, others = self.summary(), other.summary()
        shared = [name for name in mine if name in others and not name.endswith(("_layer", "_head"))]
        layers = None
        if len(self.layers) == len(other.layers):
            layers = {
                name: [_beside(a, b) for a, b in zip(self.layer_means(name), other.layer_means(name), strict=True)]
                for name in self.values
                if name in other.values
            }
        return {
            "models": [self.model, other.model],
            "summary": {name: _beside(mine[name], others[name]) for name in shared},
            "layers": layers,
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, summary included."""
        return {"format": FORMAT, **plain_json(self), "summary": self.summary()}

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file; the same result gives the same bytes."""
        atomic_write(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Locality":
        """Read what `save` wrote, or the record of the command line.

        Raises:
            UserError: The file is missing or is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as err:
            raise UserError(f"cannot read {path}: {err.strerror}") from err
        except ValueError as err:
            raise UserError(f"{path} is not a result of timm_locat.locality: it is not valid JSON ({err})") from err
        if isinstance(data, dict) and data.get("protocol") == FORMAT:
            data = data.get("results")  # the record of `python -m timm_locat.locality`
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UserError(f"{path} is not a result of timm_locat.locality: expected a JSON object of {FORMAT}")
        try:
            return cls(
                model=data["model"],
                conventions=Conventions(**data["conventions"]),
                images=data["images"],
                size=tuple(data["size"]) if data["size"] is not None else None,
                layers=tuple(data["layers"]),
                grids=tuple(tuple(grid) for grid in data["grids"]),
                num_prefix=data["num_prefix"],
                values=data["values"],
                gaussians=data.get("gaussians"),
            )
        except (KeyError, TypeError) as err:
            raise UserError(f"{path} is damaged: {err}; measure again") from err

    def to_pandas(self):
        """A `pandas.DataFrame` with a row for each head: model, layer, head, and a column for each measure."""
        pandas = require("pandas", "plots", "a table of heads")
        rows = [
            {"model": self.model, "layer": i, "head": j, **{name: table[i][j] for name, table in self.tables.items()}}
            for i, row in enumerate(self.values["mad"])
            for j in range(len(row))
        ]
        return pandas.DataFrame(rows)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _beside(a: float | None, b: float | None) -> list[float | None]:
    return [a, b, None if a is None or b is None else b - a]
