"""Segmentation data in the official layouts, and configs cut down to what a CPU trains in a second."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((64, 96), (75, 100), (96, 64))


def _write(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def _pair(image: Path, mask: Path, labels: list[int], number: int) -> None:
    """An image whose colour tells the label, in cells of 16 pixels."""
    height, width = SIZES[number % len(SIZES)]
    rows, columns = np.mgrid[0:height, 0:width] // 16
    label = np.asarray(labels, np.uint8)[(rows * 7 + columns + number) % len(labels)]
    colours = np.random.default_rng(0).integers(0, 256, (256, 3), np.uint8)
    noise = np.random.default_rng(number).integers(0, 20, (height, width, 3), np.uint8)
    _write(image, colours[label] // 2 + noise)
    _write(mask, label)


def ade20k(root: Path) -> Path:
    for split, count in (("training", 5), ("validation", 3)):
        for i in range(count):
            name = f"ADE_{split[:5]}_{i:08d}"
            image = root / "images" / split / f"{name}.jpg"
            _pair(image, root / "annotations" / split / f"{name}.png", [0, 1, 2, 75, 150], i)
    return root


def _voc(root: Path, lists: str, splits: dict[str, tuple[str, list[int]]]) -> Path:
    for number, (split, (folder, labels)) in enumerate(splits.items()):
        names = [f"2008_{number}{i:05d}" for i in range(3)]
        for i, name in enumerate(names):
            _pair(root / "JPEGImages" / f"{name}.jpg", root / folder / f"{name}.png", labels, i)
        (root / "ImageSets" / lists).mkdir(parents=True, exist_ok=True)
        (root / "ImageSets" / lists / f"{split}.txt").write_text("\n".join(names) + "\n")
    return root


def pascal_context_59(root: Path) -> Path:
    splits = dict.fromkeys(("train", "val"), ("SegmentationClassContext", [0, 1, 30, 59]))
    return _voc(root, "SegmentationContext", splits)


pascal_context_60 = pascal_context_59


def voc12_aug(root: Path) -> Path:
    stock, more = ("SegmentationClass", [0, 1, 20, 255]), ("SegmentationClassAug", [0, 5, 20, 255])
    return _voc(root, "Segmentation", {"train": stock, "val": stock, "aug": more})


def coco_stuff164k(root: Path) -> Path:
    for split in ("train2017", "val2017"):
        for i in range(3):
            mask = root / "annotations" / split / f"{i:012d}_labelTrainIds.png"
            _pair(root / "images" / split / f"{i:012d}.jpg", mask, [0, 1, 100, 170, 255], i)
    return root


def cityscapes(root: Path) -> Path:
    for split, city in (("train", "aachen"), ("val", "munster")):
        for i in range(3):
            name = f"{city}_{i:06d}_000019"
            mask = root / "gtFine" / split / city / f"{name}_gtFine_labelTrainIds.png"
            _pair(root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", mask, [0, 7, 18, 255], i)
    return root


def small(cfg, crop: int = 64) -> None:
    """Cut a config down: few and narrow blocks, random weights, small crops, two images, no workers."""
    backbone = cfg.model.backbone
    swin = backbone.model_name.startswith("swin")
    shape = (
        dict(depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 2, 2, 2))
        if swin
        else dict(depth=2, embed_dim=48, num_heads=3)
    )
    backbone.update(pretrained=False, checkpoint=None, model_args={**backbone.get("model_args", {}), **shape})
    head = cfg.model.decode_head
    if head.type == "SegmenterMaskTransformerHead":
        head.update(channels=48, embed_dims=48, num_heads=3, num_layers=1)
    elif head.type != "BNLinearHead":
        head.channels = 16
    if "auxiliary_head" in cfg.model:
        cfg.model.auxiliary_head.channels = 16
    if cfg.model.get("neck"):
        cfg.model.neck.out_channels = 16
    cfg.model.data_preprocessor.size = (crop, crop)
    if cfg.model.test_cfg.mode == "slide":
        cfg.model.test_cfg.update(crop_size=(crop, crop), stride=(crop * 2 // 3, crop * 2 // 3))
    parts = cfg.train_dataloader.dataset.get("datasets") or [cfg.train_dataloader.dataset]
    for step in (step for part in parts for step in part.pipeline):
        if step.type == "RandomResize":
            step.scale = (2 * crop, crop)
        if step.type == "RandomCrop":
            step.crop_size = (crop, crop)
        if step.type == "Pad":
            step.size = (crop, crop)
    for step in (*cfg.test_dataloader.dataset.pipeline, *cfg.val_dataloader.dataset.pipeline, *cfg.test_pipeline):
        if step.type == "Resize":
            step.scale = (2 * crop, crop)
    cfg.train_dataloader.update(batch_size=2, num_workers=0, persistent_workers=False)
    for loader in (cfg.val_dataloader, cfg.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    cfg.env_cfg.cudnn_benchmark = False
