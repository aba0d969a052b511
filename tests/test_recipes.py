"""Every recipe is a run: it could start at its full size, and at a reduced one it trains, stops and goes on."""

import csv
import json
from dataclasses import replace

import pytest
import timm
import torch
from layouts import LAYOUTS
from timm.models import get_model_input_config

from timm_locat.data import DATASETS
from timm_locat.train import RECIPES
from timm_locat.train.build import build_optimizer, build_schedule
from timm_locat.train.checkpoint import load_checkpoint
from timm_locat.train.engine import Interrupted, Trainer, train
from timm_locat.train.recipes import describe


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_can_start(name):
    config = RECIPES[name]()
    classes = DATASETS[config.data.name].num_classes
    model = timm.create_model(config.model, num_classes=classes, device="meta")
    channels, *size = get_model_input_config(model)["input_size"]
    assert channels == 3
    optimizer = build_optimizer(config, model)
    build_schedule(config, optimizer, updates_per_epoch=10).step_update(0)
    protocol = config.data.augmentation()
    images = torch.randint(256, (4, 3, *size), dtype=torch.uint8)
    images, targets = protocol.apply(images, torch.arange(4), classes, torch.Generator().manual_seed(0))
    assert images.shape == (4, 3, *size) and (targets.shape == (4, classes)) == protocol.soft_targets


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_tells_its_command(name):
    assert f"timm_locat.train {name}" in describe(name)


def test_a_control_differs_from_its_model_in_nothing_else():
    for ours in ("locatvit_tiny_in1k", "locatvit_base_in1k", "locatjumbo_tiny_in1k", "locatjumbo_base_in1k"):
        plain = ours.removeprefix("locat")
        a, b = RECIPES[ours](), RECIPES[plain]()
        assert {k for k in vars(a) if getattr(a, k) != getattr(b, k)} == {"model"}


def test_svhn_is_never_mirrored_and_tiny_imagenet_is_jittered():
    assert RECIPES["vit_compact_svhn_modern"]().data.augmentation().flip == 0
    tiny = RECIPES["vit_compact_tiny_imagenet_modern"]().data.augmentation()
    assert tiny.auto_augment is None and tiny.color_jitter[0] > 0


# Two updates of each


@pytest.fixture
def place(tmp_path, small, monkeypatch):
    """A function that makes a tiny copy of a known set in its own layout, and returns its path (None: shipped)."""

    def put(name):
        if name == "fashion_mnist_mini":
            pq = pytest.importorskip("pyarrow.parquet")
            small(name, train=4, test=4)
            files = {split: tmp_path / path.name for split, path in DATASETS[name].files.items()}
            for split, path in DATASETS[name].files.items():
                pq.write_table(pq.read_table(path).slice(0, 4), files[split])
            monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=files))
            return None
        write, sizes = LAYOUTS[name]
        small(name, **sizes)
        root = tmp_path / name
        root.mkdir()
        write(root)
        return str(root)

    return put


def reduced(config, root, out):
    """The run in two updates of a model of its family with two blocks; all else is the recipe's."""
    sizes = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    if "swin" in config.model:
        sizes = {"depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2]}
    return replace(
        config,
        data=replace(config.data, root=root, workers=min(config.data.workers, 1)),
        model_kwargs=json.dumps(json.loads(config.model_kwargs) | sizes),
        img_size={"patch4": 16, "patch8": 32}.get(config.model.split("_")[-2], 48),
        epochs=1,
        warmup_epochs=0.5,
        global_batch_size=DATASETS[config.data.name].sizes["train"] // 2,
        out=out,
    )


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "finetune"])
def test_the_recipe_trains_stops_and_goes_on(name, place, tmp_path, monkeypatch):
    config = RECIPES[name]()
    config = reduced(config, place(config.data.name), tmp_path / "run")
    stop_after_one_update(config, monkeypatch)
    assert load_checkpoint(config.out)["update"] == 1
    results = train(replace(config, resume="auto"), name)
    assert results["image_passes"] == 2 * config.global_batch_size
    assert results["test_images"] == DATASETS[config.data.name].sizes["test"]
    with (config.out / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["lr"]) == config.peak_lr and float(row["train_loss"]) > 0  # the second update: warmed up
    model = timm.create_model(f"local-dir:{config.out}", pretrained=True)
    assert "swin" in name or len(model.blocks) == 2
    assert model.num_classes == DATASETS[config.data.name].num_classes


def stop_after_one_update(config, monkeypatch):
    original = Trainer._train_update

    def once(self):
        self.stop.made = True
        return original(self)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "_train_update", once)
        train(config, "stopped")


@pytest.mark.parametrize("img_size", [16, 24])
def test_finetuning_goes_on_from_a_run_folder_at_its_size_or_a_larger_one(img_size, place, tmp_path, monkeypatch):
    demo = RECIPES["demo"]()
    demo = reduced(demo, place(demo.data.name), tmp_path / "demo")
    train(demo, "demo")
    before = timm.create_model(f"local-dir:{demo.out}", pretrained=True)

    data = replace(RECIPES["finetune"]().data, name="cifar100", root=place("cifar100"))
    config = reduced(replace(RECIPES["finetune"](), data=data), data.root, tmp_path / "tuned")
    config = replace(config, model=f"local-dir:{demo.out}", model_kwargs="{}", img_size=img_size)
    start = Trainer(replace(config, out=tmp_path / "start"), "finetune")
    assert start.bare_model.num_classes == 100 and start.bare_model.patch_embed.img_size == (img_size, img_size)
    loaded = dict(start.bare_model.blocks.named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in before.blocks.named_parameters())

    stop_after_one_update(config, monkeypatch)
    train(replace(config, resume="auto"), "finetune")
    after = timm.create_model(f"local-dir:{config.out}", pretrained=True)
    assert after.patch_embed.img_size == (img_size, img_size) and after.num_classes == 100
    assert not torch.equal(after.blocks[0].mlp.fc1.weight, before.blocks[0].mlp.fc1.weight)


def test_finetuning_lets_each_block_learn_slower_than_the_one_above(place, tmp_path):
    demo = RECIPES["demo"]()
    demo = reduced(demo, place(demo.data.name), tmp_path / "demo")
    run = Trainer(replace(demo, layer_decay=RECIPES["finetune"]().layer_decay), "finetune")
    run.schedule.step_update(1)  # warmed up
    rate = {id(p): group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
    model = run.bare_model
    layers = [[model.patch_embed.proj.weight, model.pos_embed], *(list(b.parameters()) for b in model.blocks)]
    layers[-1].append(model.norm.weight)
    layers.append([model.head.weight])
    for depth, parameters in enumerate(reversed(layers)):
        assert [rate[id(p)] for p in parameters] == pytest.approx([demo.peak_lr * 0.75**depth] * len(parameters))
