"""DINO (arXiv:2104.14294): pretraining of ViTs without labels. `accelerate launch -m timm_locat.train.dino --help`."""

from timm_locat.train.dino.config import DinoConfig
from timm_locat.train.dino.recipes import RECIPES

__all__ = ["RECIPES", "DinoConfig"]
