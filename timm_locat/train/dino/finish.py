"""What a finished run of DINO leaves in its folder: the teacher as a timm model, curves, the record."""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_locat.hub import export
from timm_locat.record import atomic_write, write_record
from timm_locat.train.finish import costs

if TYPE_CHECKING:
    from timm_locat.train.dino.trainer import DinoTrainer

__all__ = ["finish"]


def finish(trainer: "DinoTrainer", tested: dict[str, float], seconds: float) -> dict[str, Any]:
    """Export, plot and record a run.

    Args:
        trainer: At the end of its last epoch.
        tested: What its teacher reaches.
        seconds: Since it was started or taken up again.

    Returns:
        The results that the record holds.
    """
    config, last = trainer.config, trainer.history[-1]
    results = {
        **{name: tested[name] for name in ("knn_accuracy", "feature_rank")},
        **{f"{name}_untrained": trainer.untrained[name] for name in ("knn_accuracy", "feature_rank")},
        **{name: last[f"train_{name}"] for name in ("loss", "teacher_entropy", "student_entropy", "information")},
        "loss_first_epoch": trainer.history[0]["train_loss"],
        "test_images": tested["samples"],
        **costs(trainer),
        "seconds_this_session": seconds,
    }
    if trainer.is_main:
        export(trainer.backbone, trainer.folder)
        title = f"DINO, {config.model}, {config.data.name}"
        draw_curves(trainer.history, trainer.untrained, config.out_dim, trainer.folder / "curves.png", title)
        results |= trainer.course.finish(title)
        write_record(
            trainer.folder / "record.json",
            protocol="dino/v1",
            results=results,
            config=config,
            seed=config.seed,
            recipe=trainer.recipe,
        )
    trainer.log(
        f"k-NN accuracy {tested['knn_accuracy']:.2f} % on {tested['samples']:,} images after {seconds:.0f} s, "
        f"{trainer.untrained['knn_accuracy']:.2f} % before training\n"
        f"load the teacher with: timm.create_model('local-dir:{trainer.folder}', pretrained=True)"
    )
    return results


def draw_curves(rows: list[dict[str, Any]], untrained: dict[str, float], out_dim: int, path: Path, title: str) -> None:
    """Loss, k-NN accuracy, what tells collapse, and the rank of the features over epochs as a PNG."""
    from matplotlib.figure import Figure

    tested = [row for row in rows if row["knn_accuracy"] is not None]
    epochs, tested_epochs = [row["epoch"] for row in rows], [0, *(row["epoch"] for row in tested)]
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    figure.suptitle(title)
    loss, knn, told, rank = figure.subplots(1, 4)
    loss.plot(epochs, [row["train_loss"] for row in rows], "o-", color="#0072B2")
    loss.set_ylabel("DINO loss (nats)")
    for axis, name, label in (
        (knn, "knn_accuracy", "k-NN accuracy, teacher, test (%)"),
        (rank, "feature_rank", "effective rank, teacher, test"),
    ):
        axis.plot(tested_epochs, [untrained[name], *(row[name] for row in tested)], "s-", color="#009E73")
        axis.axhline(untrained[name], color="0.5", linestyle=":", label="untrained")
        axis.set_ylabel(label)
        axis.legend()
    for name, color in (("teacher_entropy", "#0072B2"), ("student_entropy", "#E69F00"), ("information", "#CC79A7")):
        told.plot(epochs, [row[f"train_{name}"] for row in rows], "o-", color=color, label=name.replace("_", " "))
    told.axhline(math.log(out_dim), color="0.5", linestyle=":", label="uniform output")
    told.set_ylabel("nats")
    told.legend(fontsize=7)
    for axis in (loss, knn, told, rank):
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())
