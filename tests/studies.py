"""Study folders for tests: images that take no time to learn from, and finished runs without training."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from timm_locat.locality import MEASURES, Conventions, Locality
from timm_locat.record import plain_json, write_record
from timm_locat.study import Settings, cells
from timm_locat.study.run import cell_folder, open_study


def picture_folder(folder):
    """An image folder of two classes: 40 training and 20 test images of 32 x 32 noise, one class darker."""
    chance = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 10)):
        for label, top in (("dark", 100), ("light", 255)):
            place = folder / split / label
            place.mkdir(parents=True)
            for i in range(count):
                pixels = chance.integers(0, top, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder


def heads(distance):
    """A result of two layers and two heads; the first head of layer 1 has this distance and looks around itself."""
    table = {name: [[0.5, 0.5], [0.5, 0.5]] for name in MEASURES}
    for name in ("mad", "mad_dropped"):
        table[name] = [[0.42, 0.42], [distance, 0.42]]
    masses = {"self_mass": (0.02, 0.05), "neighbour_mass": (0.10, 0.60), "prefix_mass": (0.02, 0.03)}
    for name, (other, least) in masses.items():
        table[name] = [[other, other], [least, other]]
    return Locality("model", Conventions(), 8, (32, 32), ("first", "second"), ((8, 8), (8, 8)), 1, table)


def fake_study(out: Path, settings: Settings, numbers) -> Path:
    """A study whose runs are done, though nothing was trained.

    Args:
        out: Folder to make.
        settings: Which study.
        numbers: Function of (condition, seed), to test accuracy and least distance.
    """
    open_study(out, settings)
    first = None
    for cell in cells(settings, fitted=False):
        accuracy, distance = numbers(cell.condition, cell.seed)
        folder, after = cell_folder(out, cell), heads(distance)
        heads(0.418).save(folder / "locality" / "update_0000000.json")
        after.save(folder / "locality" / "update_0000010.json")
        results = {"test_accuracy": accuracy, "train_accuracy": 50.0, "train_images": 40, "test_images": 20}
        results |= {"image_passes": 40, "seconds": 2.0, "locality": after.summary()}
        results |= {"mixed_precision": cell.config.mixed_precision, "test_top5": 99.0, "parameters": 1234}
        own = {"results": results, "config": plain_json(cell.config), "seed": cell.seed}
        own |= {"recipe": f"study {cell.condition}"}
        if first is None:  # asking git for the commit takes longer than all the rest
            first = write_record(folder / "record.json", protocol="train/v1", **own)
        (folder / "record.json").write_text(json.dumps({**first, **own}))
    return out


def add_weights(folder, label_names):
    """Weights in a finished run's folder, and what is exported beside them."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    save_file({"head.weight": torch.randn(3, 4, generator=generator)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"label_names": label_names}))


def without_weights(out, to):
    """A copy of a study folder that holds what its report is made of."""
    shutil.copytree(out, to, ignore=lambda _, names: [n for n in names if n.endswith((".pt", ".safetensors", ".png"))])
    return to
