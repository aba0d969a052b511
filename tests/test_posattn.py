"""Positional attention: what the matrix depends on, and that timm's switches work."""

import pytest
import timm
import torch
from posattn_models import images, model, spread
from timm.utils import AttentionExtract
from torch import nn

from timm_locat.hub import export
from timm_locat.layers.positional import OFFSETS
from timm_locat.locality import chance_recall, neighbourhood_recall, record

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
    attn = net.blocks[0].attn
    tokens = torch.randn(1, 65, 48)
    positions = nn.functional.layer_norm(net.pos_embed[0], (48,))
    both = attn(torch.cat([tokens, 3 * tokens]), positions)
    v = attn.qkv(tokens)[..., 96:].view(1, 65, 4, 12).transpose(1, 2)
    expected = attn.proj((attn.attention(positions) @ v).transpose(1, 2).reshape(1, 65, 48))
    torch.testing.assert_close(both[:1], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(attn.attention(positions), net.attention_maps()["blocks.0.attn"])


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
