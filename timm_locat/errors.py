"""Errors that are the user's to mend, and how a command line shows them.

A message says what was expected, what came and what to do, in one sentence. Everything that is not a `UserError`
is a fault of ours and keeps its traceback.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

__all__ = ["MissingExtra", "UserError", "exit_with_sentence", "require", "run_cli"]


class UserError(ValueError):
    """A mistake that the user can mend: wrong path, wrong size, wrong name."""


class MissingExtra(ModuleNotFoundError):
    """A module that one of the package's extras brings is not installed."""


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: Module to import, such as `"datasets"`.
        extra: Extra of this distribution that installs it, such as `"train"`.
        why: What needs it; the start of the sentence that the user reads.

    Raises:
        MissingExtra: The module's top-level package is not installed. An import error from inside an installed
            module is passed on unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name != module.partition(".")[0]:
            raise  # the module is there, something inside it is missing
        raise MissingExtra(
            f"{why} needs `{module}`, which is not installed: pip install 'timm-locat[{extra}]'", name=err.name
        ) from err


def exit_with_sentence(message: object) -> NoReturn:
    """Print one sentence to standard error and leave with status 1."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


def run_cli(main: Callable[[], None]) -> None:
    """Run a command line's `main`: the user's mistakes end in one sentence and status 1, ours in a traceback."""
    try:
        main()
    except (UserError, MissingExtra) as err:
        exit_with_sentence(err)
