"""Jumbo and LocAtJumbo: the reference's numbers and keys, the shared MLP, and everything that a timm ViT can do."""

import copy
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from test_locatvit import fill, golden_image, images
from timm.layers import set_fused_attn

from timm_locat import dense_features
from timm_locat.errors import UserError
from timm_locat.hub import export

DATA = Path(__file__).parent / "data"
NAMES = ("jumbo_tiny", "locatjumbo_tiny")
SHARED = "jumbo_mlp."


def small(name="locatjumbo_tiny", **kwargs):
    """A model that is quick to run, on 3 x 4 patches with 2 class tokens; every weight is far from where it starts."""
    torch.manual_seed(0)
    args = dict(img_size=(48, 64), depth=3, embed_dim=48, num_heads=4, num_classes=5, jumbo_tokens=2) | kwargs
    model = timm.create_model(name, **args)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def with_copies(state, depth=3):
    """A state dict as the paper's code writes it: the shared MLP under every block, too."""
    shared = {k: v for k, v in state.items() if k.startswith(SHARED)}
    return state | {f"blocks.{i}.{k}": v.clone() for i in range(depth) for k, v in shared.items()}


# The reference


@pytest.mark.parametrize("fused", [True, False])
def test_outputs_equal_the_reference(fused):
    golden = np.load(DATA / "variants.npz")
    set_fused_attn(fused)
    model = fill(timm.create_model("locatjumbo_tiny"))
    with torch.no_grad():
        features = model.forward_features(golden_image((1, 3, 224, 224)))
        logits = model.forward_head(features)
    np.testing.assert_allclose(logits, golden["jumbo_tiny_224/logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(features[:, ::7, ::5], golden["jumbo_tiny_224/features_sample"], rtol=0, atol=1e-5)


def test_state_dict_is_the_references_without_the_copies():
    theirs = json.loads((DATA / "variants.json").read_text())["jumbo_tiny_224"]["state_dict"]
    theirs = {k: tuple(v) for k, v in theirs.items() if not (k.startswith("blocks.") and SHARED in k)}
    ours = timm.create_model("locatjumbo_tiny", device="meta").state_dict()
    assert {k: tuple(v.shape) for k, v in ours.items()} == theirs


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("jumbo_tiny", 17_348_776),
        ("locatjumbo_tiny", 17_348_776 + 2_340 + 2 * 192),
        ("jumbo_base", 260_495_080),
        ("locatjumbo_base", 260_495_080 + 2_340 + 2 * 768),
    ],
)
def test_locality_costs_gaussians_and_one_norm(name, count):
    assert sum(p.numel() for p in timm.create_model(name, device="meta").parameters()) == count


def test_a_block_works_as_described():
    model = small("jumbo_tiny", depth=1)
    block, x = model.blocks[0], torch.randn(2, 14, 48)
    y = x + block.ls1(block.attn(block.norm1(x)))
    wide, patches = y[:, :2].reshape(2, 96), y[:, 2:]
    wide = wide + block.ls3(model.jumbo_mlp(block.norm3(wide)))
    patches = patches + block.ls2(block.mlp(block.norm2(patches)))
    expected = torch.cat([wide.reshape(2, 2, 48), patches], dim=1)
    torch.testing.assert_close(model._blocks(x, None, None, False, [], 0)[0], expected)


# The shared MLP


def test_copies_of_the_shared_mlp_are_read(tmp_path):
    source, target = (
        small(),
        timm.create_model(
            "locatjumbo_tiny", img_size=(48, 64), depth=3, embed_dim=48, num_heads=4, num_classes=5, jumbo_tokens=2
        ),
    )
    given = with_copies(source.state_dict())
    before = set(given)
    assert str(target.load_state_dict(given)) == "<All keys matched successfully>"
    assert set(given) == before  # the caller's dictionary stays
    assert torch.equal(target.eval()(images()), source(images()))


def test_copies_alone_are_enough():
    source, target = small(), small(qkv_bias=True)
    given = {k: v for k, v in with_copies(source.state_dict()).items() if not k.startswith(SHARED)}
    for p in target.parameters():
        p.data.zero_()
    target.load_state_dict(given)
    assert torch.equal(target(images()), source(images()))


@pytest.mark.parametrize("keep_shared", [True, False])
def test_copies_that_differ_are_refused_by_name(keep_shared):
    given = with_copies(small().state_dict())
    if not keep_shared:
        given = {k: v for k, v in given.items() if not k.startswith(SHARED)}
    given["blocks.1.jumbo_mlp.fc2.bias"] = given["blocks.1.jumbo_mlp.fc2.bias"] + 1
    with pytest.raises(UserError, match=r"blocks\.1\.jumbo_mlp\.fc2\.bias differs from jumbo_mlp\.fc2\.bias"):
        small().load_state_dict(given)


def test_copies_are_read_inside_another_module_and_after_a_copy_of_the_model():
    source = small()
    holder = torch.nn.ModuleDict({"model": copy.deepcopy(small(num_classes=5))})
    holder.load_state_dict({f"model.{k}": v for k, v in with_copies(source.state_dict()).items()})
    assert torch.equal(holder["model"](images()), source(images()))


def test_the_shared_mlp_learns_at_the_rate_of_the_last_block():
    model = small()
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert set(groups) == {n for n, _ in model.named_parameters()}
    assert len({groups[n] for n in groups if n.startswith(SHARED)}) == 1
    assert groups["jumbo_mlp.fc1.weight"] == groups["norm.weight"] == groups["blocks.2.norm3.weight"]


# The head


@pytest.mark.parametrize("classes", [3, 100, 1000])
def test_a_fresh_head_gives_every_class_the_same_probability(classes):
    model = timm.create_model("locatjumbo_tiny", depth=1, num_classes=classes).eval()
    probabilities = model(torch.randn(1, 3, 224, 224)).exp()
    torch.testing.assert_close(probabilities, torch.full((1, classes), 1 / classes))


@pytest.mark.parametrize("name", NAMES)
def test_another_head_and_none(name):
    model = small(name, in_chans=1)
    x = images(chans=1)
    model.reset_classifier(7)
    torch.testing.assert_close(model(x), torch.full((2, 7), -math.log(7)))
    model.reset_classifier(0)
    assert model(x).shape == (2, model.head_hidden_size) == (2, 96)
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 14, 48)
    assert small(name, num_classes=0)(images()).shape == (2, 96)


def test_the_head_reads_refined_class_tokens_side_by_side():
    model = small()
    tokens = model.forward_features(images())
    expected = model.head(model.refine(tokens, tokens)[:, :2].flatten(1))
    torch.testing.assert_close(model(images()), expected)
    torch.testing.assert_close(model.forward_head(tokens), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"global_pool": "avg"}, "must be 'token' or '', got 'avg'"),
        ({"reg_tokens": 4}, r"drop reg_tokens=4"),
        ({"class_token": False}, r"drop class_token=False"),
        ({"no_embed_class": False}, "no positions"),
        ({"jumbo_tokens": 0}, "at least 1, got 0"),
        ({"attn_layer": "diff"}, "drop attn_layer"),
    ],
)
def test_what_a_plain_vit_has_and_jumbo_has_not_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small(**kwargs)


def test_another_pooling_is_refused_later_too():
    model = small()
    with pytest.raises(ValueError, match="got 'avg'"):
        model.reset_classifier(5, "avg")
    assert model(images()).shape == (2, 5)


# As a timm ViT


@pytest.mark.parametrize("name", NAMES)
def test_features_and_intermediates(name):
    model = small(name, features_only=True, out_indices=(0, 2))
    assert [tuple(f.shape) for f in model(images())] == [(2, 48, 3, 4)] * 2
    model = small(name)
    final, ((patches, prefix),) = model.forward_intermediates(
        images(), indices=[2], norm=True, return_prefix_tokens=True, output_fmt="NLC"
    )
    assert torch.equal(torch.cat([prefix, patches], dim=1), final)
    assert torch.equal(final, model.forward_features(images()))
    early = model.forward_intermediates(images(), indices=[0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], model.forward_intermediates(images(), intermediates_only=True)[0])


def test_dense_features_before_and_after_refinement():
    model = small()
    tokens = model.forward_features(images())
    expected = model.refine(tokens, tokens)[:, 2:].transpose(1, 2).reshape(2, 48, 3, 4)
    assert torch.equal(dense_features(model, images(), "after_prr"), expected)
    assert dense_features(model, images()).shape == (2, 48, 3, 4)


def test_pruning_takes_both_final_norms():
    model = small()
    model.prune_intermediate_layers([0], prune_norm=True)
    assert len(model.blocks) == 1 and model.forward_features(images()).shape == (2, 14, 48)
    assert not any(key.startswith("norm") for key in model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_no_gradient(name):
    grads = []
    for on in (False, True):
        model = small(name, drop_path_rate=0.3, proj_drop_rate=0.1).train()
        model.set_grad_checkpointing(on)
        torch.manual_seed(7)
        model(images()).square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_every_parameter_learns_where_tokens_are_refined():
    model = small().train()
    model(images()).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []


def test_without_refinement_only_the_last_blocks_patches_do_not_learn():
    model = small("jumbo_tiny").train()
    model(images()).square().sum().backward()
    idle = {
        n.removeprefix("blocks.2.").split(".")[0]
        for n, p in model.named_parameters()
        if p.grad is None or not p.grad.any()
    }
    assert idle == {"norm2", "mlp", "ls2"}


def test_dropped_patches_are_never_class_tokens():
    model = small(patch_drop_rate=0.5).train()
    assert model.forward_features(images()).shape == (2, 8, 48)
    with torch.no_grad():
        model.cls_token.fill_(100)
        tokens, grid = model._embed(images())
    assert (tokens[:, :2] == 100).all() and grid.num_prefix == 2 and grid.keep.shape == (2, 6)


@pytest.mark.parametrize("name", NAMES)
def test_resized_models_agree_and_are_exported(name, tmp_path):
    dynamic, static = small(name, dynamic_img_size=True), small(name)
    static.load_state_dict(dynamic.state_dict())
    static.set_input_size((80, 112))
    x = images(size=(80, 112))
    torch.testing.assert_close(dynamic(x), static(x))
    export(static, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), static(x)) and again.num_prefix_tokens == 2


def test_a_saved_model_takes_another_head_and_size(tmp_path):
    model = small()
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(80, 112), num_classes=7).eval()
    model.set_input_size((80, 112))
    x = images(size=(80, 112))
    torch.testing.assert_close(again.forward_features(x), model.forward_features(x))
    assert again(x).shape == (2, 7)


def test_meta_device_then_initialisation_is_that_of_a_fresh_model():
    torch.manual_seed(0)
    model = timm.create_model("locatjumbo_tiny", depth=1, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.init_weights()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    fresh = timm.create_model("locatjumbo_tiny", depth=1)
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        spread = [t.detach().std(correction=0).item() for t in (p, q)]
        assert spread[0] == pytest.approx(spread[1], rel=0.5, abs=1e-8), name
    assert fresh.cls_token.detach().std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripts_compiles_and_pickles(name):
    torch._dynamo.reset()
    model, x = small(name), images()
    expected = model(x)
    torch.testing.assert_close(torch.jit.script(small(name, scriptable=True))(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
