"""Retrieval of patches: how well features find patches of the same class, by the Hummingbird protocol.

Balazevic et al., "Towards In-Context Scene Understanding", NeurIPS 2023 (arXiv:2306.01667), as
open-hummingbird-eval 2.0.0 made it public, with its quirks by name and without them by default.
"""

from eval.hummingbird.evaluate import Neighbours, Setup, evaluate
from eval.hummingbird.protocol import PRESETS, Protocol
from eval.hummingbird.search import ExactBank, FaissExact, RunningTopK, Search, TorchExact
from eval.hummingbird.sources import ArraySource, Batch, Source
from eval.hummingbird.tasks import Depth, Segmentation

__all__ = [
    "PRESETS",
    "ArraySource",
    "Batch",
    "Depth",
    "ExactBank",
    "FaissExact",
    "Neighbours",
    "Protocol",
    "RunningTopK",
    "Search",
    "Segmentation",
    "Setup",
    "Source",
    "TorchExact",
    "evaluate",
]
