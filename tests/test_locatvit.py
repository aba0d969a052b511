"""LocAtViT: the reference's numbers, timm's ViT as special cases, and everything that a timm ViT can do."""

import copy
import pickle
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models import save_for_hf

from timm_locat import dense_features
from timm_locat.errors import UserError
from timm_locat.layers import gaussian_grid
from timm_locat.models.locatvit import checkpoint_filter_fn

GOLDEN = np.load(Path(__file__).parent / "data" / "locatvit.npz")
CASES = {
    "tiny_224": ("locatvit_tiny", {}, (2, 3, 224, 224)),
    "tiny_dynamic_320x256": ("locatvit_tiny", {"dynamic_img_size": True}, (1, 3, 320, 256)),
    "base_224": ("locatvit_base", {}, (1, 3, 224, 224)),
    "tiny_512": ("locatvit_tiny", {"img_size": 512}, (1, 3, 512, 512)),
}


def fill(model):
    """The parameters that the reference outputs were made with: a function of each entry's name and shape."""
    state = model.state_dict()
    for name, value in state.items():
        r = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(value.shape)).astype(np.float32)
        if name.endswith("bias"):
            new = 0.1 * r
        elif r.ndim == 1:
            new = 1 + 0.1 * r
        elif "gaug" in name:
            new = 0.5 * r
        elif name.endswith(("pos_embed", "cls_token", "reg_token")):
            new = 0.2 * r
        else:
            new = r / np.sqrt(np.prod(r.shape[1:]))
        state[name] = torch.from_numpy(np.asarray(new, dtype=np.float32))
    model.load_state_dict(state)
    return model.eval()


def golden_image(shape):
    return torch.from_numpy(np.random.RandomState(7).standard_normal(shape).astype(np.float32))


def small(name="locatvit_tiny", **kwargs):
    """A model that is quick to run, on a non-square grid of 3 x 4 patches unless told otherwise."""
    torch.manual_seed(0)
    args = dict(img_size=(48, 64), depth=3, embed_dim=48, num_heads=4, num_classes=5) | kwargs
    model = timm.create_model(name, **args)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def images(batch=2, size=(48, 64), chans=3):
    return torch.randn(batch, chans, *size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_the_reference(case, fused):
    name, kwargs, shape = CASES[case]
    set_fused_attn(fused)
    model, x = fill(timm.create_model(name, **kwargs)), golden_image(shape)
    with torch.no_grad():
        features = model.forward_features(x)
        logits = model.forward_head(features)
    np.testing.assert_allclose(logits, GOLDEN[f"{case}/logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(features[:, ::7, ::5], GOLDEN[f"{case}/features_sample"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_equal_the_reference(fused):
    set_fused_attn(fused)
    model = fill(timm.create_model("locatvit_tiny"))
    model(golden_image((2, 3, 224, 224))).logsumexp(1).sum().backward()
    gaug = model.blocks[0].attn.gaug
    for key, p in {
        "grad_block0_log_var_weight": gaug.log_var.weight,
        "grad_block0_log_alpha_bias": gaug.log_alpha.bias,
        "grad_block11_qkv_bias": model.blocks[11].attn.qkv.bias,
    }.items():
        expected = GOLDEN[f"tiny_224/{key}"]
        np.testing.assert_allclose(p.grad, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_bias_of_the_first_block_equals_the_reference():
    model, x = fill(timm.create_model("locatvit_tiny")), golden_image((2, 3, 224, 224))
    with torch.no_grad():
        tokens, grid = model._embed(x)
        bias = model.blocks[0].attn.bias(model.blocks[0].norm1(tokens), grid)
    np.testing.assert_allclose(bias[:, :, ::13], GOLDEN["tiny_224/block0_bias_sample"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "count"), [("locatvit_tiny", 5_719_756), ("locatvit_small", 22_053_004), ("locatvit_base", 86_569_996)]
)
def test_parameter_counts_are_the_papers(name, count):
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_state_dict_has_the_references_keys():
    keys = set(timm.create_model("locatvit_tiny", device="meta").state_dict())
    plain = set(timm.create_model("vit_tiny_patch16_224", device="meta").state_dict())
    new = {
        f"blocks.{i}.attn.gaug.{m}.{p}" for i in range(12) for m in ("log_var", "log_alpha") for p in ("weight", "bias")
    }
    assert keys == plain | new


@pytest.mark.parametrize("name", ["locatvit_tiny", "locatvit_base"])
def test_published_weights_are_named_by_their_repository(name):
    cfg = timm.get_pretrained_cfg(name)
    assert cfg.hf_hub_id == f"sinahmr/{name}" and timm.is_model_pretrained(name)
    assert (cfg.mean, cfg.std, cfg.crop_pct, cfg.interpolation) == ((0.5,) * 3, (0.5,) * 3, 0.9, "bicubic")
    assert (cfg.license, cfg.paper_ids) == ("mit", "arXiv:2603.04892")


@pytest.mark.parametrize(
    ("ours", "timms"),
    [
        ({"gaug": False, "global_pool": "prr"}, {"global_pool": "prr"}),
        ({"gaug": False, "prr": False}, {}),
        ({"gaug": False, "prr": False, "global_pool": "avg"}, {"global_pool": "avg"}),
        ({"gaug": False, "prr": False, "reg_tokens": 3, "global_pool": "max"}, {"reg_tokens": 3, "global_pool": "max"}),
        ({"gaug": False, "prr": False, "no_pos_emb": True}, {"pos_embed": "none"}),
    ],
)
def test_with_its_parts_off_it_is_timms_vit_bit_for_bit(ours, timms):
    a, b = small(**ours), small("vit_tiny_patch16_224", **timms)
    b.load_state_dict(a.state_dict())
    x = images()
    assert torch.equal(a(x), b(x))
    assert torch.equal(a.forward_features(x), b.forward_features(x))
    for p, q in zip(a.forward_intermediates(x)[1], b.forward_intermediates(x)[1], strict=True):
        assert torch.equal(p, q)


def test_timms_prr_pooling_applies_prr_once():
    a, b = small(global_pool="prr"), small(global_pool="token")
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a(images()), b(images()))


@pytest.mark.parametrize("class_token", [True, False])
def test_average_pooling_refines_then_averages_patches_then_normalises(class_token):
    model = small(global_pool="avg", class_token=class_token, reg_tokens=2)
    tokens = model.forward_features(images())
    heads = tokens.unflatten(-1, (4, 12)).transpose(1, 2)
    refined = (heads @ heads.transpose(-2, -1) / 12**0.5).softmax(-1) @ heads
    refined = refined.transpose(1, 2).flatten(2)
    expected = model.head(model.fc_norm(refined[:, model.num_prefix_tokens :].mean(1)))
    torch.testing.assert_close(model(images()), expected)


def test_empty_pooling_returns_all_refined_tokens():
    model = small(global_pool="", num_classes=0)
    tokens = model.forward_features(images())
    torch.testing.assert_close(model(images()), model.refine(tokens, tokens))


@pytest.mark.parametrize("fused", [True, False])
def test_class_pooling_equals_the_class_row_of_full_refinement(fused):
    set_fused_attn(fused)
    model = small()
    tokens = model.forward_features(images())
    torch.testing.assert_close(model.pool(tokens), model.refine(tokens, tokens)[:, 0])


def test_refinement_gives_the_last_block_a_gradient():
    for prr, zero in ((True, False), (False, True)):
        model = small(prr=prr)
        model(images()).sum().backward()
        assert (model.blocks[-1].attn.gaug.log_alpha.weight.grad.abs().max() == 0) == zero


def test_leaving_prr_pooling_does_not_average_the_class_token_in():
    model = small(global_pool="prr", prr=False)
    model.reset_classifier(5, "avg")
    tokens = model.forward_features(images())
    torch.testing.assert_close(model.pool(tokens), tokens[:, 1:].mean(1))


def test_two_threads_at_two_sizes_get_what_one_gets():
    model = small(dynamic_img_size=True, img_size=64)
    inputs = [images(size=(64, 64)), images(size=(96, 48))]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    wrong = []

    def work(i):
        with torch.no_grad():
            wrong.extend(i for _ in range(30) if not torch.allclose(model(inputs[i]), expected[i], atol=1e-5))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_dynamic_and_static_resizing_agree_on_a_non_square_grid():
    dynamic, static = small(dynamic_img_size=True), small()
    static.load_state_dict(dynamic.state_dict())
    static.set_input_size((80, 112))
    x = images(size=(80, 112))
    torch.testing.assert_close(dynamic(x), static(x))
    assert static.gaug_grid == (3, 4)


def test_weights_mean_the_same_when_loaded_into_a_larger_model():
    source = small(img_size=224, depth=1)
    target = small(img_size=320, depth=1)
    assert target.gaug_grid == (20, 20)
    target.load_state_dict(checkpoint_filter_fn(source.state_dict(), target))
    assert target.gaug_grid == (14, 14)
    source.set_input_size((320, 320))
    torch.testing.assert_close(target(images(size=(320, 320))), source(images(size=(320, 320))))


def test_an_explicit_gaussian_grid_is_kept_at_load():
    source, target = small(img_size=224, depth=1), small(img_size=320, depth=1, gaug_grid=(20, 20))
    target.load_state_dict(checkpoint_filter_fn(source.state_dict(), target))
    assert target.gaug_grid == (20, 20)


@pytest.mark.parametrize("resize", [None, (80, 112)])
def test_exported_model_reloads_to_the_same_logits(tmp_path, resize):
    model = small()
    if resize:
        model.set_input_size(resize)
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(size=resize or (48, 64))
    assert torch.equal(again(x), model(x)) and again.gaug_grid == (3, 4)


def test_reloading_at_another_size_keeps_the_meaning_of_the_gaussians(tmp_path):
    model = small()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(80, 112)).eval()
    model.set_input_size((80, 112))
    torch.testing.assert_close(again(images(size=(80, 112))), model(images(size=(80, 112))))


def test_patch_dropout_trains_and_evaluation_sees_every_patch():
    model, plain = small(patch_drop_rate=0.5), small()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images()), plain(images()))
    model.train()
    assert model.forward_features(images()).shape == (2, 7, 48)
    model(images()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dropping_patches_equals_masking_them():
    model = small(patch_drop_rate=0.5, prr=False).train()
    torch.manual_seed(5)
    dropped = model(images(1))
    torch.manual_seed(5)
    x = model._pos_embed(model.patch_embed(images(1)))
    _, keep = model.patch_drop(x)
    mask = torch.zeros(13, dtype=torch.bool)
    mask[0] = True
    mask[1 + keep[0]] = True
    torch.testing.assert_close(dropped, model.eval()(images(1), attn_mask=mask.expand(13, 13)))


def test_masks_reach_every_block_in_both_entry_points():
    model = small()
    mask = torch.rand(13, 13) > 0.3
    mask |= torch.eye(13, dtype=torch.bool)
    as_float = torch.zeros(13, 13).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(model(images(), attn_mask=mask), model(images(), attn_mask=as_float))
    assert not torch.allclose(model(images(), attn_mask=mask), model(images()))
    last = model.forward_intermediates(images(), norm=True, attn_mask=mask, output_fmt="NLC")[1][-1]
    torch.testing.assert_close(last, model.forward_features(images(), attn_mask=mask)[:, 1:])


def test_causal_masking_hides_later_tokens():
    model = small()
    x, y = images(), images()
    y[..., -16:, -16:] += 1  # the last patch
    a, b = (model.forward_features(t, is_causal=True) for t in (x, y))
    torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=0)


def test_registers_are_prefix_tokens():
    model = small(reg_tokens=4)
    assert model.forward_features(images()).shape == (2, 17, 48)
    _, grid = model._embed(images())
    assert grid.num_prefix == 5


@pytest.mark.parametrize("kwargs", [{}, {"gaug": False}, {"patch_drop_rate": 0.25}])
def test_gradient_checkpointing_changes_no_gradient(kwargs):
    grads = []
    for on in (False, True):
        model = small(**kwargs).train()
        model.set_grad_checkpointing(on)
        torch.manual_seed(7)
        model(images()).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_features_only_gives_maps_of_the_asked_blocks():
    model = small(features_only=True, out_indices=(0, 2))
    assert [tuple(f.shape) for f in model(images())] == [(2, 48, 3, 4)] * 2


def test_intermediates_with_prefix_tokens_and_as_a_dictionary():
    model = small(reg_tokens=1)
    pairs = model.forward_intermediates(images(), indices=1, return_prefix_tokens=True, intermediates_only=True)
    assert pairs[0][0].shape == (2, 48, 3, 4) and pairs[0][1].shape == (2, 2, 48)
    found = model.forward_intermediates(images(), return_prefix_tokens=True, output_dict=True)
    assert set(found) == {"image_intermediates", "image_intermediates_prefix", "image_features"}


def test_grey_images_and_another_head():
    model = small(in_chans=1)
    assert model(images(chans=1)).shape == (2, 5)
    model.reset_classifier(7)
    assert model(images(chans=1)).shape == (2, 7)
    model.reset_classifier(0)
    assert model(images(chans=1)).shape == (2, 48)


def test_layer_decay_keeps_each_block_in_one_group():
    model = small()
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    names = [n for n, _ in model.named_parameters()]
    assert set(groups) == set(names)
    for i in range(3):
        assert len({groups[n] for n in names if n.startswith(f"blocks.{i}.")}) == 1


def test_meta_device_then_initialisation_is_finite():
    model = small(device="meta") if False else timm.create_model("locatvit_tiny", depth=1, device="meta")
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.init_weights()
    assert torch.isfinite(model(images(size=(224, 224)))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, False])
def test_low_precision_stays_close_and_keeps_its_dtype(dtype, fused):
    set_fused_attn(fused)
    model = small()
    expected = model(images())
    low = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        out = low(images().to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


def test_compiles_to_one_graph_for_all_batch_sizes():
    torch._dynamo.reset()
    model, graphs = small(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None)
    with torch.no_grad():
        for batch in (2, 3, 5, 2):
            torch.testing.assert_close(compiled(images(batch)), model(images(batch)), rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 2  # one for the first size, one for all others


def test_exports_with_a_free_batch_size():
    model = small()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(model, (images(2),), dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(images(5)), model(images(5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{}, {"gaug": False}, {"patch_drop_rate": 0.5}, {"global_pool": "avg"}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripts_with_every_switch(kwargs):
    model = small(scriptable=True, **kwargs)
    torch.testing.assert_close(torch.jit.script(model)(images()), model(images()))


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_onnx_runs_at_another_batch_size(tmp_path, dynamo):
    import onnxruntime

    model, path = small(exportable=True), str(tmp_path / "model.onnx")
    names = dict(input_names=["x"], output_names=["y"])
    if dynamo:
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(model, (images(2),), path, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    else:
        torch.onnx.export(model, (images(2),), path, dynamo=False, dynamic_axes={"x": {0: "b"}, "y": {0: "b"}}, **names)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": images(4).numpy()})
    np.testing.assert_allclose(out, model(images(4)).detach(), rtol=1e-3, atol=1e-4)


def test_pickles_and_copies():
    model = small()
    x = images()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_forward_leaves_no_tensor_behind():
    model = small(dynamic_img_size=True)
    before = {id(m): set(vars(m)) for m in model.modules()}
    with torch.inference_mode():
        model(images(size=(96, 64)))
    model.train()(images()).sum().backward()  # would fail on an inference tensor that was kept
    assert {id(m): set(vars(m)) for m in model.modules()} == before


def test_dense_features_before_refinement_are_the_last_blocks_output():
    model = small()
    expected = model.forward_intermediates(images(), indices=[-1], intermediates_only=True)[0]
    assert torch.equal(dense_features(model, images()), expected)
    normed = dense_features(model, images(), norm=True)
    torch.testing.assert_close(normed.flatten(2).transpose(1, 2), model.forward_features(images())[:, 1:])


def test_dense_features_after_refinement_are_refined_patch_tokens():
    model = small(reg_tokens=2)
    tokens = model.forward_features(images())
    expected = model.refine(tokens, tokens)[:, 3:].transpose(1, 2).reshape(2, 48, 3, 4)
    assert torch.equal(dense_features(model, images(), "after_prr"), expected)


def test_dense_features_work_on_timms_own_models():
    model = small("vit_tiny_patch16_224")
    assert dense_features(model, images()).shape == (2, 48, 3, 4)
    with pytest.raises(ValueError, match="needs a model with PRR"):
        dense_features(model, images(), "after_prr")
    with pytest.raises(ValueError, match="'before_prr' or 'after_prr', got 'both'"):
        dense_features(small(), images(), "both")


@pytest.mark.parametrize("name", ["locatvit_tiny", "vit_compact_patch4_32", "locatvit_compact_patch4_32"])
def test_a_size_that_the_patch_does_not_divide_names_the_sizes_that_fit(name):
    with pytest.raises(
        UserError, match=r"multiple of the (16x16|4x4) patch, got 225x224; use 224x224 or (240|228)x224"
    ):
        timm.create_model(name, img_size=(225, 224))


def test_resizing_to_a_size_that_does_not_fit_leaves_the_model_usable():
    model = small()
    with pytest.raises(UserError, match="got 50x64"):
        model.set_input_size((50, 64))
    assert model(images()).shape == (2, 5)


def test_padding_models_take_any_size():
    model = small(dynamic_img_size=True, dynamic_img_pad=True)
    assert model(images(size=(50, 70))).shape == (2, 5)
    assert dense_features(model, images(size=(50, 70)), "after_prr").shape == (2, 48, 4, 5)


def test_a_foreign_block_is_refused_with_gaug():
    with pytest.raises(ValueError, match="gaug=True brings its own"):
        small(attn_layer="diff")
    assert small(attn_layer="diff", gaug=False)(images()).shape == (2, 5)


def test_gaussian_grid_rescales_the_variance_by_the_shortest_side():
    x = torch.zeros(1)
    assert gaussian_grid(x, (20, 16), (14, 14)).var_scale == pytest.approx(16 / 14)
    assert gaussian_grid(x, (6, 6), (14, 14)).var_scale == pytest.approx(6 / 14)
    assert gaussian_grid(x, (20, 16), (14, 14)).max_var == 196
