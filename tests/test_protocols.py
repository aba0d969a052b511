"""Augmentation protocols: what each name does to a batch, from one generator and nothing else."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from timm_locat.data import PROTOCOLS, Protocol
from timm_locat.data.protocols import FOR_DATA

PAGE = Path(__file__).parents[1] / "docs" / "protocols.md"
SWITCHES = {"aa": {"auto_augment"}, "cm": {"cutmix", "mix_prob"}, "ls": {"label_smoothing"}}
COMBINATIONS = ["baseline", "aa", "cm", "ls", "aa+cm", "aa+ls", "cm+ls", "aa+cm+ls"]


def images(count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, 8, 16), dtype=torch.uint8, generator=generator)


def augment(protocol, x, seed=1):
    return protocol.augment(x, torch.Generator().manual_seed(seed))


def apply(protocol, x, seed=1):
    labels = torch.arange(len(x)) % 5
    return protocol.apply(x, labels, 5, torch.Generator().manual_seed(seed))


def states():
    name, key, *rest = np.random.get_state()
    return random.getstate(), (name, key.tolist(), *rest), torch.get_rng_state().tolist()


def changed_fields(a, b):
    names = [field.name for field in dataclasses.fields(Protocol)]
    return {name for name in names if getattr(a, name) != getattr(b, name)}


def test_none_changes_nothing():
    assert torch.equal(augment(PROTOCOLS["none"], images()), images())


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    x, y = images(400), augment(PROTOCOLS["flip"], images(400))
    flipped = [torch.equal(b, a.flip(-1)) for a, b in zip(x, y, strict=True)]
    kept = [torch.equal(b, a) for a, b in zip(x, y, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 150 < sum(flipped) < 250


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("count", [7, 40])
def test_every_protocol_keeps_the_kind_of_images_and_makes_targets_of_weight_one(name, count):
    protocol, x = PROTOCOLS[name], images(count)
    y, targets = apply(protocol, x)
    assert y.dtype == torch.uint8 and y.shape == x.shape and y.is_contiguous() and torch.equal(x, images(count))
    if protocol.soft_targets:
        assert targets.dtype == torch.float32 and targets.shape == (count, 5) and targets.min() >= 0
        torch.testing.assert_close(targets.sum(1), torch.ones(count))
    else:
        assert torch.equal(targets, torch.arange(count) % 5)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_same_seed_gives_the_same_batch_and_no_other_generator_matters(name):
    x, before = images(), states()
    (first, first_targets), (again, again_targets), (other, _) = (apply(PROTOCOLS[name], x, s) for s in (5, 5, 6))
    assert states() == before
    torch.rand(3), np.random.rand(3), random.random()
    moved, moved_targets = apply(PROTOCOLS[name], x, 5)
    assert torch.equal(first, again) and torch.equal(first_targets, again_targets)
    assert torch.equal(first, moved) and torch.equal(first_targets, moved_targets)
    assert torch.equal(first, other) == (name == "none")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_images_alone_are_those_of_a_batch_that_is_not_mixed(name):
    unmixed = dataclasses.replace(PROTOCOLS[name], mixup=0.0, cutmix=0.0)
    assert torch.equal(augment(PROTOCOLS[name], images()), apply(unmixed, images())[0])


def test_the_order_is_crop_flip_colours_mixing_erasing():
    protocol = Protocol(crop_padding=0.25, cutmix=1.0, erase_prob=1.0, pixel_mean=(1.0,) * 3, pixel_std=(0.0,) * 3)
    x = torch.arange(7, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 16) + 100
    y, _ = apply(protocol, x, 3)
    for image in y:  # a white box that mixing and cropping have not cut into several
        rows, cols = (image[0] == 255).any(1).sum(), (image[0] == 255).any(0).sum()
        assert (image[0] == 255).sum() == rows * cols > 0


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_eight_combinations_differ_exactly_in_their_switches(name):
    on = set() if name == "baseline" else set(name.split("+"))
    assert changed_fields(PROTOCOLS[name], PROTOCOLS["baseline"]) == set().union(*(SWITCHES[part] for part in on))
    for part in on:
        for field in SWITCHES[part]:
            assert getattr(PROTOCOLS[name], field) == getattr(PROTOCOLS["modern"], field)


def test_cm_pixels_has_the_images_of_cm_and_labels_of_their_own():
    x, different = images(), 0
    for seed in range(8):
        (mixed, targets), (pixels, own) = (apply(PROTOCOLS[name], x, seed) for name in ("cm", "cm_pixels"))
        assert torch.equal(mixed, pixels) and torch.equal(own, torch.eye(5)[torch.arange(len(x)) % 5])
        different += not torch.equal(targets, own)
    assert 0 < different < 8


def test_modern_has_all_three_and_its_jitter_form_differs_in_the_colours_only():
    assert PROTOCOLS["modern"] == PROTOCOLS["aa+cm+ls"]
    assert changed_fields(PROTOCOLS["modern"], PROTOCOLS["modern_jitter"]) == {"auto_augment", "color_jitter"}
    assert changed_fields(PROTOCOLS["modern"], PROTOCOLS["baseline"]) == set().union(*SWITCHES.values())


# Data sets


@pytest.mark.parametrize("name", PROTOCOLS)
def test_digits_are_never_mirrored(name):
    for data in ("svhn", "SVHN", "mnist", "svhn_cropped"):
        assert PROTOCOLS[name].for_data(data).flip == 0


def test_svhn_has_its_own_auto_augment_where_the_protocol_has_one():
    assert PROTOCOLS["modern"].for_data("svhn") == dataclasses.replace(
        PROTOCOLS["modern"], flip=0.0, auto_augment="svhn"
    )
    assert PROTOCOLS["cm"].for_data("svhn") == dataclasses.replace(PROTOCOLS["cm"], flip=0.0)


def test_tiny_imagenet_has_jitter_in_the_place_of_auto_augment():
    assert PROTOCOLS["modern"].for_data("tiny-imagenet") == PROTOCOLS["modern_jitter"]
    for name in ("none", "baseline", "cm+ls", "mixup", "deit", "modern_jitter"):
        assert PROTOCOLS[name].for_data("tiny_imagenet") is not None
        assert PROTOCOLS[name].for_data("tiny_imagenet") == PROTOCOLS[name]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_other_data_changes_nothing(name):
    for data in ("fashion_mnist_mini", "cifar100", "/data/svhn", "svhns"):
        assert PROTOCOLS[name].for_data(data) is PROTOCOLS[name]


# Refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flip", 1.5),
        ("flip", -0.1),
        ("crop_padding", 1.0),
        ("mix_prob", 2),
        ("label_smoothing", 1.0),
        ("cutout", -0.5),
        ("cutmix", -1.0),
        ("auto_augment", "imagenet"),
        ("rand_augment", "rand-m9"),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must .* got {value!r}"):
        Protocol(**{field: value})


def test_a_crop_in_the_loader_excludes_the_batched_crop_and_colours():
    with pytest.raises(ValueError, match="crop_area must come without crop_padding"):
        Protocol(crop_area=(0.08, 1.0), crop_padding=0.125)


def test_a_hue_of_more_than_half_a_turn_is_refused():
    with pytest.raises(ValueError, match=r"hue at most 0\.5"):
        Protocol(color_jitter=(0.4, 0.4, 0.4, 0.6))


@pytest.mark.parametrize("name", ["aa", "cm", "modern_jitter", "mixup", "cutout", "deit"])
def test_pixels_that_are_not_8_bit_rgb_are_refused(name):
    for bad in (images().float() / 255, images()[:, :1]):
        with pytest.raises(ValueError, match=r"images must be uint8 \(B, 3, H, W\), got .* of shape"):
            apply(PROTOCOLS[name], bad)


def test_only_deit_has_steps_for_the_loader():
    assert [name for name, protocol in PROTOCOLS.items() if protocol.per_image((8, 16)) is not None] == ["deit"]


def test_what_the_loader_does_is_not_done_again_to_the_batch():
    loaded = dataclasses.replace(PROTOCOLS["deit"], erase_prob=0.0)
    assert torch.equal(augment(loaded, images()), images())


# The page


def written(value):
    if isinstance(value, tuple):
        return " to ".join(map(written, value)) if len(value) == 2 else ", ".join(map(written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of_protocols():
    """Every protocol, with the fields in which it differs from one that changes nothing."""
    lines = ["| name | values |\n|---|---|\n"]
    for name, protocol in PROTOCOLS.items():
        fields = [f for f in dataclasses.fields(Protocol) if getattr(protocol, f.name) != f.default]
        values = "; ".join(f"{f.name} {written(getattr(protocol, f.name))}" for f in fields)
        lines.append(f"| `{name}` | {values or 'no change'} |\n")
    return "".join(lines)


def table_of_data():
    lines = ["| data set | changes |\n|---|---|\n"]
    for name, changes in FOR_DATA.items():
        lines.append(f"| `{name}` | {'; '.join(f'{key} {written(value)}' for key, value in changes.items())} |\n")
    return "".join(lines)


def table_of_fields():
    lines = ["| field | default |\n|---|---|\n"]
    lines += [f"| {f.name} | {written(f.default)} |\n" for f in dataclasses.fields(Protocol)]
    return "".join(lines)


@pytest.mark.parametrize("table", [table_of_protocols, table_of_data, table_of_fields])
def test_the_page_has_the_values_of_the_code(table):
    assert table() in PAGE.read_text(), f"docs/protocols.md must contain:\n{table()}"
