"""Studies of locality: a grid of conditions, seeds, models and data sets, trained, measured and reported.

python -m timm_locat.study protocol --data fashion_mnist_mini --out studies/protocol
"""

from timm_locat.study.grid import STUDIES, Cell, Settings, cells
from timm_locat.study.run import run_cells

__all__ = ["STUDIES", "Cell", "Settings", "cells", "run_cells"]
