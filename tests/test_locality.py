"""The recorder: what it measures equals plain loops over stored maps, and the model does not notice."""

import json
import math

import pytest
import timm
import torch
from locality_models import MODELS, SMALL, build, images, stored_maps
from naive_locality import naive_means

from timm_locat.errors import UserError
from timm_locat.locality import MEASURES, Conventions, Locality, record
from timm_locat.locality.watch import BLOCK_BYTES


@pytest.fixture(scope="module", params=MODELS)
def known(request):
    """A kind of model and its measures by plain loops."""
    kind = request.param
    model = build(kind, fused=False)
    maps = stored_maps(model, images(kind=kind))
    assert len(maps) == (3 if "swin" in kind else 2) and maps[0].std() > 0.02
    return kind, [naive_means(attention, (3, 4), getattr(model, "num_prefix_tokens", 0)) for attention in maps]


def assert_equal(result, expected, tolerance):
    assert result.values.keys() == MEASURES.keys()
    for layer, means in enumerate(expected):
        for name in MEASURES:
            assert result.values[name][layer] == pytest.approx(means[name], abs=tolerance, rel=tolerance), name


@pytest.mark.parametrize("fused", [True, False])
def test_the_recorder_equals_plain_loops_over_stored_maps(known, fused):
    kind, expected = known
    result = record(build(kind, fused=fused), [images(kind=kind)])
    assert_equal(result, expected, 1e-5)
    assert result.images == 5 and set(result.grids) == {(3, 4)}


def test_bfloat16_is_close(known):
    kind, expected = known
    result = record(build(kind).bfloat16(), [images(kind=kind)])
    for name in ("mad", "entropy", "self_mass", "neighbour_mass", "prefix_mass"):
        for layer, means in enumerate(expected):
            assert result.values[name][layer] == pytest.approx(means[name], abs=1e-2), name


@pytest.mark.parametrize("fused", [True, False])
def test_the_size_of_batches_and_blocks_changes_nothing_but_rounding(known, monkeypatch, fused):
    kind, expected = known
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 700)  # four rows of all heads
    monkeypatch.setattr("timm_locat.layers.attention.CHUNK_BYTES", 900)  # the layer itself answers in parts, too
    result = record(build(kind, fused=fused), images(kind=kind).split(2))
    assert_equal(result, expected, 1e-5)
    assert result.images == 5


def test_conventions_are_kept_with_the_result_and_change_it():
    model = build("registers")
    plain, other = (record(model, [images()], c) for c in (None, Conventions(prefix="drop", unit="pixels")))
    assert plain.conventions == Conventions() and other.conventions.unit == "pixels"
    longest = 16 * math.hypot(2, 3)  # patches of 16 pixels, 3 x 4 of them
    assert other.values["mad"][0] == pytest.approx([v * longest for v in plain.values["mad_dropped"][0]])


def test_the_model_is_left_as_it_was():
    model = build("locatvit").train()
    model.blocks[1].eval()
    before = {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    expected = model.eval()(images())
    model.train().blocks[1].eval()
    record(model, [images()])
    assert before == {
        name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()
    }
    assert torch.equal(model.eval()(images()), expected)
    assert all(p.grad is None for p in model.parameters())


def test_a_failure_on_the_way_leaves_nothing_behind():
    model = build("plain").train()
    with pytest.raises(AssertionError, match="Input height"):
        record(model, [torch.randn(1, 3, 32, 32)])
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_random_numbers_are_untouched():
    model = timm.create_model("locatvit_tiny", **SMALL, attn_drop_rate=0.5, drop_path_rate=0.5).train()
    x, state = images(), torch.get_rng_state()
    record(model, [x])
    assert torch.equal(torch.get_rng_state(), state)


def test_labels_of_a_loader_are_passed_over():
    model = build("plain")
    assert record(model, [(images(), torch.arange(5))]).values == record(model, [images()]).values


def test_a_result_survives_its_file(tmp_path):
    result = record(build("registers"), [images()])
    result.save(tmp_path / "a.json")
    again = Locality.load(tmp_path / "a.json")
    assert again == result and again.summary() == result.summary()
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["summary"] == result.summary()


def made_up(**values):
    """A result of two layers of two heads, all measures 0.5 but the given ones."""
    table = {name: [[0.5, 0.5], [0.5, 0.5]] for name in MEASURES} | values
    return Locality("made up", Conventions(), 1, (8, 8), ("a", "b"), ((2, 2),) * 2, 1, table)


def test_the_summary_names_the_most_local_head_and_the_most_local_layer():
    found = made_up(mad=[[0.3, 0.3], [0.9, 0.1]], self_mass=[[0, 0], [0, 0.7]]).summary()
    assert (found["min_mad_over_heads"], found["min_mad_layer"], found["min_mad_head"]) == (0.1, 1, 1)
    assert found["min_mad_over_layers"] == 0.3 and found["mean_mad"] == pytest.approx(0.4)
    assert found["min_mad_self_mass"] == 0.7 and found["mean_self_mass"] == pytest.approx(0.175)


def test_the_summary_passes_over_heads_without_a_value():
    found = made_up(mad=[[None, 0.3], [None, None]]).summary()
    assert (found["min_mad_over_heads"], found["min_mad_layer"], found["min_mad_head"]) == (0.3, 0, 1)
    assert found["min_mad_over_layers"] == found["mean_mad"] == 0.3
    nothing = made_up(mad=[[None, None], [None, None]]).summary()
    assert nothing["min_mad_over_heads"] is None and nothing["min_mad_self_mass"] is None


def test_a_table_has_a_row_for_each_head():
    table = made_up(mad=[[0.1, 0.2], [0.3, None]]).to_pandas()
    assert list(table["layer"]) == [0, 0, 1, 1] and list(table["head"]) == [0, 1, 0, 1]
    assert list(table["mad"][:3]) == [0.1, 0.2, 0.3] and table["mad"].isna()[3]
    assert set(MEASURES) < set(table.columns)


# Mistakes


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([], "there were no images"),
        ([torch.zeros(1, 3, 48, 64, dtype=torch.uint8)], "images must be normalised floating-point numbers, got torch"),
        ([torch.zeros(1, 3, 48, 64), torch.zeros(1, 3, 48, 48)], r"one size, got \(48, 64\) and \(48, 48\)"),
    ],
)
def test_images_that_cannot_be_measured_are_refused(batches, sentence):
    with pytest.raises(UserError, match=sentence):
        record(build("plain"), batches)


def test_attention_that_is_not_finite_is_refused():
    model = build("plain")
    model.blocks[1].attn.qkv.bias.data[0] = float("nan")
    with pytest.raises(UserError, match=r"attention of blocks\.1\.attn is not finite"):
        record(model, [images()])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object of loc"),
        ('{"format": "locality/v1"}', "is damaged: 'mo"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, content, sentence):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=sentence):
        Locality.load(tmp_path / "a.json")
    with pytest.raises(UserError, match="cannot read"):
        Locality.load(tmp_path / "b.json")
