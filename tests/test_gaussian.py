"""The Gaussian bias against a plain loop over patch pairs, and the attentions that use it against each other."""

import math

import pytest
import timm
import torch

from timm_locat.layers import GaussianAttention, GaussianBias, gaussian_grid, gaussian_mask
from timm_locat.layers import attention as attention_module
from timm_locat.layers.gaussian import distance_limit, variance_eps


def loop_bias(module: GaussianBias, q, grid, initial, num_prefix):
    """The formula, one pair of patches at a time, in float64."""
    module, q = module.double(), q.double()
    side = max(initial)
    M, eps, limit = side**2, 0.1, min(0.5 * (side - 1) ** 2, 6550)
    while 0.5 * (side - 1) ** 2 / eps**2 > 32500:
        eps *= 2
    shift = math.log(M - 1) if M > 2 else 0.0
    scale = min(grid) / min(initial)
    var = M * torch.sigmoid(module.log_var(q) - shift) * scale
    alpha = torch.nn.functional.softplus(module.log_alpha(q))[..., 0]
    B, heads, N, _ = q.shape
    T = N + num_prefix
    out = torch.zeros(B, heads, T, T, dtype=torch.float64)
    for i in range(N):
        for j in range(N):
            dy = max(-0.5 * (i // grid[1] - j // grid[1]) ** 2, -limit)
            dx = max(-0.5 * (i % grid[1] - j % grid[1]) ** 2, -limit)
            exponent = dy / (var[:, :, i, 0] + eps) + dx / (var[:, :, i, 1] + eps)
            out[:, :, num_prefix + i, num_prefix + j] = alpha[:, :, i] * torch.exp(exponent)
    return out


def make_bias(grid, initial=None, num_prefix=1, batch=2, heads=2, dim=8):
    torch.manual_seed(0)
    module = GaussianBias(dim)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    q = torch.randn(batch, heads, grid[0] * grid[1], dim)
    positions = gaussian_grid(q, grid, initial or grid, num_prefix)
    rows, cols = module(q, positions)
    return module, q, gaussian_mask(rows, cols, num_prefix)


@pytest.mark.parametrize(
    ("grid", "initial"),
    [((3, 4), (3, 4)), ((5, 7), (3, 4)), ((2, 3), (7, 4)), ((1, 1), (1, 1)), ((1, 6), (1, 6)), ((30, 2), (30, 2))],
)
@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_bias_matches_a_plain_loop_over_patch_pairs(grid, initial, num_prefix):
    module, q, bias = make_bias(grid, initial, num_prefix)
    torch.testing.assert_close(bias.double(), loop_bias(module, q, grid, initial, num_prefix), rtol=1e-5, atol=1e-6)


def test_bias_peaks_on_the_query_patch():
    _, _, bias = make_bias((3, 4), num_prefix=0)
    assert torch.equal(bias.argmax(-1), torch.arange(12).expand(2, 2, 12))


@pytest.mark.parametrize("num_prefix", [1, 5])
def test_prefix_tokens_get_no_bias(num_prefix):
    _, _, bias = make_bias((3, 4), num_prefix=num_prefix)
    assert bias[:, :, :num_prefix].abs().max() == 0
    assert bias[..., :num_prefix].abs().max() == 0


def test_fresh_bias_is_one_patch_wide_and_log_two_high():
    model = timm.create_model("locatvit_tiny", depth=1)
    attn = model.blocks[0].attn
    x = torch.randn(1, 197, 192)
    bias = attn.bias(x, gaussian_grid(x, (14, 14), (14, 14)))
    peak = bias[:, :, 1:, 1:].diagonal(dim1=-2, dim2=-1)
    assert peak.mean().item() == pytest.approx(math.log(2), abs=0.02)
    # exp(-1 / (2 * (1 + eps))) one patch away
    assert (bias[0, 0, 1, 2] / bias[0, 0, 1, 1]).item() == pytest.approx(math.exp(-0.5 / 1.1), abs=0.02)


@pytest.mark.parametrize(("side", "eps"), [(14, 0.1), (26, 0.1), (27, 0.2), (51, 0.2), (52, 0.4), (102, 0.4)])
def test_eps_doubles_with_the_initial_grid(side, eps):
    assert variance_eps(side) == eps


def test_distance_limit_is_that_of_the_initial_grid_and_fits_float16():
    assert distance_limit(14) == 84.5
    assert distance_limit(500) == 6550.0


def test_gradient_is_finite_in_half_precision_on_a_64x64_grid():
    module = GaussianBias(8).half()
    for p in module.parameters():
        torch.nn.init.constant_(p, -5.0)  # a variance near 0
    q = torch.ones(1, 1, 64 * 64, 8, dtype=torch.float16, requires_grad=True)
    rows, cols = module(q, gaussian_grid(q, (64, 64), (64, 64), 0))
    assert rows.dtype == cols.dtype == torch.float32
    (rows.sum() + cols.sum()).backward()
    assert torch.isfinite(q.grad).all()


def make_attention(grid, num_prefix=1, heads=3, dim=24):
    torch.manual_seed(1)
    attn = GaussianAttention(dim, heads, qkv_bias=True).eval()
    for p in attn.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(3, num_prefix + grid[0] * grid[1], dim)
    return attn, x, gaussian_grid(x, grid, grid, num_prefix)


def masks(tokens):
    generator = torch.Generator().manual_seed(2)
    keep = torch.rand(tokens, tokens, generator=generator) > 0.3
    keep |= torch.eye(tokens, dtype=torch.bool)
    return {
        "none": None,
        "bool": keep,
        "float": torch.randn(3, 1, tokens, tokens, generator=generator),
        "bool per image": keep.expand(3, 1, tokens, tokens),
    }


@pytest.mark.parametrize("kind", ["none", "bool", "float", "bool per image"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_fused_and_unfused_attention_agree(kind, causal, grad):
    attn, x, grid = make_attention((3, 4))
    mask, out, grads = masks(13)[kind], [], []
    for fused in (True, False):
        attn.fused_attn = fused
        with torch.set_grad_enabled(grad):
            leaf = x.clone().requires_grad_(grad)
            y = attn(leaf, grid, attn_mask=mask, is_causal=causal)
        out.append(y.detach())
        if grad:
            attn.zero_grad()
            y.square().sum().backward()
            grads.append([leaf.grad, *(p.grad.clone() for p in attn.parameters())])
    torch.testing.assert_close(out[0], out[1])
    for a, b in zip(*grads, strict=True) if grads else ():
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_is_softmax_of_logits_plus_bias():
    attn, x, grid = make_attention((3, 4))
    with torch.no_grad():
        q, k, v = attn.qkv(x).reshape(3, 13, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
        logits = q @ k.transpose(-2, -1) / math.sqrt(8) + attn.bias(x, grid)
        expected = attn.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(3, 13, 24))
        torch.testing.assert_close(attn(x, grid), expected)


def test_a_boolean_mask_hides_keys_completely():
    attn, x, grid = make_attention((3, 4))
    mask = torch.ones(13, 13, dtype=torch.bool)
    mask[:, -1] = False
    changed = x.clone()
    changed[:, -1] += 5
    for fused in (True, False):
        attn.fused_attn = fused
        with torch.no_grad():
            a, b = attn(x, grid, attn_mask=mask), attn(changed, grid, attn_mask=mask)
        torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=0)


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
@pytest.mark.parametrize("budget", [1, 2000, 1 << 22])
def test_chunks_of_queries_change_nothing(monkeypatch, budget, num_prefix):
    attn, x, grid = make_attention((3, 4), num_prefix)
    monkeypatch.setattr(attention_module, "CHUNK_BYTES", budget)
    attn.fused_attn = True
    with torch.no_grad():
        chunked = attn(x, grid)
    torch.testing.assert_close(chunked, attn(x, grid).detach(), rtol=1e-5, atol=1e-6)


def test_gradients_pass_a_numerical_check():
    attn, x, grid = make_attention((2, 3), heads=2, dim=8)
    attn, x = attn.double(), x[:1].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: attn(t, grid), (x,))


def test_dropped_patches_keep_the_bias_of_their_places():
    attn, x, grid = make_attention((3, 4), num_prefix=2)
    full = attn.bias(x, grid)
    keep = torch.tensor([[0, 5, 11], [7, 3, 2], [4, 8, 9]])
    tokens = torch.cat([torch.arange(2).expand(3, 2), keep + 2], dim=1)
    kept = attn.bias(x.gather(1, tokens.unsqueeze(-1).expand(-1, -1, 24)), gaussian_grid(x, (3, 4), (3, 4), 2, keep))
    for b in range(3):
        torch.testing.assert_close(kept[b], full[b][:, tokens[b]][:, :, tokens[b]])


def test_a_block_without_positions_says_what_it_needs():
    block = timm.create_model("locatvit_tiny", depth=1).blocks[0]
    with pytest.raises(ValueError, match="positions of the patches"):
        block(torch.randn(1, 197, 192))
