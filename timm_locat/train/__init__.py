"""Training on accelerate: configuration, recipes and the loop. `accelerate launch -q -m timm_locat.train --help`."""

from timm_locat.train.config import DataConfig, TrainConfig
from timm_locat.train.recipes import RECIPES

__all__ = ["RECIPES", "DataConfig", "TrainConfig"]
