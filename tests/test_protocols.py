"""Augmentation protocols: each change against a plain loop, and nothing else changed."""

import pytest
import torch

from timm_locat.data import PROTOCOLS, Protocol
from timm_locat.data.protocols import random_shift


def images(count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, 8, 16), dtype=torch.uint8, generator=generator)


def augment(protocol, x, seed=1):
    return protocol.augment(x, torch.Generator().manual_seed(seed))


def test_none_changes_nothing():
    assert torch.equal(augment(PROTOCOLS["none"], images()), images())


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    x, y = images(400), augment(PROTOCOLS["flip"], images(400))
    flipped = [torch.equal(b, a.flip(-1)) for a, b in zip(x, y, strict=True)]
    kept = [torch.equal(b, a) for a, b in zip(x, y, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 150 < sum(flipped) < 250


def test_a_shift_moves_the_image_and_leaves_black():
    x, y = images(), random_shift(images(), 0.25, torch.Generator().manual_seed(2))
    seen = set()
    for a, b in zip(x, y, strict=True):
        found = [(dy, dx) for dy in range(-2, 3) for dx in range(-4, 5) if torch.equal(moved(a, dy, dx), b)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 15  # of 45 places


def moved(image, dy, dx):
    """The image moved by whole pixels, in a loop."""
    out = torch.zeros_like(image)
    for r in range(8):
        for c in range(16):
            if 0 <= r + dy < 8 and 0 <= c + dx < 16:
                out[:, r, c] = image[:, r + dy, c + dx]
    return out


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_same_seed_gives_the_same_images_and_the_input_stays(name):
    x = images()
    first, again, other = (augment(PROTOCOLS[name], x, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again) and torch.equal(x, images())
    assert first.dtype == torch.uint8 and first.shape == x.shape and first.is_contiguous()
    assert torch.equal(first, other) == (name == "none")


@pytest.mark.parametrize(("field", "value"), [("flip", 1.5), ("flip", -0.1), ("crop_padding", 1.0)])
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .* got {value}"):
        Protocol(**{field: value})
