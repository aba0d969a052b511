"""Tables of the README and of the pages in docs, written from `eval/results`: a number that is typed can be wrong."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from timm_locat.errors import UserError
from timm_locat.locality import chance_recall
from timm_locat.record import atomic_write, read_record
from timm_locat.study.results import interval, precision_name

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
PAGES = (README, *sorted((README.parent / "docs").glob("*.md")), README.parent / "eval" / "README.md")
STUDY = "study "
"""How the recipe of a run begins that is a cell of a study."""
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Write the tables of Markdown files from the records, between their `table: NAME` and `end` comments."""

    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Markdown file to bring up to date; the README and all pages of docs when left out."""
    results: Path = RESULTS
    """Folder of records."""
    check: bool = False
    """Change nothing; leave with status 1 when a table is out of date."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def train_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per training run that is not a cell of a study."""
    rows = []
    own = [record for record in records if not record["recipe"].startswith(STUDY)]
    for record in sorted(own, key=lambda r: (r["recipe"], r["seed"])):
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


def locality_speed_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per model whose locality was recorded."""
    rows = []
    for record in records:
        run, config = record["results"], record["config"]
        peak = run["peak_memory_mib"]
        rows.append(
            [
                f"`{config['model']}`",
                f"{config['img_size']} x {config['img_size']}, batch {config['batch']}, {config['device']}",
                *(f"{r['median']:.2f} ({r['q1']:.2f} .. {r['q3']:.2f})" for r in (run["ratio"], run["plain_ratio"])),
                f"{run['memory_ratio']:.2f} ({peak['recorder']:.1f} / {peak['plain']:.1f} MiB)",
            ]
        )
    head = ["model", "input", "recorder / plain (middle half)", "plain / plain", "peak memory"]
    return markdown(head, rows)


def study_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per condition of a study: means over its seeds, with half their 95 % confidence intervals."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["recipe"].startswith(STUDY):
            data, model = record["config"]["data"]["name"], record["config"]["model"]
            cells.setdefault((data, model, record["recipe"].removeprefix(STUDY)), []).append(record)
    rows = []
    for (data, model, condition), runs in sorted(cells.items()):
        results = [run["results"] for run in runs]
        numbers = [interval([r["test_accuracy"] for r in results]).text(1)]
        for name in ("min_mad_over_heads", "mean_mad", "mean_entropy"):
            numbers.append(interval([r["locality"][name] for r in results]).text())
        passes = f"{results[0]['image_passes']:,}"
        rows.append([data, f"`{model}`", f"`{condition}`", passes, str(len(runs)), *numbers])
    head = ["data", "model", "condition", "image passes", "seeds", "test accuracy (%)", "least distance of a head"]
    return markdown([*head, "mean distance", "mean entropy"], rows)


def positional_table(records: Sequence[dict[str, Any]]) -> str:
    """Plain, positional and permuted runs of the study `embedded`, with the recall of true neighbours."""
    rows = []
    for condition in ("plain", "posattn", "permuted"):
        runs = [r["results"] for r in records if r.get("recipe") == f"{STUDY}{condition}"]
        measured = [r for r in records if f"__{condition}__" in r["config"]["model"]]
        recalls = [np.asarray(r["results"]["values"]["neighbourhood_recall"], float) for r in measured]
        chance = {f"{chance_recall(r['results']['grids'][0]):.3f}" for r in measured}
        rows.append(
            [
                f"`{condition}`",
                str(len(runs)),
                " and ".join(sorted({precision_name(run["mixed_precision"]) for run in runs})),
                interval([run["test_accuracy"] for run in runs]).text(1),
                *([interval([f(r) for r in recalls]).text() if recalls else "" for f in (np.mean, np.max)]),
                ", ".join(chance),
            ]
        )
    head = ["condition", "seeds", "precision", "test accuracy (%)", "recall, mean of heads", "recall, best head"]
    return markdown([*head, "chance"], rows)


def theory_association_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per measure of the association run."""
    rows = []
    for record in records:
        run = record["results"]
        names = {"accuracy": "test accuracy", "exact": "rows with the exact set", "recall": "top-C recall"}
        by_chance = {"accuracy": 0.5, **run["chance"]}
        for name, title in names.items():
            means = [f"{run[name][key]:.3f}" for key in ("mean", "least", "greatest")]
            rows.append([title, *means, f"{by_chance[name]:.3f}", str(record["config"]["seeds"])])
    return markdown(["measure", "mean", "least", "greatest", "by chance", "seeds"], rows)


def theory_controls_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per solution."""
    rows = [
        [
            name,
            *(f"{one[key]['mean']:.3f}" for key in ("accuracy", "exact", "recall")),
            f"{one['chance_recall']:.3f}",
            str(record["config"]["seeds"]),
        ]
        for record in records
        for name, one in record["results"]["solutions"].items()
    ]
    return markdown(["solution", "test accuracy", "exact rows", "top-C recall", "recall by chance", "seeds"], rows)


def theory_transfer_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per number of images of the new task."""
    rows = []
    for record in records:
        curves = record["results"]["curves"]
        for points in zip(*curves.values(), strict=True):
            cells = [
                f"{p['mean']:.3f}" + (" ({:.3f} .. {:.3f})".format(*p["interval"]) if p["interval"] else "")
                for p in points
            ]
            rows.append([str(points[0]["images"]), *cells])
    return markdown(["images", *(records[0]["results"]["curves"] if records else ())], rows)


def theory_regimes_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per regime tried beside the default: accuracy with the middle number of images and with the most."""
    rows = []
    for record in records:
        sizes = record["config"]["sizes"]
        shown = ((len(sizes) - 1) // 2, len(sizes) - 1)
        for name, regime in record["results"].get("tried", {}).items():
            cells = []
            for kind in ("pretrained", "diagonal", "uniform"):
                seeds = regime["accuracy"][kind]
                cells.append(" / ".join(f"{sum(seed[i] for seed in seeds) / len(seeds):.3f}" for i in shown))
            rows.append(
                [
                    name,
                    " / ".join(str(sizes[i]) for i in shown),
                    *cells,
                    f"{sum(regime['source_recall']) / regime['seeds']:.2f}",
                ]
            )
    return markdown(["regime", "images", "pretrained", "diagonal", "uniform", "recall"], rows)


def augment_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per protocol and record."""
    rows = []
    for record in records:
        run, bar = record["results"], record["config"]["bar"]
        for name, row in run["protocols"].items():
            median, q1, q3 = (f"{100 * row['share'][key]:.2f}" for key in ("median", "q1", "q3"))
            outcome = f"{row['outcome']} ({100 * bar:g} %)"
            rows.append([f"`{name}`", f"{row['us_per_image']:.0f}", f"{median} % ({q1} .. {q3})", outcome])
    return markdown(["protocol", "µs per image", "share of a training step (middle half)", "bar"], rows)


def hummingbird_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per model, weights and protocol; over seeds where weights are drawn, with the hash of the first seed."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (r["config"]["model"], r["config"]["untrained"], r["seed"])):
        run, config = record["results"], record["config"]
        weights = run["weights"].partition(",")[0]
        settings = str({name: value for name, value in run["settings"].items() if name != "seed"})
        data = f"{config['data']} ({run['images']['bank']} / {run['images']['queries']})"
        groups.setdefault((config["model"], weights, data, run["protocol"], settings), []).append(run)
    rows = []
    for (model, weights, data, protocol, _), runs in groups.items():
        first = runs[0]
        scores = [
            interval([100 * run[key] for run in runs]).text(1) if len(runs) > 1 else f"{100 * first[key]:.1f}"
            for key in ("miou", "miou_hungarian", "pixel_accuracy")
        ]
        named = f"{protocol} `{first['protocol_hash']}`"
        size = f"{first['rows']:,}, {first['grid'][0]} x {first['grid'][1]}"
        rows.append(
            [f"`{model}`", weights, data, named, size, *scores, f"{100 * first['ceiling']:.1f}", str(len(runs))]
        )
    head = ["features", "weights", "data (bank / queries)", "protocol", "bank, grid", "mIoU (%)", "Hungarian"]
    return markdown([*head, "pixel accuracy (%)", "ceiling", "runs"], rows)


def hummingbird_speed_table(records: Sequence[dict[str, Any]]) -> str:
    """One row per comparison."""
    names = {
        "torch": "exact search by torch / `faiss.knn`",
        "faiss": "exact search by faiss / `faiss.knn`",
        "evaluation": "evaluation / naive reading",
    }
    rows = []
    for record in records:
        run = record["results"]
        for key, name in names.items():
            one = run["ratios"][key]
            told = f"{one['median']:.2f} ({one['q1']:.2f} .. {one['q3']:.2f})"
            rows.append([f"time: {name}", told, f"{run['bars'][key]:g}", run["outcomes"][key]])
        peaks = run["peak_memory_mib"]
        told = f"{run['memory_ratio']:.2f} ({peaks['evaluation']:.0f} / {peaks['naive']:.0f} MiB)"
        rows.append(
            ["peak memory: evaluation / naive reading", told, f"{run['bars']['memory']:g}", run["outcomes"]["memory"]]
        )
    return markdown(["comparison", "ratio (middle half)", "bar", "outcome"], rows)


TABLES = {
    "train": ("train/", train_table),
    "study": ("train/", study_table),
    "positional": (("train/", "locality/"), positional_table),
    "speed": ("speed/", speed_table),
    "augment-speed": ("augment-speed/", augment_table),
    "hummingbird": ("hummingbird/", hummingbird_table),
    "hummingbird-speed": ("hummingbird-speed/", hummingbird_speed_table),
    "locality-speed": ("locality-speed/", locality_speed_table),
    "theory-association": ("theory-association/", theory_association_table),
    "theory-controls": ("theory-controls/", theory_controls_table),
    "theory-transfer": ("theory-transfer/", theory_transfer_table),
    "theory-regimes": ("theory-transfer/", theory_regimes_table),
}
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
    """Bring the files up to date, or check that they are."""
    said, status = [], 0
    for file in PAGES if config.file is None else (config.file,):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as err:
            raise UserError(f"cannot read {file}: {err.strerror}") from err
        new = render(text, config.results)
        if new == text:
            said.append(f"{file} is up to date")
        elif config.check:
            said.append(f"the tables of {file} differ from the records: run python -m eval tables")
            status = 1
        else:
            atomic_write(file, new)
            said.append(f"wrote the tables of {file}")
    return "\n".join(said), status
