"""One layer of positional attention with a polynomial activation, and its gradient.

    score(X) = sum_i s(z_i),   z_i = D * sum_j softmax(A_i)_j <v, X_j>,   s(z) = z^p + nu * z

Source: "Vision Transformers provably learn spatial structure" (NeurIPS 2022), arXiv:2210.09221, whose attention comes
from positions only. A stands for the products of the position encodings. The form of the activation and the fixed
diagonal are second hand; all values are our choice.

Shape letters in this file:
    S seeds, each a model of its own   N images   D patches   F features of a patch
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from timm_locat.errors import UserError

__all__ = ["Activation", "accuracy", "gradients", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """s(z) = z^power + linear * z."""

    power: int = 3
    linear: float = 0.1

    def __post_init__(self) -> None:
        if self.power < 3 or self.power % 2 == 0:
            raise UserError(f"power must be odd and at least 3, got {self.power}")
        if not self.linear >= 0:
            raise UserError(f"linear must be at least 0, got {self.linear}")

    def value(self, z: Tensor) -> Tensor:
        """s(z)"""
        return z**self.power + self.linear * z

    def slope(self, z: Tensor) -> Tensor:
        """Derivative of s at z."""
        return self.power * z ** (self.power - 1) + self.linear


def _sums(images_SNDF: Tensor, v_SF: Tensor, attn_SDD: Tensor) -> tuple[Tensor, Tensor]:
    """(S, N, D) products of the patches with v, and what the attention makes of them, times D."""
    count, number, patches, features = images_SNDF.shape
    flat = images_SNDF.reshape(count, number * patches, features)
    u_SND = torch.bmm(flat, v_SF[..., None]).view(count, number, patches)
    return u_SND, patches * torch.bmm(u_SND, attn_SDD.transpose(1, 2))


def score(images_SNDF: Tensor, v_SF: Tensor, logits_SDD: Tensor, activation: Activation) -> Tensor:
    """(S, N) score of each image; its sign is the predicted label.

    Args:
        images_SNDF: Images of each model.
        v_SF: Value vectors.
        logits_SDD: A, before the softmax of its rows.
        activation: s.
    """
    _, z_SND = _sums(images_SNDF, v_SF, logits_SDD.softmax(-1))
    return activation.value(z_SND).sum(-1)


def accuracy(score_SN: Tensor, labels_SN: Tensor) -> Tensor:
    """(S,) share of images whose score has the label's sign; a score of zero or nan is wrong."""
    return (score_SN * labels_SN > 0).double().mean(-1)


def gradients(
    images_SNDF: Tensor,
    labels_SN: Tensor,
    v_SF: Tensor,
    logits_SDD: Tensor,
    activation: Activation,
    *,
    attention: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean logistic loss of each model, and its gradient in closed form, which is faster than autograd here.

    Args:
        attention: Compute the gradient of A too.

    Returns:
        loss_S: (S,) mean of log(1 + exp(-label * score)).
        grad_v_SF: (S, F).
        grad_A_SDD: (S, D, D) with the diagonal as any other entry; None without `attention`.
    """
    count, number, patches, features = images_SNDF.shape
    attn_SDD = logits_SDD.softmax(-1)
    u_SND, z_SND = _sums(images_SNDF, v_SF, attn_SDD)
    margin_SN = labels_SN * activation.value(z_SND).sum(-1)
    loss_S = torch.nn.functional.softplus(-margin_SN).mean(-1)
    outer_SN = -labels_SN * torch.sigmoid(-margin_SN) / number
    pull_SND = patches * outer_SN[..., None] * activation.slope(z_SND)
    share_SND = torch.bmm(pull_SND, attn_SDD)
    flat = images_SNDF.reshape(count, number * patches, features)
    grad_v_SF = torch.bmm(share_SND.reshape(count, 1, -1), flat).squeeze(1)
    if not attention:
        return loss_S, grad_v_SF, None
    grad_attn_SDD = torch.bmm(pull_SND.transpose(1, 2), u_SND)
    centred_SDD = grad_attn_SDD - (attn_SDD * grad_attn_SDD).sum(-1, keepdim=True)
    return loss_S, grad_v_SF, attn_SDD * centred_SDD
