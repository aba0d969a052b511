"""The README's tables, written from the records in `eval/results`: a number that is typed can be wrong."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm_locat.errors import UserError
from timm_locat.record import atomic_write, read_record

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Write the tables of a Markdown file from the records, between its `table: NAME` and `end` comments."""

    file: Path = README
    """Markdown file to bring up to date."""
    results: Path = RESULTS
    """Folder of records."""
    check: bool = False
    """Change nothing; leave with status 1 when a table is out of date."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def train_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per training run."""
    rows = []
    for record in sorted(records, key=lambda r: (r["recipe"], r["seed"])):
        run, config = record["results"], record["config"]
        rows.append(
            [
                f"`{record['recipe']}`",
                f"`{config['model']}`",
                f"{config['data']['name']} ({run['train_images']:,} / {run['test_images']:,})",
                f"{run['image_passes']:,}",
                f"{run['test_accuracy']:.1f} %",
                f"{run['seconds'] / 60:.1f} min, {record['machine']['cores']} cores, {run['mixed_precision']}",
                str(record["seed"]),
            ]
        )
    head = ["recipe", "model", "images (train / test)", "image passes", "test accuracy", "training time", "seed"]
    return markdown(head, rows)


def speed_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per comparison of two models."""
    rows = []
    for record in records:
        run, config = record["results"], record["config"]
        size = config["img_size"]
        peak = run["peak_memory_mib"]
        rows.append(
            [
                f"`{config['model']}` / `{config['against']}`",
                f"{size[0]} x {size[-1]}, batch {config['batch']}",
                f"{'train' if config['train'] else 'eval'}, {config['dtype']}, {config['device']}",
                *(f"{r['median']:.2f} ({r['q1']:.2f} .. {r['q3']:.2f})" for r in (run["ratio"], run["plain_ratio"])),
                f"{peak['model']:.0f} / {peak['against']:.0f} MiB",
            ]
        )
    head = ["models", "input", "mode", "time ratio (middle half)", "plain / plain", "peak memory of a pass"]
    return markdown(head, rows)


TABLES = {"train": ("train/", train_table), "speed": ("speed/", speed_table)}
"""Name of a table: the protocols whose records are its rows, and the function that writes it."""


def render(text: str, results: Path) -> str:
    """`text` with every marked table written anew."""
    records = [read_record(path) for path in sorted(results.glob("*.json"))]

    def table(match: re.Match) -> str:
        if match["name"] not in TABLES:
            raise UserError(f"there is no table {match['name']!r}; choose from {', '.join(TABLES)}")
        protocol, write = TABLES[match["name"]]
        return match[1] + write([r for r in records if r["protocol"].startswith(protocol)]) + match[4]

    return MARKED.sub(table, text)


def run(config: Config) -> tuple[str, int]:
    """Bring the file up to date, or check that it is."""
    try:
        text = config.file.read_text(encoding="utf-8")
    except OSError as err:
        raise UserError(f"cannot read {config.file}: {err.strerror}") from err
    new = render(text, config.results)
    if new == text:
        return f"{config.file} is up to date", 0
    if config.check:
        return f"the tables of {config.file} differ from the records: run python -m eval tables", 1
    atomic_write(config.file, new)
    return f"wrote the tables of {config.file}", 0
