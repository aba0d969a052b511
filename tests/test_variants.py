"""LocAt on registers, rotary positions and Swin: the reference's numbers, and what the families do in timm."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from test_locatvit import fill, golden_image, images
from timm.layers import set_fused_attn
from timm.models.swin_transformer import WindowAttention

from timm_locat import dense_features
from timm_locat.errors import UserError
from timm_locat.hub import export
from timm_locat.layers import gaussian_grid

DATA = Path(__file__).parent / "data"
LAYOUTS = json.loads((DATA / "variants.json").read_text())
CASES = {
    "tiny_reg4_224": "locatvit_tiny_reg4",
    "rope_tiny_224": "locatvit_tiny_rope_mixed",
    "swin_tiny_224": "locatswin_tiny",
}
ROPE = {"img_size": (48, 64), "depth": 3, "embed_dim": 48, "num_heads": 4}
SWIN = {"img_size": (64, 96), "depths": (1, 2), "embed_dim": 24, "num_heads": (2, 4), "window_size": 4}
SMALL = {"locatvit_tiny_rope_mixed": ROPE, "locatvit_tiny_reg4": ROPE, "locatswin_tiny": SWIN}
SIZES = {name: args["img_size"] for name, args in SMALL.items()}


def small(name, **kwargs):
    """A model that is quick to run, on a grid that is not square."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL[name], "num_classes": 5, **kwargs})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_the_reference(case, fused):
    golden = np.load(DATA / "variants.npz")
    set_fused_attn(fused, experimental=fused)  # Swin's fused path is behind timm's second switch
    model = fill(timm.create_model(CASES[case]))
    with torch.no_grad():
        features = model.forward_features(golden_image((1, 3, 224, 224)))
        logits = model.forward_head(features)
    sample = features.flatten(1, -2)[:, ::7, ::5]
    np.testing.assert_allclose(logits, golden[f"{case}/logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(sample, golden[f"{case}/features_sample"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_state_dict_is_the_references(case):
    ours = timm.create_model(CASES[case], device="meta").state_dict()
    theirs = {key: tuple(shape) for key, shape in LAYOUTS[case]["state_dict"].items()}
    assert {key: tuple(value.shape) for key, value in ours.items()} == theirs


@pytest.mark.parametrize(
    ("ours", "timms", "extra"),
    [
        ("locatvit_base_rope_mixed", "vit_base_patch16_rope_mixed_224", 2340),
        ("locatvit_tiny_rope_mixed", "vit_tiny_patch16_rope_mixed_224", 2340),
        ("locatvit_tiny_reg4", "locatvit_tiny", 8 * 192),
        ("locatvit_base_reg4", "locatvit_base", 8 * 768),
        ("locatswin_tiny", "swin_tiny_patch4_window7_224", 1188),
        ("locatswin_base", "swin_base_patch4_window7_224", 2376),
    ],
)
def test_parameters_beyond_the_base(ours, timms, extra):
    a, b = (sum(p.numel() for p in timm.create_model(name, device="meta").parameters()) for name in (ours, timms))
    assert a - b == extra


@pytest.mark.parametrize(
    ("ours", "timms"),
    [
        ("locatvit_tiny_rope_mixed", "vit_tiny_patch16_rope_mixed_224"),
        ("locatswin_tiny", "swin_tiny_patch4_window7_224"),
    ],
)
def test_with_its_parts_off_it_is_timms_model_bit_for_bit(ours, timms):
    a = small(ours, gaug=False, prr=False)
    b = timm.create_model(timms, **SMALL[ours], num_classes=5).eval()
    b.load_state_dict(a.state_dict())
    x = images(size=SIZES[ours])
    assert torch.equal(a(x), b(x))
    for p, q in zip(a.forward_intermediates(x)[1], b.forward_intermediates(x)[1], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", SMALL)
def test_head_after_features_is_the_whole_and_intermediates_end_in_them(name):
    model, x = small(name), images(size=SIZES[name])
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    final, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(final, features)
    assert torch.equal(dense_features(model, x, norm=True), maps[-1])


@pytest.mark.parametrize("name", SMALL)
def test_dense_features_after_refinement_are_refined_patches(name):
    model, x = small(name), images(size=SIZES[name])
    tokens = model.forward_features(x).flatten(1, -2)
    grid = (8, 12) if name == "locatswin_tiny" else (3, 4)
    expected = model.refine(tokens, tokens)[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)
    assert torch.equal(dense_features(model, x, "after_prr"), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_checkpointing_changes_no_gradient_and_every_parameter_has_one(name, fused):
    set_fused_attn(fused, experimental=fused)
    grads = []
    for on in (False, True):
        model = small(name).train()
        for m in model.modules():
            if hasattr(m, "drop_prob"):
                m.drop_prob = 0.0
        model.set_grad_checkpointing(on)
        model(images(size=SIZES[name])).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in model.named_parameters() if "gaug" in n)
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


TIMMS_RESAMPLING = pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")


@TIMMS_RESAMPLING
@pytest.mark.parametrize(("name", "resize"), [(n, r) for n in SMALL for r in (None, (96, 128))])
def test_exported_model_reloads_to_the_same_logits(tmp_path, name, resize):
    model = small(name)
    before = model.gaug_grid
    if resize:
        model.set_input_size(resize)
    assert model.gaug_grid == before
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(size=resize or SIZES[name])
    assert torch.equal(again(x), model(x))
    assert [tuple(np.atleast_1d(g)) for g in again.gaug_grid] == [tuple(np.atleast_1d(g)) for g in before]


def test_rope_weights_mean_the_same_at_another_size(tmp_path):
    model = small("locatvit_tiny_rope_mixed")
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(80, 112)).eval()
    free = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, dynamic_img_size=True).eval()
    model.set_input_size((80, 112))
    x = images(size=(80, 112))
    torch.testing.assert_close(again(x), model(x))
    torch.testing.assert_close(free(x), model(x))


@TIMMS_RESAMPLING
def test_swin_weights_mean_the_same_in_other_windows(tmp_path):
    model = small("locatswin_tiny", img_size=64)
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=128, window_size=8).eval()
    assert again.gaug_grid == [(4, 4), (4, 4)]
    model.set_input_size((128, 128))
    x = images(size=(128, 128))
    torch.testing.assert_close(again(x), model(x))


def test_window_bias_is_that_of_a_vit_without_prefix_on_the_window():
    model = small("locatswin_tiny", depths=(1,), num_heads=(2,), img_size=16)  # one window of 4 x 4
    attn = model.layers[0].blocks[0].attn
    x = torch.randn(2, 16, 24)
    q = attn.qkv(x).reshape(2, 16, 3, 2, 12).permute(2, 0, 3, 1, 4)[0]
    alpha, sigma_y, sigma_x = attn.gaug.gaussians(q, gaussian_grid(q, (4, 4), (4, 4), 0))
    y, z = torch.arange(16) // 4, torch.arange(16) % 4
    dy, dx = (y[:, None] - y[None]) ** 2, (z[:, None] - z[None]) ** 2
    bump = alpha[..., None] * torch.exp(-dy / (2 * sigma_y[..., None] ** 2) - dx / (2 * sigma_x[..., None] ** 2))
    expected, table = attn(x), attn._get_rel_pos_bias()
    attn._get_rel_pos_bias = lambda: table + bump
    torch.testing.assert_close(WindowAttention.forward(attn, x), expected)


@pytest.mark.parametrize("name", SMALL)
def test_compiles_to_one_graph(name):
    torch._dynamo.reset()
    model, x = small(name), images(size=SIZES[name])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_masks_reach_every_rotary_block():
    model, x = small("locatvit_tiny_rope_mixed"), images()
    mask = torch.rand(13, 13) > 0.3
    mask |= torch.eye(13, dtype=torch.bool)
    as_float = torch.zeros(13, 13).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(model(x, attn_mask=mask), model(x, attn_mask=as_float))
    assert not torch.allclose(model(x, attn_mask=mask), model(x))


def test_rotary_models_refuse_to_drop_patches():
    with pytest.raises(UserError, match="build it with patch_drop_rate=0"):
        small("locatvit_tiny_rope_mixed", patch_drop_rate=0.5)
    assert small("locatvit_tiny_rope_mixed", patch_drop_rate=0.5, gaug=False)(images()).shape == (2, 5)


def test_a_size_that_the_patch_does_not_divide_is_refused():
    with pytest.raises(UserError, match="multiple of the 16x16 patch, got 50x64"):
        small("locatvit_tiny_rope_mixed", img_size=(50, 64))


def test_swin_needs_a_window_for_each_stage():
    with pytest.raises(UserError, match=r"one window for each of 2 stages, got \[\(4, 4\)\]"):
        small("locatswin_tiny", gaug_grid=[(4, 4)])


@pytest.mark.parametrize("name", SMALL)
def test_features_only_gives_maps(name):
    model = timm.create_model(name, features_only=True, out_indices=(0, 1), **SMALL[name])
    assert len(model(images(size=SIZES[name]))) == 2


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_scripts(name):
    model, x = small(name, scriptable=True), images(size=SIZES[name])
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
