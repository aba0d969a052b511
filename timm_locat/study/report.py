"""The report of a study: Markdown with pictures beside it, and one HTML file that holds everything."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from timm_locat.locality import patch_distances
from timm_locat.record import atomic_write
from timm_locat.study.grid import FACTORS, STUDIES, Settings, cells, last_part, recipe
from timm_locat.study.plots import draw_conditions, draw_courses, draw_planes
from timm_locat.study.results import Effect, Row, effects, interval, measured_after, precision_name, read_rows
from timm_locat.study.run import read_settings

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
    """Write `report.md`, its pictures and `report.html` into a study folder. The data and the weights are not needed.

    Raises:
        UserError: The folder holds no study, or no finished run.
    """
    settings = read_settings(out)
    rows = read_rows(out)
    order = [c.name for c in STUDIES[settings.study].conditions]
    rows.sort(key=lambda row: (order.index(row.condition) if row.condition in order else len(order), row.seed))
    sections = [about(settings, rows)]
    for label, mine in groups(settings, rows).items():
        sections += [findings(settings, label, mine), conditions(settings, label, mine), least_heads(label, mine)]
        if settings.study in FACTORS:
            sections += factorial(settings, label, mine)
        sections += pictures(settings, label, mine)
    for section in sections:
        if section.picture is not None:
            atomic_write(out / section.picture[0], section.picture[1])
    title = f"Study `{settings.study}` on {', '.join(map(last_part, settings.data))}"
    atomic_write(out / "report.md", to_markdown(title, sections))
    atomic_write(out / "report.html", to_html(title, sections))
    return out / "report.md"


ACCURACY = ("test_accuracy", "test accuracy (percentage points)")
LEAST = ("locality.min_mad_over_heads", "least distance of a head")
EXPLAINED = (
    ACCURACY,
    LEAST,
    ("locality.mean_mad", "mean distance of all heads"),
    ("locality.mean_entropy", "mean entropy of all heads"),
)
MASSES = {"self": "itself", "neighbour": "the 8 patches around", "prefix": "the class token"}


def groups(settings: Settings, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows whose conditions are compared with each other: of one data set, and of one model where the conditions
    are not models themselves; by a name for titles."""
    mixed = any(condition.model for condition in STUDIES[settings.study].conditions)
    found: dict[str, list[Row]] = {}
    for row in rows:
        label = settings.study if mixed else last_part(row.model)
        if len(settings.data) > 1:
            label += f" on {last_part(row.data)}"
        found.setdefault(label, []).append(row)
    return found


def by_condition(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.condition, []).append(row)
    return found


def about(settings: Settings, rows: Sequence[Row]) -> Section:
    """What was run, and what was not."""
    first = rows[0].record
    config = first["config"]
    found = {row.folder.name for row in rows}
    wanted = [cell.name for cell in cells(settings, fitted=False)]
    missing = [name for name in wanted if name not in found]
    text = [
        STUDIES[settings.study].about,
        f"{len(wanted) - len(missing)} of {len(wanted)} runs are finished"
        + (f"; missing: {', '.join(missing)}." if missing else "."),
        f"Batch {config['global_batch_size']}, AdamW, peak learning rate {config['peak_lr']:g}, {config['schedule']} "
        f"schedule: the same for every condition, and our choice. {precision(rows)}",
    ]
    for data in settings.data:
        if mine := [row for row in rows if row.data == data]:
            text.append(training(settings, data, mine))
    if moved := dict.fromkeys(row.condition for row in rows if is_permuted(row)):
        text.append(
            f"In {', '.join(moved)} the patches of all images are in one other order: distances there are "
            "between the places that patches were moved to, not between what was side by side in the image."
        )
    result = rows[0].locality()
    distance, *_ = uniform(rows[0])
    rows_, columns = result.grids[0]
    text += [
        "Distances are fractions of the longest distance between patch centres, prefix tokens dropped and attention "
        "renormalised; entropy is over patches, divided by the logarithm of their number. They are measured in float32 "
        f"on {result.images} test images. Uniform attention over {rows_} x {columns} patches, which an untrained model "
        f"comes close to, has a distance of {distance:.3f} and an entropy of 1.",
        f"Versions: {', '.join(f'{k} {v}' for k, v in first['versions'].items())}; commit {first['commit']}; "
        f"{first['machine']['cpu']}, {first['machine']['cores']} cores.",
    ]
    return Section("What was run", text)


def precision(rows: Sequence[Row]) -> str:
    """In which number format the runs were trained; a machine may have lacked the one that was asked for."""
    runs: dict[str, list[str]] = {}
    for row in rows:
        kind = row.record["results"]["mixed_precision"]
        runs.setdefault(precision_name(kind), []).append(row.folder.name)
    if len(runs) == 1:
        return f"Trained in {next(iter(runs))}."
    return " ".join(f"Trained in {kind}: {', '.join(names)}." for kind, names in runs.items())


def training(settings: Settings, data: str, rows: Sequence[Row]) -> str:
    """How long the runs on a data set were, and whether that is enough."""
    first = rows[0].record
    results, epochs = first["results"], first["config"]["epochs"]
    passes = " or ".join(f"{n:,}" for n in sorted({row.record["results"]["image_passes"] for row in rows}))
    text = (
        f"{last_part(data)}: each run sees {passes} images in {epochs} epoch{'s' * (epochs > 1)} of "
        f"{results['train_images']:,} training images; {results['test_images']:,} test images. "
    )
    full = recipe(Settings(study="protocol", data=(data,)), data).epochs
    if epochs >= full:
        return text + f"That is the full length of the compact recipe, {full} epochs, which is our choice."
    least = min(row.value("train_accuracy") for row in rows)
    return text + (
        f"The compact recipe has {full} epochs, and training accuracy (on augmented images) is as low as "
        f"{least:.0f} %: the models are not fully trained."
    )


def is_permuted(row: Row) -> bool:
    """Whether what is side by side for the model was not so in the image."""
    return row.record["config"]["data"].get("permute_patches") is not None


def uniform(row: Row) -> tuple[float, dict[str, float]]:
    """Distance of a head that attends to all tokens alike, and its shares of attention by the names in `MASSES`."""
    result = row.locality()
    distances = patch_distances(result.grids[0])
    tokens = len(distances) + result.num_prefix
    around = ((distances > 0) & (distances < 1.5)).sum(1).double().mean().item()
    shares = {"self": 1 / tokens, "neighbour": around / tokens, "prefix": result.num_prefix / tokens}
    return (distances.mean() / distances.max()).item(), shares


def findings(settings: Settings, label: str, rows: Sequence[Row]) -> Section:
    """What the numbers say, in sentences."""
    section, grouped = Section(f"{label}: what it shows"), by_condition(rows)
    least, name = LEAST
    if settings.study == "protocol" and {"baseline", "modern"} <= grouped.keys():
        ours = {key: interval([row.value(least) for row in grouped[key]]).text() for key in ("baseline", "modern")}
        section.text.append(
            f"The {name} is {ours['baseline']} with baseline and {ours['modern']} with modern; the paper's numbers, on "
            f"CIFAR-100, are {PAPER_MIN_MAD['baseline']} and {PAPER_MIN_MAD['modern']}."
        )
    for number, what in (LEAST, ACCURACY) if settings.study in FACTORS else ():
        if found := effects(rows, number, FACTORS[settings.study])[0]:
            section.text.append(f"Changes of {what}: {'; '.join(map(sentence, found))}.")
    known = [row for row in rows if row.value(least) is not None and not is_permuted(row)]
    if known:
        section.text.append(where_it_looks(min(known, key=lambda row: row.value(least))))
    return section


def sentence(effect: Effect) -> str:
    verdict = "" if effect.clear else ", which may be chance"
    return f"{effect.name} {effect.value:+.3f} (± {effect.half:.3f}{verdict})"


def where_it_looks(row: Row) -> str:
    """Where the head of least distance of a run looks."""
    found, (_, even) = row.record["results"]["locality"], uniform(row)
    ours = {mass: found[f"min_mad_{mass}_mass"] for mass in MASSES}
    most = max((mass for mass in MASSES if even[mass]), key=lambda mass: ours[mass] / even[mass])
    shares = ", ".join(
        f"{100 * ours[mass]:.1f} % to {name} (uniform: {100 * even[mass]:.1f} %)" for mass, name in MASSES.items()
    )
    ratio = ours[most] / even[most]
    verdict = (
        f"Most above uniform is the share of {MASSES[most]}, {ratio:.1f} times."
        if ratio > 1.5
        else "That is close to uniform: there is no local head."
    )
    return (
        f"Of all heads of all runs, the one of least distance ({found['min_mad_over_heads']:.3f}; {row.condition}, "
        f"seed {row.seed}, layer {found['min_mad_layer']}, head {found['min_mad_head']}) gives {shares}. {verdict}"
    )


def conditions(settings: Settings, label: str, rows: Sequence[Row]) -> Section:
    """Mean and interval of each condition."""
    paper = settings.study == "protocol"
    head = ["condition", "seeds", "test accuracy (%)", "least distance of a head", "least mean of a layer"]
    head += ["mean distance", "mean entropy"] + (["the paper's least distance, CIFAR-100"] if paper else [])
    section = Section(f"{label}: conditions", head=head)
    section.text.append("Mean over seeds ± half the 95 % confidence interval of the mean (Student's t).")
    if paper:
        section.text.append(
            "The paper's numbers (arXiv:2605.16390) are for another data set, one seed, fully trained; those of "
            "baseline and modern stand in its abstract, the bounds are known from summaries of it. Of accuracies a "
            "summary says that CutMix alone and AutoAugment alone each add 6 to 7 points there."
        )
    numbers = ("min_mad_over_heads", "min_mad_over_layers", "mean_mad", "mean_entropy")
    for name, runs in by_condition(rows).items():
        values = [interval([row.value("test_accuracy") for row in runs]).text(1)]
        values += [interval([row.value(f"locality.{number}") for row in runs]).text() for number in numbers]
        section.rows.append([name, str(len(runs)), *values, *([PAPER_MIN_MAD.get(name, "")] if paper else [])])
    return section


def least_heads(label: str, rows: Sequence[Row]) -> Section:
    """Where the head of least distance looks, run by run."""
    section = Section(f"{label}: where the head of least distance looks")
    even = ", ".join(f"{100 * share:.1f} % to {MASSES[mass]}" for mass, share in uniform(rows[0])[1].items())
    section.text.append(
        "A small distance can come from a head that looks at its own patch, or, where prefix tokens are dropped "
        "without renormalising, at the class token: neither is a look at neighbours. Shares of all attention of that "
        f"head; a uniform head gives {even}."
    )
    section.head = ["condition", "seed", "layer", "head", "distance", *MASSES.values()]
    section.head += ["least distance, dropped without renormalising", "its class token"]
    for row in rows:
        found = row.record["results"]["locality"]
        if found["min_mad_over_heads"] is None:
            continue
        section.rows.append(
            [
                row.condition,
                str(row.seed),
                str(found["min_mad_layer"]),
                str(found["min_mad_head"]),
                f"{found['min_mad_over_heads']:.3f}",
                *(f"{100 * found[f'min_mad_{mass}_mass']:.1f} %" for mass in MASSES),
                f"{found['min_mad_dropped_over_heads']:.3f}",
                f"{100 * found['min_mad_dropped_prefix_mass']:.1f} %",
            ]
        )
    return section


def factorial(settings: Settings, label: str, rows: Sequence[Row]) -> list[Section]:
    """Main effects and interactions of the components of a study."""
    sections = []
    for name, what in EXPLAINED:
        found, source = effects(rows, name, FACTORS[settings.study])
        if not found:
            return [Section(f"{label}: effects", [source])]
        text = [f"{source} Each interval holds with 95 % by itself: of twenty, one is expected to miss."]
        section = Section(f"{label}: effects on {what}", text)
        section.head = ["effect of", "change", "95 % interval", "differs from 0"]
        for effect in found:
            low, high = effect.value - effect.half, effect.value + effect.half
            clear = "yes" if effect.clear else "no"
            section.rows.append([effect.name, f"{effect.value:+.3f}", f"{low:+.3f} .. {high:+.3f}", clear])
        sections.append(section)
    return sections


def pictures(settings: Settings, label: str, rows: Sequence[Row]) -> list[Section]:
    """The plots of one group."""
    grouped, file = by_condition(rows), label.replace(" on ", "_")
    panels = {
        title: {name: interval([row.value(number) for row in runs]) for name, runs in grouped.items()}
        for title, number in (
            ("test accuracy (%)", "test_accuracy"),
            ("mean distance of all heads (fraction)", "locality.mean_mad"),
            ("least distance of a head (fraction)", "locality.min_mad_over_heads"),
        )
    }
    paper = {"baseline": 0.316, "modern": 0.008} if settings.study == "protocol" else None
    crosses = " Crosses: the paper's values on CIFAR-100." if paper else ""
    sections = [
        Section(
            f"{label}: means",
            [f"Dots are means over seeds, bars their 95 % intervals where there are several seeds.{crosses}"],
            picture=(f"{file}_conditions.png", draw_conditions(panels, paper)),
        ),
        Section(
            f"{label}: the course over training",
            [f"Means over seeds, measured after updates {', '.join(map(str, measured_after(rows)))}."],
            picture=(f"{file}_course.png", draw_courses(rows, list(grouped))),
        ),
    ]
    first = [runs[0] for runs in grouped.values()]
    for i in range(0, len(first), 3):
        names = ", ".join(row.condition for row in first[i : i + 3])
        number = "" if i == 0 else f"_{i // 3 + 1}"
        text = ["One dot per head, its layer as colour, at the end of the first seed."]
        picture = (f"{file}_plane{number}.png", draw_planes(first[i : i + 3]))
        sections.append(Section(f"{label}: every head, {names}", text, picture=picture))
    return sections


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
