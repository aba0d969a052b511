"""DINO on the training loop of this package: resume, processes, precision, logs and the record are those of any run.

A checkpoint holds the teacher and the centre too, and crops are drawn from (seed, epoch, sample): a run that was
killed continues as if it had not been.
"""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from timm_locat.data import ImageData, ImageStream
from timm_locat.errors import UserError
from timm_locat.metrics import effective_rank, knn_votes
from timm_locat.train.build import build_model
from timm_locat.train.dino.config import DinoConfig
from timm_locat.train.dino.crops import GLOBAL_CROPS, MultiCrop, draw_crops
from timm_locat.train.dino.finish import finish
from timm_locat.train.dino.network import Network, UpdateLoss, outputs, with_head
from timm_locat.train.dino.schedules import DinoSchedule, cosine, teacher_temperature
from timm_locat.train.engine import Trainer
from timm_locat.train.feed import MicroBatch
from timm_locat.train.samples import batches, input_size, native_transform
from timm_locat.train.state import is_sharded
from timm_locat.train.stream import open_samples

__all__ = ["DinoTrainer"]

_logger = logging.getLogger(__name__)

LEAST_INFORMATION = 0.05
"""Nats. Below this an epoch's outputs hardly depend on the image, and the log says so."""
LEAST_RANK = 2.0
"""The same for the effective rank of the teacher's features."""


class DinoTrainer(Trainer):
    """One run of DINO; see `Trainer`. The teacher's backbone is what is measured and exported."""

    columns = (
        *("epoch", "lr", "weight_decay", "teacher_momentum", "train_loss"),
        *("train_teacher_entropy", "train_student_entropy", "train_information", "knn_accuracy", "feature_rank"),
        *("grad_norm", "images_per_second", "seconds", "data_seconds", "peak_memory_mib"),
    )
    summed = ("loss", "teacher_entropy", "student_entropy", "information", "images", "norms")
    config: DinoConfig

    def __init__(self, config: DinoConfig, recipe: str = "run") -> None:
        self.untrained: dict[str, float] | None = None
        """What `evaluate` gave before the first update."""
        super().__init__(config, recipe)

    def _build(self, fused: bool) -> tuple[nn.Module, nn.Module]:
        if is_sharded(self.accelerator):
            raise UserError("DINO needs all weights in each process for its teacher, and FSDP spreads them; use DDP")
        config = self.config
        backbone = build_model(config, 0, fused=fused, any_size=config.local_crops > 0)
        self.img_size = input_size(backbone, config.model)
        teacher = copy.deepcopy(backbone)
        student = with_head(backbone, config)
        self.teacher = with_head(teacher, config)  # lightly's head cannot be copied
        self.teacher.load_state_dict(student.state_dict())
        self.teacher.to(self.device).eval().requires_grad_(False)
        self.loss = UpdateLoss(config).to(self.device)
        self._try_crops(self.teacher)
        return student, self.teacher.backbone

    def _try_crops(self, network: Network) -> None:
        """Refuse a model that cannot take the small crops, before anything is read."""
        size = self.config.local_size
        if not self.config.local_crops:
            return
        try:
            with torch.inference_mode():
                network([torch.zeros(1, 3, size, size, device=self.device)])
        except (AssertionError, RuntimeError, ValueError) as err:
            raise UserError(
                f"{self.config.model} cannot take crops of {size} x {size} pixels: {err}; change local_size, or pass "
                "--local-crops 0"
            ) from err

    def _open_samples(self, train: ImageData | ImageStream, test: ImageData | ImageStream, *, progress: bool) -> None:
        config, facts = self.config, resolve_model_data_config(self.backbone)
        self.protocol = MultiCrop(img_size=self.img_size, config=config, native_transform=native_transform(train))
        options = {"crop_pct": facts["crop_pct"], "interpolation": facts["interpolation"]}
        self.train_samples = open_samples(
            train, self.img_size, per_image=self.protocol.__call__, skip_broken=config.skip_broken, **options
        )
        options |= {"in_memory": config.data.in_memory, "progress": progress}
        self.bank = open_samples(train, self.img_size, **options)
        self.test_samples = open_samples(test, self.img_size, **options)

    def _build_schedule(self, optimizer: torch.optim.Optimizer) -> DinoSchedule:
        return DinoSchedule(optimizer, self.config, self.plan.updates_per_epoch)

    def _state(self) -> dict[str, Any]:
        dino = {"teacher": self.teacher.state_dict(), "center": self.loss.center, "untrained": self.untrained}
        return super()._state() | dino

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.teacher.load_state_dict(state["teacher"])
        self.loss.center.copy_(state["center"])
        self.untrained = state["untrained"]

    def fit(self) -> dict[str, Any]:
        if self.untrained is None:
            self.untrained = self.evaluate()
            self.log(
                f"before training: k-NN accuracy {self.untrained['knn_accuracy']:.2f} %, effective rank of the "
                f"features {self.untrained['feature_rank']:.1f}"
            )
        return super().fit()

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        crops = [self.prepare(crop) for crop in self.protocol.split(batch.images)]
        temperature = teacher_temperature(self.epoch, self.config)
        with torch.no_grad(), self.accelerator.autocast():
            teacher = [view.float() for view in self.teacher(crops[:GLOBAL_CROPS])]
        student = [view.float() for view in self.model(crops)]
        loss = self.loss(teacher, student, teacher_temp=temperature)
        count = len(batch.labels)
        return (
            crops[0],
            loss * count,
            tuple(value * count for value in outputs(teacher, student, self.loss, temperature)),
        )

    def _clip(self) -> Tensor:
        """Clip the gradient of each parameter by itself, as DINO does; returns the norm of all before."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), float("inf"))
        if self.config.clip_grad is not None:
            for parameter in self.wrapped.parameters():
                if parameter.grad is not None:
                    torch.nn.utils.clip_grad_norm_([parameter], self.config.clip_grad)
        if self.epoch < self.config.freeze_last_layer_epochs:
            for parameter in self.bare_model.head.last_layer.parameters():
                parameter.grad = None
        return norm

    def _after_step(self) -> None:
        momentum = self._momentum()
        with torch.no_grad():
            for of_teacher, of_student in zip(self.teacher.parameters(), self.bare_model.parameters(), strict=True):
                of_teacher.mul_(momentum).add_(of_student, alpha=1 - momentum)
        self.loss.move_center()

    def _momentum(self) -> float:
        """Share of the teacher that the present update keeps."""
        return cosine(
            self.updates_done, self.config.epochs * self.plan.updates_per_epoch, self.config.teacher_momentum, 1.0
        )

    def _trained(self, sums: dict[str, float]) -> dict[str, float]:
        names = ("loss", "teacher_entropy", "student_entropy", "information")
        return {f"train_{name}": sums[name] / sums["images"] for name in names}

    def _tested(self, tested: dict[str, float]) -> dict[str, float | None]:
        decay = next(group["weight_decay"] for group in self.optimizer.param_groups if group["weight_decay"])
        return {name: tested[name] for name in ("knn_accuracy", "feature_rank")} | {"weight_decay": decay}

    def _describe(self, row: dict[str, Any]) -> str:
        config = self.config
        self._warn_of_collapse(row)
        tested = ""
        if row["knn_accuracy"] is not None:
            tested = f", k-NN accuracy {row['knn_accuracy']:.2f} %, rank of features {row['feature_rank']:.1f}"
        return (
            f"epoch {row['epoch']}/{config.epochs}: loss {row['train_loss']:.4f}, entropy of teacher "
            f"{row['train_teacher_entropy']:.3f} and student {row['train_student_entropy']:.3f} (at most "
            f"{torch.tensor(config.out_dim).log():.3f}), information {row['train_information']:.3f}{tested}; lr "
            f"{row['lr']:.2e}, {row['images_per_second']:.0f} images/s, {row['seconds']:.0f} s "
            f"({100 * row['data_seconds'] / row['seconds']:.0f} % waiting for images)"
        )

    def _warn_of_collapse(self, row: dict[str, Any]) -> None:
        """Say in the log where the outputs or the features are the same for all images."""
        if not self.is_main:
            return
        if row["train_information"] < LEAST_INFORMATION:
            _logger.warning(
                "the teacher gives all images nearly the same output (%.3f nats tell them apart): a collapse, if it "
                "stays so; a smaller peak_lr or teacher_temp, or a longer freeze_last_layer_epochs, may help",
                row["train_information"],
            )
        if row["feature_rank"] is not None and row["feature_rank"] < LEAST_RANK:
            _logger.warning("the features of all images lie on a line: effective rank %.2f", row["feature_rank"])

    def _finish(self, tested: dict[str, float], seconds: float) -> dict[str, Any]:
        return finish(self, tested, seconds)

    def evaluate(self) -> dict[str, float]:
        """k-NN accuracy in percent and effective rank of the teacher's pooled features of the test images."""
        bank, labels = self._features(self.bank, self.config.knn_images)
        queries, truth = self._features(self.test_samples, None)
        votes = knn_votes(bank, labels, queries, len(self.classes), neighbours=self.config.knn_neighbours)
        hits = (votes.argmax(1) == truth).sum().item()
        return {
            "knn_accuracy": 100 * hits / len(truth),
            "feature_rank": effective_rank(queries),
            "samples": len(truth),
        }

    @torch.inference_mode()
    def _features(self, samples: Any, most: int | None) -> tuple[Tensor, Tensor]:
        """float32 (N, C) on the CPU and int64 (N,) of up to `most` images spread evenly; the same in each process."""
        count = samples.num_images if most is None else min(most, samples.num_images)
        mine = (torch.arange(count) * samples.num_images // count)[self.rank :: self.processes].tolist()
        size = 4 * self.plan.micro_batch_size
        source = batches(
            samples, [mine[i : i + size] for i in range(0, len(mine), size)], workers=self.config.data.workers
        )
        parts = []
        with self.accelerator.autocast():
            for images, labels in source:
                parts.append((self.backbone(self.prepare(images)).float().cpu(), labels))
        gathered = [part for process in gather_object([parts]) for part in process]
        return torch.cat([features for features, _ in gathered]), torch.cat([labels for _, labels in gathered])

    def show_batch(self, path: Path) -> None:
        """Draw the first batch of the run as the model would see it."""
        batch = next(self.feed)
        draw_crops(self.protocol.split(batch.images), path, f"DINO's crops of {self.config.data.name}")
        self.log(f"wrote {path}; nothing was trained")
