"""`python -m eval speed`: its statistics, its sentences and its record. No test asserts a time."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import eval.__main__ as command
from eval import memory, paired, speed
from timm_locat.errors import UserError
from timm_locat.models import create_model
from timm_locat.record import read_record

ROOT = Path(__file__).parents[1]
TINY = '{"depth": 1, "embed_dim": 64, "num_heads": 2}'


def config(**changes):
    given = {
        "model": "vit_tiny_patch16_224",
        "against": "vit_small_patch16_224",
        "img_size": (32, 48),
        "batch": 2,
        "pairs": 3,
        "model_kwargs": TINY,
        "against_kwargs": TINY,
    }
    return speed.Config(**{**given, **changes})


def results(ratio=1.1, *, bar=None):
    """Results as `measure` returns them, on made-up seconds of a model that is `ratio` as slow as the other."""
    against = [1.0, 2.0, 4.0]
    samples = {"model": [ratio * s for s in against], "against": against, "again": against}
    spreads = [paired.spread(paired.paired_ratios(samples[side], against)) for side in ("model", "again")]
    return {
        "ratio": spreads[0],
        "plain_ratio": spreads[1],
        "noise": paired.noise(spreads[1]),
        "ms_per_image": {"model": 2.2, "against": 2.0, "again": 2.0},
        "peak_memory_mib": {"model": 1.5, "against": None},
        "verdict": None if bar is None else paired.judge(*spreads, bar),
        "threads": 2,
        "cpu_share": 1.0,
        "passes_per_sample": 1,
        "sample_seconds": samples,
    }


# Statistics


def naive_quantile(values, share):
    """Walk along the sorted values as if they were posts on a line, and read off the height at `share` of the way."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [3, 4, 5, 15, 16])
def test_spread_matches_quantiles_read_off_the_sorted_values(count):
    values = [((7 * i) % 17) / 10 + 0.01 * i for i in range(count)]
    expected = {"median": 0.5, "q1": 0.25, "q3": 0.75, "min": 0.0, "max": 1.0}
    assert paired.spread(values) == pytest.approx({name: naive_quantile(values, q) for name, q in expected.items()})


def test_a_slow_round_drops_out_of_the_paired_ratio():
    against = [1.0, 10.0, 1.0]
    assert paired.paired_ratios([1.5 * s for s in against], against) == pytest.approx([1.5, 1.5, 1.5])


def test_rounds_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="longer than argument 1"):
        paired.paired_ratios([1.0], [1.0, 2.0])


def test_noise_is_the_distance_from_one_plus_half_the_middle():
    assert paired.noise({"median": 0.97, "q1": 0.95, "q3": 1.01}) == pytest.approx(0.03 + 0.03)


@pytest.mark.parametrize(("median", "outcome"), [(1.19, "met"), (1.26, "met"), (1.27, "missed")])
def test_the_bar_is_met_up_to_bar_plus_noise(median, outcome):
    plain = {"median": 0.97, "q1": 0.95, "q3": 1.01}  # noise 0.06
    verdict = paired.judge({"median": median}, plain, 1.2001)
    assert verdict["outcome"] == outcome and verdict["limit"] == pytest.approx(1.2601)


def test_every_six_rounds_hold_every_order_once():
    orders = paired.round_orders(13, seed=1)
    assert len(orders) == 13
    for start in (0, 6):
        assert Counter(orders[start : start + 6]) == Counter(itertools.permutations(paired.SIDES))


def test_the_same_seed_gives_the_same_orders():
    assert paired.round_orders(9, seed=3) == paired.round_orders(9, seed=3) != paired.round_orders(9, seed=4)


# Memory


def allocate_64_mebibytes():
    return lambda: torch.ones(64 * 2**20, dtype=torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be reset here")
def test_peak_growth_is_what_the_step_allocates():
    # In a process of its own, as in use: this one keeps memory that other tests freed, and would hide the need.
    assert memory.cpu_peak(allocate_64_mebibytes, "a tensor") == pytest.approx(64, abs=8)


def test_the_environment_of_the_child_is_put_back(monkeypatch):
    monkeypatch.setenv("KNOWN", "before")
    with memory._environment(KNOWN="inside", UNKNOWN="inside"):
        assert os.environ["KNOWN"] == os.environ["UNKNOWN"] == "inside"
    assert os.environ["KNOWN"] == "before" and "UNKNOWN" not in os.environ


# Steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", [False, True])
def test_a_step_gives_finite_logits(dtype, train):
    checked = config(dtype=dtype, train=train)
    step = speed.make_step(checked, "model")
    assert step().shape == (2, 1000) and not step().requires_grad
    speed.check_output(step, "model", checked)


def test_logits_that_are_not_finite_are_not_timed():
    with pytest.raises(UserError, match="a_model gives logits that are not finite in float32"):
        speed.check_output(lambda: torch.tensor([[1.0, float("nan")]]), "a_model", config())


def test_unfused_switches_fused_attention_off_and_back_on():
    def is_fused():
        return create_model("vit_tiny_patch16_224", img_size=(32, 48), **json.loads(TINY)).blocks[0].attn.fused_attn

    before = is_fused()
    with speed.restored_settings():
        speed.apply_settings(config(unfused=True))
        assert not is_fused()
    assert is_fused() == before


# Config, report, status


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"img_size": ()}, "one or two sides"),
        ({"img_size": (1, 2, 3)}, "one or two sides"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"pairs": 2}, "--pairs must be at least 3, got 2"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"bar": float("nan")}, "--bar must be a ratio above 0"),
        ({"strict": True}, "needs --bar"),
        ({"model_kwargs": "depth=1"}, "--model-kwargs must be a JSON object"),
        ({"against_kwargs": "[1]"}, "--against-kwargs must be a JSON object"),
        ({"model_kwargs": '{"img_size": 32}'}, "give it as --img-size"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**changes)


def test_the_record_is_named_after_the_settings():
    plain = speed.Config(model="locatvit_tiny", against="vit_tiny_patch16_224")
    assert speed.file_name(plain) == ("speed-v1__locatvit_tiny__vs__vit_tiny_patch16_224__224__b8__float32__eval.json")


def test_settings_that_move_the_numbers_give_another_name():
    changes = [{}, {"train": True}, {"unfused": True}, {"threads": 1}, {"device": "cuda"}, {"model_kwargs": "{}"}]
    assert len({speed.file_name(config(**change)) for change in changes}) == len(changes)


def test_the_report_says_that_the_machine_was_busy():
    assert "warning" not in speed.report(config(), results())
    assert "had a core only 50% of the time" in speed.report(config(), results() | {"cpu_share": 0.5})


@pytest.mark.parametrize(("bar", "strict", "status"), [(1.2, True, 0), (1.0, True, 1), (1.0, False, 0)])
def test_only_strict_turns_a_missed_bar_into_a_status(tmp_path, monkeypatch, bar, strict, status):
    monkeypatch.setattr(speed, "measure", lambda asked: results(1.1, bar=asked.bar))
    text, actual = speed.run(config(bar=bar, strict=strict, out=tmp_path / "run.json"))
    assert actual == status
    assert ("is met" if bar == 1.2 else "is missed") in text


def test_a_folder_as_out_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="must name a file"):
        speed.run(config(out=tmp_path))


# The command line


def test_a_misspelt_subcommand_gets_a_suggestion_and_status_2(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["sped"])
    assert left.value.code == 2
    assert "no subcommand 'sped'; did you mean 'speed'?" in capsys.readouterr().err


def test_help_lists_every_subcommand(capsys):
    command.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown and summary in shown for name, (_, summary) in command.SUBCOMMANDS.items())


def test_the_help_of_speed_says_when_a_bar_is_met(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["speed", "--help"])
    assert left.value.code == 0
    assert "plus half of its interquartile range" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_config_that_is_refused_has_status_2(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["speed", "vit_tiny_patch16_224", "--against", "vit_tiny_patch16_224", "--pairs", "1"])
    assert left.value.code == 2
    assert "--pairs must be at least 3" in capsys.readouterr().err


def test_the_command_writes_a_complete_record(tmp_path):
    out = tmp_path / "run.json"
    words = ["-m", "eval", "speed", "vit_tiny_patch16_224", "--against", "vit_small_patch16_224", "--bar", "1.2"]
    words += ["--img-size", "32", "48", "--batch", "2", "--pairs", "3", "--threads", "1", "--out", str(out)]
    words += ["--model-kwargs", TINY, "--against-kwargs", TINY]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where there is no terminal

    record = read_record(out)
    assert record["protocol"] == "speed/v1" and record["seed"] == 0
    assert record["command"].startswith("python -m eval speed vit_tiny_patch16_224 --against")
    assert record["config"]["img_size"] == [32, 48] and record["config"]["model_kwargs"] == TINY
    found = record["results"]
    for name in ("ratio", "plain_ratio"):
        assert (
            found[name]["min"] <= found[name]["q1"] <= found[name]["median"] <= found[name]["q3"] <= found[name]["max"]
        )
    assert {side: len(samples) for side, samples in found["sample_seconds"].items()} == dict.fromkeys(paired.SIDES, 3)
    assert set(found["ms_per_image"]) == set(paired.SIDES) and set(found["peak_memory_mib"]) == set(paired.SIDES[:2])
    assert found["verdict"]["bar"] == 1.2 and found["passes_per_sample"] >= 1
    assert f"record: {out}" in done.stdout and "the bar of" in done.stdout
