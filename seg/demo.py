"""The paper's head on composed scenes, for a plain and a LocAtViT compact: `python -m seg.demo`, about 10 minutes.

Writes scenes, runs, pictures and one record per run below --out. Both backbones are those that come with the package,
trained on the embedded Fashion-MNIST, and stay frozen; only the head learns. Composed scenes are not natural ones.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from seg.infer import segment
from seg.launch import check_data, read_config, untrained
from seg.test import evaluate
from timm_locat.data.images import read_image
from timm_locat.data.scenes import CLASSES, PALETTE, write_scenes
from timm_locat.errors import UserError, run_cli
from timm_locat.record import atomic_write, write_record

from mmengine.runner import Runner  # isort: skip  (after the cure in seg.launch)
from mmseg.apis import init_model  # isort: skip

__all__ = ["main"]

CONFIGS = Path(__file__).parent / "configs" / "composed"
MODELS = ("vit_compact", "locatvit_compact")
SIZE = (64, 64)
TRAIN, VAL = 200, 50
"""Number of scenes. Sizes and numbers are our choice: what two cores do in the time."""


def run(model: str, scenes: Path, seed: int, out: Path) -> dict[str, Any]:
    """Train and evaluate one head; returns the results of its record, which it writes."""
    began = time.perf_counter()
    cfg = settings(model, scenes, seed, out)
    check_data(cfg, "train_dataloader", "val_dataloader")
    Runner.from_cfg(cfg).train()
    checkpoint = out / f"iter_{cfg.train_cfg.max_iters}.pth"
    plain = cfg.to_dict()
    scores = evaluate(settings(model, scenes, seed, out), str(checkpoint))
    results = {**scores, "seconds": time.perf_counter() - began, "train_scenes": TRAIN, "val_scenes": VAL}
    record = out.parent / f"segmentation-v1__composed__{model}__seed{seed}.json"
    write_record(record, protocol="segmentation/v1", results=results, config=plain, seed=seed, model=model)
    return results


def settings(model: str, scenes: Path, seed: int, out: Path) -> Any:
    """Config of one run."""
    cfg = read_config(str(CONFIGS / f"patch_head_{model}.py"), {"data_root": str(scenes)})
    cfg.work_dir, cfg.randomness.seed, cfg.visualizer.name = str(out), seed, str(out)
    return cfg


def pictures(scenes: Path, seed: int, out: Path, count: int = 6) -> Image.Image:
    """Scenes, their masks, and what each model finds, one scene per row."""
    files = sorted((scenes / "images/validation").iterdir())[:count]
    columns = []
    for model in MODELS:
        cfg = settings(model, scenes, seed, out / model)
        checkpoint = str(out / model / f"iter_{cfg.train_cfg.max_iters}.pth")
        untrained(cfg, checkpoint)
        segmentor = init_model(cfg, checkpoint, device="cuda:0" if torch.cuda.is_available() else "cpu")
        columns.append([segment(segmentor, read_image(file)) for file in files])
    side, gap, head = 128, 4, 16
    sheet = Image.new("RGB", (4 * (side + gap), head + count * (side + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(("scene", "truth", *MODELS)):
        draw.text((column * (side + gap) + 2, 2), title, fill="black")
    palette = np.asarray(PALETTE, np.uint8)
    for row, file in enumerate(files):
        truth = np.asarray(Image.open(scenes / "annotations/validation" / file.name))
        masks = [Image.fromarray(palette[labels]) for labels in (truth, columns[0][row], columns[1][row])]
        for column, picture in enumerate((read_image(file), *masks)):
            place = (column * (side + gap), head + row * (side + gap))
            sheet.paste(picture.resize((side, side), Image.Resampling.NEAREST), place)
    return sheet


def report(results: dict[str, dict[str, Any]]) -> str:
    """Per-class IoU of the two models side by side, in percent."""
    lines = [f"{'':12s} " + " ".join(f"{model:>17s}" for model in results)]
    for name in CLASSES:
        values = (result["IoU"][name] for result in results.values())
        lines.append(f"{name:12s} " + " ".join(f"{'absent' if v is None else f'{v:.1f}':>17s}" for v in values))
    lines.append(f"{'mIoU':12s} " + " ".join(f"{result['mIoU']:17.2f}" for result in results.values()))
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument(
        "--seed", type=int, default=0, help="of the scenes, the head and the order (default: %(default)s)"
    )
    made.add_argument(
        "--out", type=Path, default=Path("runs/seg_demo"), help="folder to write into (default: %(default)s)"
    )
    args = made.parse_args()
    out = args.out / f"seed{args.seed}"
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; remove it, or pass another --out or --seed")
    scenes = write_scenes(out / "scenes", train=TRAIN, val=VAL, size=SIZE, seed=args.seed)
    results = {}
    for model in MODELS:
        print(f"training the head on {model} ...", flush=True)
        results[model] = run(model, scenes, args.seed, out / model)
    pictures(scenes, args.seed, out).save(out / "predictions.png")
    text = report(results)
    atomic_write(out / "report.txt", text + "\n")
    print(f"{text}\nrecords and predictions.png in {out}")


if __name__ == "__main__":
    run_cli(main)
