"""Attention that is kept in evaluation is never stale."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from posattn_models import fresh, images, model, spread
from torch import nn
from torch.func import functional_call, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune

from timm_locat.layers.kept import Kept
from timm_locat.models import vit_posattn
from timm_locat.models.vit_posattn import PosAttnViT

OPTIONS = [{"pos_added": False}, {"pos_shared": False}, {"free_logits": True}]


def table(net):
    """Name of what the layers of a model attend by."""
    return next(name for name in ("layer_pos", "attn_logits", "pos_embed") if hasattr(net, name))


def random_like(tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))


def roll(tensor):
    """Give each token the row of the one before it, in place."""
    tensor.copy_(tensor.roll(1, -2))


# Ways to change a weight


def in_place(net):
    with torch.no_grad():
        roll(getattr(net, table(net)))


def in_place_in_inference_mode(net):
    with torch.inference_mode():
        roll(getattr(net, table(net)))


def an_optimizer_step(net):
    optimizer = torch.optim.SGD([getattr(net, table(net))], lr=1e3)
    net(images(seed=5)).square().sum().backward()
    optimizer.step()


def loading(net):
    net.load_state_dict({name: random_like(value) for name, value in net.state_dict().items()})


def loading_by_assignment(net):
    net.load_state_dict({name: random_like(value) for name, value in net.state_dict().items()}, assign=True)


def other_data(net):
    getattr(net, table(net)).data = random_like(getattr(net, table(net)))


def another_parameter(net):
    setattr(net, table(net), nn.Parameter(random_like(getattr(net, table(net)))))


def training_and_back(net):
    net.train()
    an_optimizer_step(net)
    net.eval()


def in_place_through_data_while_training(net):
    net.train()
    roll(getattr(net, table(net)).data)  # PyTorch takes no note of it
    net.eval()


def in_place_through_data_and_to(net):
    roll(getattr(net, table(net)).data)
    net.to("cpu")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(
    "change",
    [
        in_place, in_place_in_inference_mode, an_optimizer_step, loading, loading_by_assignment, other_data,
        another_parameter, training_and_back, in_place_through_data_while_training, in_place_through_data_and_to,
    ],
)  # fmt: skip
def test_a_change_of_weights_is_seen(change, options):
    net, x = spread(model(**options)), images()
    with torch.no_grad():
        before = net(x)
    change(net)
    with torch.no_grad():
        after = net(x)
    assert torch.equal(after, fresh(net, x)) and not torch.allclose(before, after)


def test_a_change_of_queries_and_keys_is_seen():
    net, x = spread(model(qk_norm=True)), images()
    for weight in (net.blocks[1].attn.qkv.bias, net.blocks[0].attn.qkv.weight, net.blocks[0].attn.q_norm.weight):
        with torch.no_grad():
            before = net(x)
            weight[: len(weight) // 3].add_(random_like(weight[: len(weight) // 3]))
            assert torch.equal(net(x), fresh(net, x)) and not torch.allclose(net(x), before)


def test_another_dtype_another_size_and_autocast_are_seen():
    net = spread(model(dynamic_img_size=True))
    with torch.no_grad():
        for size in ((32, 32), (48, 40), (32, 32)):
            assert torch.equal(net(images(size=size)), fresh(net, images(size=size)))
        plain = net(images())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(net(images()), fresh(net, images()))
        assert torch.equal(net(images()), plain)
        net.double()
        assert net(images().double()).dtype == torch.float64
        torch.testing.assert_close(net(images().double()).float(), plain, atol=1e-4, rtol=1e-4)
        net.float().set_input_size((40, 48))
        assert torch.equal(net(images(size=(40, 48))), fresh(net, images(size=(40, 48))))


# Layers whose weight is not all that they do


class Adapter(nn.Module):
    """Adds something of low rank to a linear layer, as LoRA does; has a `weight` that does not tell."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.on = True

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.on


def test_an_adapter_is_obeyed_and_its_switch_is_seen():
    net, x = spread(model()), images()
    merged = copy.deepcopy(net)
    adapter = net.blocks[0].attn.qkv = Adapter(net.blocks[0].attn.qkv)
    with torch.no_grad():
        merged.blocks[0].attn.qkv.weight += adapter.up.weight @ adapter.down.weight
        torch.testing.assert_close(net(x), merged(x))
        adapter.on = False
        torch.testing.assert_close(net(x), spread(model())(x))


def test_pruned_and_parametrised_weights_are_what_they_say():
    net, x = spread(model()), images()
    prune.random_unstructured(net.blocks[0].attn.qkv, "weight", 0.5)

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(net.blocks[1].attn.qkv, "weight", Twice())
    with torch.no_grad():
        for _ in range(2):
            plain = spread(model())
            plain.blocks[0].attn.qkv.weight.copy_(
                net.blocks[0].attn.qkv.weight_orig * net.blocks[0].attn.qkv.weight_mask
            )
            plain.blocks[1].attn.qkv.weight.copy_(2 * net.blocks[1].attn.qkv.parametrizations.weight.original)
            torch.testing.assert_close(net(x), plain(x))
            net.blocks[0].attn.qkv.weight_mask.copy_(1 - net.blocks[0].attn.qkv.weight_mask)


# Copies, threads, replicas


def test_copies_and_pickles_keep_attention_of_their_own():
    net, x = spread(model()), images()
    size, names = len(pickle.dumps(net)), net.state_dict().keys()
    with torch.no_grad():
        before = net(x)
        assert net._kept._last is not None
        other = copy.deepcopy(net)
        in_place(other)
        assert not torch.allclose(other(x), before) and torch.equal(net(x), before)
        again = pickle.loads(pickle.dumps(net))
        assert again._kept._last is None and torch.equal(again(x), before)
    assert len(pickle.dumps(net)) == size and net.state_dict().keys() == names


def test_threads_may_share_a_model_whose_sizes_change():
    net = spread(model(dynamic_img_size=True))
    sizes = [(32, 32), (32, 40), (40, 32)]
    expected = [fresh(net, images(size=size)) for size in sizes]

    @torch.no_grad()
    def run(i):
        return torch.equal(net(images(size=sizes[i % 3])), expected[i % 3])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(48)))


def replicate(net, change):
    """What `DataParallel` makes of a model for another device: modules without parameters, tensors in their place."""
    modules = list(net.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        for name, child in module.named_children():
            setattr(copies[module], name, copies[child])
        for name, parameter in module.named_parameters(recurse=False):
            setattr(copies[module], name, change(parameter.detach().clone()))
    return copies[net]


def test_replicas_of_data_parallel_use_their_own_weights():
    net, x = spread(model()), images()
    with torch.no_grad():
        before = net(x)
        assert torch.equal(replicate(net, lambda p: p)(x), before)
        assert not torch.allclose(replicate(net, lambda p: 2 * p)(x), before)
        assert torch.equal(net(x), before)


# When it is used, and when not


def count(monkeypatch):
    calls, original = [], PosAttnViT._all_weights
    monkeypatch.setattr(PosAttnViT, "_all_weights", lambda self, grid: (calls.append(grid), original(self, grid))[1])
    return calls


def test_what_is_kept_is_used_from_pass_to_pass(monkeypatch):
    net, calls = spread(model()), count(monkeypatch)
    with torch.no_grad():
        first = net(images())
        net(images(seed=1))
        assert torch.equal(net(images()), first)
    with torch.inference_mode():
        assert torch.equal(net(images()), first)
    assert len(calls) == 1
    with torch.no_grad():
        net(images(size=(32, 32))), net.train()(images()), net.eval()(images())
    assert len(calls) == 2


def test_gradients_reach_positions_although_attention_is_kept():
    net, x = spread(model(pos_added=False)), images()
    with torch.no_grad():
        expected = net(x)
    logits = net(x)
    logits.sum().backward()
    torch.testing.assert_close(logits, expected)
    assert net.pos_embed.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_forward_derivatives_see_positions():
    net, x = spread(model(pos_added=False)).double(), images().double()
    direction, step = random_like(net.pos_embed).double(), 1e-5

    def at(positions):
        return functional_call(net, {"pos_embed": positions}, (x,))

    with torch.no_grad():
        net(x)
        found = jvp(at, (net.pos_embed.detach(),), (direction,))[1]
        near = (at(net.pos_embed + step * direction) - at(net.pos_embed - step * direction)) / (2 * step)
    torch.testing.assert_close(found, near, atol=1e-5, rtol=1e-5)


def test_more_attention_than_may_be_kept_is_computed_anew(monkeypatch):
    net, calls = spread(model()), count(monkeypatch)
    expected = fresh(net, images())
    calls.clear()
    monkeypatch.setattr(vit_posattn, "CACHE_BYTES", 4 * 2 * 4 * 65**2 - 1)
    with torch.no_grad():
        assert torch.equal(net(images()), expected) and not calls and net._kept._last is None


def test_parameters_made_in_inference_mode_are_not_kept():
    with torch.inference_mode():
        net = spread(model())
        before = net(images())
        in_place(net)
        assert torch.equal(net(images()), fresh(net, images())) and not torch.allclose(net(images()), before)
    assert net._kept._last is None


def test_memory_that_is_used_again_is_no_reason_to_keep():
    kept, calls = Kept(), []
    for value in range(3):
        parameter = nn.Parameter(torch.full((1000,), float(value)))  # often lies where the last one was
        kept.get([parameter], (), lambda value=value: calls.append(value))
        del parameter
    assert calls == [0, 1, 2]


# Compile, export, traces: what was kept would be a constant in them


@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_sees_changes(warm):
    net, x = spread(model()), images()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with torch.no_grad():
        if warm:
            net(x)
        before = compiled(x)
        in_place(net)
        torch.testing.assert_close(compiled(x), fresh(net, x))
        assert not torch.allclose(compiled(x), before)


def script(net, x):
    return torch.jit.script(net)


def trace(net, x):
    return torch.jit.trace(net, (x,))


def export(net, x):
    return torch.export.export(net, (x,)).module()


def proxies(net, x):
    return make_fx(net)(x)


@pytest.mark.parametrize("capture", [script, trace, export, proxies])
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_captured_model_has_its_weights_and_not_the_attention(capture):
    net, x = spread(model()), images()
    with torch.no_grad():
        net(x)
        captured = capture(net, x)
        torch.testing.assert_close(captured(images(seed=3)), net(images(seed=3)))
        for name, parameter in captured.named_parameters():
            if "pos_embed" in name or parameter.shape == net.pos_embed.shape:
                roll(parameter)
        net.pos_embed.copy_(spread(model()).pos_embed.roll(1, -2))
        torch.testing.assert_close(captured(x), fresh(net, x))
