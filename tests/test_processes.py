"""Several processes: the same numbers as one, and what timm's own machinery sees of the package."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from timm_locat.errors import UserError
from timm_locat.record import read_record
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.launched import check_processes

ROOT = Path(__file__).parents[1]
SIZES = '{"depth": 1, "embed_dim": 16, "num_heads": 2}'


def torchrun(*words, processes, nodes=1, port=29511):
    """Start real processes on this machine; several nodes are several launchers that meet on the loopback address."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launchers = []
    for node in range(nodes):
        launch = ["--nnodes", nodes, "--node_rank", node, "--nproc_per_node", processes]
        launch += ["--master_addr", "127.0.0.1", "--master_port", port]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "timm_locat.train", *words]
        launchers.append(
            subprocess.Popen([str(w) for w in command], env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        )
    errors = [launcher.communicate(timeout=300)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * nodes, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(1)
    for split, count in (("train", 20), ("test", 7)):  # 21 test images: no multiple of 2 processes or of a batch
        for k, name in enumerate("abc"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(60 * k, 60 * k + 100, (16, 16, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(root / split / name / f"{i}.png")
    return root


def options(folder, out, accumulate):
    size = ["--global-batch-size", 12, "--grad-accum-steps", accumulate, "--epochs", 4, "--warmup-epochs", 1]
    data = ["--data.name", folder, "--data.protocol", "modern", "--mixed-precision", "no"]
    return ["demo", "--out", out, "--model-kwargs", SIZES, "--img-size", 16, *size, *data]


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """The same 20 updates by one process that accumulates, by two processes, and by two machines of one each."""
    root = tmp_path_factory.mktemp("runs")
    torchrun(*options(folder, root / "one", 2), processes=1)
    torchrun(*options(folder, root / "two", 1), processes=2)
    torchrun(*options(folder, root / "machines", 1), processes=1, nodes=2)
    return root


def metrics(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("other", ["two", "machines"])
def test_two_processes_train_like_one_that_accumulates(runs, other):
    for a, b in zip(metrics(runs / "one"), metrics(runs / other), strict=True):
        assert a["lr"] == b["lr"]
        for name in ("train_loss", "test_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-5)
    results = read_record(runs / other / "record.json")["results"]
    assert results["processes"] == 2 and results["test_images"] == 21
    one, two = (load_checkpoint(runs / name)["model"] for name in ("one", other))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)


def test_fewer_processes_than_asked_for_are_refused():
    words = ["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "timm_locat.train"]
    with pytest.raises(UserError, match=r"--num_processes 2 was asked for, 1 process runs.*torchrun"):
        check_processes(1, words)
    with pytest.raises(UserError, match=r"--num_machines 2"):
        check_processes(1, ["accelerate", "launch", "--num-machines=2"])
    assert check_processes(2, words) is None
    assert check_processes(1, ["python", "-m", "pytest", "--num_processes", "2"]) is None


def test_timms_own_parts_train_our_models_after_an_import_by_name():
    code = """
import importlib, torch, timm
importlib.import_module("timm_locat")  # what train.py --device-modules does
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
model = timm.create_model("locatvit_tiny", depth=1, img_size=32, num_classes=4, drop_path_rate=0.1)
optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
mix, loss = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4), SoftTargetCrossEntropy()
for step in range(2):
    x, y = mix(torch.randn(4, 3, 32, 32), torch.arange(4))
    value = loss(model(x), y)
    value.backward()
    assert all(p.grad is not None for p in model.parameters()) and torch.isfinite(value)
    optimizer.step(); optimizer.zero_grad(); scheduler.step(step + 1)
print("trained")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "trained", done.stderr
