"""The trainer: what a run sees, what it leaves, how it stops and goes on, and what it says about mistakes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from training_runs import SIZES, TINY, Killed, config, easy_folder, kill_after, rows, same, weights

from timm_locat.errors import UserError, run_cli
from timm_locat.record import read_record
from timm_locat.train import RECIPES, DataConfig, session
from timm_locat.train.__main__ import main
from timm_locat.train.build import build_optimizer, build_schedule
from timm_locat.train.checkpoint import load_checkpoint, save_checkpoint
from timm_locat.train.engine import Interrupted, Trainer, train
from timm_locat.train.launched import choose_threads
from timm_locat.train.run_folder import choose_folder
from timm_locat.train.samples import BatchPlan, evaluation_ids, seed_for

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return easy_folder(tmp_path_factory.mktemp("data"))


# What a run sees


def test_an_epoch_shows_every_image_once_up_to_a_whole_number_of_updates():
    plan = BatchPlan(103, 20, 1, 1, seed=0)
    seen = [i for batch in plan.epoch(0, 0) for i in batch]
    assert len(seen) == len(set(seen)) == 100 and set(seen) < set(range(103))


def test_the_images_left_out_change_from_epoch_to_epoch():
    plan = BatchPlan(103, 20, 1, 1, seed=0)
    left = [set(range(103)) - {i for batch in plan.epoch(e, 0) for i in batch} for e in range(3)]
    assert left[0] != left[1] != left[2]


def test_two_processes_share_what_one_accumulates():
    one, two = BatchPlan(100, 20, 2, 1, seed=3), BatchPlan(100, 20, 1, 2, seed=3)
    alone = one.epoch(4, 0)
    together = [batch for pair in zip(two.epoch(4, 0), two.epoch(4, 1), strict=True) for batch in pair]
    assert alone == together
    assert one.draw_seed(4, 2, 1, 0) == two.draw_seed(4, 2, 0, 1)


def test_an_epoch_can_start_at_any_update():
    plan = BatchPlan(100, 20, 2, 1, seed=0)
    assert plan.epoch(1, 0, first_update=3) == plan.epoch(1, 0)[6:]


@pytest.mark.parametrize(("samples", "size", "accum"), [(100, 20, 3), (10, 20, 1)])
def test_impossible_batches_are_refused(samples, size, accum):
    with pytest.raises(UserError, match=r"global_batch_size=20.*(change one of them|lower it)"):
        BatchPlan(samples, size, accum, 1, seed=0)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_counts_every_sample_once(processes):
    ids = [i for rank in range(processes) for batch in evaluation_ids(21, 4, rank, processes) for i in batch]
    assert sorted(ids) == list(range(21))


def test_seeds_of_neighbouring_numbers_are_unrelated():
    assert len({seed_for(a, b) for a in range(20) for b in range(20)}) == 400


# Schedule and optimizer


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate_rises_to_its_peak_and_falls_to_its_minimum(folder, schedule):
    run = config(folder, None, schedule=schedule, epochs=10, peak_lr=1e-2, min_lr=1e-4, warmup_epochs=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.peak_lr)
    steps = build_schedule(run, optimizer, updates_per_epoch=10)
    rates = []
    for update in range(101):
        steps.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[100] == 1e-4 and rates[20] == 1e-2 == max(rates)
    assert rates[10] == pytest.approx((1e-2 + 1e-4) / 2)
    assert rates[60] == pytest.approx((1e-2 + 1e-4) / 2)  # half way down, cosine and line agree
    assert all(a > b for a, b in itertools.pairwise(rates[20:]))


def test_vectors_and_position_embeddings_are_not_decayed(folder):
    model = timm.create_model("locatvit_tiny", **SIZES)
    groups = build_optimizer(config(folder, None), model).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    assert all(decay[id(p)] == 0 for p in named.values() if p.ndim <= 1)
    assert decay[id(named["pos_embed"])] == decay[id(named["cls_token"])] == 0
    assert decay[id(named["blocks.0.attn.gaug.log_var.weight"])] == 0.05  # as the paper's code has it


# A whole run


def test_a_run_learns_and_leaves_everything_behind(folder, tmp_path):
    results = train(config(folder, tmp_path, epochs=8, peak_lr=3e-3, data={"protocol": "baseline"}), "easy")
    assert results["test_accuracy"] == 100 and results["test_images"] == 10
    record = read_record(tmp_path / "record.json")
    assert record["protocol"] == "train/v1" and record["results"] == results
    assert record["config"]["data"]["name"] == str(folder) and record["machine"]["torch_threads"] >= 1
    assert len(rows(tmp_path)) == 8
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1320, 432)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert list(model.pretrained_cfg["label_names"]) == ["dark", "light"]
    dark = (torch.full((1, 3, 16, 16), 40.0) / 255 - 0.5) / 0.5
    assert model(dark).argmax(1).item() == 0 and model(-dark).argmax(1).item() == 1
    assert not list(tmp_path.glob("*.partial*")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("workers", "protocol"), [(0, "modern"), (2, "modern"), (0, "deit"), (2, "deit")])
def test_a_killed_run_ends_as_if_it_had_not_been_killed(folder, tmp_path, monkeypatch, workers, protocol):
    data = {"workers": workers, "in_memory": workers == 0, "protocol": protocol}
    train(config(folder, tmp_path / "whole", data=data))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 5)
        train(config(folder, tmp_path / "killed", data=data))
    train(config(folder, tmp_path / "killed", data=data, resume="auto"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_a_stopped_run_goes_on_in_the_middle_of_an_epoch(folder, tmp_path, monkeypatch):
    train(config(folder, tmp_path / "whole"))
    original = Trainer._train_update

    def stop_at_five(self):
        original(self)
        self.stop.made = self.epoch == 1 and self.update == 1

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"epoch 2 after update 2.*--resume auto"):
        patch.setattr(Trainer, "_train_update", stop_at_five)
        train(config(folder, tmp_path / "stopped"))
    assert load_checkpoint(tmp_path / "stopped")["update"] == 2
    train(config(folder, tmp_path / "stopped", resume="auto"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "stopped")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_finished_run_can_be_resumed_without_harm(folder, tmp_path):
    first = train(config(folder, tmp_path))
    again = train(config(folder, tmp_path, resume="auto"))
    assert again["test_accuracy"] == first["test_accuracy"] and len(rows(tmp_path)) == 3


def test_accumulation_changes_nothing_but_rounding(folder, tmp_path):
    plain = {"drop_path_rate": 0.0, "data": {"protocol": "none"}}
    runs = [Trainer(config(folder, tmp_path / str(n), grad_accum_steps=n, **plain)) for n in (1, 2)]
    for run in runs:
        run.fit()
    a, b = (weights(run.folder) for run in runs)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_moving_average_is_evaluated_exported_and_resumed(folder, tmp_path, monkeypatch, precision):
    monkeypatch.setattr(session, "cpu_has_bf16", lambda: True)
    changes = {"ema_decay": 0.9, "mixed_precision": precision, "grad_checkpointing": True, "layer_decay": 0.7}
    results = train(config(folder, tmp_path / "whole", **changes))
    assert {"ema_accuracy", "ema_loss", "ema_top5"} < set(results)
    averaged = timm.create_model(f"local-dir:{tmp_path / 'whole' / 'ema'}", pretrained=True).state_dict()
    assert same(averaged, load_checkpoint(tmp_path / "whole")["ema"])
    assert not same(averaged, weights(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 5)
        train(config(folder, tmp_path / "killed", **changes))
    train(config(folder, tmp_path / "killed", **changes, resume="auto"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert same(averaged, load_checkpoint(tmp_path / "killed")["ema"])


def test_a_run_goes_on_in_its_own_precision_only(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "cpu_has_bf16", lambda: True)
    train(config(folder, tmp_path, mixed_precision="bf16"))
    monkeypatch.setattr(session, "cpu_has_bf16", lambda: False)
    with pytest.raises(UserError, match="holds a run in precision 'bf16', and here it would go on in 'no'"):
        train(config(folder, tmp_path, mixed_precision="bf16", resume="auto"))


def test_the_number_of_workers_changes_nothing(folder, tmp_path):
    for workers in (0, 2):
        train(config(folder, tmp_path / str(workers), data={"workers": workers, "protocol": "deit"}, epochs=2))
    assert same(weights(tmp_path / "0"), weights(tmp_path / "2"))


def test_a_batch_can_be_looked_at_without_training(folder, tmp_path):
    assert train(config(folder, tmp_path / "run", show_batch=tmp_path / "batch.png")) == {}
    with Image.open(tmp_path / "batch.png") as image:
        assert image.format == "PNG"
    assert not (tmp_path / "run").exists()


def test_values_on_the_command_line_replace_the_protocols():
    own = DataConfig(protocol="modern", cutmix=0.5, mix_prob=1.0, label_smoothing=0.0).augmentation()
    assert (own.cutmix, own.mix_prob, own.label_smoothing, own.auto_augment) == (0.5, 1.0, 0.0, "cifar10")


# Mistakes


def test_another_configuration_is_not_continued(folder, tmp_path):
    train(config(folder, tmp_path, epochs=2))
    with pytest.raises(
        UserError, match=r"another run: data.protocol was 'modern', is 'none'; epochs was 2, is 3; peak_lr was"
    ):
        train(config(folder, tmp_path, peak_lr=2e-3, resume="auto", data={"protocol": "none"}))


def test_a_run_may_be_continued_with_its_data_at_another_place(folder, tmp_path):
    train(config(folder, tmp_path, epochs=2))
    state = load_checkpoint(tmp_path)
    state["config"]["data"] |= {"root": "/somewhere/else", "workers": 7, "in_memory": False}
    save_checkpoint(tmp_path, state)
    assert train(config(folder, tmp_path, epochs=2, resume="auto"))["test_images"] == 10


def test_a_folder_that_is_not_empty_is_refused(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty; pass --resume auto"):
        train(config(folder, tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_runs_without_a_folder_get_new_ones(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [choose_folder(config(folder, None), "demo") for _ in range(3)]
    assert [str(f) for f in folders] == ["runs/demo", "runs/demo-2", "runs/demo-3"]


def test_a_run_saved_before_a_setting_existed_can_go_on(folder, tmp_path):
    train(config(folder, tmp_path))
    state = load_checkpoint(tmp_path)
    del state["config"]["compile"], state["config"]["data"]["mix_prob"], state["broken"]
    save_checkpoint(tmp_path, state)
    train(config(folder, tmp_path, resume="auto"))
    with pytest.raises(UserError, match="compile was False, is True"):
        train(config(folder, tmp_path, resume="auto", compile=True))


def test_a_model_for_grey_images_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="images have 3 channels"):
        train(config(folder, tmp_path, model_kwargs=json.dumps(SIZES | {"in_chans": 1})))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"warmup_epochs": 3}, r"warmup_epochs must be in \[0, epochs=3\), got 3"),
        ({"min_lr": 1.0}, "min_lr must be in"),
        ({"data": {"label_smoothing": 1.0}}, "label_smoothing must be a share"),
        ({"clip_grad": 0.0}, "clip_grad must be positive"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"model_kwargs": "gaug=False"}, "--model-kwargs must be a JSON object"),
    ],
)
def test_nonsense_is_refused(folder, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(folder, None, **changes)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match=r"protocol must be one of none, flip, baseline, .*, got 'flop'"):
        DataConfig(protocol="flop")


# Command line


def launch(*words, env=None):
    """The command as a user gives it, in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "ACCELERATE_"))}
    start = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "-m", "timm_locat.train"]
    env = {**clean, **(env or {})}
    return subprocess.run([*start, *map(str, words)], capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)


def command(monkeypatch, *words):
    """The same in this process, which saves seconds; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["timm_locat.train", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        run_cli(main)
    return left.value.code


def tiny_run(folder, out):
    size = ["--model-kwargs", TINY, "--img-size", 16, "--epochs", 1]
    return ["demo", "--data.name", folder, "--out", out, "--global-batch-size", 8, "--warmup-epochs", 0, *size]


@pytest.mark.parametrize(("omp", "threads"), [(None, len(os.sched_getaffinity(0))), ("1", 1)])
def test_a_launched_run_uses_all_cores_unless_the_user_said_otherwise(folder, tmp_path, omp, threads):
    done = launch(*tiny_run(folder, tmp_path / "run"), env={} if omp is None else {"OMP_NUM_THREADS": omp})
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "record.json")
    assert record["results"]["threads_per_process"] == threads
    assert record["results"]["mixed_precision"] == ("bf16" if session.cpu_has_bf16() else "no")
    assert record["command"].startswith("accelerate launch ") and "-m timm_locat.train demo" in record["command"]


def test_threads_are_shared_by_local_processes(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for local, threads in (("3", 2), ("7", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert choose_threads() == threads


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["demmo"], 2, "demo"),
        (["demo", "--epochs", "0"], 2, "epochs must be at least 1, got 0"),
        (["demo", "--epoch", "3"], 2, "--epochs"),
        (["demo", "--data.name", "/not/there"], 1, "error: there is no data set, folder or parquet file '/not/there'"),
        (["demo", "--data.name", "cifar10", "--data.root", "/not/there"], 1, "error: there is no folder /not/there"),
        (["demo", "--model", "locatvit_tinny"], 1, "error: there is no model 'locatvit_tinny'"),
        (["demo", "--img-size", "33"], 1, "multiple of the 4x4 patch, got 33x33"),
        (["demo", "--model-kwargs", '{"gaugg": true}'], 1, "unexpected keyword argument 'gaugg'"),
    ],
)
def test_mistakes_on_the_command_line_end_in_a_sentence(tmp_path, monkeypatch, capsys, words, status, sentence):
    assert command(monkeypatch, *words, *(["--out", tmp_path / "run"] if status == 1 else [])) == status
    out, err = capsys.readouterr()
    assert sentence in out + err and "Traceback" not in err


def test_a_launched_mistake_leaves_no_traceback(tmp_path):
    done = launch("demo", "--data.name", "/not/there", "--out", tmp_path / "run")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: there is no data set, folder or parquet file '/not/there'")


def test_help_explains_recipes_and_settings(monkeypatch, capsys):
    assert command(monkeypatch, "--help") == command(monkeypatch, "demo", "--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in RECIPES) and "Images per optimizer step" in text


def test_a_missing_extra_is_named(tmp_path):
    code = "import sys, runpy; sys.modules['tyro'] = None; sys.argv = ['x', 'demo']; " + (
        "runpy.run_module('timm_locat.train', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("not installed: pip install 'timm-locat[train]'")
