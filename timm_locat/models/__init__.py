"""Model families. Importing this registers every one of them with timm."""

from timm_locat.models import jumbo, locatswin, locatvit, locatvit_rope, vit_compact, vit_posattn
from timm_locat.models.create import create_any_size, create_model, parse_kwargs
from timm_locat.models.features import dense_features
from timm_locat.models.jumbo import JumboViT
from timm_locat.models.locatswin import LocAtSwin
from timm_locat.models.locatvit import LocAtViT
from timm_locat.models.locatvit_rope import LocAtEva
from timm_locat.models.vit_posattn import PosAttnViT

__all__ = [
    "JumboViT",
    "LocAtEva",
    "LocAtSwin",
    "LocAtViT",
    "PosAttnViT",
    "create_any_size",
    "create_model",
    "dense_features",
    "jumbo",
    "locatswin",
    "locatvit",
    "locatvit_rope",
    "parse_kwargs",
    "vit_compact",
    "vit_posattn",
]
