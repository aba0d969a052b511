"""A laboratory of patch association: one-layer positional attention learns which patches belong together.

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221. `docs/theory.md` tells
the theorem in words, and what is only seen here.
"""

from timm_locat.theory.association import chance, patch_association
from timm_locat.theory.controls import Solution, solutions
from timm_locat.theory.data import Structure, World
from timm_locat.theory.descent import Descent, Trained, idealised, realistic
from timm_locat.theory.model import Activation, accuracy, gradients, score
from timm_locat.theory.transfer import attentions, refit, transfer

__all__ = [
    "Activation",
    "Descent",
    "Solution",
    "Structure",
    "Trained",
    "World",
    "accuracy",
    "attentions",
    "chance",
    "gradients",
    "idealised",
    "patch_association",
    "realistic",
    "refit",
    "score",
    "solutions",
    "transfer",
]
