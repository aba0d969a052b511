"""What mmsegmentation lacks today to import, to read its own base configs and to load its own checkpoints.

Two distributions own the import names `mmseg`, `mmcv` and `mmengine`: the maintained fork (onedl-*, extra `seg`) and
upstream (extra `seg-upstream`). Each cure looks for its symptom first and does nothing where the symptom is absent, so
that a release which needs none of them gets none.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import pickle
import sys
import types
import warnings
from pathlib import Path

from timm_locat.errors import MissingExtra, UserError

__all__ = ["base", "cure", "installed"]

FORK, UPSTREAM = "onedl-mmsegmentation", "mmsegmentation"


def base(name: str) -> str:
    """Path of one of mmsegmentation's own base configs, for use in `_base_`.

    `_base_ = [__import__("timm_locat._mmseg_compat", fromlist="base").base("datasets/ade20k.py")]` also works under a
    launcher that knows nothing of this package, since mmengine evaluates `_base_` before anything else of a config.

    Args:
        name: Below `configs/_base_`, such as `datasets/ade20k.py`.

    Raises:
        MissingExtra, UserError: See `cure`.
        UserError: There is no such base config.
    """
    cure()
    folder = Path(importlib.util.find_spec("mmseg").origin).parent / ".mim" / "configs" / "_base_"
    if not (folder / name).is_file():
        raise UserError(f"mmsegmentation {installed(FORK) or installed(UPSTREAM)} has no base config {name}")
    return str(folder / name)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def cure() -> tuple[str, ...]:
    """Make the installed mmsegmentation usable; call before anything imports `mmseg` or `mmcv`.

    Returns:
        Names of the cures that were needed.

    Raises:
        MissingExtra: Neither stack is installed.
        UserError: Both are: they overwrite each other's files.
    """
    if installed(FORK) and installed(UPSTREAM):
        raise UserError(
            f"{FORK} and {UPSTREAM} are both installed and overwrite each other's files; uninstall every "
            "mmsegmentation, mmcv, mmcv-lite, mmengine and onedl-* package, then install one of the extras seg and "
            "seg-upstream"
        )
    for module in ("mmseg", "mmcv", "mmengine"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(
                f"segmentation needs `{module}`, which is not installed: pip install 'timm-locat[seg]'", name=module
            )
    cures = (_compiled_operators, _package_lookup, _scope_of_the_fork, _own_checkpoints, _chatter)
    return tuple(name.__name__.strip("_") for name in cures if name())


def _compiled_operators() -> bool:
    """Upstream imports `mmcv.ops` everywhere, and mmcv-lite has its Python files but not the compiled `mmcv._ext`.

    None of our heads runs such an operator. Upstream only: the fork guards its imports.
    """
    if not installed(UPSTREAM) or importlib.util.find_spec("mmcv._ext") is not None:
        return False

    class Operators(types.ModuleType):
        def __getattr__(self, name: str):
            if name.startswith("__"):
                raise AttributeError(name)

            def missing(*args, **kwargs):
                raise RuntimeError(
                    f"{name} is a compiled operator of mmcv, and mmcv-lite has none: install mmcv itself"
                )

            return missing

    stand_in = Operators("mmcv._ext")
    stand_in.__spec__ = importlib.util.spec_from_loader("mmcv._ext", loader=None)
    sys.modules["mmcv._ext"] = stand_in
    return True


def _package_lookup() -> bool:
    """mmengine 0.10 finds packages through `pkg_resources`, which setuptools no longer has."""
    if importlib.util.find_spec("pkg_resources") is not None:
        return False
    lookup = importlib.import_module("mmengine.utils.package_utils")
    if "pkg_resources" not in inspect.getsource(lookup.is_installed):
        return False

    def is_installed(package: str) -> bool:
        return installed(package) is not None or importlib.util.find_spec(package) is not None

    def get_installed_path(package: str) -> str:
        name = package
        if installed(package):
            listed = importlib.metadata.distribution(package).read_text("top_level.txt") or package
            name = listed.split()[0]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return str(Path(spec.origin).parent)

    # Other modules of mmengine hold the functions under their own names.
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "mmengine"]:
        for function in (is_installed, get_installed_path):
            if function.__name__ in vars(module):
                setattr(module, function.__name__, function)
    return True


def _scope_of_the_fork() -> bool:
    """`mmseg::` in a config leads mmengine to the distribution `mmsegmentation`, which the fork is not called."""
    if installed(UPSTREAM) or not installed(FORK):
        return False
    names = importlib.import_module("mmengine.config.utils").MODULE2PACKAGE
    if names.get("mmseg") == FORK:
        return False
    names["mmseg"] = FORK
    return True


def _own_checkpoints() -> bool:
    """torch loads tensors and plain values only, and a checkpoint of mmengine also holds its message history.

    Allows exactly the types of that history: numpy arrays and scalars, and the four methods of `HistoryBuffer`; and of
    one-cycle schedules, whose state holds the function they anneal by.
    """
    import numpy as np
    import torch
    from mmengine.logging.history_buffer import HistoryBuffer
    from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler

    methods = {
        HistoryBuffer: ("min", "max", "mean", "current"),
        OneCycleParamScheduler: ("_annealing_linear", "_annealing_cos"),
    }
    if not hasattr(torch.serialization, "add_safe_globals"):
        return False

    def listed_method(owner: object, name: str, *default: object):
        if isinstance(owner, type) and name in methods.get(owner, ()):
            return getattr(owner, name)
        raise pickle.UnpicklingError(f"refused to look up {name!r} of {owner!r} for a checkpoint")

    core = getattr(np, "_core", None) or np.core
    scalars = ("f2", "f4", "f8", "i4", "i8", "u1", "u4", "u8", "?")
    torch.serialization.add_safe_globals(
        [
            *methods,
            (listed_method, "builtins.getattr"),
            np.ndarray,
            np.dtype,
            core.multiarray._reconstruct,
            core.multiarray.scalar,
            *{type(np.dtype(code)) for code in scalars},
        ]
    )
    loader = importlib.import_module("mmengine.runner.checkpoint")
    if hasattr(loader, "_safe_torch_load"):
        # The fork's own takes the list above back after each file, and runs what is not in its own list.
        loader._safe_torch_load = lambda file, map_location=None, weights_only=None: torch.load(
            file, map_location=map_location, weights_only=True
        )
    return True


def _chatter() -> bool:
    """The first import of `mmseg` prints and warns about parts that nothing here uses."""
    if "mmseg.datasets" in sys.modules:
        return False
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("mmseg.datasets", "mmseg.models", "mmseg.apis"):
            importlib.import_module(module)
    return True
