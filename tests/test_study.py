"""Studies: which cells they have, and that they are trained once, whoever and however often is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studies import picture_folder

from timm_locat.errors import UserError
from timm_locat.study import STUDIES, Settings, cells, run_cells
from timm_locat.study.cost import plan, seconds_per_image
from timm_locat.study.grid import FACTORS
from timm_locat.study.results import read_rows
from timm_locat.study.run import claim, is_done, open_study, parse_shard, read_settings

ROOT = Path(__file__).parents[1]
SMALL = json.dumps({"depth": 2, "embed_dim": 16, "num_heads": 2})


def small(cell):
    """The cell with a model that takes no time."""
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


@pytest.mark.parametrize("study", list(FACTORS))
def test_a_study_of_factors_has_every_combination_once(study):
    on = [frozenset(FACTORS[study][c.name]) for c in STUDIES[study].conditions if c.name in FACTORS[study]]
    components = frozenset().union(*on)
    assert len(set(on)) == len(on) == len(FACTORS[study]) == 2 ** len(components)


@pytest.mark.parametrize("study", ["protocol", "pooling"])
def test_a_conditions_run_has_the_components_that_its_factors_say(study):
    for cell in cells(Settings(study=study)):
        on, protocol = FACTORS[study][cell.condition], cell.config.data.augmentation()
        if study == "protocol":
            parts = (protocol.auto_augment is not None, protocol.cutmix > 0, protocol.label_smoothing > 0)
            assert parts == tuple(part in on for part in ("aa", "cm", "ls"))
        else:
            pool = json.loads(cell.config.model_kwargs).get("global_pool", "token")
            assert (protocol.cutmix > 0, pool == "avg") == ("modern" in on, "mean" in on)


def test_data_sets_and_models_span_the_grid(tmp_path):
    settings = Settings(
        study="protocol",
        data=("cifar10", "tiny_imagenet"),
        root=("/a", "/b"),
        models=("vit_compact_patch4_32", f"local-dir:{tmp_path}/mine"),
        conditions=("baseline", "aa"),
    )
    found = cells(settings)
    assert [(c.name, c.config.data.root, c.config.data.augmentation().auto_augment) for c in found[3:5]] == [
        ("mine__cifar10__aa__seed0", "/a", "cifar10"),
        ("vit_compact_patch4_32__tiny_imagenet__baseline__seed0", "/b", None),
    ]
    assert len(found) == 8
    with pytest.raises(UserError, match="two cells are named vit__cifar10__baseline__seed0"):
        cells(replace(settings, models=("x/vit", "y/vit")))


def test_each_data_set_has_the_compact_model_of_its_size():
    found = cells(Settings(study="dose", data=("cifar10", "tiny_imagenet")))
    assert {(c.data, c.model) for c in found} == {
        ("cifar10", "vit_compact_patch4_32"),
        ("tiny_imagenet", "vit_compact_patch8_64"),
    }


@pytest.mark.parametrize(("passes", "batch", "epochs"), [(60_000, 100, 12), (5_000, 128, 1), (5_001, 100, 2)])
def test_image_passes_are_rounded_up_to_whole_epochs(passes, batch, epochs):
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
        ({"study": "embedded", "data": ("cifar10",)}, "the study embedded has its own models, on fashion_mnist_mini"),
        ({"study": "embedded", "models": ("locatvit_tiny",)}, "the study embedded has its own models"),
        ({"study": "protocol", "data": "cifar10"}, "data and root must be tuples"),
        ({"study": "protocol", "data": ("cifar10", "svhn"), "root": ("/a",)}, "root must be one path for each of data"),
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
    """A study of two conditions and two seeds, on small models and images of no meaning."""
    out = tmp_path_factory.mktemp("study")
    pictures = picture_folder(tmp_path_factory.mktemp("data") / "pictures")
    common = {"data": (str(pictures),), "image_passes": 40, "global_batch_size": 10}
    settings = Settings(study="protocol", seeds=2, conditions=("baseline", "cm"), **common)
    open_study(out, settings)
    todo = [small(cell) for cell in cells(settings)]
    assert run_cells(out, todo, progress=False) == 4
    return out, settings, todo


def test_finished_cells_are_not_trained_again(finished):
    out, _, todo = finished
    before = [(out / "cells" / cell.name / "record.json").stat().st_mtime_ns for cell in todo]
    assert run_cells(out, todo, progress=False) == 0 and all(is_done(out, cell) for cell in todo)
    assert before == [(out / "cells" / cell.name / "record.json").stat().st_mtime_ns for cell in todo]
    assert plan(out, todo).endswith("all are done") and plan(out, todo).count("done ") == 4


def test_a_cell_of_another_configuration_is_not_taken_for_done(finished):
    out, _, todo = finished
    with pytest.raises(UserError, match=r"peak_lr was 0\.001, is 0\.1"):
        is_done(out, replace(todo[0], config=replace(todo[0].config, peak_lr=0.1)))


def test_the_plan_counts_what_is_left_by_what_is_known(finished, monkeypatch):
    out, _, todo = finished
    new = replace(todo[0], condition="aa", config=replace(todo[0].config, seed=7))
    seconds = np.median([row.value("seconds") / row.value("image_passes") for row in read_rows(out)])
    monkeypatch.setattr("timm_locat.study.cost.seconds_per_image", lambda cell: pytest.fail("known already"))
    text = plan(out, [*todo, new])
    assert f"1 of 5 to do: 40 image passes, about {seconds * 40 / 60:.0f} minutes" in text
    assert "by finished cells;" in text and "to do  vit_compact_patch4_32__pictures__aa__seed0" in text


def test_a_model_that_no_finished_cell_has_is_timed(finished, monkeypatch):
    out, _, todo = finished
    assert seconds_per_image(todo[0]) > 0
    monkeypatch.setattr("timm_locat.study.cost.seconds_per_image", lambda cell: 450)
    assert plan(out / "elsewhere", todo[:1]).endswith(
        "1 of 1 to do: 40 image passes, about 5.0 hours of training for one process (by a few passes measured now; "
        "testing and measuring come on top)"
    )


def test_another_study_is_not_mixed_into_a_folder(finished):
    out, settings, _ = finished
    with pytest.raises(UserError, match="holds another study: image_passes was 40, is 1000"):
        open_study(out, replace(settings, image_passes=1000))
    open_study(out, replace(settings, seeds=3))
    open_study(out, settings)
    assert read_settings(out) == settings


def test_a_folder_from_when_a_study_had_one_data_set_is_the_same_study(tmp_path):
    settings = Settings(study="protocol", data=("fashion_mnist",), root=("/data",))
    old = {"study": "protocol", "data": "fashion_mnist", "root": "/data", "models": [], "seeds": None}
    (tmp_path / "study.json").write_text(json.dumps(old))
    open_study(tmp_path, settings)
    (tmp_path / "study.json").write_text(json.dumps({**old, "root": None}))
    open_study(tmp_path, replace(settings, root=()))


@pytest.mark.parametrize("text", ["{", "[1]", '{"study": "protocol", "colour": 1}'])
def test_a_damaged_study_file_is_named(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot use .*study\.json: .* pass another study folder"):
        read_settings(tmp_path)


def test_a_cell_that_somebody_else_is_at_is_left_alone(finished, tmp_path):
    _, _, todo = finished
    with claim(tmp_path, todo[0]) as first, claim(tmp_path, todo[0]) as second, claim(tmp_path, todo[1]) as other:
        assert (first, second, other) == (True, False, True)
        assert run_cells(tmp_path, todo[:2], progress=False) == 0
    with claim(tmp_path, todo[0]) as free:
        assert free


@pytest.mark.slow
def test_a_study_killed_twice_and_ended_by_two_processes_is_as_an_undisturbed_one(tmp_path):
    """About a minute and a half."""
    pictures = picture_folder(tmp_path / "pictures")
    words = ["protocol", "--data", str(pictures), "--image-passes", "160", "--global-batch-size", "10"]
    words += ["--mixed-precision", "no", "--conditions", "baseline", "cm", "modern"]
    command = [sys.executable, "-m", "timm_locat.study", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(out):
        with (tmp_path / f"{out.name}.log").open("a") as log:
            return subprocess.Popen([*command, "--out", str(out)], cwd=tmp_path, env=environment, stderr=log)

    assert start(tmp_path / "whole").wait() == 0, (tmp_path / "whole.log").read_text()
    for number in (1, 2):  # in the first cell, between two checkpoints; and in the second one
        process = start(tmp_path / "killed")
        while len(list((tmp_path / "killed").glob("cells/*/locality/update_0000008.json"))) < number:
            assert process.poll() is None, (tmp_path / "killed.log").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < len(list((tmp_path / "killed").glob("cells/*/record.json"))) < 3
    last = [start(tmp_path / "killed"), start(tmp_path / "killed")]
    assert [process.wait() for process in last] == [0, 0], (tmp_path / "killed.log").read_text()
    assert "going on in" in (tmp_path / "killed.log").read_text()
    table = [
        [
            (row.condition, row.seed, row.value("test_accuracy"), row.record["results"]["locality"])
            for row in read_rows(out)
        ]
        for out in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert table[0] == table[1] and len(table[0]) == 3
    reports = [(out / "report.md").read_text() for out in (tmp_path / "whole", tmp_path / "killed")]
    assert reports[0] == reports[1] and "3 of 3 runs are finished." in reports[0]
