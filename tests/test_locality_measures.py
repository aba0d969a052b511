"""Measures of attention against values worked out by hand and against plain loops."""

import math

import pytest
import torch
from naive_locality import naive_means

from timm_locat.errors import UserError
from timm_locat.locality import MEASURES, PRESETS, Conventions, measure, patch_distances

N = 64


def uniform(tokens=N):
    return torch.full((1, 1, tokens, tokens), 1 / tokens)


def window():
    """Uniform over the 3 x 3 patches around the query, cut at the border of an 8 x 8 grid."""
    inside = (patch_distances((8, 8)) < 1.5).float()
    return (inside / inside.sum(1, keepdim=True))[None, None]


def one_to_the_right():
    """All attention one patch to the right; patches of the last column attend to themselves."""
    target = torch.arange(N) + (torch.arange(N) % 8 < 7)
    return torch.nn.functional.one_hot(target, N).float()[None, None]


def self_and_all(share):
    return share * torch.eye(N)[None, None] + (1 - share) * uniform()


def on_the_class_token(share):
    """`share` on one class token, the rest uniform over the 8 x 8 patches."""
    rows = torch.full((1, 1, N + 1, N + 1), (1 - share) / N)
    rows[..., 0] = share
    return rows


def of(attention, grid=(8, 8), num_prefix=0, **conventions):
    return {
        k: v[0]
        for k, v in measure(attention, grid, num_prefix=num_prefix, conventions=Conventions(**conventions)).items()
    }


def test_uniform_attention_on_8x8_is_0_418_of_the_diagonal_and_4_1365_patches():
    found = of(uniform())
    assert found["mad"] == pytest.approx(0.41785, abs=1e-5)
    assert of(uniform(), unit="patches")["mad"] == pytest.approx(4.1365, abs=1e-4)
    assert found["entropy"] == pytest.approx(1, abs=1e-6) and found["effective_tokens"] == pytest.approx(64, rel=1e-5)
    assert found["self_mass"] == pytest.approx(1 / 64) and found["prefix_mass"] == 0 and found["empty_rows"] == 0
    pairs = 4 * (3 * 1) + 24 * 5 + 36 * 8  # corners have 3 neighbours, edges 5, the inner 36 patches 8
    assert found["neighbour_mass"] == pytest.approx(pairs / 64 / 64)


@pytest.mark.parametrize(("share", "mad"), [(0.98, 0.0084), (0.95, 0.0209)])
def test_a_head_that_looks_at_itself_has_a_tiny_distance_but_not_without_itself(share, mad):
    found = of(self_and_all(share))
    assert found["mad"] == pytest.approx(mad, abs=5e-5)
    assert found["self_mass"] == pytest.approx(share + (1 - share) / 64)
    assert found["mad_without_self"] == pytest.approx(0.41785 * 64 / 63, abs=1e-4)


def test_uniform_3x3_windows_cut_at_the_border():
    found = of(window())
    assert found["mad"] == pytest.approx(0.103, abs=5e-4) and found["entropy"] == pytest.approx(0.480, abs=5e-4)
    assert found["self_mass"] + found["neighbour_mass"] == pytest.approx(1)
    assert found["mad_without_self"] == pytest.approx(0.120, abs=5e-4)
    assert found["effective_tokens"] == pytest.approx((36 * 9 + 24 * 6 + 4 * 4) / 64, rel=1e-5)


def test_a_shift_by_one_patch_is_one_step_for_all_but_the_last_column():
    found = of(one_to_the_right())
    assert found["mad"] == pytest.approx(7 / 8 / (7 * math.sqrt(2))) and found["mad"] == pytest.approx(0.088, abs=5e-4)
    assert found["entropy"] == pytest.approx(0, abs=1e-7) and found["effective_tokens"] == pytest.approx(1)
    assert found["self_mass"] == pytest.approx(1 / 8) and found["neighbour_mass"] == pytest.approx(7 / 8)
    # Patches of the last column have nothing left without themselves; all others have one step.
    assert found["mad_without_self"] == pytest.approx(1 / (7 * math.sqrt(2)))


def test_attention_on_the_class_token_is_near_only_where_it_is_dropped():
    sink = on_the_class_token(0.98)
    assert of(sink, num_prefix=1)["mad"] == pytest.approx(0.41785, abs=1e-5)
    assert of(sink, num_prefix=1)["entropy"] == pytest.approx(1, abs=1e-5)
    for prefix in ("drop", "include"):
        assert of(sink, num_prefix=1, prefix=prefix)["mad"] == pytest.approx(0.0084, abs=5e-5)
    found = of(sink, num_prefix=1)
    assert found["mad_dropped"] == pytest.approx(0.0084, abs=5e-5) and found["prefix_mass"] == pytest.approx(0.98)
    assert found["entropy_tokens"] < 0.1


def test_rows_with_nothing_left_are_counted_and_not_a_number_appears_nowhere():
    sink = on_the_class_token(1.0)
    found = of(sink, num_prefix=1)
    assert found["mad"] is None and found["entropy"] is None and found["mad_without_self"] is None
    assert found["empty_rows"] == 1 and found["prefix_mass"] == 1 and found["mad_dropped"] == 0
    assert of(sink, num_prefix=1, prefix="drop")["mad"] == 0
    half = torch.cat([sink, on_the_class_token(0.5)])
    found = of(half, num_prefix=1)
    assert found["empty_rows"] == 0.5 and found["mad"] == pytest.approx(0.41785, abs=1e-5)


def test_masses_add_up_to_one():
    maps = torch.rand(2, 3, 4 + 12, 4 + 12).softmax(-1)
    found = of(maps, (2, 6), 4)
    assert found["self_mass"] + found["neighbour_mass"] + found["prefix_mass"] < 1
    found = of(maps[..., :3, :3].softmax(-1), (1, 2), 1)  # two patches: each is the other's only neighbour
    assert found["self_mass"] + found["neighbour_mass"] + found["prefix_mass"] == pytest.approx(1)


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
@pytest.mark.parametrize("prefix", ["renormalise", "drop", "include"])
@pytest.mark.parametrize("unit", ["fraction", "patches", "pixels", "sides"])
@pytest.mark.parametrize("entropy", ["patches", "tokens"])
def test_measures_equal_plain_loops(num_prefix, prefix, unit, entropy):
    generator = torch.Generator().manual_seed(0)
    maps = (4 * torch.randn(2, 2, num_prefix + 12, num_prefix + 12, generator=generator)).softmax(-1)
    conventions = {"prefix": prefix, "unit": unit, "entropy": entropy}
    found = measure(maps, (3, 4), num_prefix=num_prefix, conventions=Conventions(**conventions), patch_pixels=(8, 16))
    expected = naive_means(maps, (3, 4), num_prefix, **conventions, patch=(8, 16))
    assert found.keys() == expected.keys() == MEASURES.keys()
    for name in MEASURES:
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name


def random_maps():
    return (3 * torch.randn(2, 2, 14, 14, generator=torch.Generator().manual_seed(0))).softmax(-1)


def by_hand(name, maps):
    """What the code of that name computes, in our words, for two prefix tokens and 3 x 4 patches of 16 pixels."""
    rows, columns = torch.arange(12) // 4, torch.arange(12) % 4
    patches = maps[:, :, 2:, 2:]
    if name in ("cl-vs-mim", "vit-analysis"):
        patches = patches / patches.sum(-1, keepdim=True)
    if name == "vit-analysis":
        rows, columns = torch.linspace(0, 1, 3)[rows], torch.linspace(0, 1, 4)[columns]
    squared = (rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2
    scale = 16 if name in ("probing-vits", "cl-vs-mim") else 1
    return (patches * squared.sqrt() * scale).sum(-1).mean(-1).mean(0).tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_counts_as_the_public_code_of_its_name(name):
    maps = random_maps()
    found = measure(maps, (3, 4), num_prefix=2, conventions=PRESETS[name], patch_pixels=(16, 16))
    assert found["mad"] == pytest.approx(by_hand(name, maps), rel=1e-5)


@pytest.mark.parametrize("grid", [(1, 1), (1, 5)])
def test_a_grid_without_height_or_width_has_finite_measures(grid):
    tokens = grid[0] * grid[1]
    found = of(uniform(tokens), grid)
    assert found["mad"] == pytest.approx(0.4 if tokens == 5 else 0, abs=1e-6)
    assert found["mad_without_self"] == (None if tokens == 1 else pytest.approx(0.5))


@pytest.mark.parametrize(
    ("maps", "grid", "sentence"),
    [
        (uniform(), (8, 7), r"grid of 8x7 patches and 0 prefix tokens needs .* 56, 56\), got \(1, 1, 64, 64\)"),
        (2 * uniform(), (8, 8), "rows of attention must sum to 1"),
        (uniform()[0], (8, 8), "needs attention of shape"),
    ],
)
def test_maps_that_are_none_are_refused(maps, grid, sentence):
    with pytest.raises(UserError, match=sentence):
        measure(maps, grid, num_prefix=0)


def test_pixels_need_the_size_of_a_patch():
    with pytest.raises(UserError, match="pass patch_pixels"):
        of(uniform(), unit="pixels")


def test_an_unknown_convention_is_refused():
    with pytest.raises(UserError, match="prefix must be one of renormalise, drop, include, got 'keep'"):
        Conventions(prefix="keep")
