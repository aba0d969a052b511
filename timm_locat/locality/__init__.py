"""How local a model's attention is: measures of attention maps, and a recorder for whole models.

result = record(model, batches)  # batches of normalised images
print(result.summary())
"""

from timm_locat.locality.conventions import Conventions
from timm_locat.locality.measures import MEASURES, measure, patch_distances
from timm_locat.locality.recorder import record
from timm_locat.locality.result import Locality

__all__ = ["MEASURES", "Conventions", "Locality", "measure", "patch_distances", "record"]
