"""python -m timm_locat.study STUDY --out FOLDER | report FOLDER | ship FOLDER  [--help]"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from timm_locat.errors import exit_with_sentence, require, run_cli


def main() -> None:
    """Read the study from the command line, and train what is missing."""
    for module in ("accelerate", "datasets", "matplotlib", "tqdm"):
        require(module, "train", "a study")
    tyro = require("tyro", "train", "a study")
    from tqdm.contrib.logging import logging_redirect_tqdm

    from timm_locat.study.cost import plan
    from timm_locat.study.grid import STUDIES, Settings, StudyName, cells
    from timm_locat.study.report import write_report
    from timm_locat.study.run import open_study, parse_shard, run_cells
    from timm_locat.train.engine import Interrupted

    @dataclass(frozen=True, kw_only=True)
    class Command(Settings):
        study: tyro.conf.Positional[StudyName]
        """Which question."""
        out: Path | None = None
        """Study folder: one run folder per cell, in `cells`. None takes studies/STUDY."""
        shard: str | None = None
        """`i/n`: only every n-th cell, from the i-th on, for machines that share the work. Processes on one machine
        need no shards: each takes the next cell that is free."""
        dry_run: bool = False
        """Print the cells, what is done and what the rest will cost, and leave."""

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("timm_locat").setLevel(logging.INFO)
    about = "".join(f"\n\n{name}: {study.about}" for name, study in STUDIES.items())
    words = sys.argv[1:]
    if words[:1] == ["report"]:
        from timm_locat.study.report import ReportConfig, run

        print(run(tyro.cli(ReportConfig, prog="python -m timm_locat.study report", args=words[1:])))
        return
    if words[:1] == ["ship"]:
        from timm_locat.study.ship import ShipConfig, run

        print(run(tyro.cli(ShipConfig, prog="python -m timm_locat.study ship", args=words[1:])))
        return
    command = tyro.cli(
        Command,
        prog="python -m timm_locat.study",
        description="Train and measure a grid of conditions; what is done already is kept. `report FOLDER` writes the "
        f"report of what is there, `ship FOLDER` copies the best weights of the study embedded.{about}",
        args=words,
    )
    settings = Settings(**{name: getattr(command, name) for name in Settings.__dataclass_fields__})
    out = command.out or Path("studies") / settings.study
    first, count = parse_shard(command.shard)
    mine = cells(settings)[first - 1 :: count]
    if command.dry_run:
        print(plan(out, mine))
        return
    open_study(out, settings)
    try:
        with logging_redirect_tqdm():
            run_cells(out, mine)
    except Interrupted:
        exit_with_sentence(f"stopped, state saved in {out}; give the same command again to go on")
    if any(out.glob("cells/*/record.json")):
        print(f"wrote {write_report(out)}")


if __name__ == "__main__":
    run_cli(main)
