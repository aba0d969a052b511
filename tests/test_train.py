"""The trainer: what a run sees, what it leaves, how it stops and goes on, and what it says about mistakes."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import timm
import torch
from accelerate import Accelerator
from PIL import Image
from training_runs import SIZES, TINY, Killed, config, easy_folder, kill_after, rows, same, weights

from timm_locat.data import load, permute_patches
from timm_locat.errors import MissingExtra, UserError, run_cli
from timm_locat.record import read_record
from timm_locat.train import RECIPES, DataConfig
from timm_locat.train.__main__ import main
from timm_locat.train.bare import BareLoop
from timm_locat.train.build import build_optimizer, build_schedule
from timm_locat.train.checkpoint import load_checkpoint, save_checkpoint
from timm_locat.train.engine import Interrupted, Trainer, train
from timm_locat.train.feed import Feed
from timm_locat.train.launched import choose_threads
from timm_locat.train.run_folder import choose_folder
from timm_locat.train.samples import BatchPlan, Samples, evaluation_ids, patch_order, seed_for
from timm_locat.train.trackers import start_tracker

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


def test_a_failed_write_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, {"epoch": 1})

    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        save_checkpoint(tmp_path, {"epoch": 2})
    assert load_checkpoint(tmp_path) == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*checkpoint.pt.*delete it to start again"):
        load_checkpoint(tmp_path)


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


def broken_copy(folder, tmp_path, *names):
    """A copy of a data folder in which some files are cut short; the folder and these files."""
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    for name in names:
        (data / name).write_bytes((data / name).read_bytes()[:60])
    return data, [data / name for name in names]


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(folder, tmp_path, in_memory, workers):
    data, (broken,) = broken_copy(folder, tmp_path, "train/light/3.png")
    with pytest.raises(UserError) as caught:
        train(config(data, tmp_path / "run", data={"in_memory": in_memory, "workers": workers}))
    assert str(broken) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("in_memory", "workers"), [(True, 0), (False, 0), (False, 1)])
def test_broken_images_are_tolerated_up_to_a_number(folder, tmp_path, in_memory, workers, monkeypatch):
    data, broken = broken_copy(folder, tmp_path, "train/light/3.png", "train/light/4.png")
    options = {"data": {"in_memory": in_memory, "workers": workers}, "skip_broken": 2}
    assert train(config(data, tmp_path / "whole", **options))["broken_images"] == 2
    named = (tmp_path / "whole" / "broken.txt").read_text().splitlines()
    assert len(named) == 2 and all(any(str(path) in line for line in named) for path in broken)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 4)
        train(config(data, tmp_path / "killed", **options))
    assert train(config(data, tmp_path / "killed", resume="auto", **options))["broken_images"] == 2
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    with pytest.raises(UserError, match=r"skip_broken=1 (tolerates|was asked for)"):
        train(config(data, tmp_path / "one", **options | {"skip_broken": 1}))


def test_the_next_readable_image_stands_in_with_its_own_label(folder, tmp_path):
    data, broken = broken_copy(folder, tmp_path, "train/dark/9.png")  # the last of its class, by name
    found = load(data, "train")
    index = [found.source(i) for i in range(len(found))].index(str(broken[0]))
    for in_memory in (True, False):
        samples = Samples(found, (16, 16), crop_pct=1.0, interpolation="bilinear", skip_broken=1, in_memory=in_memory)
        pixels, labels, _ = samples.__getitems__([(index, 0), (index + 1, 0)])
        assert torch.equal(pixels[0], pixels[1]) and labels.tolist() == [1, 1] and found.labels[index] == 0


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_batch(folder, tmp_path, monkeypatch):
    original = Feed._augmented

    def spoil(self, images, labels, seed):
        batch = original(self, images, labels, seed)
        spoiled = seed == self.plan.draw_seed(1, 1, 0, 0)
        return batch._replace(targets=batch.targets * float("nan")) if spoiled else batch

    train(config(folder, tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"not finite in epoch 2, update 2.*peak_lr"):
        patch.setattr(Feed, "_augmented", spoil)
        train(config(folder, tmp_path / "run"))
    told = json.loads((tmp_path / "run" / "not_finite.json").read_text())
    data = load(folder, "train")
    expected = BatchPlan(len(data), 8, 1, 1, seed=0).epoch(1, 0)[1]
    assert told["processes"][0]["images"] == [data.source(i) for i in expected] and told["update"] == 2
    state = load_checkpoint(tmp_path / "run")
    assert state["epoch"] == 1 and state["update"] == 0  # the last good one is untouched
    (tmp_path / "run" / "not_finite.pt").replace(tmp_path / "run" / "checkpoint.pt")
    train(config(folder, tmp_path / "run", resume="auto"))  # the state that was saved is as good
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))


def test_a_learning_rate_that_is_far_too_large_is_noticed(folder, tmp_path):
    with pytest.raises(UserError, match=r"not finite in epoch 1.*smaller peak_lr"):
        train(config(folder, tmp_path, peak_lr=1e30, min_lr=1e29, warmup_epochs=0, clip_grad=None))


# Switches


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
def test_a_compiled_run_learns_the_same_and_keeps_the_names_of_its_weights(folder, tmp_path):
    plain = train(config(folder, tmp_path / "plain", epochs=2))
    compiled = train(config(folder, tmp_path / "compiled", epochs=2, compile=True))
    assert weights(tmp_path / "plain").keys() == weights(tmp_path / "compiled").keys()
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-4)
    timm.create_model(f"local-dir:{tmp_path / 'compiled'}", pretrained=True)


def test_deterministic_algorithms_are_asked_for_and_put_back(folder, tmp_path, monkeypatch):
    seen = []
    original = Trainer._train_update

    def switches():
        cudnn = torch.backends.cudnn
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.allow_tf32, workspace

    def look(self):
        seen.append((*switches(), torch.get_float32_matmul_precision()))
        return original(self)

    before = switches()
    monkeypatch.setattr(Trainer, "_train_update", look)
    train(config(folder, tmp_path, deterministic=True, epochs=2))
    assert set(seen) == {(True, True, False, ":4096:8", "highest")}
    assert switches() == before and not before[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_gets_every_epoch_of_a_run_that_was_killed(folder, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 4)
        train(config(folder, tmp_path, tracker="tensorboard"))
    train(config(folder, tmp_path, tracker="tensorboard", resume="auto"))
    values = {}
    for file in sorted(tmp_path.rglob("events.out.tfevents*")):
        events = accumulator.EventAccumulator(str(file))
        events.Reload()
        if "test_accuracy" in events.Tags()["scalars"]:
            values |= {event.step: event.value for event in events.Scalars("test_accuracy")}
    written = {3 * int(row["epoch"]): float(row["test_accuracy"]) for row in rows(tmp_path)}
    assert values == pytest.approx(written) and len(written) == 3


def test_a_tracker_that_is_not_installed_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"--tracker wandb needs `wandb`.*timm-locat\[trackers\]"):
        train(config(folder, tmp_path, tracker="wandb"))


def test_only_the_main_process_chooses_the_id_of_a_run(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    start_tracker(types.SimpleNamespace(is_main_process=False), config(folder, tmp_path, tracker="wandb"), tmp_path)
    assert not (tmp_path / "tracker_id").exists()


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_under_the_same_id(folder, tmp_path, monkeypatch, tracker):
    calls = []
    monkeypatch.setitem(sys.modules, tracker, types.ModuleType(tracker))
    monkeypatch.setattr("timm_locat.train.trackers.filter_trackers", lambda names, folder: names)
    monkeypatch.setattr(
        Accelerator, "init_trackers", lambda self, project, config, options: calls.append((config, options[tracker]))
    )
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: None)
    train(config(folder, tmp_path, tracker=tracker))
    train(config(folder, tmp_path, tracker=tracker, resume="auto"))
    (first, options), (_, again) = calls
    assert options == again and options["resume"] == "allow" and (tmp_path / "tracker_id").read_text().strip()
    assert first["data.protocol"] == "modern" and first["peak_lr"] == 1e-3


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
    assert record["results"]["mixed_precision"] == "bf16"
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


# Speed beside a bare loop


def test_comparing_with_a_bare_loop_changes_no_weight_and_is_recorded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("timm_locat.train.bare.EVERY", 2)
    train(config(folder, tmp_path / "plain", grad_accum_steps=2))
    results = train(config(folder, tmp_path / "compared", grad_accum_steps=2, compare_bare=True))
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "compared"))
    assert rows(tmp_path / "plain") == rows(tmp_path / "compared")
    recorded = read_record(tmp_path / "compared" / "record.json")["results"]
    assert recorded["bare_comparisons"] == results["bare_comparisons"] == 3  # one of the three updates of each epoch
    assert recorded["share_of_bare"] > 0 and recorded["bare_images_per_second"] > 0
    assert "share_of_bare" not in read_record(tmp_path / "plain" / "record.json")["results"]


def test_a_bare_loop_makes_as_many_passes_as_an_update(monkeypatch):
    monkeypatch.setattr("timm_locat.train.bare.EVERY", 1)
    seen, model = [], torch.nn.Linear(4, 3)
    bare = BareLoop(3, lambda images: (seen.append(len(images)), model(images))[1])
    spent = bare.after(0, 0.5, torch.ones(6, 4))
    assert seen == [6, 6, 6] and model.weight.grad.abs().sum() > 0
    assert bare.results(18)["share_of_bare"] == pytest.approx(bare.seconds[0] / 0.5)
    assert bare.results(18)["bare_images_per_second"] == pytest.approx(18 / bare.seconds[0])
    assert spent >= bare.seconds[0]


def test_permuted_patches_are_permuted_in_training_and_testing_alike(folder, tmp_path):
    trainer = Trainer(config(folder, tmp_path, data={"permute_patches": 3}))
    plain = Trainer(config(folder, tmp_path / "plain"))
    images = trainer.test_samples.pixels[:2]
    order = patch_order(16, 3)
    expected = permute_patches(plain.prepare(images), order, (4, 4))
    assert torch.equal(trainer.prepare(images), expected) and not torch.equal(expected, plain.prepare(images))
    assert not torch.equal(order, patch_order(16, 4))
