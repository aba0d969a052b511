"""The record of a run: what it holds, what it refuses, and that a file is whole or not there."""

import enum
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from timm_locat.errors import UserError
from timm_locat.record import atomic_write, command_line, commit_of, plain_json, read_record, write_record

FIELDS = ["protocol", "results", "config", "command", "seed", "versions", "commit", "machine", "date"]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


class Mode(enum.Enum):
    FAST = "fast"


@dataclass(frozen=True)
class Inner:
    sides: tuple[int, ...] = (3, 4)


@dataclass(frozen=True)
class Settings:
    root: Path = Path("images") / "train"
    dtype: torch.dtype = torch.bfloat16
    mode: Mode = Mode.FAST
    inner: Inner = Inner()
    clip: float = float("inf")


def write(path, **changes):
    given = {"protocol": "speed/v1", "results": {"top1": 71.5}, "config": {"epochs": 3}, "seed": 0, **changes}
    return write_record(path, **given)


def git(folder, *words):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *identity, *words], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def package_in(folder):
    package = folder / "lib" / "timm_locat"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("version = 1\n")
    return package


# write_record and read_record


def test_a_record_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "new folder" / "run.json"
    record = write(path, epochs_done=3)
    assert read_record(path) == record
    assert list(record) == [*FIELDS, "epochs_done"]


def test_a_record_names_versions_machine_and_time(tmp_path):
    record = write(tmp_path / "run.json")
    assert {"python", "torch", "timm", "timm_locat"} <= set(record["versions"])
    assert record["machine"]["cores"] >= 1 and record["machine"]["torch_threads"] == torch.get_num_threads()
    assert record["machine"]["cpu"] and record["machine"]["platform"]
    assert datetime.fromisoformat(record["date"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize("protocol", ["speed", "speed/1", "Speed/v1", "speed/v0", "a b/v1"])
def test_a_protocol_without_a_version_is_refused(tmp_path, protocol):
    with pytest.raises(ValueError, match=r"must read like 'speed/v1'"):
        write(tmp_path / "run.json", protocol=protocol)


def test_an_extra_field_may_not_replace_a_fixed_one(tmp_path):
    with pytest.raises(ValueError, match=r"own: commit, machine"):
        write(tmp_path / "run.json", machine={}, commit="abc")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"protocol": "speed/v1"', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'{"protocol": "speed/v1", "results": {}}', "lacks config, command, seed, versions, commit, machine, date"),
    ],
)
def test_a_broken_record_is_one_sentence(tmp_path, content, sentence):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_record(tmp_path / "run.json")


def test_a_field_of_the_wrong_type_is_named(tmp_path):
    record = write(tmp_path / "run.json") | {"seed": "zero"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="seed must be int or list or null, got 'zero'"):
        read_record(tmp_path / "run.json")


def test_a_missing_record_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the record .*none\.json"):
        read_record(tmp_path / "none.json")


# plain_json


def test_settings_become_plain_json():
    assert plain_json(Settings()) == {
        "root": str(Path("images/train")),
        "dtype": "bfloat16",
        "mode": "fast",
        "inner": {"sides": [3, 4]},
        "clip": None,
    }


def test_numbers_that_json_lacks_become_null():
    assert plain_json([float("nan"), float("inf"), -float("inf"), 1.5]) == [None, None, None, 1.5]


def test_tensors_and_arrays_become_numbers():
    tensor = torch.tensor([[1.0, float("nan"), 2.0]])
    assert plain_json({"a": tensor, "b": tensor.numpy(), "c": torch.tensor(3)}) == {
        "a": [[1.0, None, 2.0]],
        "b": [[1.0, None, 2.0]],
        "c": 3,
    }


def test_a_value_without_a_plain_form_is_refused_by_name():
    with pytest.raises(TypeError, match=r"config\.steps\[1\] is a function"):
        plain_json({"steps": [1, write]}, "config")


def test_a_key_without_a_plain_form_is_refused():
    with pytest.raises(TypeError, match=r"keys must be text or whole numbers"):
        plain_json({(1, 2): 3})


# command_line


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["/opt/env/bin/python", "-m", "eval", "speed", "vit tiny"], "python -m eval speed 'vit tiny'"),
        (["python3.11", "-X", "utf8", "-W", "error", "-m", "eval"], "python -X utf8 -W error -m eval"),
        ([sys.executable, str(Path(sysconfig.get_path("scripts")) / "pytest"), "-q"], "pytest -q"),
        ([sys.executable, str(Path.cwd() / "tools" / "run.py"), "a"], f"python {Path('tools/run.py')} a"),
        (["python", "-c", "print(1)"], "python -c 'print(1)'"),
    ],
)
def test_the_command_reads_as_it_was_typed(words, typed):
    assert command_line(words) == typed


@pytest.mark.parametrize(
    ("launcher", "typed"),
    [
        (["/env/bin/python", "/env/bin/accelerate", "launch", "-m", "m", "demo"], "accelerate launch -m m demo"),
        (["python", "-m", "accelerate.commands.launch", "run.py"], "accelerate launch run.py"),
        (["python", "/env/bin/torchrun", "--nproc-per-node", "2", "-m", "m"], "torchrun --nproc-per-node 2 -m m"),
        (["bash", "-c", "accelerate launch -m m"], "python -u -m m demo"),
    ],
)
def test_a_launcher_is_part_of_the_command(launcher, typed):
    assert command_line(["/env/bin/python", "-u", "-m", "m", "demo"], launcher) == typed


# commit_of


def test_there_is_no_commit_outside_a_checkout(tmp_path):
    assert commit_of(package_in(tmp_path)) is None


@needs_git
def test_the_commit_is_that_of_the_checkout(tmp_path):
    package = package_in(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    assert commit_of(package) is None  # tracked, but nothing is committed yet
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert commit_of(package) == git(tmp_path, "rev-parse", "HEAD")


@needs_git
def test_the_commit_is_dirty_when_a_tracked_file_differs(tmp_path):
    package = package_in(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    (tmp_path / "untracked.txt").write_text("nobody minds")
    assert not commit_of(package).endswith("-dirty")
    (package / "__init__.py").write_text("version = 2\n")
    assert commit_of(package) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


@needs_git
def test_an_environment_inside_a_strangers_checkout_does_not_lend_its_commit(tmp_path):
    (tmp_path / "README").write_text("somebody else's project")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert commit_of(package_in(tmp_path)) is None


@needs_git
def test_the_commit_is_not_that_of_a_hooks_repository(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert commit_of(package_in(tmp_path)) is None


# atomic_write


@pytest.mark.parametrize("data", [b"\x00\xff\r\n", "grüße\r\n"])
def test_a_file_holds_exactly_what_was_given(tmp_path, data):
    atomic_write(tmp_path / "deep" / "file", data)
    expected = data if isinstance(data, bytes) else data.encode("utf-8")
    assert (tmp_path / "deep" / "file").read_bytes() == expected


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    path = tmp_path / "file"
    atomic_write(path, "old")
    monkeypatch.setattr(os, "fsync", fail) if step == "fsync" else monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
