"""What goes wrong in a run: a full disk, images that cannot be read, a loss that is not finite."""

import json
import shutil

import pytest
import torch
from training_runs import Killed, config, easy_folder, kill_after, same, weights

from timm_locat.data import load
from timm_locat.errors import UserError
from timm_locat.train.checkpoint import load_checkpoint, save_checkpoint
from timm_locat.train.engine import train
from timm_locat.train.feed import Feed
from timm_locat.train.samples import BatchPlan, Samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return easy_folder(tmp_path_factory.mktemp("data"))


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
