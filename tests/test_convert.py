"""`add_locat` on timm's families: starts at the base, keeps its weights, exports, compiles, and can be taken back."""

import copy
import pickle

import pytest
import timm
import torch
from test_locatvit import fill, images

from timm_locat import add_locat, dense_features, remove_locat
from timm_locat.convert import locat_parameters
from timm_locat.data import DATASETS, decode_all, eval_transform, load
from timm_locat.errors import UserError
from timm_locat.hub import export
from timm_locat.locality import record

VIT = {"img_size": (48, 64), "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
SWIN = {"img_size": (64, 96), "patch_size": 4, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4), "num_classes": 5}
ARCHITECTURES = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "vit_base_patch16_clip_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "vit_small_patch14_dinov2": {**VIT, "num_classes": 0},
    "vit_small_patch14_reg4_dinov2": VIT,
    "vit_compact_patch4_32": VIT,
    "eva02_tiny_patch14_224": VIT,
    "eva_giant_patch14_224": VIT,
    "vit_small_patch16_rope_mixed_224": VIT,
    "vit_small_patch16_dinov3": VIT,
    "beit3_base_patch16_224": VIT,
    "swin_tiny_patch4_window7_224": {**SWIN, "window_size": 4},
    "swin_s3_tiny_224": {**SWIN, "window_size": (4, 8)},
}
ONE_OF_EACH = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_rope_mixed_224",
    "swin_tiny_patch4_window7_224",
)
each = pytest.mark.parametrize("name", ONE_OF_EACH)


def base_of(name, **kwargs):
    return fill(timm.create_model(name, **{**ARCHITECTURES[name], **kwargs}))


def size(name):
    return ARCHITECTURES[name]["img_size"]


def grown(model):
    """The same model far from where it started, so that every part of it matters."""
    with torch.no_grad():
        for _, p in locat_parameters(model):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_starts_at_the_base_keeps_its_weights_and_learns_everywhere(name):
    base, x = base_of(name), images(size=size(name))
    model = add_locat(copy.deepcopy(base))
    expected, out = base(x), model(x)
    assert (out - expected).norm() < 1e-4 * expected.norm()
    new = dict(locat_parameters(model))
    state = model.state_dict()
    assert set(state) == set(base.state_dict()) | set(new)
    assert all(torch.equal(state[key], value) for key, value in base.state_dict().items())
    assert any(name.startswith("refine.") for name in new) == model.prr

    model(x).square().sum().backward()
    assert [n for n, p in new.items() if p.grad is None or p.grad.abs().max() == 0] == []
    remove_locat(model)
    assert type(model) is type(base) and torch.equal(model(x), expected)
    assert set(model.state_dict()) == set(base.state_dict()) and vars(model).keys() == vars(base).keys()
    assert model.pretrained_cfg == base.pretrained_cfg and model._model_args == base._model_args


@each
@pytest.mark.parametrize("init", ["identity", "paper"])
def test_exported_model_reloads_to_the_same_outputs(tmp_path, name, init):
    model = grown(add_locat(base_of(name), blocks=[-1], init=init)).eval()
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(size=size(name))
    assert type(again) is type(model) and torch.equal(again(x), model(x))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3).eval()
    assert other(x).shape == (2, 3)
    remove_locat(again)
    assert again.pretrained_cfg["architecture"] == name


@each
@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")
def test_other_image_sizes_and_their_export(tmp_path, name):
    model = grown(add_locat(base_of(name))).eval()
    grid = model.gaug_grid
    model.set_input_size((96, 128))
    x = images(size=(96, 128))
    export(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    assert [tuple(g) if isinstance(g, list) else g for g in again.gaug_grid] == list(grid)


def test_dynamic_sizes_agree_with_static_ones():
    free, fixed = (grown(add_locat(base_of("vit_tiny_patch16_224", dynamic_img_size=d))).eval() for d in (True, False))
    fixed.load_state_dict(free.state_dict())
    fixed.set_input_size((80, 112))
    x = images(size=(80, 112))
    torch.testing.assert_close(free(x), fixed(x))


@each
def test_it_is_the_named_model_with_the_papers_start(name):
    named = {
        "vit_tiny_patch16_224": "locatvit_tiny",
        "vit_small_patch16_rope_mixed_224": "locatvit_tiny_rope_mixed",
        "swin_tiny_patch4_window7_224": "locatswin_tiny",
    }
    if name not in named:
        pytest.skip("the paper has no such model")
    model = add_locat(base_of(name), init="paper").eval()
    ours = timm.create_model(named[name], **ARCHITECTURES[name]).eval()
    ours.load_state_dict(model.state_dict())
    x = images(size=size(name))
    assert type(model) is type(ours) and torch.equal(model(x), ours(x))


@each
def test_it_compiles_to_one_graph(name):
    torch._dynamo.reset()
    model, x = grown(add_locat(base_of(name))).eval(), images(size=size(name))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@each
def test_checkpointing_changes_no_gradient(name):
    grads, start = [], grown(add_locat(base_of(name, drop_path_rate=0.0))).train()
    for on in (False, True):
        model = copy.deepcopy(start)
        model.set_grad_checkpointing(on)
        model(images(size=size(name))).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@each
def test_features_and_intermediates_are_there_as_in_the_base(name):
    args, x = ARCHITECTURES[name], images(size=size(name))
    maps = timm.create_model("locat_any", base=name, features_only=True, out_indices=(0, 1), **args)
    assert [f.shape for f in maps(x)] == [
        f.shape
        for f in timm.create_model(name, features_only=True, out_indices=(0, 1), feature_cls="getter", **args)(x)
    ]
    sum(f.sum() for f in maps(x)).backward()
    assert [n for n, p in maps.named_parameters() if p.grad is None] == []  # what DDP insists on
    model = grown(add_locat(base_of(name))).eval()
    final, taken = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(final, model.forward_features(x))
    assert torch.equal(dense_features(model, x, norm=True), taken[-1])
    assert dense_features(model, x, "after_prr").shape == taken[-1].shape


@each
def test_layer_decay_puts_new_parameters_with_their_block(name):
    model = add_locat(base_of(name))
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert set(groups) == {n for n, _ in model.named_parameters()}
    for n, _ in locat_parameters(model):
        if ".gaug." in n:
            assert groups[n] == groups[n.split("gaug")[0] + "proj.weight"]


def test_only_the_chosen_blocks_get_a_gaussian_and_the_base_can_be_frozen():
    model = add_locat(base_of("eva02_tiny_patch14_224"), blocks=[1], freeze_base=True)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    maps = [f"blocks.1.attn.gaug.{m}.{p}" for m in ("log_var", "log_alpha") for p in ("weight", "bias")]
    assert names == {"blocks.1.attn.gaug.gate", "refine.mix", *maps}
    assert model(images(size=(48, 64))).shape == (2, 5)


def test_gradients_and_copies_belong_to_the_same_parameters():
    base = base_of("vit_tiny_patch16_224")
    weight = base.blocks[0].attn.qkv.weight
    model = add_locat(base)
    assert model is base and model.blocks[0].attn.qkv.weight is weight
    x = images(size=(48, 64))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_patch_dropout_goes_on_and_comes_back():
    model = add_locat(base_of("vit_tiny_patch16_224", patch_drop_rate=0.5)).train()
    assert model.forward_features(images(size=(48, 64))).shape == (2, 7, 48)
    assert type(remove_locat(model).patch_drop).__name__ == "PatchDropout"


def test_refinement_is_left_to_heads_that_it_was_made_for():
    siglip = add_locat(base_of("vit_base_patch16_siglip_224"))
    assert not siglip.prr and "refine.mix" not in siglip.state_dict()
    with pytest.raises(UserError, match="this one pools by 'map'"):
        add_locat(base_of("vit_base_patch16_siglip_224"), gaug=False)
    assert add_locat(base_of("swin_tiny_patch4_window7_224"), gaug=False).prr


@pytest.mark.parametrize(
    ("name", "kwargs"), [("resnet18", {}), ("beit_base_patch16_224", {}), ("swinv2_tiny_window8_256", {})]
)
def test_other_families_are_refused_by_the_names_of_those_that_work(name, kwargs):
    with pytest.raises(UserError, match=r"add_locat takes timm's VisionTransformer .* Eva .* SwinTransformer .* got"):
        add_locat(timm.create_model(name, device="meta", **kwargs))


def test_mistakes_are_one_sentence_and_change_nothing():
    model = base_of("vit_tiny_patch16_224")
    before = set(model.state_dict())
    for kwargs, sentence in (
        ({"blocks": [2]}, r"indices from -2 to 1, at least one, got \[2\]"),
        ({"blocks": "last"}, "blocks must be 'all' or indices"),
        ({"blocks": []}, "at least one"),
        ({"init": "zero"}, "init must be 'identity' or 'paper', got 'zero'"),
        ({"gaug": False, "prr": False}, "would add nothing"),
    ):
        with pytest.raises(UserError, match=sentence):
            add_locat(model, **kwargs)
    assert set(model.state_dict()) == before
    with pytest.raises(UserError, match="has LocAt already"):
        add_locat(add_locat(model))
    with pytest.raises(UserError, match="has LocAt already"):
        add_locat(timm.create_model("locatvit_tiny", device="meta"))
    with pytest.raises(UserError, match="takes a model that add_locat made, got LocAtViT"):
        remove_locat(timm.create_model("locatvit_tiny", device="meta"))
    with pytest.raises(UserError, match=r"needs the name of a timm model as base, such as .* got None"):
        timm.create_model("locat_any")
    with pytest.raises(UserError, match="patch_drop_rate=0"):
        add_locat(base_of("eva02_tiny_patch14_224", patch_drop_rate=0.5))


def test_a_wrapped_model_is_refused_with_what_to_pass():
    with pytest.raises(UserError, match="features_only=True"):
        add_locat(timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(0, 1), **VIT))
    with pytest.raises(UserError, match="pass the one inside"):
        add_locat(torch.nn.DataParallel(base_of("vit_tiny_patch16_224")))


def test_training_raises_the_strength_to_the_papers_whatever_the_loss_says():
    model = add_locat(base_of("vit_tiny_patch16_224")).train()
    gates = [p for n, p in locat_parameters(model) if n.endswith("gate")]
    x = images(size=(48, 64))
    for sign in (1, -1):
        model.zero_grad()
        (sign * model(x).square().sum()).backward()
        assert all(gate.grad.item() < 0 for gate in gates)
    model.eval().zero_grad()
    (-model(x).square().sum()).backward()
    assert any(gate.grad.item() > 0 for gate in gates)  # as it is, for whoever looks at gradients


def test_the_strength_ends_where_the_paper_begins():
    paper = add_locat(base_of("vit_tiny_patch16_224"), init="paper", prr=False)
    model = add_locat(base_of("vit_tiny_patch16_224"), prr=False)
    assert set(model.load_state_dict(paper.state_dict(), strict=False).missing_keys) == {
        n for n, _ in locat_parameters(model) if n.endswith("gate")
    }
    for n, p in locat_parameters(model):
        if n.endswith("gate"):
            torch.nn.init.constant_(p, 5.0)
    x = images(size=(48, 64))
    assert torch.equal(model.eval()(x), paper.eval()(x))


SMALL = {
    "vit_compact_patch4_32.fashion_mnist": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 4, "depth": 4, "num_classes": 10},
    "vit_small_patch16_rope_mixed_224": {
        "img_size": 32,
        "patch_size": 4,
        "depth": 4,
        "embed_dim": 96,
        "num_heads": 3,
        "num_classes": 10,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "depths": (2, 2),
        "embed_dim": 48,
        "num_heads": (3, 6),
        "num_classes": 10,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_after_200_steps_every_layer_is_local_and_the_loss_no_worse_than_the_bases(name):
    """About two minutes each. No worse: within 2 % of the base's mean over the last 100 steps of the same images."""
    data = load("fashion_mnist_mini", "train")
    transform = eval_transform((32, 32), 1.0, "bilinear", native_transform=DATASETS[data.name].native_transform)
    pixels, labels = decode_all(data, transform)
    losses = {}
    for kind in ("base", "locat"):
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained="." in name, **SMALL[name])
        if kind == "locat":
            add_locat(model)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
        draw = torch.Generator().manual_seed(0)
        last = []
        for step in range(200):
            ids = torch.randint(len(pixels), (16,), generator=draw)
            loss = torch.nn.functional.cross_entropy(model(pixels[ids] / 127.5 - 1), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step >= 100:
                last.append(loss.item())
        losses[kind] = sum(last) / len(last)
    strengths = record(model.eval(), [pixels[:32] / 127.5 - 1]).gaussians["alpha"]
    assert all(torch.as_tensor(layer).mean() > 0.05 for layer in strengths)
    assert losses["locat"] <= 1.02 * losses["base"]
