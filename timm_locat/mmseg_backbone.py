"""Any timm Vision Transformer as a backbone of mmsegmentation, with what a ViT needs around it.

`custom_imports = dict(imports=["timm_locat.mmseg_backbone"])` registers:
    TimmViT            backbone: ViT, DeiT, DINOv2, Eva, DINOv3, Swin and the models of this package
    TimmSegmentor      EncoderDecoder that takes channels, mean, std and padding from the backbone
    TimmPreProcessor   its preprocessor, which also refuses masks with a class too many
    SimplePyramid      neck: four scales from one map, for heads made for convolutional networks
    PatchHead          the two-layer head of arXiv:2603.04892
    BNLinearHead       batch norm and one linear layer, as DINOv2 evaluates
    TimmLayerDecay     optimizer constructor: learning rates that fall from block to block
and, from `_mmseg_repeat`, what makes a resumed run go on as if it had never stopped.
"""

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data import resolve_model_data_config
from timm.layers import LayerNorm2d
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn import functional as F

from timm_locat._mmseg_compat import cure
from timm_locat.errors import UserError, require
from timm_locat.layers import GaussianBias
from timm_locat.models import create_any_size, dense_features

cure()

from mmcv.cnn import build_norm_layer  # noqa: E402
from mmengine.logging import print_log  # noqa: E402
from mmengine.model import BaseModule  # noqa: E402
from mmengine.optim import DefaultOptimWrapperConstructor  # noqa: E402
from mmseg.models.data_preprocessor import SegDataPreProcessor  # noqa: E402
from mmseg.models.decode_heads.decode_head import BaseDecodeHead  # noqa: E402
from mmseg.models.segmentors import EncoderDecoder  # noqa: E402
from mmseg.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS  # noqa: E402

from timm_locat import _mmseg_repeat  # noqa: E402, F401  (registers)

__all__ = [
    "BNLinearHead",
    "PatchHead",
    "SimplePyramid",
    "TimmLayerDecay",
    "TimmPreProcessor",
    "TimmSegmentor",
    "TimmViT",
]


@MODELS.register_module()
class TimmViT(BaseModule):
    """Feature maps of a timm model.

    Args:
        model_name: A timm name, `local-dir:FOLDER` (a run folder, say) or `hf-hub:OWNER/NAME`.
        model_args: Build arguments, such as `dict(img_size=512, drop_path_rate=0.1)`. Models that can take images of
            any size are built so (`dynamic_img_size`).
        pretrained: Load the weights that the name stands for.
        checkpoint: A safetensors file, or a run folder (one with `model.safetensors`), whose weights to load instead.
        out_indices: Blocks (stages, for Swin) whose maps to return, counted from 0; negative from the last.
        norm: Apply the final norm to each map. Without effect on a model that norms after pooling only.
        features: `after_prr` refines the last map as the classifier would see it; needs `out_indices=(-1,)`.
        trainable: `all`; `none` freezes the backbone in evaluation mode; `locality` trains the parameters of the
            Gaussians only.
        grad_checkpointing: Recompute the blocks in the backward pass.
        init_cfg: Not used; mmengine passes it. Weights come from `pretrained` or `checkpoint`.

    Raises:
        UserError: No such model, weights of another model, a block that it does not have, or an image size that it
            cannot take.
    """

    def __init__(
        self,
        model_name: str,
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        checkpoint: str | None = None,
        out_indices: Sequence[int] = (-1,),
        norm: bool = True,
        features: Literal["before_prr", "after_prr"] = "before_prr",
        trainable: Literal["all", "none", "locality"] = "all",
        grad_checkpointing: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.vit = build(model_name, pretrained=pretrained, **(model_args or {}))
        if checkpoint is not None:
            load_weights(self.vit, Path(checkpoint.removeprefix("local-dir:")))
        self.strides = strides(self.vit)
        self.out_indices, self.norm, self.features, self.trainable = tuple(out_indices), norm, features, trainable
        self._check(model_name)
        self.channels = tuple(self.vit.feature_info[i]["num_chs"] for i in self.out_indices)
        if getattr(self.vit, "gaug", False):
            # Decides what the learned Gaussians mean, and belongs to the weights that were loaded, not to the config.
            self.register_buffer("gaug_grid", torch.tensor(self.vit.gaug_grid))
        if grad_checkpointing:
            self.vit.set_grad_checkpointing(True)
        self._freeze()
        if trainable != "all" and not pretrained and checkpoint is None:
            print_log(
                f"{model_name} is frozen with random weights until a checkpoint is loaded", "current", logging.WARNING
            )

    def _check(self, model_name: str) -> None:
        if self.features not in ("before_prr", "after_prr"):
            raise UserError(f"features must be 'before_prr' or 'after_prr', got {self.features!r}")
        if self.trainable not in ("all", "none", "locality"):
            raise UserError(f"trainable must be 'all', 'none' or 'locality', got {self.trainable!r}")
        blocks = len(self.vit.feature_info)
        if not self.out_indices or not all(-blocks <= i < blocks for i in self.out_indices):
            raise UserError(f"{model_name} has {blocks} blocks, out_indices={self.out_indices} names others")
        if self.features == "after_prr":
            if not hasattr(self.vit, "refine") or self.out_indices not in ((-1,), (blocks - 1,)):
                raise UserError(
                    "features='after_prr' needs a model with PRR, such as locatvit_base, and out_indices=(-1,)"
                )
            return
        # What no map depends on would have no gradient, which distributed training takes for an error.
        self.vit.prune_intermediate_layers(list(self.out_indices), prune_norm=not self.norm, prune_head=True)

    def _freeze(self) -> None:
        if self.trainable == "all":
            return
        self.vit.requires_grad_(False)
        if self.trainable == "locality":
            gaussians = [module for module in self.vit.modules() if isinstance(module, GaussianBias)]
            if not gaussians:
                raise UserError(f"trainable='locality' needs a model with GAug, got {type(self.vit).__name__}")
            for module in gaussians:
                module.requires_grad_(True)

    def train(self, mode: bool = True) -> "TimmViT":
        """Training mode, in which a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if self.trainable == "none":
            self.vit.eval()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if hasattr(self, "gaug_grid"):
            self.vit.set_gaug_grid(tuple(self.gaug_grid.tolist()))

    def init_weights(self) -> None:
        """Nothing: the weights are there since construction, and mmengine would log a line for each of them."""
        self._is_init = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Maps of a batch.

        Args:
            x: (B, 3, height, width), normalised. Sizes that are no multiple of the stride are padded with zeros, right
                and bottom; in mmsegmentation the preprocessor has done so, and crops the logits again.

        Returns:
            One (B, C, H, W) map for each of `out_indices`.
        """
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % self.strides[1], 0, -height % self.strides[0]))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trainable != "none"):
            if self.features == "after_prr":
                return (dense_features(self.vit, x, "after_prr"),)
            maps = self.vit.forward_intermediates(
                x, indices=list(self.out_indices), norm=self.norm, output_fmt="NCHW", intermediates_only=True
            )
        return tuple(maps)


def build(model_name: str, *, pretrained: bool = False, **model_args: Any) -> nn.Module:
    """A timm model without classifier, for images of any size where its class can take them."""
    return create_any_size(model_name, pretrained=pretrained, **{"num_classes": 0, **model_args})


def strides(model: nn.Module) -> tuple[int, int]:
    """Height and width in pixels to whose multiples images are padded: a ViT's patch, a pyramid's coarsest cell."""
    coarsest = max(info["reduction"] for info in model.feature_info)
    height, width = getattr(getattr(model, "patch_embed", None), "patch_size", (coarsest, coarsest))
    return (height, width) if max(height, width) == coarsest else (coarsest, coarsest)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint of the same architecture; its classifier is left out, everything else has to fit.

    Args:
        model: From `build`.
        path: A safetensors file, or a folder that holds `model.safetensors`.

    Raises:
        UserError: No such file, no safetensors file, or weights of another model.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no checkpoint {file}; give a safetensors file or a run folder")
    load_file = require("safetensors.torch", "hub", "reading a checkpoint").load_file
    try:
        state = load_file(file)
    except Exception as err:  # safetensors' own error types are not of one base
        raise UserError(f"{file} is no readable safetensors file: {err}") from err
    convert = getattr(importlib.import_module(type(model).__module__), "checkpoint_filter_fn", None)
    if convert is not None:
        state = convert(state, model)
    own = model.state_dict()
    classifier = tuple(model.pretrained_cfg.get("classifier") or ("head",))
    missing = sorted(own.keys() - state.keys())
    extra = sorted(name for name in state.keys() - own.keys() if not name.startswith(classifier))
    wrong = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    if missing or extra or wrong:
        faults = ((missing, "not in it"), (extra, "unknown to the model"), (wrong, "of another shape"))
        told = ", ".join(f"{len(names)} {what} ({names[0]})" for names, what in faults if names)
        raise UserError(f"{file} holds the weights of another model than {type(model).__name__} as configured: {told}")
    model.load_state_dict({name: state[name] for name in own})


@MODELS.register_module()
class TimmPreProcessor(SegDataPreProcessor):
    """mmsegmentation's preprocessor, which also refuses masks whose classes the head does not have.

    The stock metric drops such pixels without a word, and the stock loss stops with an index error, on CUDA long after.

    Args:
        num_classes: Classes of the head; None checks nothing.
        kwargs: Of `SegDataPreProcessor`; its `seg_pad_val` is the label that is ignored.
    """

    def __init__(self, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes

    def forward(self, data: dict, training: bool = False) -> dict[str, Any]:
        """As in the base class; see there."""
        if self.num_classes is not None:
            for sample in data.get("data_samples") or ():
                if "gt_sem_seg" in sample:
                    self._check(sample)
        return super().forward(data, training)

    def _check(self, sample: Any) -> None:
        label = sample.gt_sem_seg.data
        highest = int(label.masked_fill(label == self.seg_pad_val, 0).max())
        if highest >= self.num_classes:
            mask = sample.metainfo.get("seg_map_path", "a mask")
            raise UserError(
                f"{mask} holds class {highest}, but the head has classes 0 to {self.num_classes - 1}, and "
                f"{self.seg_pad_val} for what is ignored; is it the mask of another data set, or another flavour of it?"
            )


@MODELS.register_module()
class TimmSegmentor(EncoderDecoder):
    """`EncoderDecoder` that reads from a `TimmViT` what configs repeat by hand and get wrong.

    What a config says stands; what it leaves out is filled in: `in_channels` of `SimplePyramid` and of the heads, and
    mean, std and padding of the preprocessor, from the model's `pretrained_cfg`. A checkpoint has to fit as a whole.
    """

    def __init__(
        self,
        backbone: dict,
        decode_head: dict,
        neck: dict | None = None,
        auxiliary_head: dict | list[dict] | None = None,
        data_preprocessor: dict | None = None,
        **kwargs: Any,
    ) -> None:
        body = MODELS.build(backbone)
        channels = body.channels
        if neck is not None:
            neck_module = MODELS.build({**_in_channels(neck, channels, "SimplePyramid"), **neck})
            channels = getattr(neck_module, "channels", None)
        heads = auxiliary_head if isinstance(auxiliary_head, list) else [auxiliary_head]
        filled = [head and {**_head_channels(head, channels), **head} for head in heads]
        super().__init__(
            backbone={"type": lambda: body},
            neck=neck and {"type": lambda: neck_module},
            decode_head={**_head_channels(decode_head, channels), **decode_head},
            auxiliary_head=filled if isinstance(auxiliary_head, list) else filled[0],
            data_preprocessor={
                **preprocessing(body),
                "num_classes": decode_head["num_classes"],
                **(data_preprocessor or {}),
            },
            **kwargs,
        )
        self.register_load_state_dict_pre_hook(_refuse_other_weights)


def _in_channels(neck: dict, channels: tuple[int, ...], kind: str) -> dict[str, int]:
    return {"in_channels": channels[-1]} if neck["type"] in (kind, f"mmseg.{kind}") else {}


def _head_channels(head: dict, channels: tuple[int, ...] | None) -> dict[str, Any]:
    if channels is None:
        return {}
    index = head.get("in_index", -1)
    wanted = channels[index] if isinstance(index, int) else [channels[i] for i in index]
    return {"in_channels": wanted}


def preprocessing(backbone: TimmViT) -> dict[str, Any]:
    """Settings of `TimmPreProcessor` for a backbone: its mean and std in pixel values, and padding to whole patches."""
    data = resolve_model_data_config(backbone.vit)
    return {
        "type": TimmPreProcessor,
        "mean": [255 * value for value in data["mean"]],
        "std": [255 * value for value in data["std"]],
        "bgr_to_rgb": True,
        "pad_val": 0,
        "seg_pad_val": 255,
        "test_cfg": {"size_divisor": max(backbone.strides)},
    }


def _refuse_other_weights(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """mmengine loads what fits, says the rest in its log and goes on with random weights."""
    given = {name.removeprefix(prefix): value.shape for name, value in state.items() if name.startswith(prefix)}
    own = {name: value.shape for name, value in module.state_dict().items()}
    differ = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if differ:
        name = differ[0]
        sizes = [tuple(side[name]) if name in side else "nothing" for side in (given, own)]
        raise UserError(
            f"the checkpoint is of another model than the config: {len(differ)} tensors differ, the first of them "
            f"{name}, {sizes[0]} in the checkpoint and {sizes[1]} in the model; pass the config it was trained with"
        )


@MODELS.register_module()
class SimplePyramid(BaseModule):
    """Four maps of 4, 2, 1 and 1/2 times the resolution of the last one.

    Source: "Exploring Plain Vision Transformer Backbones for Object Detection", arXiv:2203.16527, section 3: transposed
    convolutions up, max pooling down, then a 1x1 and a 3x3 convolution, each followed by LayerNorm.

    Args:
        in_channels: Of the last map.
        out_channels: Of each of the four.
    """

    def __init__(self, in_channels: int, out_channels: int = 256, init_cfg: dict | None = None) -> None:
        super().__init__(init_cfg)
        self.channels = (out_channels,) * 4
        half, quarter = in_channels // 2, in_channels // 4
        up = nn.ConvTranspose2d(in_channels, half, 2, stride=2)
        self.scales = nn.ModuleList(
            [
                nn.Sequential(up, LayerNorm2d(half), nn.GELU(), nn.ConvTranspose2d(half, quarter, 2, stride=2)),
                nn.ConvTranspose2d(in_channels, half, 2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),
            ]
        )
        self.outs = nn.ModuleList(_to_out(width, out_channels) for width in (quarter, half, in_channels, in_channels))

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Last of the (B, C, H, W) maps to (B, out_channels, 4H, 4W), (.., 2H, 2W), (.., H, W), (.., ~H/2, ~W/2)."""
        return tuple(out(scale(maps[-1])) for scale, out in zip(self.scales, self.outs, strict=True))


def _to_out(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        LayerNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        LayerNorm2d(out_channels),
    )


@MODELS.register_module()
class PatchHead(BaseDecodeHead):
    """Two 1x1 convolutions: every patch is classified on its own, so that the features have to know their place.

    Source: the "1-layer MLP decoder" of arXiv:2603.04892 as its code has it: C to 512 without bias, GroupNorm with one
    group, GELU, 512 to classes; no dropout.
    """

    def __init__(self, channels: int = 512, dropout_ratio: float = 0.0, **kwargs: Any) -> None:
        super().__init__(channels=channels, dropout_ratio=dropout_ratio, **kwargs)
        self.hidden = nn.Sequential(
            nn.Conv2d(self.in_channels, channels, 1, bias=False), nn.GroupNorm(1, channels), nn.GELU()
        )

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Maps of the backbone to (B, num_classes, H, W) logits."""
        return self.cls_seg(self.hidden(self._transform_inputs(inputs)))


@MODELS.register_module()
class BNLinearHead(BaseDecodeHead):
    """Batch norm and one linear layer over the maps in `in_index`, set side by side.

    Source: the linear evaluation of DINOv2, arXiv:2304.07193.
    """

    def __init__(self, in_channels: int | Sequence[int], norm_cfg: dict | None = None, **kwargs: Any) -> None:
        width = in_channels if isinstance(in_channels, int) else sum(in_channels)
        settings = {"dropout_ratio": 0.0, "norm_cfg": norm_cfg or {"type": "SyncBN"}, **kwargs}
        super().__init__(in_channels=in_channels, channels=width, **settings)
        self.bn = build_norm_layer(self.norm_cfg, width)[1]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Maps of the backbone to (B, num_classes, H, W) logits."""
        return self.cls_seg(self.bn(self._transform_inputs(inputs)))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TimmLayerDecay(DefaultOptimWrapperConstructor):
    """The learning rate of each block is `layer_decay` times that of the next; heads and neck have the full one.

    `paramwise_cfg=dict(layer_decay=0.65)`. Blocks are what the model's own `group_matcher` says. Norms, biases and what
    the model lists in `no_weight_decay` have no weight decay. The stock constructor knows ConvNeXt, BEiT and MAE only.
    """

    def add_params(self, params: list[dict], module: nn.Module, **kwargs: Any) -> None:
        """Append the groups of all trainable parameters of a segmentor to `params`."""
        vit, weight_decay = module.backbone.vit, self.base_wd or 0.0
        layer_decay = self.paramwise_cfg.get("layer_decay", 1.0)
        exempt = getattr(vit, "no_weight_decay", set)()
        for group in param_groups_layer_decay(vit, weight_decay, no_weight_decay_list=exempt, layer_decay=layer_decay):
            # timm gives the last group of a model the full rate; here that is the segmentation head, outside of it.
            rates = {"lr": self.base_lr * layer_decay * group["lr_scale"], "weight_decay": group["weight_decay"]}
            params.append({"params": group["params"], **rates})
        in_backbone = {id(parameter) for parameter in vit.parameters()}
        rest = [p for p in module.parameters() if p.requires_grad and id(p) not in in_backbone]
        for decays in (True, False):
            chosen = [p for p in rest if (p.ndim > 1) == decays]
            if chosen:
                rates = {"lr": self.base_lr, "weight_decay": weight_decay if decays else 0.0}
                params.append({"params": chosen, **rates})
