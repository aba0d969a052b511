"""Small training runs that several test files make, and what they look at afterwards."""

import csv
import dataclasses
import json
import re

import torch
from PIL import Image

from timm_locat.train import DataConfig, TrainConfig
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.engine import Trainer

SIZES = {"depth": 1, "embed_dim": 16, "num_heads": 2}
TINY = json.dumps(SIZES)


def easy_images(count, generator):
    """Noise of 16 x 16 pixels around two levels, one per class: `count` images of each."""
    for name, level in (("dark", 30), ("light", 220)):
        for i in range(count):
            noise = torch.randint(0, 30, (16, 16, 3), dtype=torch.uint8, generator=generator)
            yield name, i, Image.fromarray((noise + level).numpy())


def easy_folder(root):
    """A folder data set of two easy classes: 24 training and 10 test images."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("test", 5)):
        for name, i, image in easy_images(count, generator):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            image.save(root / split / name / f"{i}.png")
    return root


def config(folder, out, **changes):
    """Three epochs of a tiny model with every kind of augmentation."""
    data = DataConfig(**{"name": str(folder), "protocol": "modern", **changes.pop("data", {})})
    base = TrainConfig(
        model="locatvit_compact_patch4_32",
        data=data,
        model_kwargs=TINY,
        img_size=16,
        epochs=3,
        global_batch_size=8,
        warmup_epochs=1,
        drop_path_rate=0.2,
        out=out,
    )
    return dataclasses.replace(base, **changes)


def weights(folder):
    return load_checkpoint(folder)["model"]


def rows(folder):
    """Metrics without the columns that are times or memory."""
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not re.search("second|memory", k)} for row in csv.DictReader(file)]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Killed(Exception):
    """Stands for SIGKILL: nothing of ours handles it."""


def kill_after(monkeypatch, update):
    """Let a run die without warning after so many updates."""
    done, original = [0], Trainer._train_update

    def once(self):
        if done[0] == update:
            raise Killed
        done[0] += 1
        return original(self)

    monkeypatch.setattr(Trainer, "_train_update", once)
