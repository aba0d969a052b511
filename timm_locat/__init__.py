"""Locality-aware Vision Transformers for timm. Importing this registers the models with timm and does nothing else."""

from timm_locat._version import __version__
from timm_locat.convert import add_locat, remove_locat
from timm_locat.models import dense_features

__all__ = ["__version__", "add_locat", "dense_features", "remove_locat"]
