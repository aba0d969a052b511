"""The benchmark of the recorder: it times what it says, and its bars have a status."""

import pytest
import torch

from eval import __main__ as command
from eval import locality_speed, speed
from timm_locat.errors import UserError
from timm_locat.locality import Locality
from timm_locat.record import read_record


def config(**changes):
    return locality_speed.Config(**{"img_size": 32, "batch": 2, "pairs": 3, "threads": 1} | changes)


def results(ratio=1.1, memory=1.1):
    row = {"median": ratio, "q1": ratio, "q3": ratio, "min": ratio, "max": ratio}
    again = dict.fromkeys(row, 1.0)
    return {
        "ratio": row,
        "plain_ratio": again,
        "verdict": speed.judge(row, again, 1.25),
        "peak_memory_mib": {"recorder": 11.0, "plain": 10.0},
        "memory_ratio": memory,
        "ms_per_pass": {"recorder": 110.0, "plain": 100.0},
        "threads": 1,
        "cpu_share": 1.0,
    }


def test_one_side_measures_and_the_other_does_not():
    found, logits = locality_speed.recording(config())(), locality_speed.plain(config())()
    assert isinstance(found, Locality) and found.images == 2 and len(found.layers) == 12
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 1000)


@pytest.mark.parametrize(
    ("ratio", "memory", "strict", "status"),
    [(1.1, 1.1, True, 0), (1.3, 1.1, True, 1), (1.1, 1.3, True, 1), (1.3, 1.3, False, 0), (1.1, None, True, 0)],
)
def test_only_strict_turns_a_missed_bar_into_a_status(tmp_path, monkeypatch, ratio, memory, strict, status):
    monkeypatch.setattr(locality_speed, "measure", lambda asked: results(ratio, memory))
    text, found = locality_speed.run(config(strict=strict, out=tmp_path / "run.json"))
    assert found == status and f"{ratio:.3f}" in text


def test_the_command_of_two_words_writes_a_record(tmp_path, capsys, monkeypatch):
    peaks = iter((11.0, 10.0))
    monkeypatch.setattr(locality_speed, "cpu_peak", lambda make, what: next(peaks))  # a fresh process takes seconds
    monkeypatch.setattr(speed, "MIN_SAMPLE_S", 1e-3)
    out = tmp_path / "run.json"
    words = ["speed", "locality", "--img-size", "32", "--batch", "2", "--pairs", "3", "--threads", "1"]
    command.main([*words, "--out", str(out)])
    record = read_record(out)
    assert record["protocol"] == "locality-speed/v1" and record["results"]["memory_ratio"] == 1.1
    assert len(record["results"]["sample_seconds"]["model"]) == 3 and f"record: {out}" in capsys.readouterr().out


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--pairs must be at least 3, got 2"):
        config(pairs=2)
    with pytest.raises(UserError, match="must name a file"):
        locality_speed.run(config(out=tmp_path))
