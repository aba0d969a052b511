"""Images for training and measuring: one reader, data sets behind one function, and the way to tensors."""

from timm_locat.data.datasets import ImageData, load
from timm_locat.data.images import BACKGROUND, read_image, to_rgb8
from timm_locat.data.masks import PALETTES, read_mask
from timm_locat.data.protocols import PROTOCOLS, Protocol
from timm_locat.data.registry import DATASETS, DatasetEntry
from timm_locat.data.streams import ImageStream
from timm_locat.data.transforms import EvalTransform, decode_all, eval_transform, pad32_rgb, permute_patches

__all__ = [
    "BACKGROUND",
    "DATASETS",
    "PALETTES",
    "PROTOCOLS",
    "DatasetEntry",
    "EvalTransform",
    "ImageData",
    "ImageStream",
    "Protocol",
    "decode_all",
    "eval_transform",
    "load",
    "pad32_rgb",
    "permute_patches",
    "read_image",
    "read_mask",
    "to_rgb8",
]
