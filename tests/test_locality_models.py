"""What is special about some models: windows, attention that is the same for every image, Gaussians, and refusals."""

import math

import pytest
import timm
import torch
from locality_models import SMALL, build, images, stored_maps
from torch import nn

from timm_locat.errors import UserError
from timm_locat.locality import Conventions, chance_recall, mean_attention, measure, neighbourhood_recall, record
from timm_locat.locality.maps import query_maps
from timm_locat.locality.watch import BLOCK_BYTES, attention_layers, watch


class FixedAttention(nn.Module):
    """Stands for positional attention: the same maps for every image, told by `attention_maps`."""

    def __init__(self, maps):
        super().__init__()
        self.num_heads = len(maps)
        self.logits = nn.Parameter(maps.log())

    def attention_maps(self):
        return self.logits.softmax(-1)

    def forward(self, x, attn_mask=None, is_causal=False):
        values = x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights = self.logits.expand(len(x), -1, -1, -1).softmax(-1)
        return (weights @ values).transpose(1, 2).flatten(2)


class ForeignAttention(nn.Module):
    """Attention that nobody here knows: two softmaxes mixed."""

    def __init__(self, fused):
        super().__init__()
        self.num_heads, self.fused = 3, fused

    def forward(self, x, attn_mask=None, is_causal=False):
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)


def fixed_maps(seed):
    return (3 * torch.randn(3, 13, 13, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def test_attention_that_does_not_depend_on_the_image_needs_none():
    model = build("plain").train()
    for i in range(2):
        model.blocks[i].attn = FixedAttention(fixed_maps(i))
    result = record(model)
    assert result.images == 0 and result.size == (48, 64) and model.training
    for i in range(2):
        expected = measure(fixed_maps(i)[None], (3, 4))
        for name, values in expected.items():
            assert result.values[name][i] == pytest.approx(values, abs=1e-6), name
    assert all(torch.allclose(m, fixed_maps(i)[:, 1:, 1:]) for i, m in enumerate(mean_attention(model)))
    maps = query_maps(model, images(1)[0], [(2, 1)])
    assert torch.allclose(maps[1][:, 0].flatten(1), fixed_maps(1)[:, 1 + 9, 1:])


def test_layers_of_both_kinds_go_together():
    model = build("plain")
    plain = record(model, [images()])
    model.blocks[1].attn = FixedAttention(fixed_maps(1))
    result = record(model, [images()])
    assert result.images == 5 and result.values["mad"][0] == plain.values["mad"][0]
    assert result.values["mad"][1] == pytest.approx(measure(fixed_maps(1)[None], (3, 4))["mad"])


@pytest.mark.parametrize("fused", [True, False])
def test_attention_in_an_unknown_layer_is_refused(fused):
    model = build("plain", fused=fused)
    model.blocks[1].attn = ForeignAttention(fused)
    with pytest.raises(UserError, match="cannot read all attention of vit_tiny_patch16_224: it also attends in layers"):
        record(model, [images()])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cait_xxs24_224", r"cait_xxs24_224: its layers with heads are ClassAttn, TalkingHeadAttn"),
        ("convit_tiny", r"convit_tiny: its layers with heads are GPSA, MHSA"),
        ("vit_dlittle_patch16_reg1_gap_256", "its layers with heads are DiffAttention"),
        ("resnet18", "resnet18: it has no layer with heads"),
        ("pit_ti_224", "cannot place the tokens of pit_ti_224"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_by_name(name, sentence):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=sentence):
        record(model.to_empty(device="cpu"), [torch.zeros(1, 3, 224, 224)])


def test_a_wrapped_model_is_refused():
    with pytest.raises(UserError, match="expected a timm model, got DataParallel; of a wrapper, pass the model inside"):
        record(nn.DataParallel(build("plain")), [images()])


def test_a_layer_that_is_not_run_is_refused():
    model = build("plain")
    model.forward_features = lambda x: model.blocks[0](model._pos_embed(model.patch_embed(x)))
    with pytest.raises(UserError, match=r"cannot read attention of blocks\.1\.attn: the model did not run it"):
        record(model, [images()])


def test_surrounding_autocast_changes_the_model_and_not_the_measures():
    model = build("locatvit")
    with torch.autocast("cpu", torch.bfloat16):
        inside = record(model, [images()])
    outside = record(model, [images()])
    assert inside.values["mad"][0] == pytest.approx(outside.values["mad"][0], abs=1e-2)
    assert inside.values["self_mass"] != outside.values["self_mass"]


@pytest.mark.parametrize("kind", ["plain", "locatvit", "rope"])
def test_watching_changes_nothing_but_rounding_in_what_the_model_returns(kind):
    model = build(kind).eval()
    with torch.no_grad():
        expected = model(images())
        with watch(model, attention_layers(model), lambda block: None):
            torch.testing.assert_close(model.forward_head(model.forward_features(images())), expected)


def test_no_block_is_larger_than_its_room(monkeypatch):
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 1000)
    sizes, model = [], build("plain").eval()
    with torch.no_grad(), watch(model, attention_layers(model), lambda block: sizes.append(block.logits.nbytes)):
        model.forward_features(images())
    assert max(sizes) <= 1000 and sum(sizes) == 2 * 5 * 3 * 13 * 13 * 4


# Windows


def test_pixels_of_a_window_grow_with_the_stage():
    model = build("swin")
    pixels, patches = (record(model, [images(kind="swin")], Conventions(unit=u)) for u in ("pixels", "patches"))
    for layer, size in enumerate((4, 4, 8)):
        expected = [size * value for value in patches.values["mad"][layer]]
        assert pixels.values["mad"][layer] == pytest.approx(expected)


def test_windows_that_need_padding_are_refused():
    model = build("swin", img_size=(24, 40), strict_img_size=False)
    with pytest.raises(UserError, match="cuts 6x10 tokens into windows of 3x4, which needs padding"):
        record(model, [torch.zeros(1, 3, 24, 40)])


def test_maps_over_an_image_are_refused_for_windows():
    with pytest.raises(UserError, match="not within windows"):
        query_maps(build("swin"), images(1, "swin")[0], [(0, 0)])


# Gaussians


def test_learned_gaussians_are_read():
    model = build("locatvit")
    for block in model.blocks:
        block.attn.gaug.log_var.weight.data.zero_()
        block.attn.gaug.log_alpha.weight.data.zero_()
    model.blocks[1].attn.gaug.log_var.bias.data = torch.tensor([0.5, -1.0])
    model.blocks[1].attn.gaug.log_alpha.bias.data = torch.tensor([2.0])
    found = record(model, [images()]).gaussians
    assert found["alpha"][0] == pytest.approx([math.log(2)] * 3) and found["sigma_rows"][0] == found["sigma_columns"][0]
    assert found["alpha"][1] == pytest.approx([math.log1p(math.exp(2.0))] * 3)
    # M sigmoid(raw - ln(M - 1)) + eps, M the longest side squared: see the docstring of timm_locat.layers.gaussian
    for name, raw in (("sigma_rows", 0.5), ("sigma_columns", -1.0)):
        variance = 16 / (1 + math.exp(-(raw - math.log(15)))) + 0.1
        assert found[name][1] == pytest.approx([math.sqrt(variance)] * 3)


def test_a_model_without_gaussians_has_none():
    assert record(build("plain"), [images()]).gaussians is None
    assert record(timm.create_model("locatvit_tiny", gaug=False, **SMALL), [images()]).gaussians is None


# Maps and neighbourhoods


@pytest.mark.parametrize("kind", ["registers", "locatvit", "rope"])
def test_mean_maps_and_maps_of_queries_are_those_of_the_model(kind, monkeypatch):
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 700)
    stored = stored_maps(build(kind, fused=False), images())
    model = build(kind)
    prefix = model.num_prefix_tokens
    for found, whole in zip(mean_attention(model, images().split(2)), stored, strict=True):
        torch.testing.assert_close(found, whole.mean(0)[:, prefix:, prefix:])
    queries = [(2, 3), (0, 0)]
    for found, whole in zip(query_maps(model, images()[2], queries), query_rows(model, queries, stored), strict=True):
        torch.testing.assert_close(found, whole)


def query_rows(model, queries, stored):
    prefix = model.num_prefix_tokens
    tokens = [prefix + 4 * row + column for row, column in queries]
    return [whole[2][:, tokens, prefix:].unflatten(-1, (3, 4)) for whole in stored]


def test_a_query_outside_of_the_grid_is_refused():
    with pytest.raises(UserError, match=r"no patch \(3, 0\) in a grid of 3x4"):
        query_maps(build("plain"), images(1)[0], [(3, 0)])


def near_maps(grid):
    """One head that attends to its neighbours, one that attends to all others."""
    rows, columns = grid
    places = torch.tensor([(r, c) for r in range(rows) for c in range(columns)])
    near = ((places[:, None] - places).abs().amax(-1) == 1).float()
    return torch.stack([near + 0.01, 1.01 - near])


def test_recall_is_one_for_a_head_of_neighbours_and_zero_for_its_contrary():
    assert neighbourhood_recall(near_maps((4, 9)), (4, 9)) == [1, 0]


def test_recall_knows_a_permutation():
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    shown = near_maps((4, 9))[:, order][:, :, order]
    assert neighbourhood_recall(shown, (4, 9), order) == [1, 0]
    assert neighbourhood_recall(shown, (4, 9))[0] < 0.5


def test_random_heads_recall_by_chance():
    maps = torch.rand(400, 20, 20, generator=torch.Generator().manual_seed(0))
    found = neighbourhood_recall(maps, (4, 5))
    assert sum(found) / 400 == pytest.approx(chance_recall((4, 5)), abs=0.01)
    assert chance_recall((4, 5)) == pytest.approx((4 * 3 + 10 * 5 + 6 * 8) / 20 / 19)  # corners, edges, the rest


def test_the_recorder_measures_recall_on_the_way():
    model = build("plain")
    result = record(model, [images()], recall=True)
    expected = [neighbourhood_recall(maps, (3, 4)) for maps in mean_attention(model, [images()])]
    assert result.values["neighbourhood_recall"] == expected
    assert result.summary()["mean_neighbourhood_recall"] == pytest.approx(sum(map(sum, expected)) / 6)


@pytest.mark.parametrize(
    ("maps", "order", "sentence"),
    [
        (torch.zeros(1, 3, 3), None, r"needs attention of shape \(heads, 4, 4\), got \(1, 3, 3\)"),
        (torch.zeros(1, 4, 4), [0, 1, 2, 2], "permutation must hold each of 0 to 3 once"),
    ],
)
def test_recall_refuses_what_does_not_fit(maps, order, sentence):
    with pytest.raises(UserError, match=sentence):
        neighbourhood_recall(maps, (2, 2), order)
