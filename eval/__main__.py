"""The command line of the evaluations: `python -m eval SUBCOMMAND [OPTIONS]`.

A subcommand is a module with two names: `Config`, a frozen dataclass that is its command line, and
`run(config) -> tuple[str, int]`, which measures, writes the record, and returns what to print and the exit status.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from timm_locat.errors import require, run_cli

SUBCOMMANDS = {
    "speed": ("eval.speed", "time and memory of one model against another, interleaved and paired"),
    "speed locality": ("eval.locality_speed", "time and memory of recording locality against a plain forward"),
    "speed augment": ("eval.augment_speed", "time of the augmentation protocols as a share of a training step"),
    "speed hummingbird": ("eval.hummingbird_speed", "time and memory of retrieval against faiss and a naive reading"),
    "hummingbird": ("eval.hummingbird.command", "retrieval: how well patch features find patches of the same class"),
    "tables": ("eval.tables", "write the README's tables from the records in eval/results"),
}
"""Name, of one or two words: its module, and what it measures. A new evaluation is a line here; only the one asked for
is imported."""


def usage() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m eval SUBCOMMAND [OPTIONS]",
            "",
            "Measures models and writes a record of each run. Run it from the root of the checkout.",
            "",
            "subcommands:",
            *lines,
            "",
            "python -m eval SUBCOMMAND --help explains one; eval/README.md says what its numbers mean.",
        ]
    )


def _refuse(word: str) -> NoReturn:
    close = difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(SUBCOMMANDS)}"
    print(f"error: there is no subcommand {word!r}; {hint} (python -m eval --help)", file=sys.stderr)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand; status 2 for a command line that cannot be read, as usual."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(usage())
        return
    if not words:
        print(usage(), file=sys.stderr)
        raise SystemExit(2)
    length = 2 if " ".join(words[:2]) in SUBCOMMANDS else 1
    name, rest = " ".join(words[:length]), words[length:]
    if name not in SUBCOMMANDS:
        _refuse(name)
    tyro = require("tyro", "eval", "python -m eval")
    module = importlib.import_module(SUBCOMMANDS[name][0])
    plain_flags = (tyro.conf.FlagCreatePairsOff,)  # `--train`, without a `--no-train` twin
    config = tyro.cli(module.Config, prog=f"python -m eval {name}", args=rest, config=plain_flags)
    text, status = module.run(config)
    print(text)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    run_cli(main)
