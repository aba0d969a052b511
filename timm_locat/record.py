"""The record of a run: what was measured, with what settings, by which code, on which machine.

Training and evaluation write the same record, so that a table is made from files and never typed. One reported
number is one record is one command.

Rules for what a JSON file cannot say, applied to every field:
    nan, inf and -inf become null: a run that diverged still leaves its record, and no reader meets `NaN`.
    A dataclass becomes an object, a path its text, a dtype its name, an enum its value, a tuple or set an array.
    A tensor or array becomes numbers. Anything else is refused by name, rather than written as its `repr`.
"""

import contextlib
import dataclasses
import enum
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path, PurePath
from typing import Any

import torch

from timm_locat._version import __version__
from timm_locat.errors import UserError

__all__ = ["atomic_write", "command_line", "commit_of", "plain_json", "read_record", "write_record"]

FIELDS: dict[str, tuple[type, ...]] = {
    "protocol": (str,),
    "results": (dict,),
    "config": (dict,),
    "command": (str,),
    "seed": (int, list, type(None)),
    "versions": (dict,),
    "commit": (str, type(None)),
    "machine": (dict,),
    "date": (str,),
}
"""Every record's fields, in the order they are written, with the types that a reader may count on."""

PROTOCOL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*/v[1-9][0-9]*")
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "datasets")


def write_record(
    path: str | os.PathLike, *, protocol: str, results: dict, config: Any, seed: int | list[int] | None, **extra: Any
) -> dict:
    """Write the record of a finished run, whole or not at all.

    Args:
        path: JSON file to write; its folder is made when missing, an older file is replaced.
        protocol: Name and version, such as `"speed/v1"`; bump the version when any number could move.
        results: The numbers.
        config: Dataclass or dict with every setting of the run.
        seed: Seed of the run, or a list where one run has many; None when nothing was random.
        extra: More top-level fields; they may not take the name of a fixed one.

    Returns:
        The record as `read_record` gives it back.
    """
    if not PROTOCOL.fullmatch(protocol):
        raise ValueError(f"protocol must read like 'speed/v1', got {protocol!r}")
    if taken := sorted(set(extra) & set(FIELDS)):
        raise ValueError(f"extra fields may not replace the record's own: {', '.join(taken)}")
    record = plain_json(
        {
            "protocol": protocol,
            "results": results,
            "config": config,
            "command": command_line(),
            "seed": seed,
            "versions": _versions(),
            "commit": commit_of(),
            "machine": _machine(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **extra,
        }
    )
    atomic_write(path, json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    return record


def read_record(path: str | os.PathLike) -> dict:
    """Read a record and check that every field is there and of its type.

    Raises:
        UserError: The file is missing, is not JSON, or is not a record; the sentence says which.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"cannot read the record {path}: {err.strerror}") from err
    except ValueError as err:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is not a record: it is not valid JSON ({err}); run its command again") from err
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a record: expected a JSON object, got {type(record).__name__}")
    if missing := [name for name in FIELDS if name not in record]:
        raise UserError(f"{path} is not a record: it lacks {', '.join(missing)}; run its command again")
    for name, types in FIELDS.items():
        if not isinstance(record[name], types) or isinstance(record[name], bool):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise UserError(f"{path} is not a record: {name} must be {wanted}, got {record[name]!r}")
    return record


def atomic_write(path: str | os.PathLike, data: bytes | str) -> None:
    """Write a file so that a reader, or a crash, meets either the old content or the new, never a part.

    Args:
        path: File to write; its folder is made when missing.
        data: Whole content; text is written as UTF-8 with its line ends as they are.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same folder, because a rename is atomic only within one file system. Cut short to stay within 255 bytes.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system lets a folder be opened (Windows does not)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse; the file itself is already synced
            os.fsync(handle)
    finally:
        os.close(handle)


def plain_json(value: Any, where: str = "record") -> Any:
    """Turn settings and numbers into what JSON can hold, by the rules at the top of this file.

    Args:
        value: Anything made of dataclasses, mappings, sequences, numbers, text, paths, dtypes, tensors and arrays.
        where: Name of the value in the message that refuses it.

    Raises:
        TypeError: Something in it has no plain form, such as a function or a key that is neither text nor number.
    """
    if isinstance(value, enum.Enum):
        return plain_json(value.value, where)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain_json(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {_plain_key(key, where): plain_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain_json(item, where) for item in value), key=str)
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        return plain_json(value.tolist(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which has no plain JSON form; give text or numbers")


def _plain_key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f"{where} has the key {key!r}; keys must be text or whole numbers")


def command_line(argv: Sequence[str] | None = None, launcher: Sequence[str] | None = None) -> str:
    """The command as a person would type it, with no interpreter's path in it.

    Args:
        argv: Words of the running process; `sys.orig_argv` when None.
        launcher: Words of the process that started this one. When that was `accelerate launch` or `torchrun`, its
            words are the ones that the person typed. When both are None, the parent process is asked (Linux only).
    """
    if argv is None:
        argv, launcher = sys.orig_argv, _parent_words() if launcher is None else launcher
    words = _launch_words(launcher or []) or _python_words(argv)
    return shlex.join(words)


def _python_words(argv: Sequence[str]) -> list[str]:
    rest = 1
    while rest < len(argv) and argv[rest].startswith("-") and argv[rest] not in ("-m", "-c", "-"):
        rest += 2 if argv[rest] in ("-W", "-X") else 1
    options, words = list(argv[1:rest]), list(argv[rest:])
    if words and words[0] not in ("-m", "-c", "-"):
        script = Path(words[0])
        scripts = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
        if script.is_absolute() and script.parent in scripts:
            return [script.name, *words[1:]]  # an installed command: `pytest`, not `python /.../bin/pytest`
        if script.is_absolute() and script.is_relative_to(Path.cwd()):
            words[0] = str(script.relative_to(Path.cwd()))
    return ["python", *options, *words]


def _launch_words(words: Sequence[str]) -> list[str] | None:
    """What was typed to start a launcher; None when the words are not a launcher's."""
    for index, word in enumerate(words[:4]):
        after = list(words[index + 1 :])
        name, is_module = Path(word).name, list(words[:index][-1:]) == ["-m"]
        if name == "accelerate" and after[:1] == ["launch"]:
            return ["accelerate", *after]
        if name == "accelerate-launch" or (is_module and word == "accelerate.commands.launch"):
            return ["accelerate", "launch", *after]
        if name == "torchrun" or (is_module and word == "torch.distributed.run"):
            return ["torchrun", *after]
    return None


def _parent_words() -> list[str]:
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.rstrip(b"\0").split(b"\0")]


def commit_of(package: str | os.PathLike | None = None) -> str | None:
    """Commit of the checkout that the package's code lies in, with `-dirty` when tracked files differ from it.

    None where that cannot be said: no git, no commit yet, or a package that the surrounding repository does not
    track. The last is the usual case of an environment inside somebody else's checkout, whose commit says
    nothing about this code.

    Args:
        package: Folder of the package; this package's own when None.
    """
    package = Path(__file__).parent if package is None else Path(package)
    if shutil.which("git") is None or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "--verify", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    if not head or changes is None:
        return None
    return f"{head}-dirty" if changes else head


def _git(folder: Path, *words: str) -> str | None:
    # A git hook exports GIT_DIR and friends, which would point every question at the hook's repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "timm_locat": __version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # Linux only
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows
        return None
