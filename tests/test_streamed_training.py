"""Training from a stream: each image once, exact resume, the same whatever the processes and workers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from training_runs import TINY, Killed, config, easy_images, kill_after, rows, same, weights

from timm_locat.data import load
from timm_locat.errors import UserError
from timm_locat.record import read_record
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.engine import Interrupted, Trainer, train
from timm_locat.train.evaluate import EvaluateConfig, run
from timm_locat.train.feed import Feed
from timm_locat.train.samples import BatchPlan
from timm_locat.train.stream import StreamedSamples

datasets = pytest.importorskip("datasets")

SHARDS = (7, 12, 5)
"""Rows of the three training files."""
LOAD_DATASET = datasets.load_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The easy classes in parquet files of uneven sizes: 24 training images in three, 10 test images in one."""
    root = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    for split, sizes in (("train", SHARDS), ("test", (10,))):
        images = [(name, image) for name, _, image in easy_images(sum(sizes) // 2, generator)]
        for i, size in enumerate(sizes):
            piece, images = images[:size], images[size:]
            columns = {"image": [image for _, image in piece], "label": [name for name, _ in piece]}
            table = datasets.Dataset.from_dict(columns, features=features)
            table.to_parquet(root / f"{split}-{i:05d}-of-{len(sizes):05d}.parquet", batch_size=3)
    return root


@pytest.fixture
def hub(folder, monkeypatch):
    """The same files as a data set of the Hub that states no length."""
    files = {split: sorted(str(file) for file in folder.glob(f"{split}*")) for split in ("train", "test")}

    def load_dataset(repo, config, streaming):
        return LOAD_DATASET("parquet", data_files=files, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return "someone/easy"


def streamed(name, out, **changes):
    data = {"streaming": True, "shuffle_buffer": 6, **changes.pop("data", {})}
    return config(name, out, data=data, **changes)


def samples(folder, buffer=6, **options):
    stream = load(folder, streaming=True)
    return StreamedSamples(stream, (16, 16), crop_pct=1.0, interpolation="bilinear", buffer=buffer, **options)


def ids(samples, plan, epoch, rank, first_update=0):
    batches = samples.training_ids(plan, epoch, rank, first_update)
    return [[samples.numbers(row) for row in batch] for batch in batches]


# What a run sees


@pytest.mark.parametrize(("accumulate", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_an_epoch_shows_every_image_once(folder, accumulate, processes):
    plan = BatchPlan(24, 8, accumulate, processes, seed=0)
    seen = [i for rank in range(processes) for batch in ids(samples(folder), plan, 0, rank) for i in batch]
    assert len(seen) == len(set(seen)) == 24


def test_epochs_have_orders_of_their_own(folder):
    orders = [ids(samples(folder), BatchPlan(24, 8, 1, 1, seed), epoch, 0) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4


def test_two_processes_share_what_one_accumulates(folder):
    one, two = BatchPlan(24, 8, 2, 1, seed=3), BatchPlan(24, 8, 1, 2, seed=3)
    alone = ids(samples(folder), one, 4, 0)
    pairs = zip(ids(samples(folder), two, 4, 0), ids(samples(folder), two, 4, 1), strict=True)
    assert alone == [batch for pair in pairs for batch in pair]


def test_an_epoch_can_start_at_any_update(folder, hub):
    for name in (folder, hub):
        plan = BatchPlan(24, 4, 2, 1, seed=0)
        assert ids(samples(name), plan, 1, 0, first_update=4) == ids(samples(name), plan, 1, 0)[8:]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_counts_every_image_once(folder, hub, processes):
    for name in (folder, hub):
        found = samples(name)
        batches = [batch for rank in range(processes) for batch in found.evaluation_ids(5, rank, processes)]
        assert sorted(found.numbers(row) for batch in batches for row in batch) == ids_in_order(found)


def ids_in_order(samples):
    return [samples.numbers(row) for row in samples.data.rows()]


# Whole runs


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("workers", "protocol"), [(0, "modern"), (2, "deit")])
@pytest.mark.parametrize("source", ["files", "hub"])
def test_a_killed_run_ends_as_if_it_had_not_been_killed(folder, hub, tmp_path, monkeypatch, workers, protocol, source):
    name = folder if source == "files" else hub
    changes = {"data": {"workers": workers, "protocol": protocol, "updates_per_epoch": 3}, "checkpoint_every": 1}
    results = train(streamed(name, tmp_path / "whole", **changes))
    assert results["test_images"] == 10 and results["train_images"] == (24 if source == "files" else None)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 5)
        train(streamed(name, tmp_path / "killed", **changes))
    train(streamed(name, tmp_path / "killed", resume="auto", **changes))
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_stopped_run_goes_on_in_the_middle_of_an_epoch_with_another_number_of_workers(folder, tmp_path, monkeypatch):
    train(streamed(folder, tmp_path / "whole", data={"protocol": "deit"}))
    original = Trainer._train_update

    def stop_at_five(self):
        self.stop.made = self.epoch == 1 and self.update == 1
        return original(self)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="epoch 2 after update 2"):
        patch.setattr(Trainer, "_train_update", stop_at_five)
        train(streamed(folder, tmp_path / "stopped", data={"protocol": "deit"}))
    assert load_checkpoint(tmp_path / "stopped")["update"] == 2
    train(streamed(folder, tmp_path / "stopped", data={"protocol": "deit", "workers": 2}, resume="auto"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "stopped")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_streamed_run_is_evaluated_and_recorded_like_any_other(folder, tmp_path):
    results = train(streamed(folder, tmp_path, epochs=8, peak_lr=3e-3, data={"protocol": "baseline"}))
    assert results["test_accuracy"] == 100
    assert read_record(tmp_path / "record.json")["config"]["data"]["streaming"] is True
    model = f"local-dir:{tmp_path}"
    measured = [run(EvaluateConfig(model=model, data=str(folder), streaming=streaming)) for streaming in (True, False)]
    assert measured[0] == measured[1] and measured[0]["samples"] == 10


@pytest.mark.slow
def test_two_real_processes_train_on_a_stream_like_one_that_accumulates(folder, tmp_path):
    for processes, accumulate in ((1, 2), (2, 1)):
        words = ["--data.name", folder, "--data.streaming", "--data.protocol", "modern", "--mixed-precision", "no"]
        words += ["--model-kwargs", TINY, "--img-size", 16, "--epochs", 3, "--warmup-epochs", 1]
        words += ["--global-batch-size", 8, "--grad-accum-steps", accumulate, "--out", tmp_path / str(processes)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--master_port", 29513, "--nproc_per_node", processes]
        command = [*launch, "-m", "timm_locat.train", "demo", *words]
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in command], env=env, check=True, timeout=300)
    one, two = (read_record(tmp_path / name / "record.json")["results"] for name in "12")
    assert one["test_images"] == two["test_images"] == 10 and two["processes"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], abs=1e-5)
    assert two["test_loss"] == pytest.approx(one["test_loss"], abs=1e-5)


def test_a_streamed_batch_can_be_looked_at(folder, tmp_path):
    assert train(streamed(folder, tmp_path / "run", show_batch=tmp_path / "batch.png")) == {}
    assert (tmp_path / "batch.png").exists()


# Mishaps


def broken_copy(folder, tmp_path, *positions):
    """The training images in one file, some of them cut short."""
    tables = [datasets.Dataset.from_parquet(str(file)) for file in sorted(folder.glob("train*"))]
    table = datasets.concatenate_datasets(tables).cast_column("image", datasets.Image(decode=False))
    features = table.features

    def cut(row, i):
        content = row["image"]["bytes"]
        return {"image": {"bytes": content[:60] if i in positions else content, "path": None}}

    table.map(cut, with_indices=True, features=features).to_parquet(tmp_path / "train.parquet", batch_size=5)
    (tmp_path / "test.parquet").write_bytes(next(folder.glob("test*")).read_bytes())
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_broken_images_are_named_or_tolerated(folder, tmp_path, monkeypatch, workers):
    (tmp_path / "data").mkdir()
    data = broken_copy(folder, tmp_path / "data", 3, 17)
    changes = {"data": {"workers": workers}}
    with pytest.raises(UserError, match=r"cannot read image parquet row (3|17) of .*train\.parquet"):
        train(streamed(data, tmp_path / "none", **changes))
    changes["skip_broken"] = 2
    assert train(streamed(data, tmp_path / "whole", **changes))["broken_images"] == 2
    assert len((tmp_path / "whole" / "broken.txt").read_text().splitlines()) == 2
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 4)
        train(streamed(data, tmp_path / "killed", **changes))
    assert train(streamed(data, tmp_path / "killed", resume="auto", **changes))["broken_images"] == 2
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_another_image_of_the_batch_stands_in_with_its_own_label(folder, tmp_path):
    found = samples(broken_copy(folder, tmp_path, 2), skip_broken=1)
    batch = list(found.data.rows())[1:4]  # of one class; then the next one of the other
    batch[2] = batch[2]._replace(label=1 - batch[2].label)
    pixels, labels, broken = found.__getitems__([(row, 0) for row in batch])
    assert torch.equal(pixels[1], pixels[2]) and labels[1] == labels[2] != labels[0] and len(broken) == 1


def test_a_loss_that_is_not_finite_names_the_streamed_images(folder, tmp_path, monkeypatch):
    original = Feed._augmented

    def spoil(self, images, labels, seed):
        batch = original(self, images, labels, seed)
        spoiled = seed == self.plan.draw_seed(1, 1, 0, 0)
        return batch._replace(targets=batch.targets * float("nan")) if spoiled else batch

    monkeypatch.setattr(Feed, "_augmented", spoil)
    with pytest.raises(UserError, match="not finite in epoch 2, update 2"):
        train(streamed(folder, tmp_path))
    told = json.loads((tmp_path / "not_finite.json").read_text())["processes"][0]["images"]
    found = samples(folder)
    expected = list(found.training_ids(BatchPlan(24, 8, 1, 1, seed=0), 1, 0))[1]
    assert told == [found.source(row) for row in expected] and "parquet row" in told[0]


def test_an_unknown_length_has_to_be_given(hub, tmp_path):
    with pytest.raises(UserError, match=r"nothing states how many images .*--data.updates-per-epoch.* of 8 images"):
        train(streamed(hub, tmp_path))


def test_a_stream_that_ends_early_says_how_many_updates_there_are(hub, folder, tmp_path):
    with pytest.raises(UserError, match=r"someone/easy ends after 3 updates.* --data.updates-per-epoch 3"):
        train(streamed(hub, tmp_path / "hub", data={"updates_per_epoch": 4}))
    with pytest.raises(UserError, match=r"has 24 images, fewer than 4 updates of global_batch_size=8"):
        train(streamed(folder, tmp_path / "files", data={"updates_per_epoch": 4}))


def test_an_epoch_may_be_part_of_a_set(folder, tmp_path):
    for streaming in (True, False):
        data = {"streaming": streaming, "updates_per_epoch": 2}
        assert train(config(folder, tmp_path / str(streaming), data=data))["image_passes"] == 3 * 2 * 8


def test_locality_and_streams_are_not_recorded_together(folder):
    with pytest.raises(ValueError, match="record_locality needs test images in any order"):
        streamed(folder, None, record_locality="log")
