"""`python -m timm_locat.train evaluate MODEL DATA`: accuracy of any timm model on any labelled images."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from accelerate import Accelerator
from timm.data import resolve_model_data_config
from torch import nn

from timm_locat.data import ImageData, ImageStream, load
from timm_locat.errors import UserError
from timm_locat.models import create_model, parse_kwargs
from timm_locat.record import write_record
from timm_locat.train.launched import check_processes, choose_threads
from timm_locat.train.samples import batches, input_size, normaliser
from timm_locat.train.scores import evaluate
from timm_locat.train.stream import open_samples

__all__ = ["EvaluateConfig", "run"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Top-1 and top-5 accuracy, confusion matrix and per-class table of a model, as a record."""

    model: tyro.conf.Positional[str]
    """Any timm model name (its pretrained weights are loaded), `local-dir:RUN_FOLDER` or `hf-hub:OWNER/NAME`."""
    data: tyro.conf.Positional[str]
    """A data set by name, a path, or a Hub id; see docs/training.md."""
    root: str | None = None
    """For a data set by name, the path of its files."""
    split: str = "test"
    streaming: bool = False
    """Read parquet files, a folder of `save_to_disk` or a data set of the Hub from start to end, and keep nothing."""
    model_kwargs: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Further arguments of the model as a JSON object."""
    img_size: int | None = None
    """Height and width in pixels; None takes the model's own."""
    batch_size: int = 64
    workers: int = 0
    out: Path | None = None
    """File of the record; nothing is written when not given."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 0:
            raise ValueError(
                f"batch_size must be 1 or more and workers 0 or more, got {self.batch_size}, {self.workers}"
            )
        parse_kwargs(self.model_kwargs, "--model-kwargs")


def label_names(model: nn.Module) -> tuple[str, ...] | None:
    """Class names that were exported with the weights, if any."""
    names = model.pretrained_cfg.get("label_names")
    return tuple(names) if names else None


def open_data(config: EvaluateConfig, model: nn.Module) -> ImageData | ImageStream:
    """The images, with labels in the order of the model's logits.

    Raises:
        UserError: The data has another number of classes than the model.
    """
    names = label_names(model)
    data = load(config.data, config.split, classes=names, root=config.root, streaming=config.streaming)
    if len(data.classes) != model.num_classes:
        raise UserError(
            f"{config.model} has {model.num_classes} classes and {config.data} has {len(data.classes)}; "
            "give the data that it was trained for"
        )
    return data


def run(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate, print a table, and write the record; every image counts once whatever the number of processes."""
    accelerator = Accelerator()
    check_processes(accelerator.num_processes)
    if accelerator.device.type == "cpu":
        choose_threads()
    size = None if config.img_size is None else (config.img_size, config.img_size)
    kwargs = parse_kwargs(config.model_kwargs, "--model-kwargs")
    model = create_model(config.model, pretrained=True, img_size=size, **kwargs).eval().to(accelerator.device)
    data = open_data(config, model)
    facts = resolve_model_data_config(model)
    samples = open_samples(
        data,
        input_size(model, config.model),
        crop_pct=facts["crop_pct"],
        interpolation=facts["interpolation"],
        in_memory=False,
    )
    ids = samples.evaluation_ids(config.batch_size, accelerator.process_index, accelerator.num_processes)
    source = batches(samples, ids, workers=config.workers)
    scores = evaluate(model, source, normaliser(facts, accelerator.device), accelerator, model.num_classes)
    results = summarise(scores, data.classes)
    if accelerator.is_main_process:
        _logger.info(describe(results))
        if config.out is not None:
            write_record(config.out, protocol="evaluate/v1", results=results, config=config, seed=None)
            _logger.info(f"record: {config.out}")
    accelerator.end_training()
    return results


def summarise(scores: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """Scores with a row for each class; recall is the accuracy on a class, None where it has no images."""
    confusion = scores["confusion"]
    correct, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    rows = [
        {
            "class": name,
            "images": int(true[k]),
            "recall": 100 * int(correct[k]) / int(true[k]) if true[k] else None,
            "precision": 100 * int(correct[k]) / int(predicted[k]) if predicted[k] else None,
        }
        for k, name in enumerate(classes)
    ]
    return {**scores, "per_class": rows, "confusion": confusion.tolist()}


def describe(results: dict[str, Any]) -> str:
    """The table as a person reads it."""
    width = max(len(row["class"]) for row in results["per_class"])
    lines = [f"{'class':<{width}}  {'images':>7}  {'recall':>7}  {'precision':>9}"]
    for row in results["per_class"]:
        recall, precision = (f"{row[k]:.1f} %" if row[k] is not None else "-" for k in ("recall", "precision"))
        lines.append(f"{row['class']:<{width}}  {row['images']:>7}  {recall:>7}  {precision:>9}")
    lines.append(f"top-1 {results['accuracy']:.2f} %, top-5 {results['top5']:.2f} % of {results['samples']:,} images")
    return "\n".join(lines)
