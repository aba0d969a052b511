"""How local a model's attention is: measures of attention maps, and a recorder for whole models.

result = record(model, batches)  # batches of normalised images
print(result.summary())
"""

from timm_locat.locality.conventions import PRESETS, Conventions
from timm_locat.locality.measures import (
    GAUSSIANS,
    MEASURES,
    chance_recall,
    measure,
    neighbourhood_recall,
    patch_distances,
)
from timm_locat.locality.recorder import mean_attention, record
from timm_locat.locality.result import Locality

__all__ = [
    "GAUSSIANS",
    "MEASURES",
    "PRESETS",
    "Conventions",
    "Locality",
    "chance_recall",
    "mean_attention",
    "measure",
    "neighbourhood_recall",
    "patch_distances",
    "record",
]
