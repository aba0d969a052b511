"""A run that is killed without warning, again and again, ends as one that was left alone. `pytest -m slow`."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from timm_locat.train.checkpoint import load_checkpoint

ROOT = Path(__file__).parents[1]
ARGUMENTS = [
    "demo",
    "--data.protocol",
    "modern",
    "--epochs",
    "6",
    "--global-batch-size",
    "250",
    "--mixed-precision",
    "no",
]
ARGUMENTS += ["--model-kwargs", '{"depth": 1, "embed_dim": 16, "num_heads": 2}', "--ema-decay", "0.9"]


def start(out):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "timm_locat.train", *ARGUMENTS, "--out", str(out), "--resume", "auto"]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_as_if_undisturbed(tmp_path):
    begun = time.monotonic()
    whole = start(tmp_path / "whole")
    assert whole.wait(600) == 0, whole.stderr.read()
    length = time.monotonic() - begun
    chance = random.Random(0)
    kills = 0
    while kills < 10:
        run = start(tmp_path / "killed")
        try:
            run.wait(chance.uniform(0.3, 1.0) * length)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
            kills += 1
        else:
            assert run.returncode == 0, run.stderr.read()
            break  # it came to its end before the tenth time
    last = start(tmp_path / "killed")
    assert last.wait(600) == 0, last.stderr.read()
    assert kills >= 3 and rows(tmp_path / "whole") == rows(tmp_path / "killed")
    a, b = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "killed")
    for part in ("model", "ema"):
        assert all(torch.equal(a[part][key], b[part][key]) for key in a[part])
