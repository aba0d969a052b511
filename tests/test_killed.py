"""A run that is killed without warning, at any point, ends as one that was left alone. `pytest -m slow`."""

import csv
import os
import random
import re
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
    """Begin or continue the run in `out`; what it says goes to a file beside it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "timm_locat.train", *ARGUMENTS, "--out", str(out), "--resume", "auto"]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stderr=log)


def finish(out):
    assert start(out).wait(600) == 0, out.with_suffix(".log").read_text()


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not re.search("second|memory", k)} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_run_killed_at_ten_random_points_ends_as_if_undisturbed(tmp_path):
    begun = time.monotonic()
    finish(tmp_path / "whole")
    length = time.monotonic() - begun
    expected, chance, kills = load_checkpoint(tmp_path / "whole"), random.Random(0), 0
    while kills < 10:
        out = tmp_path / f"killed-{time.monotonic_ns()}"
        run = start(out)
        time.sleep(chance.uniform(0.2, 0.9) * length)
        if run.poll() is not None:
            continue  # it was quicker than the first one
        run.send_signal(signal.SIGKILL)
        run.wait()
        kills += 1
        finish(out)
        assert rows(out) == rows(tmp_path / "whole")
        state = load_checkpoint(out)
        for part in ("model", "ema"):
            assert all(torch.equal(state[part][key], expected[part][key]) for key in expected[part])
