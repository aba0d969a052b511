"""The report of a study: Markdown with pictures beside it, and one HTML file that holds everything."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from timm_locat.errors import UserError
from timm_locat.record import atomic_write
from timm_locat.study.grid import STUDIES, Settings, cells
from timm_locat.study.plots import draw_conditions, draw_courses, draw_planes
from timm_locat.study.results import Row, effects, interval, read_rows
from timm_locat.study.run import SETTINGS, is_done

__all__ = ["write_report"]

PAPER_MIN_MAD = {
    "baseline": "0.316",
    "modern": "0.008",
    "cm": "at most 0.024",
    "aa+cm": "at most 0.024",
    "cm+ls": "at most 0.024",
    "aa": "at least 0.210",
    "ls": "at least 0.210",
    "aa+ls": "at least 0.210",
}
"""Least distance of a head on CIFAR-100 in arXiv:2605.16390, one seed, fully trained. Baseline and modern stand in its
abstract; the bounds are known to us from summaries of the paper only."""


@dataclass(frozen=True)
class ReportConfig:
    """Write the report of a study from its finished runs."""

    folder: Annotated[Path, Positional]
    """Study folder."""


def run(config: ReportConfig) -> str:
    """Write it; returns what to tell the user."""
    return f"wrote {write_report(config.folder)} and report.html beside it"


@dataclass
class Section:
    """A piece of a report."""

    title: str
    text: list[str] = field(default_factory=list)
    head: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    picture: tuple[str, bytes] | None = None
    """File name and PNG."""


def write_report(out: Path) -> Path:
    """Write `report.md`, its pictures and `report.html` into a study folder.

    Raises:
        UserError: The folder holds no study, or no finished run.
    """
    settings = read_settings(out)
    rows = read_rows(out)
    order = [c.name for c in STUDIES[settings.study].conditions]
    rows.sort(key=lambda row: (row.model, order.index(row.condition) if row.condition in order else 99, row.seed))
    title = f"Study `{settings.study}` on {settings.data}"
    sections = [about(out, settings, rows)]
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        sections += [conditions(settings, mine), least_heads(mine)]
        if settings.study == "protocol":
            sections += [factorial(mine, name, label) for name, label in EXPLAINED]
        sections += pictures(settings, mine)
    for section in sections:
        if section.picture is not None:
            atomic_write(out / section.picture[0], section.picture[1])
    atomic_write(out / "report.md", to_markdown(title, sections))
    atomic_write(out / "report.html", to_html(title, sections))
    return out / "report.md"


EXPLAINED = (
    ("test_accuracy", "test accuracy (percentage points)"),
    ("locality.min_mad_over_heads", "least distance of a head"),
    ("locality.mean_mad", "mean distance of all heads"),
    ("locality.mean_entropy", "mean entropy of all heads"),
)


def read_settings(out: Path) -> Settings:
    """The settings that a study folder was made with."""
    try:
        found = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise UserError(f"{out} is no study folder: cannot read its {SETTINGS} ({err}); pass --out") from err
    return Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


def about(out: Path, settings: Settings, rows: Sequence[Row]) -> Section:
    """What was run, and what was not."""
    first = rows[0].record
    config = first["config"]
    passes = sorted({row.record["results"]["image_passes"] for row in rows})
    wanted = cells(settings)
    missing = [cell.name for cell in wanted if not is_done(out, cell)]
    least = min(row.value("train_accuracy") for row in rows)
    text = [
        STUDIES[settings.study].about,
        f"{len(rows)} of {len(wanted)} runs are finished" + (f"; missing: {', '.join(missing)}." if missing else "."),
        f"Each run sees {' or '.join(f'{n:,}' for n in passes)} images (epochs x training images; "
        f"{first['results']['train_images']:,} training and {first['results']['test_images']:,} test images), batch "
        f"{config['global_batch_size']}, AdamW, peak learning rate {config['peak_lr']:g}, "
        f"{config['schedule']} schedule, precision {config['mixed_precision']}. The optimisation is the same for every "
        "condition, and our choice.",
        f"These runs are short: {passes[-1] / first['results']['train_images']:.1f} epochs, where the recipe has 200. "
        f"Training accuracy (on augmented images) is as low as {least:.0f} %: the models are not fully trained."
        if config["epochs"] < 100
        else f"The models were trained for {config['epochs']} epochs.",
        "Distances are fractions of the longest distance between patch centres, prefix tokens dropped and rows "
        "renormalised; entropy is over patches, divided by the logarithm of their number. They are measured in float32 "
        f"on {rows[0].locality().images} test images. An untrained model has a distance of 0.418 and an entropy of 1 "
        "(uniform attention on 8 x 8 patches).",
        f"Versions: {', '.join(f'{k} {v}' for k, v in first['versions'].items())}; commit {first['commit']}; "
        f"{first['machine']['cpu']}, {first['machine']['cores']} cores.",
    ]
    return Section("What was run", text)


def by_condition(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.condition, []).append(row)
    return found


def conditions(settings: Settings, rows: Sequence[Row]) -> Section:
    """Mean and interval of each condition."""
    paper = settings.study == "protocol"
    head = ["condition", "seeds", "test accuracy (%)", "least distance of a head", "least mean of a layer"]
    head += ["mean distance", "mean entropy"] + (["the paper's least distance, CIFAR-100"] if paper else [])
    section = Section(f"{rows[0].model}: conditions", head=head)
    section.text.append("Mean over seeds ± half the 95 % confidence interval of the mean (Student's t).")
    if paper:
        section.text.append(
            "The paper's numbers (arXiv:2605.16390) are for another data set, one seed, fully trained; those of "
            "baseline and modern stand in its abstract, the bounds are known from summaries of it."
        )
    numbers = ("min_mad_over_heads", "min_mad_over_layers", "mean_mad", "mean_entropy")
    for name, runs in by_condition(rows).items():
        values = [interval([row.value("test_accuracy") for row in runs]).text(1)]
        values += [interval([row.value(f"locality.{number}") for row in runs]).text() for number in numbers]
        section.rows.append([name, str(len(runs)), *values, *([PAPER_MIN_MAD.get(name, "")] if paper else [])])
    return section


def least_heads(rows: Sequence[Row]) -> Section:
    """Where the head of least distance looks."""
    section = Section(f"{rows[0].model}: where the head of least distance looks")
    section.text.append(
        "A small distance can come from a head that looks at its own patch, or, where prefix tokens are dropped "
        "without renormalising, at the class token: neither is a look at neighbours. Shares of all attention of that "
        "head; a uniform head gives 1.5 % to itself, 10 % to the 8 patches around and 1.5 % to the class token."
    )
    section.head = ["condition", "seed", "layer", "head", "distance", "itself", "8 around", "class token"]
    section.head += ["least distance, dropped without renormalising", "its class token"]
    for row in rows:
        found = row.record["results"]["locality"]
        masses = [f"{100 * found[f'min_mad_{name}_mass']:.1f} %" for name in ("self", "neighbour", "prefix")]
        section.rows.append(
            [
                row.condition,
                str(row.seed),
                str(found["min_mad_layer"]),
                str(found["min_mad_head"]),
                f"{found['min_mad_over_heads']:.3f}",
                *masses,
                f"{found['min_mad_dropped_over_heads']:.3f}",
                f"{100 * found['min_mad_dropped_prefix_mass']:.1f} %",
            ]
        )
    return section


def factorial(rows: Sequence[Row], name: str, label: str) -> Section:
    """Main effects and interactions of the three components."""
    found, source = effects(rows, name)
    section = Section(f"{rows[0].model}: effects on {label}", [source])
    if found:
        section.head = ["effect of", "change", "95 % interval", "differs from 0"]
        for effect in found:
            low, high = effect.value - effect.half, effect.value + effect.half
            clear = "yes" if low > 0 or high < 0 else "no"
            section.rows.append([effect.name, f"{effect.value:+.3f}", f"{low:+.3f} .. {high:+.3f}", clear])
    return section


def pictures(settings: Settings, rows: Sequence[Row]) -> list[Section]:
    """The plots of one model."""
    model, grouped = rows[0].model, by_condition(rows)
    panels = {
        label: {name: interval([row.value(number) for row in runs]) for name, runs in grouped.items()}
        for label, number in (
            ("test accuracy (%)", "test_accuracy"),
            ("mean distance of all heads (fraction)", "locality.mean_mad"),
            ("least distance of a head (fraction)", "locality.min_mad_over_heads"),
        )
    }
    paper = {"baseline": 0.316, "modern": 0.008} if settings.study == "protocol" else None
    first = [runs[0] for runs in grouped.values()][:3]
    shown = list(grouped)[:8]
    crosses = " Crosses: the paper's values on CIFAR-100." if paper else ""
    return [
        Section(
            f"{model}: means",
            [f"Dots are means over seeds, bars their 95 % intervals where there are several seeds.{crosses}"],
            picture=(f"{model}_conditions.png", draw_conditions(panels, paper)),
        ),
        Section(
            f"{model}: the course over training",
            ["Means over seeds, measured after 0, 1, 2, 4, ... updates."],
            picture=(f"{model}_course.png", draw_courses(rows, shown)),
        ),
        Section(
            f"{model}: every head",
            ["One dot per head, its layer as colour; the first seed of the first conditions."],
            picture=(f"{model}_plane.png", draw_planes(first)),
        ),
    ]


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown; pictures are files beside it."""
    parts = [f"# {title}\n"]
    for section in sections:
        parts.append(f"## {section.title}\n")
        parts += [f"{text}\n" for text in section.text]
        if section.rows:
            lines = [section.head, ["---"] * len(section.head), *section.rows]
            parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
        if section.picture is not None:
            parts.append(f"![{section.title}]({section.picture[0]})\n")
    return "\n".join(parts)


STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.9rem}"
    "td,th{border:1px solid #bbb;padding:.25rem .6rem;text-align:left}img{max-width:100%}"
)


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one file without links to others."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    ]
    parts.append(f"<h1>{html.escape(title)}</h1>")
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        if section.rows:
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.head)
            body = "".join(
                f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows
            )
            parts.append(f"<table><tr>{head}</tr>{body}</table>")
        if section.picture is not None:
            data = base64.b64encode(section.picture[1]).decode()
            parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">')
    return "".join(parts) + "</html>\n"
