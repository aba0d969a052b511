"""Every recipe is a run that could start: its model, protocol and schedule exist and fit its data."""

import pytest
import timm
import torch
from timm.models import get_model_input_config

from timm_locat.data import DATASETS
from timm_locat.train import RECIPES
from timm_locat.train.build import build_optimizer, build_schedule
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
    for ours, plain in (("locatvit_tiny_in1k", "vit_tiny_in1k"), ("locatvit_base_in1k", "vit_base_in1k")):
        a, b = RECIPES[ours](), RECIPES[plain]()
        assert {k for k in vars(a) if getattr(a, k) != getattr(b, k)} == {"model"}


def test_svhn_is_never_mirrored_and_tiny_imagenet_is_jittered():
    assert RECIPES["vit_compact_svhn_modern"]().data.augmentation().flip == 0
    tiny = RECIPES["vit_compact_tiny_imagenet_modern"]().data.augmentation()
    assert tiny.auto_augment is None and tiny.color_jitter[0] > 0
