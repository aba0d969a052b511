"""What the segmentation commands share: reading a config, checking its data, one process or many."""

import argparse
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from timm_locat._mmseg_compat import cure
from timm_locat.errors import UserError

cure()

from mmengine.config import Config, DictAction  # noqa: E402
from mmengine.registry import init_default_scope  # noqa: E402
from mmseg.registry import DATASETS  # noqa: E402

__all__ = ["check_data", "finish", "launch", "parser", "read_config", "untrained"]


def parser(description: str, *, checkpoint: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments that all commands take, as mmsegmentation's own tools name them."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("config", help="config file, such as seg/configs/ade20k/patch_head_locatvit_tiny.py")
    if checkpoint:
        made.add_argument("checkpoint", help="checkpoint that training with this config has written, *.pth")
    made.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        default={},
        metavar="KEY=VALUE",
        help="settings to change, such as train_dataloader.batch_size=4 data_root=/data/ade",
    )
    return made


def read_config(path: str, options: dict[str, Any]) -> Config:
    """Read a config; `data_root=...` among the options moves every data set of it.

    Raises:
        UserError: There is no such file, or it is no config.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no config {path}; those of this project lie in seg/configs")
    try:
        cfg = Config.fromfile(path)
    except (SyntaxError, NameError, KeyError, AttributeError, FileNotFoundError, OSError) as err:
        raise UserError(f"{path} is no config that mmengine can read: {type(err).__name__}: {err}") from err
    cfg.merge_from_dict(options)
    if "data_root" in options:
        for loader in ("train_dataloader", "val_dataloader", "test_dataloader"):
            for dataset in _datasets(cfg[loader].dataset):
                dataset.data_root = options["data_root"]
    init_default_scope(cfg.get("default_scope", "mmseg"))
    return cfg


def untrained(cfg: Config, checkpoint: str) -> None:
    """Let all weights come from a checkpoint of a segmentor, without those that its training began with.

    Raises:
        UserError: There is no such checkpoint, or it holds other things than tensors and plain values.
    """
    if not Path(checkpoint).is_file():
        raise UserError(f"there is no checkpoint {checkpoint}; pass the *.pth file of a run folder")
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as err:
        raise UserError(
            f"{checkpoint} is no checkpoint that can be trusted and read ({str(err).splitlines()[0]}); pass one that "
            "seg.train has written"
        ) from err
    cfg.model.backbone.update(pretrained=False, checkpoint=None)
    cfg.load_from, cfg.resume = checkpoint, False


def _datasets(dataset: Config) -> Iterator[Config]:
    if "datasets" in dataset:
        for part in dataset.datasets:
            yield from _datasets(part)
    else:
        yield dataset


def check_data(cfg: Config, *loaders: str) -> None:
    """See that every image and mask of the data sets is there, before anything else takes its time.

    Args:
        loaders: Of `train_dataloader`, `val_dataloader` and `test_dataloader`.

    Raises:
        UserError: A folder, list, image or mask is missing; the sentence names the first and counts them.
    """
    for loader in loaders:
        for dataset in _datasets(cfg[loader].dataset):
            _check_folders(dataset)
            if dataset.get("ann_file") and not (Path(dataset.data_root) / dataset.ann_file).is_file():
                raise UserError(
                    f"{Path(dataset.data_root) / dataset.ann_file} is missing; is {dataset.data_root} whole?"
                )
            _check_files(dataset)


def _check_folders(dataset: Config) -> None:
    root = Path(dataset.data_root)
    for folder in (root, *(root / prefix for prefix in dataset.data_prefix.values())):
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; docs/segmentation_data.md says what {dataset.type} looks like, and "
                "--cfg-options data_root=FOLDER says where it is"
            )


def _check_files(dataset: Config) -> None:
    rows = DATASETS.build({**dataset, "pipeline": [], "lazy_init": False, "serialize_data": False})
    files = [
        Path(row[key])
        for row in (rows.get_data_info(i) for i in range(len(rows)))
        for key in ("img_path", "seg_map_path")
    ]
    if not files:
        raise UserError(
            f"{dataset.data_root} has no images in {dataset.data_prefix.img_path}; is it copied as a whole?"
        )
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{dataset.data_root} lacks {len(missing)} of {len(files)} files, the first of them {missing[0]}; "
            "copy it again"
        )


def launch(cfg: Config) -> None:
    """Set up the processes that `torchrun` has started; without a GPU they talk through gloo."""
    if "LOCAL_RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    cfg.launcher = "pytorch"
    if torch.cuda.is_available():
        return
    torch.distributed.init_process_group("gloo")  # mmengine would ask for a CUDA device
    cfg.model_wrapper_cfg = dict(type="MMDistributedDataParallel", device_ids=None, broadcast_buffers=False)
    _without_syncbn(cfg.model)


def _without_syncbn(node: Any) -> None:
    """SyncBN has no CPU form; with a batch per process, plain BN is another model, which is why this is said here."""
    values = node.values() if isinstance(node, dict) else node
    if isinstance(node, dict) and node.get("type") == "SyncBN":
        node["type"] = "BN"
    for value in values:
        if isinstance(value, dict | list):
            _without_syncbn(value)


def finish() -> None:
    """Leave the group of processes, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
