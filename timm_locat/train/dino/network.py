"""Student and teacher of DINO, and their loss: lightly's, with a centre that moves once per update.

Shape letters in this file:
    B batch   C width of the model   K outputs of the head
"""

import warnings
from typing import NamedTuple

import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.train.dino.config import DinoConfig

__all__ = ["Network", "Outputs", "UpdateLoss", "outputs", "with_head"]


class Network(nn.Module):
    """A backbone without classifier, and the head that DINO puts on its pooled features.

    Args:
        backbone: From (B, 3, H, W) to (B, C), for every size of crop.
        head: From (B, C) to (B, K).
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Names of the weights that the backbone exempts, as timm's optimizers ask for them."""
        names = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in names}

    def forward(self, crops: list[Tensor]) -> list[Tensor]:
        """One (B, K) for each crop. Crops of one size that follow each other go through the backbone together."""
        features, start = [], 0
        for i in range(1, len(crops) + 1):
            if i == len(crops) or crops[i].shape != crops[start].shape:
                features.append(self.backbone(torch.cat(crops[start:i])))
                start = i
        return list(self.head(torch.cat(features)).chunk(len(crops)))


def with_head(backbone: nn.Module, config: DinoConfig) -> Network:
    """A network around a backbone, its head drawn anew from torch's global generator.

    Raises:
        UserError: The backbone does not say how many features it gives.
    """
    width = getattr(backbone, "num_features", None)
    if not isinstance(width, int):
        raise UserError(f"DINO needs a model with num_features, {type(backbone).__name__} has none; take another model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weight_norm.*", FutureWarning)  # lightly's to replace
        head = DINOProjectionHead(
            width, config.hidden_dim, config.bottleneck_dim, config.out_dim, norm_last_layer=config.norm_last_layer
        )
    return Network(backbone, head)


class UpdateLoss(DINOLoss):
    """DINO's loss. The centre moves when `move_center` is called, by the mean over all passes of the update.

    lightly moves it in each pass, so that two passes of half a batch would not be one pass of the whole. The mean
    is taken over processes too.
    """

    def __init__(self, config: DinoConfig) -> None:
        super().__init__(
            config.out_dim,
            teacher_temp=config.teacher_temp,
            student_temp=config.student_temp,
            center_momentum=config.center_momentum,
        )
        self.seen: list[Tensor] = []

    @torch.no_grad()
    def update_center(self, teacher_out: Tensor) -> None:
        """Remember the outputs of a pass, (crops, B, K), by their mean."""
        self.seen.append(teacher_out.mean((0, 1), keepdim=True))

    @torch.no_grad()
    def move_center(self) -> None:
        """Move the centre by what was seen since the last time; every pass had equally many images."""
        super().update_center(torch.cat(self.seen, dim=1))
        self.seen = []


class Outputs(NamedTuple):
    """Means over the images of a pass, in nats."""

    teacher_entropy: Tensor
    """Of the teacher's output for an image; log K where it says nothing about any image."""
    student_entropy: Tensor
    """Of the student's for the same crops."""
    information: Tensor
    """Entropy of the teacher's mean output less `teacher_entropy`: 0 where all images get the same output, collapse of
    either kind, and at most the logarithm of the images in a pass."""


@torch.no_grad()
def outputs(teacher: list[Tensor], student: list[Tensor], loss: UpdateLoss, teacher_temp: float) -> Outputs:
    """What tells collapse. Call before the centre moves.

    Args:
        teacher: (B, K) float32 for each global crop.
        student: The same of the student, for the same crops.
        loss: Has the centre and the student's temperature.
        teacher_temp: Temperature of the teacher.
    """
    of_teacher = ((torch.stack(teacher) - loss.center) / teacher_temp).softmax(-1)
    of_student = (torch.stack(student[: len(teacher)]) / loss.student_temp).softmax(-1)
    single = entropy(of_teacher).mean()
    mean = entropy(of_teacher.mean((0, 1)))
    return Outputs(single, entropy(of_student).mean(), mean - single)


def entropy(probabilities: Tensor) -> Tensor:
    """Over the last axis, in nats."""
    return torch.special.entr(probabilities).sum(-1)
