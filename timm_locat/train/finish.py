"""What a finished run leaves in its folder: weights, curves, the record."""

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from timm_locat.hub import export
from timm_locat.record import write_record
from timm_locat.train.build import build_model
from timm_locat.train.curves import draw_curves
from timm_locat.train.state import is_sharded, model_state

if TYPE_CHECKING:
    from timm_locat.train.engine import Trainer

__all__ = ["costs", "finish"]


def finish(trainer: "Trainer", tested: dict[str, float], seconds: float) -> dict[str, Any]:
    """Export, plot and record a run.

    Args:
        trainer: At the end of its last epoch.
        tested: What its final weights reach.
        seconds: Since it was started or taken up again.

    Returns:
        The results that the record holds.
    """
    config = trainer.config
    results = summary(trainer, tested) | {"seconds_this_session": seconds}
    weights = model_state(trainer.accelerator, trainer.bare_model) if is_sharded(trainer.accelerator) else None
    if trainer.is_main:
        model = trainer.bare_model
        if weights is not None:
            model = build_model(replace(config, pretrained=False), len(trainer.classes))
            model.load_state_dict(weights)
        export(model, trainer.folder, label_names=trainer.classes)
        if trainer.ema is not None:
            export(trainer.ema.module, trainer.folder / "ema", label_names=trainer.classes)
        title = f"{config.model}, {config.data.name}, protocol {config.data.protocol}"
        draw_curves(trainer.history, trainer.folder / "curves.png", title)
        results |= trainer.course.finish(title)
        write_record(
            trainer.folder / "record.json",
            protocol="train/v1",
            results=results,
            config=config,
            seed=config.seed,
            recipe=trainer.recipe,
        )
    if "share_of_bare" in results:
        trainer.log(
            f"{results['images_per_second']:.0f} images/s; forward and backward passes alone "
            f"{trainer.processes * results['bare_images_per_second']:.0f} images/s; the run reaches "
            f"{results['share_of_bare']:.3f} of them (median of {results['bare_comparisons']} comparisons)"
        )
    trainer.log(
        f"test accuracy {tested['accuracy']:.2f} % on {tested['samples']:,} images after {seconds:.0f} s\n"
        f"load it with: timm.create_model('local-dir:{trainer.folder}', pretrained=True)"
    )
    return results


def summary(trainer: "Trainer", tested: dict[str, float]) -> dict[str, Any]:
    """The numbers of a classifier's run."""
    config, history = trainer.config, trainer.history
    results = {
        "test_accuracy": tested["accuracy"],
        "test_top5": tested["top5"],
        "test_loss": tested["loss"],
        "test_images": tested["samples"],
        "train_accuracy": history[-1]["train_accuracy"],
        "train_loss": history[-1]["train_loss"],
        **costs(trainer),
    }
    if trainer.ema is not None:
        results |= {name: value for name, value in tested.items() if name.startswith("ema_")}
    if trainer.bare is not None:
        results |= trainer.bare.results(config.global_batch_size // trainer.processes)
    return results


def costs(trainer: "Trainer") -> dict[str, Any]:
    """What a run took, and on what; the same for every kind of training."""
    config, history = trainer.config, trainer.history
    return {
        "train_images": trainer.train_samples.num_images,
        "image_passes": config.epochs * trainer.plan.updates_per_epoch * config.global_batch_size,
        "images_per_second": statistics.median(row["images_per_second"] for row in history),
        "seconds": sum(row["seconds"] for row in history),
        "peak_memory_mib": max(row["peak_memory_mib"] or 0 for row in history) or None,
        "broken_images": len(trainer.broken.files),
        "parameters": trainer.num_parameters,
        "processes": trainer.processes,
        "distributed": trainer.accelerator.distributed_type.value,
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": trainer.accelerator.mixed_precision,
    }
