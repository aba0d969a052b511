"""Locality recorded during training: at the updates asked for, the same after a kill, no trace left in the run."""

import dataclasses
import json

import pytest
import torch
from PIL import Image

from timm_locat.errors import UserError
from timm_locat.locality import Locality, record
from timm_locat.record import read_record
from timm_locat.train import DataConfig, TrainConfig, session
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.course import chosen_updates
from timm_locat.train.engine import Trainer, train

TINY = json.dumps({"depth": 2, "embed_dim": 16, "num_heads": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder data set of two classes: 24 training and 10 test images of 16 x 16 pixels."""
    root = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("test", 5)):
        for name, level in (("dark", 30), ("light", 220)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(0, 30, (16, 16, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray((noise + level).numpy()).save(root / split / name / f"{i}.png")
    return root


def config(folder, out, **changes):
    base = TrainConfig(
        model="locatvit_compact_patch4_32",
        data=DataConfig(name=str(folder), protocol="modern"),
        model_kwargs=TINY,
        img_size=16,
        epochs=3,
        global_batch_size=8,
        warmup_epochs=1,
        drop_path_rate=0.2,
        out=out,
        record_locality="log",
    )
    return dataclasses.replace(base, **changes)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "locality").iterdir())}


def same_weights(a, b):
    a, b = load_checkpoint(a)["model"], load_checkpoint(b)["model"]
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("when", "last", "updates"),
    [
        (None, 9, []),
        ("log", 9, [0, 1, 2, 4, 8, 9]),
        ("log", 8, [0, 1, 2, 4, 8]),
        ("log", 1, [0, 1]),
        ("every:4", 9, [0, 4, 8, 9]),
        ("every:100", 9, [0, 9]),
        ("7,3", 9, [3, 7, 9]),
    ],
)
def test_when_names_updates(when, last, updates):
    assert chosen_updates(when, last) == updates


@pytest.mark.parametrize("when", ["", "logs", "every", "every:0", "every:-1", "1,,2", "1.5", "-1", "every:1,2"])
def test_when_refuses_everything_else(folder, when):
    with pytest.raises(ValueError, match="record_locality must be log, every:N, or updates such as 0,10,100, got"):
        config(folder, None, record_locality=when)


def test_an_update_that_the_run_does_not_have_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="names update 10, the run has 9"):
        train(config(folder, tmp_path, record_locality="1,10"))


def test_a_model_that_cannot_be_read_is_refused_before_training(folder, tmp_path):
    with pytest.raises(UserError, match="cannot read attention of"):
        train(config(folder, tmp_path, model="resnet18", model_kwargs="{}", drop_path_rate=0.0, img_size=32))


def test_a_run_is_measured_and_does_not_notice(folder, tmp_path):
    train(config(folder, tmp_path / "plain", record_locality=None))
    results = train(config(folder, tmp_path / "measured"))
    assert same_weights(tmp_path / "plain", tmp_path / "measured")
    assert not (tmp_path / "plain" / "locality").exists()
    assert list(files(tmp_path / "measured")) == [f"update_{u:07d}.json" for u in (0, 1, 2, 4, 8, 9)]
    with Image.open(tmp_path / "measured" / "locality.png") as image:
        assert image.size == (1500, 600)
    final = Locality.load(tmp_path / "measured" / "locality" / "update_0000009.json")
    assert final.images == 10 and results["locality"] == final.summary()
    assert read_record(tmp_path / "measured" / "record.json")["results"]["locality"] == final.summary()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_measured_is_the_model_of_that_update_in_float32(folder, tmp_path, monkeypatch, precision):
    monkeypatch.setattr(session, "cpu_has_bf16", lambda: True)
    trainer = Trainer(config(folder, tmp_path, mixed_precision=precision, ema_decay=0.9, record_locality="every:5"))
    trainer.fit()
    pixels = trainer.test_samples.pixels
    expected = record(trainer.ema.module.float(), [trainer.prepare(pixels)])
    trainer.ema.module.load_state_dict(trainer.bare_model.state_dict())  # a copy that accelerate has not touched
    expected, averaged = record(trainer.ema.module, [trainer.prepare(pixels)]), expected
    found = Locality.load(tmp_path / "locality" / "update_0000009.json")
    assert found.values == expected.values != averaged.values


class Killed(Exception):
    """Stands for SIGKILL: nothing of ours handles it."""


@pytest.mark.parametrize("after", [1, 4, 8])
def test_a_killed_run_leaves_the_same_files(folder, tmp_path, monkeypatch, after):
    train(config(folder, tmp_path / "whole"))
    original, done = Trainer._train_update, []

    def die(self):
        if len(done) == after:
            raise Killed
        done.append(1)
        original(self)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_train_update", die)
        train(config(folder, tmp_path / "killed"))
    train(config(folder, tmp_path / "killed", resume="auto"))
    assert files(tmp_path / "whole") == files(tmp_path / "killed")
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def test_a_finished_run_measures_again_what_was_deleted(folder, tmp_path):
    train(config(folder, tmp_path))
    before = files(tmp_path)
    (tmp_path / "locality" / "update_0000009.json").unlink()
    train(config(folder, tmp_path, resume="auto"))
    assert files(tmp_path) == before
