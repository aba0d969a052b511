"""Studies: which cells they have, that a killed one goes on, what the report says, and what is shipped."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from timm_locat.errors import UserError
from timm_locat.record import read_record
from timm_locat.study import STUDIES, Settings, cells, run_cells
from timm_locat.study.report import write_report
from timm_locat.study.results import Row, effects, interval, read_rows
from timm_locat.study.run import claim, is_done, open_study, parse_shard, plan
from timm_locat.study.ship import ShipConfig
from timm_locat.study.ship import run as ship

ROOT = Path(__file__).parents[1]
SHORT = {"image_passes": 500, "global_batch_size": 500}
SMALL = json.dumps({"depth": 2, "embed_dim": 16, "num_heads": 2})


def small(cell):
    """A cell that takes a second."""
    kwargs = json.dumps({**json.loads(cell.config.model_kwargs), **json.loads(SMALL)})
    return replace(cell, config=replace(cell.config, model_kwargs=kwargs, mixed_precision="no"))


def names(settings):
    return [cell.name.replace("vit_compact_patch4_32__fashion_mnist_mini__", "") for cell in cells(settings)]


def test_the_protocol_study_is_the_full_factorial_and_its_first_seeds_come_first():
    found = names(Settings(study="protocol", more_seeds="baseline,cm=3"))
    assert len({name.split("__")[0] for name in found}) == 8 and all(name.endswith("seed0") for name in found[:8])
    assert found[8:] == ["baseline__seed1", "cm__seed1", "baseline__seed2", "cm__seed2"]


@pytest.mark.parametrize("study", list(STUDIES))
def test_every_cell_of_every_study_is_another_run(study):
    found = cells(Settings(study=study))
    assert len({cell.name for cell in found}) == len(found) == len({str(cell.config) for cell in found})


@pytest.mark.parametrize(("passes", "batch", "epochs"), [(60_000, 100, 12), (5_001, 100, 2), (100, 128, 1)])
def test_epochs_show_at_least_as_many_images_as_asked(passes, batch, epochs):
    settings = Settings(study="protocol", image_passes=passes, global_batch_size=batch)
    config = cells(settings)[0].config
    assert config.epochs == epochs and config.warmup_epochs == pytest.approx(epochs / 20)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"study": "protcol"}, "there is no study 'protcol'"),
        ({"study": "protocol", "seeds": 0}, "seeds must be at least 1"),
        ({"study": "protocol", "more_seeds": "cutmix=3"}, "more_seeds must be conditions out of baseline"),
        ({"study": "protocol", "conditions": ("cutmix",)}, "protocol has no condition 'cutmix'"),
        ({"study": "embedded", "data": "cifar10"}, "the study embedded is of fashion_mnist_mini"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Settings(**settings)


def test_shards_share_the_cells_between_them():
    found = cells(Settings(study="protocol"))
    parts = [found[first - 1 :: count] for first, count in map(parse_shard, ("1/3", "2/3", "3/3"))]
    assert sorted(cell.name for part in parts for cell in part) == sorted(cell.name for cell in found)
    for wrong in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(UserError, match="shard must be i/n"):
            parse_shard(wrong)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of two conditions and two seeds, on small models."""
    out = tmp_path_factory.mktemp("study")
    settings = Settings(study="protocol", seeds=2, conditions=("baseline", "cm"), **SHORT)
    open_study(out, settings)
    todo = [small(cell) for cell in cells(settings)]
    assert run_cells(out, todo, progress=False) == 4
    return out, settings, todo


def test_finished_cells_are_not_trained_again(finished):
    out, _, todo = finished
    before = [(out / "cells" / cell.name / "record.json").stat().st_mtime_ns for cell in todo]
    assert run_cells(out, todo, progress=False) == 0 and all(is_done(out, cell) for cell in todo)
    assert before == [(out / "cells" / cell.name / "record.json").stat().st_mtime_ns for cell in todo]
    assert plan(out, todo).endswith("all are done") and plan(out, todo).count("done   ") == 4


def test_a_cell_of_another_configuration_is_not_taken_for_done(finished):
    out, _, todo = finished
    with pytest.raises(UserError, match=r"peak_lr was 0\.001, is 0\.1"):
        is_done(out, replace(todo[0], config=replace(todo[0].config, peak_lr=0.1)))


def test_another_study_is_not_mixed_into_a_folder(finished):
    out, settings, _ = finished
    with pytest.raises(UserError, match="holds another study: image_passes was 500, is 1000"):
        open_study(out, replace(settings, image_passes=1000))
    open_study(out, replace(settings, seeds=3))
    open_study(out, settings)


def test_a_cell_that_another_process_is_at_is_left_alone(finished, tmp_path):
    _, _, todo = finished
    with claim(tmp_path, todo[0]) as first:
        code = "import sys; from pathlib import Path; from types import SimpleNamespace as S; "
        code += "from timm_locat.study.run import claim\n"
        code += f"with claim(Path({str(tmp_path)!r}), S(name={todo[0].name!r})) as mine: print(mine)"
        other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert first and other.stdout.strip() == "False"


def test_the_report_says_what_the_records_say(finished, monkeypatch):
    out, _, todo = finished
    monkeypatch.setattr("timm_locat.study.report.cells", lambda settings: todo)
    text = write_report(out).read_text()
    rows = read_rows(out)
    accuracies = [row.value("test_accuracy") for row in rows if row.condition == "cm"]
    assert f"| cm | 2 | {interval(accuracies).text(1)} |" in text and "4 of 4 runs are finished." in text
    assert "not fully trained" in text and "at most 0.024" in text
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and 'src="' in page and "http" not in page.replace("https://", "")
    for picture in out.glob("*.png"):
        assert picture.stat().st_size > 5000
    assert rows[0].locality().images == 512


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no study folder"):
        write_report(tmp_path)


def fake(condition, value, seed=0):
    return Row("m", condition, seed, {"results": {"y": value}}, Path())


COMBINATIONS = ("baseline", "aa", "cm", "ls", "aa+cm", "aa+ls", "cm+ls", "modern")


def truth(condition):
    on = {"baseline": (), "modern": ("aa", "cm", "ls")}.get(condition, condition.split("+"))
    return 10 + 2 * ("aa" in on) - 5 * ("cm" in on) + 3 * ("aa" in on and "cm" in on)


def test_effects_of_a_known_factorial_are_found():
    rows = [fake(name, truth(name) + e, seed) for name in COMBINATIONS for seed, e in enumerate((-0.01, 0.01))]
    found, source = effects(rows, "y")
    values = {effect.name: effect.value for effect in found}
    # Averaged over the other components: aa gives 2 without cm and 5 with it, cm gives -5 and -2.
    expected = {"aa": 3.5, "cm": -3.5, "ls": 0.0, "aa x cm": 1.5, "aa x ls": 0.0, "cm x ls": 0.0, "aa x cm x ls": 0.0}
    assert values == pytest.approx(expected, abs=1e-9) and "8 degrees of freedom" in source
    scatter = math.sqrt(8 * 2 * 0.01**2 / 8)
    half = 2.306004135 * 2 * scatter / math.sqrt(16)  # t of 0.975 at 8 degrees of freedom
    assert all(effect.half == pytest.approx(half, rel=1e-6) for effect in found)


def test_effects_of_single_runs_take_the_highest_interaction_for_error():
    found, source = effects([fake(name, truth(name)) for name in COMBINATIONS], "y")
    assert len(found) == 6 and "one seed per condition" in source
    assert effects([fake("baseline", 1.0)], "y") == ([], effects([fake("baseline", 1.0)], "y")[1])


def test_intervals_are_those_of_student():
    found = interval([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3) and found.half == pytest.approx(
        4.302652730 * np.std([1, 2, 4], ddof=1) / 3**0.5
    )
    assert interval([5.0]).half is None and interval([5.0]).text(1) == "5.0 (one seed)"


def test_the_best_seed_is_shipped_in_half_precision(tmp_path):
    settings = Settings(study="embedded", seeds=2, conditions=("plain", "locat"), **SHORT)
    open_study(tmp_path, settings)
    run_cells(tmp_path, [small(cell) for cell in cells(settings)], progress=False)
    told = ship(ShipConfig(folder=tmp_path, to=tmp_path / "weights", cards=tmp_path / "cards"))
    rows = [row for row in read_rows(tmp_path) if row.condition == "locat"]
    best = max(rows, key=lambda row: row.value("test_accuracy"))
    assert f"locatvit_compact_patch4_32.fashion_mnist: seed {best.seed}" in told
    state = load_file(tmp_path / "weights" / "locatvit_compact_patch4_32.fashion_mnist.safetensors")
    trained = load_file(best.folder / "model.safetensors")
    assert state.keys() == trained.keys()
    for name, value in trained.items():
        assert state[name].dtype == torch.float16 and torch.equal(state[name], value.half())
    assert read_record(tmp_path / "weights" / "locatvit_compact_patch4_32.fashion_mnist.json")["seed"] == best.seed
    card = (tmp_path / "cards" / "locatvit_compact_patch4_32.fashion_mnist.md").read_text()
    assert f"{best.value('test_accuracy'):.1f} %" in card


@pytest.mark.slow
def test_a_study_killed_twice_ends_as_an_undisturbed_one(tmp_path):
    """About two minutes: two studies of three cells of the compact model, one of them killed in the middle."""
    words = ["protocol", "--image-passes", "1000", "--global-batch-size", "250", "--mixed-precision", "no"]
    words += ["--conditions", "baseline", "cm", "modern"]
    command = [sys.executable, "-m", "timm_locat.study", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(out):
        return subprocess.Popen([*command, "--out", str(out)], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    for number in (1, 2):
        process = start(tmp_path / "killed")
        while len(list((tmp_path / "killed").glob("cells/*/locality/update_0000004.json"))) < number:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed").wait() == 0
    table = [
        [
            (row.condition, row.seed, row.value("test_accuracy"), row.record["results"]["locality"])
            for row in read_rows(out)
        ]
        for out in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert table[0] == table[1] and len(table[0]) == 3
