"""DINO: schedules, loss, centre and crops by the paper, and a run that resumes, spreads and exports like any other."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from training_runs import SIZES, Killed, easy_folder, kill_after, rows

from timm_locat.convert import add_locat
from timm_locat.errors import UserError
from timm_locat.hub import export
from timm_locat.layers.gaussian import gaussian_grid
from timm_locat.metrics import effective_rank, knn_votes
from timm_locat.record import read_record
from timm_locat.train import DataConfig
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.engine import train

pytest.importorskip("lightly")

from timm_locat.train.dino import RECIPES, DinoConfig
from timm_locat.train.dino.crops import MultiCrop
from timm_locat.train.dino.network import Network, UpdateLoss, outputs, with_head
from timm_locat.train.dino.recipes import describe
from timm_locat.train.dino.schedules import DinoSchedule, cosine, teacher_temperature
from timm_locat.train.dino.trainer import DinoTrainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return easy_folder(tmp_path_factory.mktemp("data"))


def config(folder, out, **changes):
    """Two epochs of three updates of a tiny model, every kind of change switched on."""
    data = DataConfig(**{"name": str(folder), "protocol": "none", **changes.pop("data", {})})
    base = DinoConfig(
        model="locatvit_compact_patch4_32",
        model_kwargs=json.dumps(SIZES),
        data=data,
        img_size=16,
        epochs=2,
        global_batch_size=8,
        warmup_epochs=1,
        local_crops=2,
        local_size=8,
        drop_path_rate=0.2,
        out_dim=32,
        hidden_dim=16,
        bottleneck_dim=8,
        teacher_temp=0.07,
        teacher_temp_warmup_epochs=2,
        knn_neighbours=3,
        out=out,
    )
    return dataclasses.replace(base, **changes)


def parts(folder):
    """Everything in a checkpoint that training goes on from."""
    state = load_checkpoint(folder)
    return {**state["model"], **{f"teacher.{k}": v for k, v in state["teacher"].items()}, "center": state["center"]}


# The paper's formulas


def published(start, end, epochs, per_epoch, warmup_epochs=0):
    """The schedule of DINO's code: a linear rise from 0, then a half cosine, as arrays."""
    warmup = np.linspace(0, start, warmup_epochs * per_epoch)
    steps = np.arange(epochs * per_epoch - len(warmup))
    return np.concatenate([warmup, end + 0.5 * (start - end) * (1 + np.cos(np.pi * steps / len(steps)))])


CHECKED = (0, 1, 39, 40, 41, 100, 199, 300, 398, 399)


def test_learning_rate_and_weight_decay_follow_the_published_schedules(tmp_path):
    run = dataclasses.replace(RECIPES["dino_vit_small_in1k"](), epochs=40, warmup_epochs=4)
    model = torch.nn.Linear(3, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.04}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    schedule = DinoSchedule(optimizer, run, 10)
    rates, decays = published(2e-3, 1e-6, 40, 10, 4), published(0.04, 0.4, 40, 10)
    for step in CHECKED:
        schedule.step_update(step)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rates[step]] * 2, rel=1e-12)
        assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([decays[step], 0.0])


def test_the_teachers_momentum_follows_the_published_schedule():
    momenta = published(0.996, 1.0, 40, 10)
    assert [cosine(step, 400, 0.996, 1.0) for step in CHECKED] == pytest.approx([momenta[step] for step in CHECKED])


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_teachers_temperature_follows_the_published_schedule(warmup):
    run = dataclasses.replace(
        RECIPES["dino_vit_small_in1k"](), teacher_temp=0.07, teacher_temp_warmup_epochs=warmup, warmup_teacher_temp=0.04
    )
    expected = np.concatenate([np.linspace(0.04, 0.07, warmup), np.full(10 - warmup, 0.07)])
    assert [teacher_temperature(epoch, run) for epoch in range(10)] == pytest.approx(expected.tolist())


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_cross_entropy_of_every_pair_of_different_crops(tmp_path):
    loss = UpdateLoss(config(tmp_path, tmp_path))
    loss.center.copy_(noise(1, 1, 32, seed=1))
    teacher, student = list(noise(2, 5, 32, seed=2)), list(noise(4, 5, 32, seed=3))
    terms = [
        -((t - loss.center[0]).div(0.05).softmax(-1) * s.div(0.1).log_softmax(-1)).sum(-1).mean()
        for i, t in enumerate(teacher)
        for j, s in enumerate(student)
        if i != j
    ]
    assert loss(teacher, student, teacher_temp=0.05).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def test_the_centre_moves_once_by_the_mean_of_all_passes(tmp_path):
    loss = UpdateLoss(config(tmp_path, tmp_path, center_momentum=0.8))
    before = noise(1, 1, 32, seed=1)
    loss.center.copy_(before)
    passes = [list(noise(2, 5, 32, seed=seed)) for seed in (2, 3)]
    for teacher in passes:
        loss(teacher, teacher, teacher_temp=0.05)
        assert torch.equal(loss.center, before)
    loss.move_center()
    mean = torch.stack([torch.stack(teacher) for teacher in passes]).mean((0, 1, 2))
    assert torch.allclose(loss.center.flatten(), 0.8 * before.flatten() + 0.2 * mean, atol=1e-6)


def test_what_tells_collapse_is_right_for_outputs_that_are_known(tmp_path):
    loss = UpdateLoss(config(tmp_path, tmp_path))
    student = [torch.zeros(4, 32)] * 2
    sure = torch.eye(32)[:4] * 100.0
    told = outputs([sure, sure], student, loss, 0.04)
    assert told.teacher_entropy.item() == pytest.approx(0, abs=1e-5)
    assert told.student_entropy.item() == pytest.approx(math.log(32))
    assert told.information.item() == pytest.approx(math.log(4))
    for collapsed in (torch.zeros(4, 32), sure[:1].expand(4, -1)):
        assert outputs([collapsed] * 2, student, loss, 0.04).information.item() == pytest.approx(0, abs=1e-5)


def test_nearest_neighbours_vote_as_a_loop_over_them_says():
    bank, labels, queries = noise(40, 6), torch.arange(40) % 3, noise(7, 6, seed=1)
    votes = torch.zeros(7, 3)
    for i, query in enumerate(queries):
        cosines = [torch.cosine_similarity(query, other, dim=0).item() for other in bank]
        for j in sorted(range(40), key=lambda j: -cosines[j])[:5]:
            votes[i, labels[j]] += math.exp(cosines[j] / 0.07)
    assert torch.allclose(knn_votes(bank, labels, queries, 3, neighbours=5), votes, rtol=1e-4)
    assert knn_votes(bank, labels, queries, 3, neighbours=400).shape == (7, 3)


def test_the_effective_rank_counts_directions():
    basis = torch.linalg.qr(noise(50, 3)).Q
    assert effective_rank(basis @ torch.linalg.qr(noise(8, 3, seed=1)).Q.T) == pytest.approx(3)
    assert effective_rank(torch.ones(20, 8)) == pytest.approx(1)
    assert 7.5 < effective_rank(noise(2000, 8)) <= 8


# Crops


def test_crops_have_their_sizes_and_depend_on_the_seed_alone(folder, tmp_path):
    crops = MultiCrop(img_size=(16, 12), config=config(folder, tmp_path))
    image = Image.fromarray((noise(20, 24, 3).sigmoid() * 255).byte().numpy())

    def packed(seed):
        return crops(image, torch.Generator().manual_seed(seed))

    first = crops.split(packed(3)[None])
    assert [tuple(crop.shape) for crop in first] == [(1, 3, 16, 12)] * 2 + [(1, 3, 8, 8)] * 2
    torch.manual_seed(7)
    assert torch.equal(packed(3), packed(3))
    assert not torch.equal(packed(3), packed(4))


def test_without_changes_and_with_the_whole_area_a_crop_is_the_image(folder, tmp_path):
    plain = config(
        folder, tmp_path, flip=0, color_jitter=0, grayscale=0, blur=(0, 0, 0), solarize=0, global_area=(1, 1)
    )
    pixels = (noise(16, 16, 3).sigmoid() * 255).byte()
    crops = MultiCrop(img_size=(16, 16), config=plain)
    # torchvision draws the aspect ratio, too; when none fits ten times it takes the centre, which is all of a square.
    packed = crops(Image.fromarray(pixels.numpy()), torch.Generator().manual_seed(0))
    for crop in crops.split(packed[None])[:2]:
        assert (crop[0].permute(1, 2, 0).int() - pixels.int()).abs().max() <= 1


def test_crops_of_one_size_go_through_the_backbone_together_and_come_out_in_order():
    calls = []

    class Backbone(torch.nn.Module):
        num_features = 3

        def forward(self, x):
            calls.append(len(x))
            return x.mean((2, 3))

    network = Network(Backbone(), torch.nn.Identity())
    crops = [noise(2, 3, size, size, seed=i) for i, size in enumerate((8, 8, 4, 4, 4))]
    found = network(crops)
    assert calls == [4, 6]
    assert all(torch.allclose(a, b.mean((2, 3))) for a, b in zip(found, crops, strict=True))


def test_a_small_crop_of_a_large_model_has_its_gaussians_narrowed_by_the_grids():
    """96 pixels of a 224-pixel model: a 6 x 6 grid, and variances times 6 / 14, as in the paper's code."""
    large, small = (gaussian_grid(torch.zeros(()), grid, (14, 14)) for grid in ((14, 14), (6, 6)))
    assert small.var_scale / large.var_scale == pytest.approx(6 / 14)


# Runs


def test_a_run_trains_measures_and_exports_its_teacher(folder, tmp_path, caplog):
    with caplog.at_level("INFO", logger="timm_locat"):
        results = train(config(folder, tmp_path / "run"), "tiny", DinoTrainer)
    record = read_record(tmp_path / "run" / "record.json")
    assert record["protocol"] == "dino/v1"
    assert record["results"]["knn_accuracy"] == results["knn_accuracy"]
    assert {row["knn_accuracy"] for row in rows(tmp_path / "run")} != {""}
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert "before training: k-NN accuracy" in caplog.text

    teacher = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    assert teacher.num_classes == 0
    state = load_checkpoint(tmp_path / "run")["teacher"]
    assert all(torch.equal(value, state[f"backbone.{name}"]) for name, value in teacher.state_dict().items())
    assert teacher(noise(2, 3, 16, 16)).shape == (2, 16)


def test_the_teacher_is_the_moving_average_and_gets_no_gradient(folder, tmp_path):
    trainer = DinoTrainer(config(folder, tmp_path / "run", drop_path_rate=0.0, freeze_last_layer_epochs=0))
    before = {name: value.clone() for name, value in trainer.teacher.state_dict().items()}
    assert all(torch.equal(value, before[name]) for name, value in trainer.bare_model.state_dict().items())
    for _ in range(2):
        trainer.update += 1  # the learning rate of the first update is 0
        trainer._train_update()
        momentum = cosine(trainer.update, 6, 0.996, 1.0)
        student = trainer.bare_model.state_dict()
        for name, value in trainer.teacher.state_dict().items():
            assert torch.allclose(value, momentum * before[name] + (1 - momentum) * student[name], atol=1e-7), name
        before = {name: value.clone() for name, value in trainer.teacher.state_dict().items()}
    assert all(parameter.grad is None for parameter in trainer.teacher.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in trainer.bare_model.state_dict().items())


def test_the_last_layer_rests_in_the_first_epoch(folder, tmp_path):
    name = "head.last_layer.weight_v"
    trainer = DinoTrainer(config(folder, tmp_path / "run", norm_last_layer=False))
    first = trainer.bare_model.state_dict()[name].clone()
    trainer.fit()
    assert not torch.equal(trainer.bare_model.state_dict()[name], first)
    resting = DinoTrainer(config(folder, tmp_path / "resting", freeze_last_layer_epochs=2))
    resting.fit()
    assert torch.equal(resting.bare_model.state_dict()[name], first)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_in_an_epoch_ends_as_one_left_alone(folder, tmp_path, monkeypatch, workers):
    run = config(folder, tmp_path / "whole", data={"workers": workers})
    train(run, "tiny", DinoTrainer)
    broken = dataclasses.replace(run, out=tmp_path / "killed", resume="auto")
    with monkeypatch.context() as patch:
        kill_after(patch, 4)  # in the second epoch
        with pytest.raises(Killed):
            train(broken, "tiny", DinoTrainer)
    results = train(broken, "tiny", DinoTrainer)
    whole, again = parts(tmp_path / "whole"), parts(tmp_path / "killed")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    untrained = read_record(tmp_path / "whole" / "record.json")["results"]["knn_accuracy_untrained"]
    assert results["knn_accuracy_untrained"] == untrained


def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_bit_equal(folder, tmp_path, monkeypatch):
    run = config(folder, tmp_path / "whole")
    train(run, "tiny", DinoTrainer)
    trainer = DinoTrainer(dataclasses.replace(run, out=tmp_path / "stopped"))
    trainer.untrained = trainer.evaluate()
    trainer.feed.start(0, 0)
    trainer.model.train()
    for _ in range(2):
        trainer._train_update()
        trainer.update += 1
    trainer.save()
    train(dataclasses.replace(run, out=tmp_path / "stopped", resume="auto"), "tiny", DinoTrainer)
    whole, again = parts(tmp_path / "whole"), parts(tmp_path / "stopped")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def words(folder, out, **flags):
    """A run of the command line."""
    base = {
        "data.name": folder,
        "model-kwargs": json.dumps(SIZES),
        "img-size": 16,
        "epochs": 1,
        "global-batch-size": 8,
        "warmup-epochs": 0,
        "local-crops": 2,
        "local-size": 8,
        "out-dim": 32,
        "hidden-dim": 16,
        "bottleneck-dim": 8,
        "out": out,
    }
    return ["dino_locatvit_compact", *(str(w) for key, v in (base | flags).items() for w in (f"--{key}", v))]


def command(*arguments, processes=1, port=29541):
    launch = ["torch.distributed.run", "--nproc_per_node", processes, "--master_port", port] if processes > 1 else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    given = [sys.executable, "-m", *map(str, launch), *(["-m"] if launch else []), "timm_locat.train.dino", *arguments]
    return subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_two_processes_and_two_passes_of_one_have_the_loss_and_centre_of_one_pass(folder, tmp_path):
    runs = {"one": (1, {}), "two": (2, {}), "passes": (1, {"grad-accum-steps": 2})}
    for name, (processes, flags) in runs.items():
        done = command(*words(folder, tmp_path / name, **flags), processes=processes)
        assert done.returncode == 0, done.stderr
    for name in ("two", "passes"):
        for one, other in zip(rows(tmp_path / "one"), rows(tmp_path / name), strict=True):
            assert float(other["train_loss"]) == pytest.approx(float(one["train_loss"]), abs=1e-5)
            assert other["knn_accuracy"] == one["knn_accuracy"]
        difference = parts(tmp_path / "one")["center"] - parts(tmp_path / name)["center"]
        assert difference.abs().max() < 1e-5


def test_a_run_without_small_crops_works_for_models_of_one_size(folder, tmp_path):
    run = config(folder, tmp_path / "run", model="vit_compact_patch4_32", local_crops=0, epochs=1, warmup_epochs=0)
    train(run, "tiny", DinoTrainer)


def test_a_converted_checkpoint_of_timm_goes_on_and_its_teacher_is_converted_again(folder, tmp_path):
    sizes = dict(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    pretrained = add_locat(timm.create_model("vit_small_patch16_224.dino", pretrained=False, **sizes))
    export(pretrained, tmp_path / "converted")
    run = config(
        folder,
        tmp_path / "run",
        model=f"local-dir:{tmp_path / 'converted'}",
        pretrained=True,
        model_kwargs="{}",
        epochs=1,
        warmup_epochs=0,
    )
    trainer = DinoTrainer(run)
    loaded = trainer.teacher.backbone.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in pretrained.state_dict().items())
    trainer.fit()
    teacher = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
    assert teacher(noise(1, 3, 16, 16)).shape == (1, 16)


def test_add_locat_takes_the_teacher_of_a_plain_run(folder, tmp_path):
    train(config(folder, tmp_path / "run", model="vit_compact_patch4_32", epochs=1, warmup_epochs=0), "r", DinoTrainer)
    teacher = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    images = noise(2, 3, 16, 16)
    before = teacher(images)
    after = add_locat(teacher, prr=False).eval()(images)
    assert (after - before).norm() < 1e-3 * before.norm()


def test_outputs_that_are_the_same_for_all_images_are_told(folder, tmp_path, caplog):
    trainer = DinoTrainer(config(folder, tmp_path / "run"))
    row = dict.fromkeys(trainer.columns, 1.0) | {"train_information": 0.01, "feature_rank": 1.2}
    with caplog.at_level("WARNING", logger="timm_locat"):
        trainer._describe(row)
    assert "nearly the same output" in caplog.text
    assert "effective rank 1.20" in caplog.text


# Mistakes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"protocol": "modern"}}, "data.protocol must be none"),
        ({"data": {"streaming": True}}, "DINO is measured on training images"),
        ({"data": {"permute_patches": 1}}, "permute_patches is not for DINO"),
        ({"ema_decay": 0.9}, "the teacher is the moving average"),
        ({"schedule": "linear"}, "schedule must be cosine"),
        ({"out_dim": 0}, "out_dim must be at least 1"),
        ({"local_crops": -1}, "local_crops must be 0 or more"),
        ({"teacher_temp": 0.0}, "teacher_temp must be positive"),
        ({"teacher_momentum": 1.5}, "teacher_momentum must be in"),
        ({"blur": (0.5, 2.0, 0.0)}, "three probabilities"),
        ({"blur_sigma": (0.0, 1.0)}, "two radii above 0"),
        ({"local_area": (0.4, 0.05)}, "two shares of the image"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(folder, tmp_path, **changes)


def test_small_crops_that_the_model_cannot_take_are_refused_before_anything_is_read(folder, tmp_path):
    with pytest.raises(UserError, match=r"cannot take crops of 10 x 10 pixels.*change local_size"):
        DinoTrainer(config(folder, tmp_path / "run", local_size=10))


def test_a_mistake_on_the_command_line_is_one_sentence(folder, tmp_path):
    done = command(*words(folder / "nowhere", tmp_path / "run"))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_every_recipe_describes_itself_with_its_command():
    for name in RECIPES:
        assert f"timm_locat.train.dino {name}" in describe(name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_an_update_at_a_small_size(folder, tmp_path, name):
    recipe = RECIPES[name]()
    small = "compact" in name
    sizes = SIZES if small else {**SIZES, "patch_size": 4}
    run = dataclasses.replace(
        recipe,
        model_kwargs=json.dumps(sizes),
        data=dataclasses.replace(recipe.data, name=str(folder), workers=0),
        img_size=16,
        local_size=8,
        epochs=1,
        warmup_epochs=0,
        global_batch_size=24,
        out_dim=32,
        hidden_dim=16,
        bottleneck_dim=8,
        mixed_precision="no",
        out=tmp_path / "run",
    )
    assert math.isfinite(train(run, name, DinoTrainer)["loss"])


def test_a_batch_can_be_looked_at(folder, tmp_path):
    train(config(folder, tmp_path / "run", show_batch=tmp_path / "crops.png"), "tiny", DinoTrainer)
    with Image.open(tmp_path / "crops.png") as picture:
        assert picture.size[0] > 300
    assert not (tmp_path / "run").exists()


def test_a_head_needs_to_know_the_width_of_its_backbone(folder, tmp_path):
    with pytest.raises(UserError, match="num_features"):
        with_head(torch.nn.Linear(3, 3), config(folder, tmp_path))
