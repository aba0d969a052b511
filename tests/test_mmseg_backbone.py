"""The backbone, heads and cures that timm_locat registers with mmsegmentation."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from timm_locat import _mmseg_compat
from timm_locat.errors import MissingExtra, UserError
from timm_locat.hub.export import export

pytestmark = pytest.mark.filterwarnings("ignore")  # mmsegmentation's and mmcv's own

try:
    from timm_locat import mmseg_backbone
    from timm_locat._mmseg_repeat import Draw, DrawSampler
    from timm_locat.mmseg_backbone import (
        BNLinearHead,
        PatchHead,
        SimplePyramid,
        TimmLayerDecay,
        TimmPreProcessor,
        TimmSegmentor,
        TimmViT,
    )
except MissingExtra as err:
    pytest.skip(str(err), allow_module_level=True)

TINY = dict(depth=2, embed_dim=48, num_heads=3)
SWIN = dict(depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 2, 2, 2))


def images(height: int, width: int, number: int = 1) -> torch.Tensor:
    return torch.randn(number, 3, height, width, generator=torch.Generator().manual_seed(0))


def segmentor(**changes) -> TimmSegmentor:
    config = dict(
        backbone=dict(type="TimmViT", model_name="locatvit_tiny", model_args=TINY),
        decode_head=dict(type="PatchHead", num_classes=5, channels=16),
        test_cfg=dict(mode="whole"),
    )
    return TimmSegmentor(**{**config, **changes})


@pytest.mark.parametrize(
    ("name", "args", "size", "grid"),
    [
        ("locatvit_tiny", TINY, (100, 75), (7, 5)),
        ("vit_tiny_patch16_224", dict(TINY, reg_tokens=4), (64, 96), (4, 6)),
        ("vit_small_patch14_reg4_dinov2", dict(TINY, img_size=112), (70, 45), (5, 4)),
        ("vit_small_patch16_dinov3", TINY, (64, 90), (4, 6)),
        ("eva02_tiny_patch14_224", TINY, (56, 75), (4, 6)),
        ("swin_tiny_patch4_window7_224", SWIN, (100, 75), (4, 3)),
        ("locatvit_compact_patch4_32", {}, (21, 33), (6, 9)),
    ],
)
def test_any_timm_model_gives_a_channels_first_map_of_the_padded_image(name, args, size, grid):
    backbone = TimmViT(name, args).eval()
    (features,) = backbone(images(*size))
    assert features.shape == (1, backbone.channels[0], *grid)


def test_a_map_is_what_timm_computes_on_the_padded_image():
    backbone = TimmViT("locatvit_tiny", TINY, out_indices=(0, -1)).eval()
    padded = nn.functional.pad(images(30, 50), (0, 14, 0, 2))
    want = backbone.vit.forward_intermediates(padded, indices=[0, 1], norm=True, intermediates_only=True)
    for one, other in zip(backbone(images(30, 50)), want, strict=True):
        assert torch.equal(one, other)


def test_blocks_that_no_map_needs_are_not_there():
    assert len(TimmViT("vit_tiny_patch16_224", TINY, out_indices=(0,)).vit.blocks) == 1


def test_refined_features_differ_and_are_the_classifiers():
    plain, refined = (TimmViT("locatvit_tiny", TINY, features=name).eval() for name in ("before_prr", "after_prr"))
    plain.vit.load_state_dict(refined.vit.state_dict())
    x = images(32, 48)
    tokens = refined.vit.forward_features(x)
    want = refined.vit.refine(tokens, tokens)[:, 1:].transpose(1, 2).unflatten(2, (2, 3))
    assert torch.equal(refined(x)[0], want)
    assert not torch.allclose(plain(x)[0], want)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(model_name="locatvit_teeny"), r"no model 'locatvit_teeny'.*did you mean locatvit_tiny"),
        (dict(out_indices=(2,)), r"2 blocks, out_indices=\(2,\)"),
        (dict(model_name="vit_tiny_patch16_224", features="after_prr"), r"needs a model with PRR"),
        (dict(features="after_norm"), r"'before_prr' or 'after_prr'"),
        (dict(model_name="vit_tiny_patch16_224", trainable="locality"), r"needs a model with GAug"),
        (dict(checkpoint="no/such/folder"), r"no checkpoint no/such/folder"),
    ],
)
def test_what_a_backbone_cannot_do_is_one_sentence(changes, match):
    with pytest.raises(UserError, match=match):
        TimmViT(**{"model_name": "locatvit_tiny", "model_args": TINY, **changes})


def test_weights_come_from_a_run_folder_by_either_way(tmp_path):
    model = timm.create_model("locatvit_tiny", num_classes=7, img_size=64, **TINY)
    nn.init.normal_(model.pos_embed)
    export(model, tmp_path)
    by_name = TimmViT(f"local-dir:{tmp_path}", pretrained=True).eval()
    by_checkpoint = TimmViT("locatvit_tiny", dict(TINY, img_size=64), checkpoint=str(tmp_path)).eval()
    x = images(64, 64)
    want = model.eval().forward_intermediates(x, indices=[1], norm=True, intermediates_only=True)[0]
    assert torch.equal(by_name(x)[0], want) and torch.equal(by_checkpoint(x)[0], want)


def test_a_checkpoint_of_another_size_is_resampled_and_of_another_model_refused(tmp_path):
    export(timm.create_model("vit_tiny_patch16_224", img_size=64, **TINY), tmp_path)
    assert TimmViT("vit_tiny_patch16_224", TINY, checkpoint=str(tmp_path)).vit.pos_embed.shape[1] == 197
    with pytest.raises(UserError, match=r"weights of another model than LocAtViT .*\d+ not in it"):
        TimmViT("locatvit_tiny", TINY, checkpoint=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(UserError, match="no readable safetensors file"):
        TimmViT("vit_tiny_patch16_224", TINY, checkpoint=str(tmp_path))


def test_a_checkpoint_says_on_which_grid_its_gaussians_were_learned(tmp_path):
    export(timm.create_model("locatvit_tiny", img_size=64, **TINY), tmp_path)
    trained = TimmViT(f"local-dir:{tmp_path}", dict(img_size=96), pretrained=True)
    assert trained.vit.gaug_grid == (4, 4)
    again = TimmViT("locatvit_tiny", dict(TINY, img_size=96))
    assert again.vit.gaug_grid == (6, 6)
    again.load_state_dict(trained.state_dict())
    assert again.vit.gaug_grid == (4, 4)


def test_a_frozen_backbone_has_no_gradient_and_stays_in_evaluation():
    model = segmentor(backbone=dict(type="TimmViT", model_name="locatvit_tiny", model_args=TINY, trainable="none"))
    model.train()
    assert model.decode_head.training and not any(module.training for module in model.backbone.vit.modules())
    model._forward(images(32, 48)).sum().backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    assert model.decode_head.hidden[0].weight.grad is not None


def test_only_gaussians_train_in_a_backbone_whose_locality_trains():
    backbone = TimmViT("locatvit_tiny", TINY, trainable="locality")
    trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    assert trained and all(".gaug." in name for name in trained)
    backbone(images(32, 48))[0].square().sum().backward()
    assert all(p.grad is not None for p in backbone.parameters() if p.requires_grad)


@pytest.mark.parametrize(("features", "norm"), [("before_prr", True), ("before_prr", False), ("after_prr", True)])
def test_every_trained_parameter_has_a_gradient(features, norm):
    backbone = TimmViT("locatvit_tiny", TINY, features=features, norm=norm)
    backbone(images(32, 48))[0].square().sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


def test_checkpointed_blocks_give_the_same_gradients():
    one, other = (TimmViT("locatvit_tiny", TINY, grad_checkpointing=on) for on in (False, True))
    other.load_state_dict(one.state_dict())
    for backbone in (one, other):
        backbone(images(32, 48))[0].square().sum().backward()
    assert other.vit.grad_checkpointing
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_mean_std_and_padding_are_the_models():
    model = segmentor(backbone=dict(type="TimmViT", model_name="eva02_tiny_patch14_224", model_args=TINY))
    cfg = timm.get_pretrained_cfg("eva02_tiny_patch14_224")
    pre = model.data_preprocessor
    assert isinstance(pre, TimmPreProcessor) and pre.test_cfg == {"size_divisor": 14}
    torch.testing.assert_close(pre.mean.flatten(), 255 * torch.tensor(cfg.mean))
    torch.testing.assert_close(pre.std.flatten(), 255 * torch.tensor(cfg.std))
    bgr = torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None, None].expand(3, 14, 14)
    out = pre(dict(inputs=[bgr], data_samples=[]))["inputs"][0, :, 0, 0]
    torch.testing.assert_close(
        out, (torch.tensor([30.0, 20, 10]) / 255 - torch.tensor(cfg.mean)) / torch.tensor(cfg.std)
    )


def test_what_the_config_says_of_preprocessing_stands():
    pre = segmentor(data_preprocessor=dict(mean=[1.0, 2.0, 3.0], size=(32, 32))).data_preprocessor
    assert (
        pre.mean.flatten().tolist() == [1, 2, 3] and pre.std.flatten().tolist() == [127.5] * 3 and pre.size == (32, 32)
    )


def test_the_papers_head_is_its_plain_formula():
    head = PatchHead(in_channels=6, num_classes=4, channels=8).eval()
    x = images(3, 5)[:, :1].expand(1, 6, 3, 5) * torch.arange(1.0, 7)[:, None, None]
    hidden = torch.einsum("oc,bchw->bohw", head.hidden[0].weight[:, :, 0, 0], x)
    hidden = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + 1e-5).sqrt()
    hidden = nn.functional.gelu(hidden)
    want = torch.einsum("oc,bchw->bohw", head.conv_seg.weight[:, :, 0, 0], hidden) + head.conv_seg.bias[:, None, None]
    torch.testing.assert_close(head([x]), want)
    assert head.hidden[0].bias is None and head.dropout is None
    assert PatchHead(in_channels=192, num_classes=150).channels == 512


def test_the_linear_head_is_one_linear_layer_over_normalised_maps():
    head = BNLinearHead(
        in_channels=[6, 6], in_index=[0, 1], input_transform="resize_concat", num_classes=4, norm_cfg=dict(type="BN")
    )
    maps = [torch.randn(2, 6, 3, 5), torch.randn(2, 6, 3, 5)]
    out = head(maps)
    assert out.shape == (2, 4, 3, 5)
    x = torch.cat(maps, 1)
    x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        out, nn.functional.conv2d(x, head.conv_seg.weight, head.conv_seg.bias), atol=1e-5, rtol=1e-4
    )


def test_a_pyramid_has_four_scales_of_a_map_that_is_not_square():
    neck = SimplePyramid(in_channels=16, out_channels=8)
    sizes = [tuple(level.shape[1:]) for level in neck([images(6, 10)[:, :1].expand(1, 16, 6, 10)])]
    assert sizes == [(8, 24, 40), (8, 12, 20), (8, 6, 10), (8, 3, 5)]


def test_a_segmentor_fills_in_the_channels():
    model = segmentor(
        neck=dict(type="SimplePyramid", out_channels=12),
        decode_head=dict(
            type="UPerHead",
            in_index=[0, 1, 2, 3],
            channels=16,
            num_classes=5,
            pool_scales=(1, 2),
            norm_cfg=dict(type="BN"),
        ),
        auxiliary_head=dict(
            type="FCNHead", in_index=2, channels=8, num_classes=5, num_convs=1, norm_cfg=dict(type="BN")
        ),
    )
    assert model.decode_head.in_channels == [12] * 4 and model.auxiliary_head.in_channels == 12
    assert model.eval()._forward(images(32, 48)).shape == (1, 5, 8, 12)


def test_weights_of_another_model_are_refused_whoever_loads_them():
    from mmengine.runner.checkpoint import load_state_dict

    small, other = segmentor(), segmentor(decode_head=dict(type="PatchHead", num_classes=6, channels=16))
    load_state_dict(segmentor(), small.state_dict(), strict=False)
    with pytest.raises(
        UserError, match=r"2 tensors differ.* decode_head.conv_seg.bias, \(6,\) in the checkpoint and \(5,\)"
    ):
        load_state_dict(small, other.state_dict(), strict=False)


def test_layer_decay_falls_from_the_head_to_the_patches():
    model = segmentor()
    wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1.0, weight_decay=0.1))
    optimizer = TimmLayerDecay(wrapper, dict(layer_decay=0.5))(model).optimizer
    rate = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(rate) == len(list(model.parameters()))
    vit = model.backbone.vit
    assert rate[id(model.decode_head.conv_seg.weight)] == (1.0, 0.1)
    assert rate[id(model.decode_head.conv_seg.bias)] == (1.0, 0.0)
    blocks = [rate[id(block.mlp.fc1.weight)][0] for block in vit.blocks]
    assert blocks == [0.25, 0.5] and rate[id(vit.norm.weight)] == (0.5, 0.0)
    assert rate[id(vit.patch_embed.proj.weight)] == (0.125, 0.1)
    assert rate[id(vit.pos_embed)] == (0.125, 0.0)


def test_layer_decay_leaves_out_what_is_frozen():
    model = segmentor(backbone=dict(type="TimmViT", model_name="locatvit_tiny", model_args=TINY, trainable="none"))
    wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1.0))
    optimizer = TimmLayerDecay(wrapper, dict(layer_decay=0.5))(model).optimizer
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.decode_head.parameters()))


def test_a_draw_survives_a_worker_and_a_concatenated_set():
    draw = pickle.loads(pickle.dumps(Draw(7, (0, 3)))) - 5
    assert draw == 2 and draw.entropy == (0, 3)


def test_a_sampler_that_skipped_goes_on_where_it_would_have_been():
    import itertools

    whole = [(int(d), d.entropy) for d in itertools.islice(iter(DrawSampler(range(5), seed=3)), 12)]
    assert len({entropy for _, entropy in whole}) == 12
    sampler = DrawSampler(range(5), seed=3)
    if not hasattr(super(DrawSampler, sampler), "skip"):
        pytest.skip("upstream's loop reads the images that it skips")
    sampler.skip(7)
    assert [(int(d), d.entropy) for d in itertools.islice(iter(sampler), 5)] == whole[7:]


def stacks(monkeypatch, *names):
    versions = {name: "1.0" for name in names}
    monkeypatch.setattr(_mmseg_compat, "installed", versions.get)
    _mmseg_compat.cure.cache_clear()


def test_both_stacks_at_once_are_refused(monkeypatch):
    stacks(monkeypatch, _mmseg_compat.FORK, _mmseg_compat.UPSTREAM)
    with pytest.raises(UserError, match=r"both installed and overwrite each other"):
        _mmseg_compat.cure()
    _mmseg_compat.cure.cache_clear()


def test_a_missing_stack_names_the_extra(monkeypatch):
    stacks(monkeypatch)
    find = _mmseg_compat.importlib.util.find_spec
    monkeypatch.setattr(_mmseg_compat.importlib.util, "find_spec", lambda name: None if name == "mmseg" else find(name))
    with pytest.raises(MissingExtra, match=r"needs `mmseg`.*timm-locat\[seg\]"):
        _mmseg_compat.cure()
    _mmseg_compat.cure.cache_clear()


def test_a_stock_base_is_found_and_a_missing_one_is_told():
    assert "ADE20KDataset" in Path(_mmseg_compat.base("datasets/ade20k.py")).read_text()
    with pytest.raises(UserError, match=r"has no base config datasets/ade21k.py"):
        _mmseg_compat.base("datasets/ade21k.py")


def test_a_checkpoint_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return getattr, (str, "format")

    torch.save({"state_dict": {}, "meta": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pth", weights_only=True)


def test_importing_the_package_does_not_import_mmsegmentation():
    code = "import sys, timm_locat; print([m for m in ('mmseg', 'mmcv', 'mmengine', 'cv2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_is_registered():
    from mmseg.registry import MODELS

    assert all(MODELS.get(name) is not None for name in mmseg_backbone.__all__ if name != "TimmLayerDecay")
