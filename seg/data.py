"""Check a copy of a segmentation set before hours are spent on it.

    python -m seg.data check ade20k /data/ADEChallengeData2016

Counts the files, looks for images without masks and masks without images, and reads every mask: its kind of file, its
size beside its image's, and each of its numbers. The first ten faults are named; any fault makes the command fail.
"""

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from timm_locat.data.images import open_or_say
from timm_locat.data.masks import mask_labels, stored_values
from timm_locat.data.segmentation import SEGMENTATION, Pairs, SegmentationEntry, find_pairs
from timm_locat.errors import UserError, require, run_cli

__all__ = ["Report", "check", "main"]

SHOWN = 10
"""Faults that are named; the rest are counted."""

_EXIF_ORIENTATION = 0x0112


@dataclass
class Report:
    """What was found in one split."""

    split: str
    pairs: int
    """Images with a mask."""
    faults: list[str]
    """One sentence each."""
    pixels: Counter
    """Number of pixels of each label, ignored ones under -1."""


def check(
    name: str, root: Path, splits: Iterable[str] = (), *, processes: int = 1, partial: bool = False
) -> list[Report]:
    """Check the splits of a set known by name.

    Args:
        name: A name in `timm_locat.data.segmentation.SEGMENTATION`.
        root: Folder of the set.
        splits: Which of them; all when empty.
        processes: How many read masks.
        partial: Whether fewer images than the whole set has are no fault.

    Returns:
        A report for each split. A split of which nothing is found has that as its only fault.
    """
    if name not in SEGMENTATION:
        raise UserError(f"there is no segmentation set {name!r}, expected one of {', '.join(SEGMENTATION)}")
    entry = SEGMENTATION[name]
    reports = []
    with (
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) if processes > 1 else nullcontext() as pool
    ):
        for split in splits or entry.splits:
            try:
                pairs = find_pairs(name, split, root)
            except UserError as err:
                reports.append(Report(split, 0, [str(err)], Counter()))
                continue
            reports.append(_check_split(entry, split, pairs, pool, partial))
    return reports


def _check_split(
    entry: SegmentationEntry, split: str, pairs: Pairs, pool: ProcessPoolExecutor | None, partial: bool
) -> Report:
    faults = [f"{path} is an image without mask" for path in pairs.without_mask]
    listed = bool(entry.splits[split].lists)
    faults += [
        f"{path} is {'listed but not there' if listed else 'a mask without image'}" for path in pairs.without_image
    ]
    expected = entry.splits[split].count
    if expected and len(pairs.images) != expected and not partial:
        faults.insert(
            0, f"{split} has {len(pairs.images):,} images with masks, the whole set has {expected:,}; copy it again"
        )
    jobs = [
        (image, mask, len(entry.classes), entry.reduce_zero_label)
        for image, mask in zip(pairs.images, pairs.masks, strict=True)
    ]
    checked = pool.map(_check_pair, jobs, chunksize=16) if pool else map(_check_pair, jobs)
    pixels: Counter = Counter()
    for fault, counts in _bar(checked, len(jobs), split):
        pixels.update(counts)
        if fault:
            faults.append(fault)
    return Report(split, len(pairs.images), faults, pixels)


def _check_pair(job: tuple[str, str, int, bool]) -> tuple[str | None, dict[int, int]]:
    """The fault of one image with its mask, if it has any, and how many pixels of its mask have each label."""
    image, mask, num_classes, reduce_zero_label = job
    try:
        with open_or_say(image, None) as opened:  # its header alone: images are decoded when trained on
            width, height = opened.size
            if opened.getexif().get(_EXIF_ORIENTATION, 1) >= 5:
                width, height = height, width
        with open_or_say(mask, None, "mask") as opened:
            values = stored_values(opened)
            if values.shape != (height, width):
                raise UserError(
                    f"it has {values.shape[1]}x{values.shape[0]} pixels, but its image has {width}x{height}"
                )
            labels = mask_labels(values, num_classes=num_classes, reduce_zero_label=reduce_zero_label)
    except UserError as err:
        return str(err), {}
    labels[labels == 255] = num_classes
    counts = torch.bincount(labels.flatten(), minlength=num_classes + 1).tolist()
    return None, {(label if label < num_classes else -1): n for label, n in enumerate(counts) if n}


def _bar(results: Iterable, length: int, split: str) -> Iterator:
    return iter(require("tqdm", "train", "the progress bar").tqdm(results, total=length, desc=split, unit="mask"))


def describe(name: str, reports: list[Report]) -> str:
    """The reports as text: counts, the first faults, classes that never occur."""
    entry = SEGMENTATION[name]
    lines = []
    for report in reports:
        total = sum(report.pixels.values())
        ignored = f", {report.pixels[-1] / total:.1%} of the pixels ignored" if total else ""
        lines.append(
            f"{name} {report.split}: {report.pairs:,} images with masks{ignored}, {len(report.faults):,} faults"
        )
        lines += [f"  {i}. {fault}" for i, fault in enumerate(report.faults[:SHOWN], 1)]
        if len(report.faults) > SHOWN:
            lines.append(f"  and {len(report.faults) - SHOWN:,} more")
        absent = [entry.classes[label] for label in range(len(entry.classes)) if total and not report.pixels[label]]
        if absent:
            shown = ", ".join(absent[:SHOWN])
            lines.append(f"  {len(absent)} classes never occur: {shown}{', ...' if len(absent) > SHOWN else ''}")
    if any(report.faults for report in reports):
        lines.append(f"{name} is expected as: {entry.prepare}.")
    else:
        lines.append("no faults")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m seg.data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "check",
        help="count files, look for orphans, read every mask",
        description="Count files, look for orphans, read every mask; status 1 where anything is wrong.",
        epilog="sets: " + "; ".join(f"{name} ({entry.prepare})" for name, entry in SEGMENTATION.items()),
    )
    command.add_argument("name", choices=SEGMENTATION, metavar="SET", help=f"one of {', '.join(SEGMENTATION)}")
    command.add_argument("path", type=Path, help="folder of the set")
    command.add_argument("--split", action="append", default=[], help="check this split only; may be repeated")
    command.add_argument("--partial", action="store_true", help="fewer images than the whole set has are no fault")
    command.add_argument("--processes", type=int, default=1, help="processes that read masks (default: %(default)s)")
    options = parser.parse_args()
    if options.processes < 1:
        raise UserError(f"expected at least one process, got {options.processes}")
    reports = check(options.name, options.path, options.split, processes=options.processes, partial=options.partial)
    print(describe(options.name, reports))
    sys.exit(any(report.faults for report in reports))


if __name__ == "__main__":
    run_cli(main)
