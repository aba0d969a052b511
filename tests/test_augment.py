"""The mechanics of augmentation: each against a plain loop, torchvision or an exact special case."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import AutoAugment, AutoAugmentPolicy
from torchvision.transforms.v2 import functional as F

from timm_locat.data import PROTOCOLS, Protocol, augment
from timm_locat.data.protocols import POLICIES

HEIGHT, WIDTH = 8, 16


def images(count=40, height=HEIGHT, width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def numbered(count=7):
    """Each image is its own number all over, so that every pixel tells where it comes from."""
    return torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, HEIGHT, WIDTH).contiguous()


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def box_of(mask):
    """Rows and columns of a mask that must be a full rectangle, as (top, bottom, left, right)."""
    rows, cols = mask.any(1).nonzero().flatten().tolist(), mask.any(0).nonzero().flatten().tolist()
    top, bottom, left, right = rows[0], rows[-1] + 1, cols[0], cols[-1] + 1
    assert mask[top:bottom, left:right].all() and mask.sum() == (bottom - top) * (right - left)
    return top, bottom, left, right


# Shift


def test_a_shift_moves_the_image_and_leaves_black():
    x, y = images(), augment.random_shift(images(), 0.25, seeded(2))
    seen = set()
    for a, b in zip(x, y, strict=True):
        found = [(dy, dx) for dy in range(-2, 3) for dx in range(-4, 5) if torch.equal(moved(a, dy, dx), b)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 15  # of 45 places


def moved(image, dy, dx):
    """The image moved by whole pixels, in a loop."""
    out = torch.zeros_like(image)
    for r in range(HEIGHT):
        for c in range(WIDTH):
            if 0 <= r + dy < HEIGHT and 0 <= c + dx < WIDTH:
                out[:, r, c] = image[:, r + dy, c + dx]
    return out


# AutoAugment


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_are_those_of_torchvision(name):
    assert list(POLICIES[name]) == AutoAugment(AutoAugmentPolicy(name))._get_policies(AutoAugmentPolicy(name))


@pytest.mark.parametrize("operation", augment._OPERATIONS)
def test_each_operation_of_a_batch_is_torchvisions_image_by_image(operation):
    x, theirs = images(9, 12, 20), AutoAugment()
    values, signed = theirs._AUGMENTATION_SPACE[operation]
    values = values(10, 12, 20)
    for magnitude in range(10) if values is not None else [None]:
        for negative in (False, True) if signed else (False,):
            ours = augment._OPERATIONS[operation](x, augment.operation_value(operation, magnitude, negative))
            value = (0.0 if magnitude is None else float(values[magnitude])) * (-1 if negative else 1)
            for a, b in zip(x, ours, strict=True):
                c = theirs._apply_image_or_video_transform(a, operation, value, "nearest", {torch.Tensor: None})
                # Their values are float32: 0.1 and 0.09999999 may round apart.
                assert (b.int() - c.int()).abs().max() <= 1


@pytest.mark.parametrize("name", POLICIES)
def test_auto_augment_of_a_batch_is_a_loop_over_its_images(name):
    x, policy, generator = images(300, 12, 20), POLICIES[name], seeded(3)
    chosen = torch.randint(len(policy), (len(x),), generator=generator).tolist()
    draws = torch.rand(len(x), 2, 2, generator=generator).tolist()
    expected = []
    for i in range(len(x)):
        image = x[i : i + 1]
        for (happens, sign), (operation, probability, magnitude) in zip(draws[i], policy[chosen[i]], strict=True):
            if happens < probability:
                value = augment.operation_value(operation, magnitude, sign < 0.5)
                image = augment._OPERATIONS[operation](image, value)
        expected.append(image)
    y = augment.auto_augment(x, policy, seeded(3))
    assert torch.equal(y, torch.cat(expected)) and torch.equal(x, images(300, 12, 20))
    assert sum(not torch.equal(a, b) for a, b in zip(x, y, strict=True)) > 150  # noise has no contrast to gain


def test_auto_augment_draws_for_each_image_by_itself():
    policy = ((("Invert", 0.3, None), ("TranslateX", 0.0, 9)), (("TranslateX", 1.0, 9), ("Invert", 0.0, None)))
    x = images(1).expand(800, -1, -1, -1)
    kinds = Counter(y.numpy().tobytes() for y in augment.auto_augment(x, policy, seeded()))
    # Half get either line: 0.7 of the first unchanged, 0.3 inverted; the second to the left or to the right.
    assert sorted(kinds.values()) == pytest.approx([120, 200, 200, 280], abs=45)


# Colour jitter


ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


@pytest.mark.parametrize("kind", range(4), ids=["brightness", "contrast", "saturation", "hue"])
def test_each_jitter_equals_torchvision_image_by_image(kind):
    strengths = [0.0] * 4
    strengths[kind] = 0.4
    x = images(30)
    x[0], x[1] = x[0].float().mean(0).to(torch.uint8), 0  # grey and black have no hue
    y = augment.color_jitter(x, strengths, seeded(4))
    change = (2 * torch.rand(30, 4, generator=seeded(4))[:, kind] - 1) * 0.4
    for a, b, c in zip(x, y, change.tolist(), strict=True):
        expected = ADJUST[kind](a, c if kind == 3 else 1 + c)
        assert (b.int() - expected.int()).abs().max() <= 1
    assert not torch.equal(x, y)


def test_jitter_comes_in_an_order_of_its_own_for_each_image():
    x = images(1).expand(300, -1, -1, -1)
    y = augment.color_jitter(x, (1.0, 1.0, 0.0, 0.0), seeded(5))
    factors = (1 + (2 * torch.rand(300, 4, generator=seeded(5)) - 1))[:, :2].tolist()
    first = [
        torch.equal(b, F.adjust_contrast(F.adjust_brightness(a, p), q))
        for a, b, (p, q) in zip(x, y, factors, strict=True)
    ]
    second = [
        torch.equal(b, F.adjust_brightness(F.adjust_contrast(a, q), p))
        for a, b, (p, q) in zip(x, y, factors, strict=True)
    ]
    assert sum(first) > 100 and sum(second) > 100
    assert sum(a or b for a, b in zip(first, second, strict=True)) > 280  # the rest differs by rounding


# CutMix, mixup, targets


@pytest.mark.parametrize("seed", range(12))
def test_cutmix_takes_exactly_one_box_from_the_partner_and_weighs_by_pixels(seed):
    x, y = numbered(), torch.arange(7)
    mixed, targets = Protocol(cutmix=1.0).apply(x, y, 7, seeded(seed))
    boxes = set()
    for i in range(7):
        others = [k for k in range(7) if k != i and targets[i, k] > 0]
        assert len(others) <= 1 and set(mixed[i].unique().tolist()) == {i, *others}
        for k in range(7):
            assert targets[i, k] == (mixed[i] == k).float().mean()
        boxes |= {box_of(mixed[i, 0] == k) for k in others}
    assert len(boxes) == 1  # the same for the whole batch
    assert torch.equal(x, numbered())


def test_cutmix_boxes_are_centred_on_any_pixel_and_lose_what_leaves_the_image():
    # A kept share of 0.75 asks for half of each side: 4 rows and 8 columns around a pixel.
    rows = {(max(r - 2, 0), min(r + 2, HEIGHT)) for r in range(HEIGHT)}
    cols = {(max(c - 4, 0), min(c + 4, WIDTH)) for c in range(WIDTH)}
    seen_rows, seen_cols, shares = set(), set(), set()
    for seed in range(300):
        mixed, kept = augment.cutmix(numbered(2), torch.tensor([1, 0]), 0.75, seeded(seed))
        top, bottom, left, right = box_of(mixed[0, 0] == 1)
        assert kept == 1 - (bottom - top) * (right - left) / (HEIGHT * WIDTH)
        seen_rows.add((top, bottom))
        seen_cols.add((left, right))
        shares.add(kept)
    assert seen_rows == rows and seen_cols == cols and min(shares) == 0.75


@pytest.mark.parametrize("kept", [1.0, 0.0])
def test_cutmix_at_its_ends_keeps_all_or_takes_what_the_box_reaches(kept):
    mixed, real = augment.cutmix(numbered(2), torch.tensor([1, 0]), kept, seeded())
    assert (real == 1.0) == (kept == 1.0)
    assert (mixed[0, 0] == 0).sum() == round(real * HEIGHT * WIDTH)


def test_mixup_is_the_weighted_sum_of_two_images_and_of_their_targets():
    x, y = images(7), torch.arange(7)
    mixed, targets = Protocol(mixup=1.0).apply(x, y, 7, seeded(2))
    kept = targets.diagonal().min().item()
    assert 0 < kept < 1
    for i in range(7):
        partner = [k for k in range(7) if k != i and targets[i, k] > 0] or [i]
        expected = kept * x[i].double() + (1 - kept) * x[partner[0]].double()
        assert (mixed[i].double() - expected).abs().max() <= 0.5 + 1e-4  # 8 bit, rounded to the nearest
        assert targets[i].sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0, 2.0])
def test_the_weight_follows_a_beta_distribution(alpha):
    generator = seeded(6)
    draws = np.array([augment.draw_beta(alpha, generator) for _ in range(3000)])
    assert draws.mean() == pytest.approx(0.5, abs=0.025)
    assert draws.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_mixing_happens_and_switches_as_often_as_asked():
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    x, y = numbered(), torch.arange(7)
    protocol = Protocol(cutmix=1.0, mixup=1.0, mix_prob=0.6, switch_prob=0.25)
    for seed in range(600):
        mixed, targets = protocol.apply(x, y, 7, seeded(seed))
        if targets.max(1).values.min() == 1:
            kinds["none"] += 1
        else:
            kinds["mixup" if all(len(image.unique()) == 1 for image in mixed) else "cutmix"] += 1
    # Small boxes, full ones and mixtures of neighbours look like something else now and then.
    assert kinds["none"] == pytest.approx(240, abs=45)
    assert kinds["cutmix"] == pytest.approx(90, abs=35) and kinds["mixup"] == pytest.approx(270, abs=45)


def test_smoothing_spreads_its_share_over_all_classes():
    targets = augment.soft_targets(torch.tensor([2, 0]), 4, 0.1)
    torch.testing.assert_close(targets, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))


def test_soft_targets_cost_what_pytorchs_label_smoothing_costs():
    logits, labels = torch.randn(5, 4, generator=seeded()), torch.tensor([0, 3, 1, 1, 2])
    soft = torch.nn.functional.cross_entropy(logits, augment.soft_targets(labels, 4, 0.1))
    torch.testing.assert_close(soft, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))


# Boxes


def test_cutout_boxes_are_centred_on_any_pixel_and_cut_off_at_the_border():
    boxes = augment.cutout_boxes(2000, (HEIGHT, WIDTH), 0.5, seeded())
    centres = set()
    for top, bottom, left, right in boxes.tolist():
        places = [
            (r, c)
            for r in range(HEIGHT)
            for c in range(WIDTH)
            if (max(r - 2, 0), min(r + 2, HEIGHT), max(c - 4, 0), min(c + 4, WIDTH)) == (top, bottom, left, right)
        ]
        assert len(places) == 1
        centres.update(places)
    assert len(centres) == HEIGHT * WIDTH


def test_erasing_boxes_have_the_asked_areas_ratios_and_frequency():
    values = dict(probability=0.25, area=(0.1, 0.2), ratio=(0.5, 2.0))
    boxes = augment.erasing_boxes(4000, (40, 60), generator=seeded(), **values)
    top, bottom, left, right = boxes.unbind(1)
    erased = bottom > top
    assert erased.float().mean() == pytest.approx(0.25, abs=0.03)
    assert (top >= 0).all() and (left >= 0).all() and (bottom <= 40).all() and (right <= 60).all()
    height, width = (bottom - top)[erased], (right - left)[erased]
    area, ratio = height * width / 2400, height / width
    assert area.min() > 0.095 and area.max() < 0.21 and area.mean() == pytest.approx(0.15, abs=0.01)
    assert ratio.min() > 0.45 and ratio.max() < 2.2 and ratio.log().mean().abs() < 0.06
    assert ((bottom - top)[~erased] == 0).all()
    assert top[erased].min() == 0 and bottom[erased].max() == 40 and right[erased].max() == 60


def test_a_box_that_never_fits_erases_nothing():
    boxes = augment.erasing_boxes(50, (4, 50), probability=1.0, area=(0.3, 0.3), ratio=(9, 10), generator=seeded())
    assert torch.equal(boxes[:, 0], boxes[:, 1])


def test_erasing_fills_the_box_with_one_colour_and_leaves_the_rest():
    x = images(2)
    y = augment.erase(x, torch.tensor([[1, 4, 2, 9], [0, 0, 5, 5]]), mean=(0.0, 0.5, 1.0), std=None, generator=seeded())
    expected = x.clone()
    for r in range(1, 4):
        for c in range(2, 9):
            expected[0, :, r, c] = torch.tensor([0, 128, 255])
    assert torch.equal(y, expected) and torch.equal(x, images(2))


def test_erasing_with_noise_has_the_asked_mean_and_deviation_in_each_channel():
    x = torch.zeros(4, 3, 60, 80, dtype=torch.uint8)
    boxes = torch.tensor([[0, 60, 0, 80]]).expand(4, 4)
    y = augment.erase(x, boxes, mean=(0.3, 0.5, 0.6), std=(0.05, 0.1, 0.02), generator=seeded()).float() / 255
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.tensor([0.3, 0.5, 0.6]), atol=0.005, rtol=0)
    torch.testing.assert_close(y.std((0, 2, 3)), torch.tensor([0.05, 0.1, 0.02]), atol=0.005, rtol=0)
    assert not torch.equal(y[0], y[1])


# In the loader


def states():
    name, key, *rest = np.random.get_state()
    return random.getstate(), (name, key.tolist(), *rest), torch.get_rng_state().tolist()


def photo():
    return Image.fromarray(images(1, 30, 50)[0].permute(1, 2, 0).numpy())


def test_borrowed_generators_are_seeded_inside_and_as_they_were_after():
    before, inside = states(), []
    for _ in range(2):
        with augment.borrowed_global_rngs(seeded(8)):
            inside.append((random.random(), np.random.rand(), torch.rand(()).item()))
    with pytest.raises(KeyError), augment.borrowed_global_rngs(seeded(8)):
        random.random()
        raise KeyError
    assert inside[0] == inside[1] and states() == before


def test_the_loader_transform_depends_on_its_generator_only():
    transform, image = pickle.loads(pickle.dumps(PROTOCOLS["deit"].per_image((HEIGHT, WIDTH)))), photo()
    before = states()
    first, again, other = (transform(image, seeded(seed)) for seed in (5, 5, 6))
    assert states() == before
    torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(first, again) and torch.equal(first, transform(image, seeded(5)))
    assert first.shape == (3, HEIGHT, WIDTH) and first.dtype == torch.uint8 and not torch.equal(first, other)


def test_the_loader_transform_can_leave_an_image_as_it_is():
    transform = Protocol(crop_area=(1.0, 1.0), crop_ratio=(5 / 3, 5 / 3)).per_image((30, 50))
    assert torch.equal(transform(photo(), seeded()), images(1, 30, 50)[0])


def test_the_loader_transform_starts_with_the_data_sets_own():
    whole = Protocol(crop_area=(1.0, 1.0), crop_ratio=(5 / 3, 5 / 3))
    transform = whole.per_image((30, 50), native_transform=lambda pixels: 255 - pixels)
    assert torch.equal(transform(photo(), seeded()), 255 - images(1, 30, 50)[0])


def test_the_loader_steps_of_deit_are_those_of_timm():
    steps = repr(PROTOCOLS["deit"].per_image((HEIGHT, WIDTH))._transform)
    assert "scale=(0.08, 1.0), ratio=(0.75, 1.3333), interpolation=bilinear bicubic" in steps
    assert "RandomHorizontalFlip(p=0.5)" in steps and "RandAugment(n=2" in steps
    assert "name=ColorIncreasing, p=0.5, m=9, mstd=0.5" in steps
    assert "ColorJitter" not in steps  # timm leaves it out beside RandAugment
