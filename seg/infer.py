"""Segment images: `python -m seg.infer CONFIG CHECKPOINT IMAGE_OR_FOLDER` writes overlays, a legend and JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from seg.launch import parser, read_config, untrained
from timm_locat.data.images import read_image
from timm_locat.errors import UserError, run_cli
from timm_locat.record import atomic_write

from mmseg.apis import inference_model, init_model  # isort: skip  (after the cure in seg.launch)

__all__ = ["main", "overlay", "shares"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
LINE = 18
"""Height in pixels of a line of the legend."""


def shares(labels: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    """Class histogram: share of the (H, W) labels that each class has, largest first, absent classes left out."""
    counts = np.bincount(labels.ravel(), minlength=len(classes))
    order = [i for i in np.argsort(-counts, kind="stable") if counts[i]]
    return {classes[i]: counts[i] / labels.size for i in order}


def overlay(image: Image.Image, labels: np.ndarray, classes: tuple[str, ...], palette: list[list[int]]) -> Image.Image:
    """An image under the colours of its labels, beside a legend with the share of each class.

    Args:
        image: RGB.
        labels: (H, W), of the image's size.
        classes: Names in the order of the labels.
        palette: Colour of each class.
    """
    colours = np.asarray(palette, np.uint8)[labels]
    painted = Image.blend(image, Image.fromarray(colours), 0.5)
    found = shares(labels, classes)
    width = 230
    sheet = Image.new("RGB", (image.width + width, max(image.height, LINE * len(found) + 8)), "white")
    sheet.paste(painted, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for row, (name, share) in enumerate(found.items()):
        x, y = image.width + 8, 4 + row * LINE
        bar = round(60 * share)
        draw.rectangle((x, y + 2, x + 12, y + 14), fill=tuple(palette[classes.index(name)]), outline="black")
        draw.text((x + 18, y + 2), f"{100 * share:5.1f} %  {name}", fill="black")
        draw.rectangle((sheet.width - 4 - bar, y + 5, sheet.width - 4, y + 11), fill=(170, 170, 170))
    return sheet


def find(path: Path) -> list[Path]:
    """The image at a path, or the images of a folder and its folders."""
    if path.is_dir():
        images = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not images:
            raise UserError(f"{path} has no images ({', '.join(sorted(SUFFIXES))})")
        return images
    if not path.is_file():
        raise UserError(f"there is no image or folder {path}")
    return [path]


def segment(model: Any, image: Image.Image) -> np.ndarray:
    """(H, W) labels of an RGB image, of its own size."""
    bgr = np.ascontiguousarray(np.asarray(image)[..., ::-1])
    return inference_model(model, bgr).pred_sem_seg.data[0].cpu().numpy()


def main() -> None:
    """Command line."""
    args = _parse()
    cfg = read_config(args.config, args.cfg_options)
    untrained(cfg, args.checkpoint)
    root, out = Path(args.images), Path(args.out)
    files = find(root)
    model = init_model(cfg, args.checkpoint, device="cuda:0" if torch.cuda.is_available() else "cpu")
    classes, palette = tuple(model.dataset_meta["classes"]), [list(c) for c in model.dataset_meta["palette"]]
    report = []
    for file in files:
        image = read_image(file)
        labels = segment(model, image)
        name = file.relative_to(root) if root.is_dir() else Path(file.name)
        # The suffix stays in the name, or a.jpg and a.png would write the same file.
        painted, mask = out / f"{name}.overlay.png", out / f"{name}.labels.png"
        painted.parent.mkdir(parents=True, exist_ok=True)
        overlay(image, labels, classes, palette).save(painted)
        Image.fromarray(labels.astype(np.uint8)).save(mask)
        found = shares(labels, classes)
        report.append(
            {
                "image": str(file),
                "overlay": str(painted),
                "labels": str(mask),
                "size": [image.height, image.width],
                "classes": found,
            }
        )
        print(f"{file}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in list(found.items())[:4]))
    atomic_write(out / "predictions.json", json.dumps(report, indent=1))
    print(f"{len(report)} images, overlays and predictions.json in {out}")


def _parse():
    made = parser(__doc__)
    made.add_argument("images", help="an image, or a folder of images")
    made.add_argument("--out", default="predictions", help="folder to write into (default: %(default)s)")
    return made.parse_args()


if __name__ == "__main__":
    run_cli(main)
