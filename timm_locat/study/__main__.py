"""python -m timm_locat.study STUDY --out FOLDER  [--help]"""

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

    from timm_locat.study.grid import STUDIES, Settings, cells
    from timm_locat.study.run import is_done, open_study, parse_shard, run_cells
    from timm_locat.train.engine import Interrupted

    @dataclass(frozen=True, kw_only=True)
    class Command(Settings):
        out: Path | None = None
        """Study folder: one run folder per cell, in `cells`. None takes studies/STUDY."""
        shard: str | None = None
        """`i/n`: only every n-th cell, from the i-th on, for machines that share the work. Processes on one machine
        need no shards: each takes the next cell that is free."""
        dry_run: bool = False
        """Print the cells and what is done, and leave."""

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("timm_locat").setLevel(logging.INFO)
    about = "".join(f"\n\n{name}: {study.about}" for name, study in STUDIES.items())
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words = ["--study", *words]
    command = tyro.cli(
        Command,
        prog="python -m timm_locat.study",
        description=f"Train and measure a grid of conditions; what is done already is kept.{about}",
        args=words,
    )
    settings = Settings(**{name: getattr(command, name) for name in Settings.__dataclass_fields__})
    out = command.out or Path("studies") / settings.study
    first, count = parse_shard(command.shard)
    mine = cells(settings)[first - 1 :: count]
    if command.dry_run:
        for cell in mine:
            print(f"{'done' if is_done(out, cell) else 'to do':6} {cell.name}")
        return
    open_study(out, settings)
    try:
        with logging_redirect_tqdm():
            run_cells(out, mine)
    except Interrupted as stopped:
        exit_with_sentence(stopped)


if __name__ == "__main__":
    run_cli(main)
