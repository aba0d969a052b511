"""Switches of a run beside what it computes: compilation, determinism, trackers, comparison with a bare loop."""

import functools
import os
import sys
import types

import huggingface_hub
import pytest
import timm
import torch
from accelerate import Accelerator
from fake_hub import FakeHub, http_error
from training_runs import Killed, config, easy_folder, kill_after, rows, same, weights

from timm_locat.data import permute_patches
from timm_locat.errors import MissingExtra, UserError
from timm_locat.hub import remote
from timm_locat.hub.contents import FILES
from timm_locat.record import read_record
from timm_locat.train.bare import BareLoop
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.engine import Trainer, train
from timm_locat.train.samples import patch_order
from timm_locat.train.trackers import start_tracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return easy_folder(tmp_path_factory.mktemp("data"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_learns_the_same_and_keeps_the_names_of_its_weights(folder, tmp_path, monkeypatch, backend):
    changes = {"epochs": 2, "ema_decay": 0.9}
    plain = train(config(folder, tmp_path / "plain", **changes))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        compiled = train(config(folder, tmp_path / "compiled", compile=True, **changes))
    states = [load_checkpoint(tmp_path / name) for name in ("plain", "compiled")]
    assert all(states[0][part].keys() == states[1][part].keys() for part in ("model", "ema"))
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-4)
    for exported in (tmp_path / "compiled", tmp_path / "compiled" / "ema"):
        timm.create_model(f"local-dir:{exported}", pretrained=True)


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
        train(config(folder, tmp_path / "run", tracker="wandb"))
    assert not (tmp_path / "run").exists()


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


def test_a_finished_run_is_published_in_one_commit(folder, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "cache")
    monkeypatch.setattr(remote, "hub_api", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    train(config(folder, tmp_path / "run", push_to_hub="someone/model"))
    assert set(hub._files("someone/model", None)[1]) == {".gitattributes", *FILES}
    assert hub.calls == ["create_repo", "model_info", "create_commit"]


def test_a_run_that_cannot_be_published_is_complete_all_the_same(folder, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "cache")
    hub.fail["create_repo"] = [http_error(403)]
    monkeypatch.setattr(remote, "hub_api", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    with pytest.raises(UserError, match=r"is complete, but cannot push .*python -m timm_locat\.hub push"):
        train(config(folder, tmp_path / "run", push_to_hub="someone/model"))
    assert (tmp_path / "run" / "record.json").exists() and (tmp_path / "run" / "model.safetensors").exists()


def test_publishing_without_a_token_is_refused_before_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login"):
        train(config(folder, tmp_path / "run", push_to_hub="someone/model"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="owner/name"):
        config(folder, tmp_path, push_to_hub="model")
