"""Positional attention: what the matrix depends on, that it is never stale, and that timm's switches work."""

import copy
import pickle

import pytest
import timm
import torch
from timm.utils import AttentionExtract
from torch import nn

from timm_locat.hub import export
from timm_locat.layers.positional import OFFSETS
from timm_locat.locality import chance_recall, neighbourhood_recall, record
from timm_locat.models import PosAttnViT

SMALL = dict(depth=2, embed_dim=48, num_heads=4)


def model(**kwargs):
    torch.manual_seed(0)
    return timm.create_model("vit_posattn_compact_patch4_32", **{**SMALL, **kwargs}).eval()


def images(count=2, size=(32, 32), seed=0):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def fresh(net, x):
    """What a copy that has computed nothing yet says."""
    with torch.no_grad():
        return copy.deepcopy(net)(x)


@torch.no_grad()
def spread(net):
    """Give positions and weights a size at which they matter."""
    for name, p in net.named_parameters():
        if name in ("pos_embed", "layer_pos", "attn_logits") or "qkv.weight" in name:
            p.normal_(generator=torch.Generator().manual_seed(len(name)))
    return net


# The definition


def by_the_formula(net, x):
    """A plain reading: softmax((norm(P) Wq)(norm(P) Wk)^T / sqrt(d)) times the values of the tokens, head by head."""
    tokens = net._pos_embed(net.patch_embed(x))
    positions = nn.functional.layer_norm(net.pos_embed[0], net.pos_embed.shape[-1:])
    for block in net.blocks:
        attn, inner = block.attn, block.norm1(tokens)
        q, k, _ = (positions @ attn.qkv.weight.T + attn.qkv.bias).chunk(3, dim=-1)
        v = (inner @ attn.qkv.weight.T + attn.qkv.bias).chunk(3, dim=-1)[2]
        heads = []
        for h in range(attn.num_heads):
            part = slice(h * attn.head_dim, (h + 1) * attn.head_dim)
            heads.append((q[:, part] @ k[:, part].T / attn.head_dim**0.5).softmax(-1) @ v[..., part])
        tokens = tokens + attn.proj(torch.cat(heads, dim=-1))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return net.head(net.norm(tokens)[:, 0])


@pytest.mark.parametrize("grad", [True, False])
def test_the_model_is_its_formula(grad):
    net = spread(model())
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(net(images()), by_the_formula(net, images()), atol=1e-5, rtol=1e-4)


def test_every_image_has_the_same_attention_bit_for_bit():
    net, seen = spread(model()), []
    for block in net.blocks:
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    net(images(seed=1)), net(images(seed=2))
    layers = len(net.blocks)
    assert all(torch.equal(a, b) for a, b in zip(seen[:layers], seen[layers:], strict=True))
    told = net.attention_maps()
    assert list(told) == ["blocks.0.attn", "blocks.1.attn"] and torch.equal(told["blocks.0.attn"], seen[0])


def test_swapping_two_patches_with_their_positions_changes_nothing():
    net, x = spread(model()), images()
    logits = net(x)
    swapped = x.clone()
    swapped[..., 0:4, 0:4], swapped[..., 8:12, 20:24] = x[..., 8:12, 20:24], x[..., 0:4, 0:4]
    a, b = 1, 1 + 2 * 8 + 5
    with torch.no_grad():
        net.pos_embed[:, [a, b]] = net.pos_embed[:, [b, a]]
    torch.testing.assert_close(net(swapped), logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(net(x), logits, atol=1e-3)


def test_attention_does_not_read_the_tokens():
    net = spread(model())
    tokens = torch.randn(1, 65, 48)
    weights = net.attention_maps()["blocks.0.attn"]
    block = net.blocks[0].attn
    both = block(torch.cat([tokens, 3 * tokens]), weights[None], normalised=True)
    v = block.values(tokens).view(1, 65, 4, 12).transpose(1, 2)
    expected = block.proj((weights @ v).transpose(1, 2).reshape(1, 65, 48))
    torch.testing.assert_close(both[:1], expected, atol=1e-5, rtol=1e-4)


# Never stale


def change_in_place(net):
    with torch.no_grad():
        net.blocks[0].attn.qkv.weight.mul_(2)


def change_positions(net):
    with torch.no_grad():
        net.pos_embed.mul_(-1).add_(torch.linspace(0, 1, net.pos_embed.shape[1]).view(1, -1, 1))


def take_a_step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
    net(images(seed=5)).square().sum().backward()
    optimizer.step()


def load_another(net):
    other = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(9)) for k, v in net.state_dict().items()}
    net.load_state_dict(other)


def load_by_assignment(net):
    other = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(9)) for k, v in net.state_dict().items()}
    net.load_state_dict(other, assign=True)


def swap_data(net):
    net.pos_embed.data = torch.randn(net.pos_embed.shape, generator=torch.Generator().manual_seed(3))


def replace_a_parameter(net):
    net.pos_embed = nn.Parameter(torch.randn(net.pos_embed.shape, generator=torch.Generator().manual_seed(3)))


def train_and_back(net):
    net.train()
    take_a_step(net)
    net.eval()


CHANGES = [
    change_in_place, change_positions, take_a_step, load_another, load_by_assignment, swap_data, replace_a_parameter,
    train_and_back,
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"pos_shared": False}, {"free_logits": True}])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_is_seen(change, options):
    net, x = spread(model(**options)), images()
    with torch.no_grad():
        before = net(x)
    change(net)
    with torch.no_grad():
        after = net(x)
    assert torch.equal(after, fresh(net, x))
    if not (options and change in (change_positions, swap_data, replace_a_parameter, change_in_place)):
        assert not torch.allclose(before, after)


def test_another_dtype_another_size_and_autocast_are_seen():
    net = spread(model(dynamic_img_size=True))
    with torch.no_grad():
        for size in ((32, 32), (48, 40), (32, 32)):
            torch.testing.assert_close(net(images(size=size)), fresh(net, images(size=size)), atol=0, rtol=0)
        plain = net(images())
        with torch.autocast("cpu", torch.bfloat16):
            mixed = net(images())
            assert torch.equal(mixed, fresh(net, images()))
        assert torch.equal(net(images()), plain)
        net.double()
        assert net(images().double()).dtype == torch.float64
        torch.testing.assert_close(net(images().double()).float(), plain, atol=1e-4, rtol=1e-4)
        net.float().set_input_size((40, 48))
        assert torch.equal(net(images(size=(40, 48))), fresh(net, images(size=(40, 48))))


def test_copies_and_pickles_keep_attention_of_their_own():
    net, x = spread(model()), images()
    with torch.no_grad():
        before = net(x)
        other = copy.deepcopy(net)
        change_positions(other)
        assert not torch.allclose(other(x), before) and torch.equal(net(x), before)
        again = pickle.loads(pickle.dumps(net))
        assert again._kept is None and torch.equal(again(x), before)
    assert net.state_dict().keys() == model().state_dict().keys()


def test_what_is_kept_is_used_and_gradients_bypass_it(monkeypatch):
    net, calls = spread(model()), []
    original = PosAttnViT._logits
    monkeypatch.setattr(PosAttnViT, "_logits", lambda self, grid: (calls.append(grid), original(self, grid))[1])
    with torch.no_grad():
        net(images()), net(images(seed=1))
    assert len(calls) == 1
    net(images()).sum().backward()
    assert len(calls) == 2 and net.pos_embed.grad.abs().sum() > 0
    with torch.inference_mode():
        net(images())
    assert len(calls) == 2


def test_a_compiled_model_sees_changes():
    net = spread(model())
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(images())
        change_positions(net)
        torch.testing.assert_close(compiled(images()), net(images()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_model_says_the_same():
    net = spread(model())
    scripted = torch.jit.script(net)
    with torch.no_grad():
        torch.testing.assert_close(scripted(images()), net(images()))


def test_an_exported_program_has_its_weights_as_inputs():
    net = spread(model())
    with torch.no_grad():
        net(images())
        program = torch.export.export(net, (images(),))
        expected = net(images(seed=3))
    torch.testing.assert_close(program.module()(images(seed=3)), expected)
    assert not any("kept" in name for name in program.constants)


@pytest.mark.parametrize("method", ["fx", "hook"])
def test_attention_can_be_extracted_as_from_any_timm_vit(method):
    net = spread(model())
    with torch.no_grad():
        found = AttentionExtract(net, method=method)(images())
        found = [value for name, value in found.items() if "blocks" in name]
    for maps, told in zip(found, net.attention_maps().values(), strict=True):
        torch.testing.assert_close(maps, told.unsqueeze(0).expand_as(maps))


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"pos_shared": False}, {"pos_added": False}, {"pos_norm": False}, {"free_logits": True}, {"reg_tokens": 2},
        {"class_token": False, "global_pool": "avg"}, {"qkv_bias": False}, {"patch_drop_rate": 0.25},
    ],
)  # fmt: skip
def test_every_option_trains_takes_other_sizes_and_loads_again(options, tmp_path):
    net = model(**options).train()
    net(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    net.eval()
    export(net, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(images()), net(images()), atol=0, rtol=0)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=48).eval()
    net.set_input_size((48, 48))
    torch.testing.assert_close(larger(images(size=(48, 48))), net(images(size=(48, 48))), atol=1e-5, rtol=1e-5)


def test_logits_resampled_to_a_finer_grid_look_where_they_did():
    net = model(free_logits=True, class_token=False, global_pool="avg")
    with torch.no_grad():
        rows = torch.arange(64)
        net.attn_logits.zero_()
        net.attn_logits[:, :, rows, rows] = 20.0
    net.set_input_size((64, 64))
    attention = net.attention_maps()["blocks.0.attn"][0]
    assert attention.shape == (256, 256)
    target = attention.argmax(-1)
    near = (target // 16 - torch.arange(256) // 16).abs() + (target % 16 - torch.arange(256) % 16).abs()
    assert (near <= 1).float().mean() > 0.9


def test_conv_heads_look_beside_the_query_and_mimetic_ones_at_it():
    conv = model(attn_init="conv", embed_dim=192, num_heads=8).attention_maps()["blocks.0.attn"][:, 1:, 1:]
    centre = 3 * 8 + 4
    for head, (dr, dc) in enumerate(OFFSETS[:8]):
        assert conv[head, centre].argmax() == centre + 8 * dr + dc
    mimetic = model(attn_init="mimetic", embed_dim=192, num_heads=8).attention_maps()["blocks.0.attn"]
    assert (mimetic.argmax(-1) == torch.arange(65)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attn_init": "gabor"}, "attn_init must be"),
        ({"no_embed_class": True}, "drop no_embed_class"),
        ({"pos_embed": "none"}, "needs pos_embed='learn'"),
        ({"img_size": 30}, "img_size must be a multiple"),
        ({"attn_init": "conv", "embed_dim": 12, "num_heads": 2}, "widths of model and heads that 4 divides"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        model(**options)


def test_masks_are_obeyed():
    net, x = spread(model()), images()
    mask = torch.ones(65, 65, dtype=torch.bool)
    mask[:, 40:] = False
    seen = []
    net.blocks[0].attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out))
    net.forward_features(x, attn_mask=mask)
    assert (seen[0][..., 40:] == 0).all() and torch.allclose(seen[0].sum(-1), torch.ones(()))
    net.forward_features(x, is_causal=True)
    assert (seen[1].triu(1) == 0).all()


# Locality without data


def test_locality_is_read_from_the_model_alone():
    net = model(attn_init="conv", embed_dim=192, num_heads=8)
    result = record(net, [])
    told = net.attention_maps()
    assert result.images == 0 and result.layers == tuple(told)
    recall = neighbourhood_recall(told["blocks.0.attn"][:, 1:, 1:], (8, 8))
    assert min(recall) > 2 * chance_recall((8, 8))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("vit_posattn", "vit_tiny_patch16_224"),
        ("vit_posattn_small_patch16_224", "vit_small_patch16_224"),
        ("vit_posattn_base_patch16_224", "vit_base_patch16_224"),
        ("vit_posattn_compact_patch4_32", "vit_compact_patch4_32"),
    ],
)
def test_the_weights_are_those_of_the_plain_model(name, plain):
    with torch.device("meta"):
        mine, theirs = timm.create_model(name, num_classes=10), timm.create_model(plain, num_classes=10)
    assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
