"""Several processes: the same numbers as one, and what timm's own machinery sees of the package."""

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from PIL import Image

from timm_locat.errors import UserError
from timm_locat.record import plain_json, read_record
from timm_locat.train import RECIPES, session
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.launched import check_processes
from timm_locat.train.session import new_accelerator
from timm_locat.train.state import check_sharding, name_blocks

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "timm_locat" / "train" / "launch"
SIZES = '{"depth": 1, "embed_dim": 16, "num_heads": 2}'


def start(*commands, **environment):
    """Run launchers side by side on this machine, and wait for them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment}
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, command)], env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    errors = [launcher.communicate(timeout=300)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * len(commands), errors


def torchrun(*words, processes, nodes=1, port=29511):
    """Several nodes are several launchers that meet on the loopback address."""
    launch = ["--nnodes", nodes, "--nproc_per_node", processes, "--master_addr", "127.0.0.1", "--master_port", port]
    node = ["torch.distributed.run", *launch, "--node_rank"]
    start(*([*node, rank, "-m", "timm_locat.train", *words] for rank in range(nodes)))


def accelerate_launch(*words, file):
    """Two machines of one process each, by a configuration file; without a GPU only their number has to be given."""
    launch = ["--config_file", LAUNCH / file, "--num_processes", 2, "--main_process_ip", "127.0.0.1"]
    node = ["accelerate.commands.launch", "--quiet", *launch, "--main_process_port", 29512, "--machine_rank"]
    start(*([*node, rank, "-m", "timm_locat.train", *words] for rank in range(2)))


def train_sharded(*words, stop_after=0):
    """Two processes that share one copy of the weights, by the launch file for FSDP; stopped and resumed if asked."""
    launch = ["--config_file", LAUNCH / "8_gpus_fsdp.yaml", "--num_processes", 2, "--main_process_port", 29513]
    script = Path(__file__).with_name("fsdp_on_cpu.py")
    start(["accelerate.commands.launch", "--quiet", *launch, script, *words], STOP_AFTER=str(stop_after))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(1)
    # 49 test images: one process gets a batch of 24 and a rest of one, the other a batch of 24.
    for split, counts in (("train", (20, 20, 20)), ("test", (17, 16, 16))):
        for k, name in enumerate("abc"):
            (root / split / name).mkdir(parents=True)
            for i in range(counts[k]):
                pixels = torch.randint(60 * k, 60 * k + 100, (16, 16, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(root / split / name / f"{i}.png")
    return root


def options(folder, out, accumulate):
    size = ["--global-batch-size", 12, "--grad-accum-steps", accumulate, "--epochs", 4, "--warmup-epochs", 1]
    data = ["--data.name", folder, "--data.protocol", "modern", "--mixed-precision", "no"]
    return ["demo", "--out", out, "--model-kwargs", SIZES, "--img-size", 16, *size, *data]


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """The same 20 updates by one process that accumulates, by two, and by two machines of one each."""
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
    agree(runs / "one", runs / other)


def agree(one, two):
    """Learning rates, losses and weights of one process, and of two that trained the same."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["lr"] == b["lr"]
        for name in ("train_loss", "test_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-5)
    results = read_record(two / "record.json")["results"]
    assert results["processes"] == 2 and results["test_images"] == 49
    one, two = (load_checkpoint(folder)["model"] for folder in (one, two))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_launch_file_starts_machines_that_train_like_one_process(runs, folder):
    accelerate_launch(*options(folder, runs / "launched", 1), file="2x8_gpus.yaml")
    agree(runs / "one", runs / "launched")


def test_a_sharded_run_that_was_stopped_ends_like_one_that_is_not_sharded(runs, folder):
    out = runs / "sharded"
    train_sharded(*options(folder, out, 1), stop_after=7)
    agree(runs / "two", out)
    assert read_record(out / "record.json")["results"]["distributed"] == "FSDP"
    plain, sharded = (load_checkpoint(runs / name)["optimizer"] for name in ("two", "sharded"))
    assert plain_json(plain["param_groups"]) == plain_json(sharded["param_groups"])
    torch.testing.assert_close(plain["state"], sharded["state"], rtol=1e-2, atol=1e-4)
    exported = timm.create_model(f"local-dir:{out}", pretrained=True).state_dict()
    assert all(torch.equal(exported[key], value) for key, value in load_checkpoint(out)["model"].items())


@pytest.mark.slow
def test_a_sharded_run_that_accumulates_ends_like_one_that_is_not_sharded(folder, tmp_path):
    torchrun(*options(folder, tmp_path / "plain", 2), processes=2)
    train_sharded(*options(folder, tmp_path / "sharded", 2))
    agree(tmp_path / "plain", tmp_path / "sharded")


def test_accelerate_would_leave_sharding_out_on_a_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP was asked for, and accelerate shards on accelerators only, not on cpu"):
        check_sharding(Accelerator(), RECIPES["demo"]())


@pytest.mark.parametrize(
    ("version", "changes", "sentence"),
    [
        (1, {}, "supported in its second version: put fsdp_version: 2"),
        (2, {"ema_decay": 0.9, "compare_bare": True}, "^ema_decay and compare_bare need all weights"),
        (2, {"record_locality": "log"}, "^record_locality need"),
    ],
)
def test_what_sharding_cannot_do_is_refused(version, changes, sentence):
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=version == 2)
    with pytest.raises(UserError, match=sentence):
        check_sharding(sharded, replace(RECIPES["demo"](), **changes))


@pytest.mark.parametrize("name", ["locatvit_tiny", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18"])
def test_blocks_are_the_units_of_sharding(name):
    model = timm.create_model(name, device="meta")
    name_blocks(model)
    units = [type(module).__name__ for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert len(units) == {"resnet18": 0}.get(name, 12)


def test_half_precision_that_a_cpu_does_not_have_is_not_claimed(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert new_accelerator(replace(RECIPES["demo"](), mixed_precision="fp16")).mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert new_accelerator(RECIPES["demo"]()).mixed_precision == "no"


def test_a_cpu_without_bf16_trains_in_float32_unless_the_launcher_insists(monkeypatch, caplog):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for quick, precision in ((True, "bf16"), (False, "no")):
        monkeypatch.setattr(session, "cpu_has_bf16", lambda quick=quick: quick)
        assert new_accelerator(RECIPES["demo"]()).mixed_precision == precision
    assert "this CPU has no instructions for bf16" in caplog.text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert new_accelerator(RECIPES["demo"]()).mixed_precision == "bf16"


def test_fewer_processes_than_asked_for_are_refused():
    words = ["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "timm_locat.train"]
    with pytest.raises(UserError, match=r"--num_processes 2 was asked for, 1 process runs.*torchrun"):
        check_processes(1, words)
    with pytest.raises(UserError, match=r"--num_machines 2"):
        check_processes(1, ["accelerate", "launch", "--num-machines=2"])
    assert check_processes(2, words) is None
    file = ["accelerate", "launch", "--config_file", str(LAUNCH / "2x8_gpus.yaml")]
    with pytest.raises(UserError, match=r"--num_processes 16 was asked for, 2 process runs"):
        check_processes(2, file)
    with pytest.raises(UserError, match=r"--num_machines 2 was asked for, 1 process runs"):
        check_processes(1, [*file, "--num_processes", "1"])
    assert check_processes(2, [*file, "--num_processes=2"]) is None
    assert check_processes(1, ["python", "-m", "pytest", "--num_processes", "2"]) is None


@pytest.mark.parametrize(
    ("file", "processes", "machines", "kind"),
    [
        ("1_gpu.yaml", 1, 1, "NO"),
        ("8_gpus.yaml", 8, 1, "MULTI_GPU"),
        ("2x8_gpus.yaml", 16, 2, "MULTI_GPU"),
        ("8_gpus_fsdp.yaml", 8, 1, "FSDP"),
    ],
)
def test_accelerate_reads_the_launch_files(file, processes, machines, kind):
    config = load_config_from_file(str(LAUNCH / file))  # refuses a field that it does not know
    assert (config.num_processes, config.num_machines, config.distributed_type.value) == (processes, machines, kind)
    words = ["--config_file", str(LAUNCH / file), "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "-m", "timm_locat.train"]))
    assert (args.num_processes, args.num_machines, args.multi_gpu) == (processes, machines, kind == "MULTI_GPU")
    assert args.use_fsdp == (kind == "FSDP") and args.mixed_precision == "no"
    if kind != "NO":
        env = prepare_multi_gpu_env(args)
        assert args.nproc_per_node == "8" and int(getattr(args, "nnodes", 1)) == machines
        assert env.get("FSDP_VERSION") == ("2" if kind == "FSDP" else None)


def test_every_launch_file_is_tested_and_documented():
    page = (ROOT / "docs" / "training.md").read_text()
    files = {path.name for path in LAUNCH.iterdir()}
    assert files == {"1_gpu.yaml", "8_gpus.yaml", "2x8_gpus.yaml", "8_gpus_fsdp.yaml"}
    assert all(f"timm_locat/train/launch/{name}" in page for name in files)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    """What accelerate launch does with a configuration for GPUs on a machine without."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match="WORLD_SIZE 8 was asked for, 1 process runs"):
        check_processes(1, ["python"])
    assert check_processes(8, ["python"]) is None


TIMM_TRAIN = """
import importlib, sys, torch
for module in sys.argv[1:2]:
    importlib.import_module(module)  # what train.py does with --device-modules
from timm.data import Mixup, create_dataset, create_loader, resolve_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
model = create_model("locatvit_tiny", depth=1, img_size=32, num_classes=3, drop_path_rate=0.1)
optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
dataset = create_dataset("", root=sys.argv[2], split="train", is_training=True)
data = resolve_data_config({"img_size": 32}, model=model)
loader = create_loader(dataset, data["input_size"], 30, is_training=True, auto_augment="rand-m9-mstd0.5-inc1",
    re_prob=0.25, mean=data["mean"], std=data["std"], num_workers=0, use_prefetcher=False, device=torch.device("cpu"))
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, updates_per_epoch=len(loader))
mix, loss = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=3), SoftTargetCrossEntropy()
for step, (x, y) in enumerate(loader):
    x, y = mix(x, y)
    value = loss(model(x), y)
    value.backward()
    assert all(p.grad is not None for p in model.parameters()) and torch.isfinite(value)
    optimizer.step(); optimizer.zero_grad(); scheduler.step_update(step + 1)
print("updates:", step + 1)
"""


@pytest.mark.parametrize("module", ["timm_locat", "timm"])
def test_timms_own_parts_train_our_models_after_an_import_by_name(folder, module):
    command = [sys.executable, "-c", TIMM_TRAIN, module, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if module == "timm_locat":
        assert done.stdout.strip() == "updates: 2", done.stderr
    else:  # without the import, timm does not know the model
        assert "Unknown model (locatvit_tiny)" in done.stderr
