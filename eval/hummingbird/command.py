"""`python -m eval hummingbird`: one model on one data set, with a record and pictures."""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from eval.hummingbird.evaluate import Order, Setup, evaluate
from eval.hummingbird.features import RAW_PIXELS, Extractor, ModelSource
from eval.hummingbird.protocol import PRESETS, Protocol
from eval.hummingbird.ranks import rank
from eval.hummingbird.search import FaissExact, FaissIvfPq, TorchExact
from eval.hummingbird.tasks import Segmentation
from timm_locat.data.scenes import ComposedScenes
from timm_locat.data.segmentation import SEGMENTATION, load_segmentation
from timm_locat.errors import UserError, require
from timm_locat.memory import resident_peak
from timm_locat.models import parse_kwargs
from timm_locat.record import write_record

RECORD = "hummingbird/v1"
ALL = "all"
COMPOSED = "composed"
CHOICES = ("scenes", "bank_sizes", "ks", "betas", "model_kwargs")
"""What the file name of a record tells by a hash, where it is not at its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How well a model's patch features find patches of the same class: nearest neighbours, no training.

    Patches of the training images make a bank; each patch of a validation image takes the labels of its nearest rows,
    and the label maps are scored by IoU. Search is exact. With several processes, start it by torchrun.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Any timm model name, `local-dir:FOLDER` or `hf-hub:OWNER/NAME`; or `raw-pixels:P` for pixels of P x P patches."""
    data: Annotated[str, tyro.conf.arg(metavar="DATASET")] = COMPOSED
    """A segmentation set by name, such as voc or ade20k; a parquet file or folder, or `owner/name` of the Hub;
    `composed` are scenes that the package makes."""
    root: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the files of a set known by name are."""
    splits: tuple[str, str] = ("train", "val")
    """Split of the bank, and of the queries."""
    train_folders: Annotated[tuple[Path, Path] | None, tyro.conf.arg(metavar="IMAGES MASKS")] = None
    """Instead of --data: a folder of images and one of masks for the bank."""
    val_folders: Annotated[tuple[Path, Path] | None, tyro.conf.arg(metavar="IMAGES MASKS")] = None
    """The same for the queries."""
    classes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Class names in the order of their labels; sets known by name have their own."""
    ignore_index: int = 255
    """Label of pixels that do not count, for sets that are not known by name."""
    skip_check: bool = False
    """Do not read all images and masks once before the model runs; mistakes then show when they are met."""
    scenes: tuple[int, int] = (200, 50)
    """Composed scenes for the bank, and for the queries."""
    protocol: Literal["hbird", "ohe-2.0", "locatvit", "dip", "capi-knn"] = "hbird"
    """Settings by name; what is given below replaces single ones and changes the hash."""
    img_size: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT")] = None
    """Image side in pixels, or height and width."""
    bank_size: Annotated[str | None, tyro.conf.arg(metavar="INT|all")] = None
    """Rows of the bank, or `all` patches."""
    epochs: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Passes over the training images, each with other crops."""
    k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Neighbours of a query."""
    beta: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Temperature of the neighbours' weights."""
    features: Literal["before_prr", "after_prr"] | None = None
    """Before or after patch representation refinement."""
    layer: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Block or stage whose output is taken; -1 is the last."""
    norm: Annotated[bool | None, tyro.conf.arg(metavar="True|False")] = None
    """Apply the model's final norm."""
    precision: Literal["float32", "float16"] | None = None
    """How features are kept."""
    seed: int = 0
    """Seed of crops, of the patch choice, and of weights that are not loaded."""
    bank_sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="INT|all")] = ()
    """More banks to report in the same pass; each is part of the next larger."""
    ks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT")] = (1, 5, 10)
    """More numbers of neighbours to report; they cost no search."""
    betas: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOAT")] = ()
    """More temperatures to report; they cost no search."""
    untrained: bool = False
    """Do not load weights: what the architecture alone does."""
    model_kwargs: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Build arguments of the model as a JSON object, such as '{"depth": 2}'."""
    engine: Literal["torch", "faiss", "faiss-ivfpq"] = "torch"
    """Exact search by torch or by faiss, or approximate search by faiss, which reports its own recall."""
    order: Order | None = None
    """Keep the queries and let the bank pass by, or keep the bank; queries unless an index has to be built."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "cpu"
    """Where model and search run, such as cuda."""
    batch: int = 16
    """Images per pass."""
    workers: int = 0
    """Processes that read images."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads of torch; torch's own choice when left out."""
    pictures: int = 6
    """Query images in the picture of retrieval, which lies beside the record; 0 draws none."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the record; a name made of the settings, in ./results, when left out."""

    def __post_init__(self) -> None:
        if self.img_size is not None and (len(self.img_size) not in (1, 2) or min(self.img_size) < 1):
            raise ValueError(f"--img-size takes one or two sides of at least 1 pixel, got {self.img_size}")
        for name, least in (("batch", 1), ("workers", 0), ("threads", 1), ("pictures", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
        if (self.train_folders is None) != (self.val_folders is None):
            raise ValueError("--train-folders and --val-folders go together; give both")
        for text in (*self.bank_sizes, *([] if self.bank_size is None else [self.bank_size])):
            parse_size(text)
        parse_kwargs(self.model_kwargs, "--model-kwargs")
        self.settings()

    @property
    def data_name(self) -> str:
        """What the data are called in the report and in file names."""
        if self.train_folders is not None:
            return str(self.train_folders[0])
        return self.data if self.root is None else f"{self.data} in {self.root}"

    def settings(self) -> Protocol:
        """The protocol with what this command line changes."""
        changes: dict[str, Any] = {"seed": self.seed}
        if self.img_size is not None:
            changes["img_size"] = (self.img_size[0], self.img_size[-1])
        if self.bank_size is not None:
            changes["bank_size"] = parse_size(self.bank_size)
        for name in ("epochs", "k", "beta", "features", "layer", "norm", "precision"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return replace(PRESETS[self.protocol], **changes)


def parse_size(text: str) -> int | None:
    """Rows of a bank; None for `all`."""
    if text == ALL:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a bank has a number of rows above 0, or {ALL}, got {text!r}")
    return int(text)


def open_data(config: Config, protocol: Protocol) -> tuple[Any, Any, int | None]:
    """Training and validation images with masks, and the label that does not count."""
    if config.train_folders is not None or config.data != COMPOSED or config.root is not None:
        places = (config.train_folders, config.val_folders) if config.train_folders else (config.data, config.data)
        options: dict[str, Any] = {"root": config.root}
        if config.train_folders or config.data not in SEGMENTATION:
            options |= {"classes": config.classes or None, "ignore_index": config.ignore_index}
        train, val = (
            load_segmentation(place, split, **options) for place, split in zip(places, config.splits, strict=True)
        )
        return train, val, train.ignore_index
    height, width = protocol.img_size
    train, val = (
        ComposedScenes(split=split, length=length, size=(height, width))
        for split, length in zip(("train", "val"), config.scenes, strict=True)
    )
    return train, val, None


def make_setup(config: Config, protocol: Protocol) -> Setup:
    """Engine, order and bar."""
    index = functools.partial(FaissIvfPq, protocol.distance) if config.engine == "faiss-ivfpq" else None
    knn: Callable = FaissExact if config.engine == "faiss" else TorchExact
    order = config.order or ("queries" if index is None else "bank")
    return Setup(order=order, knn=knn, index=index, device=config.device, progress=bar)


def bar(images: Sequence[int], what: str) -> Any:
    """A bar on a terminal, nothing in a log file or in other processes than the first."""
    tqdm = require("tqdm", "eval", "the progress bar of python -m eval hummingbird").tqdm
    return tqdm(images, desc=what, unit="image", leave=False, disable=None if rank() == 0 else True)


def check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as err:
        raise UserError(f"torch cannot use the device {device!r}; use --device cpu") from err


def join_processes(device: str) -> None:
    """Meet the other processes where torchrun started several."""
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")


def measure(config: Config, protocol: Protocol) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """The results of a record, and what draws the picture."""
    train_data, val_data, ignore_index = open_data(config, protocol)
    kwargs = parse_kwargs(config.model_kwargs, "--model-kwargs")
    extractor = Extractor(config.model, protocol, pretrained=not config.untrained, device=config.device, **kwargs)
    train, val = (
        ModelSource(data, extractor, batch=config.batch, workers=config.workers) for data in (train_data, val_data)
    )
    task = Segmentation(protocol, train_data.classes, ignore_index)
    if not config.skip_check and config.data_name != COMPOSED:
        for source in (val, train):
            source.check(task, bar)
    sizes = [parse_size(text) for text in config.bank_sizes]
    setup = make_setup(config, protocol)
    results, found = evaluate(
        protocol, task, train, val, bank_sizes=sizes, ks=config.ks, betas=config.betas, setup=setup
    )
    peak = resident_peak()
    results |= {
        "protocol": config.protocol,
        "protocol_hash": protocol.hash,
        "settings": protocol,
        "weights": weights_name(config),
        "peak_memory_mib": None if peak is None else round(peak / 2**20, 1),
        "peak_cuda_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1)
        if config.device.startswith("cuda")
        else None,
    }

    def picture(path: Path) -> None:
        from eval.hummingbird.pictures import draw_retrieval

        draw_retrieval(path, task, protocol, train, val, found, config.pictures)

    return results, picture


def weights_name(config: Config) -> str:
    """Where the features come from, in a word or two."""
    if config.model.startswith(RAW_PIXELS):
        return "none"
    return f"initialisation, seed {config.seed}" if config.untrained else "loaded"


def file_name(config: Config, protocol: Protocol) -> str:
    """Name of the record: model, data and protocol with its hash, and what else is not at its default."""
    words = [RECORD, config.model, config.data_name]
    words.append(f"{config.protocol}-{protocol.hash}")
    words = [re.sub(r"[^\w.+-]+", "-", word) for word in words]
    words += ["untrained"] if config.untrained else []
    words += [config.engine] if config.engine != "torch" else []
    default = {field: Config.__dataclass_fields__[field].default for field in CHOICES}
    changed = {name: getattr(config, name) for name, value in default.items() if getattr(config, name) != value}
    if changed:
        words.append(hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6])
    return "__".join(words) + ".json"


def report(config: Config, protocol: Protocol, results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    grid, images = results["grid"], results["images"]
    lines = [
        f"{config.model} on {config.data_name}: protocol {config.protocol}, hash {protocol.hash}",
        f"{images['bank']} images in the bank ({results['rows']:,} rows), {images['queries']} as queries, "
        f"grid {grid[0]}x{grid[1]}, k = {protocol.k}, beta = {protocol.beta:g}, engine {config.engine}",
        "",
        f"mIoU               {100 * results['miou']:.2f}",
        f"  identity match   {100 * results['miou_identity']:.2f}",
        f"  Hungarian match  {100 * results['miou_hungarian']:.2f}",
        f"  ceiling          {100 * results['ceiling']:.2f}  (the true labels of the patches, decoded alike)",
        f"pixel accuracy     {100 * results['pixel_accuracy']:.2f}",
        f"classes present    {results['classes_present']} of {len(results['class_iou'])}",
        "",
        *(f"  {name:<20} {100 * iou:6.2f}" for name, iou in results["class_iou"].items()),
        "",
        f"{'bank':>10} {'k':>4} {'beta':>6} {'mIoU':>7}",
    ]
    for row in results["curve"]:
        lines.append(f"{row['rows']:>10} {row['k']:>4} {row['beta']:>6g} {100 * row['miou']:>7.2f}")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in results["seconds"].items())
    peak = results["peak_memory_mib"]
    lines += ["", f"seconds: {seconds}; peak memory {'unknown' if peak is None else f'{peak:.0f} MiB'}"]
    if results["index"]:
        one = results["index"]
        agreement = f", label agreement {one['label_agreement']:.4f}" if "label_agreement" in one else ""
        lines.append(f"approximate search: recall {one['recall']:.4f}{agreement}, on {one['queries']} queries")
    return "\n".join(lines)


def markdown_row(config: Config, results: dict[str, Any]) -> str:
    """The result as a row of a table: model, data, protocol with hash, rows, mIoU, ceiling."""
    cells = [
        f"`{config.model}`",
        config.data_name,
        f"{config.protocol} `{results['protocol_hash']}`",
        f"{results['rows']:,}",
        f"{100 * results['miou']:.1f}",
        f"{100 * results['ceiling']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def run(config: Config) -> tuple[str, int]:
    """Measure, write record and picture, and return the report."""
    protocol = config.settings()
    path = Path("results") / file_name(config, protocol) if config.out is None else config.out
    if path.is_dir():
        raise UserError(f"--out must name a file, and {path} is a folder")
    check_device(config.device)
    join_processes(config.device)
    threads = torch.get_num_threads()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        try:
            results, picture = measure(config, protocol)
        except torch.OutOfMemoryError as err:
            raise UserError("the device has too little memory for this; lower --batch, or use --device cpu") from err
        if not math.isfinite(results["miou"]):
            raise UserError("no pixel of the queries counts, so there is nothing to score; check the masks")
        if rank():
            return "", 0
        write_record(path, protocol=RECORD, results=results, config=config, seed=config.seed)
        said = f"{report(config, protocol, results)}\n\n{markdown_row(config, results)}\n\nrecord: {path}"
        if config.pictures:
            picture(path.with_suffix(".png"))
            said += f"\npicture: {path.with_suffix('.png')}"
        return said, 0
    finally:
        torch.set_num_threads(threads)
