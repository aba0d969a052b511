"""Reading attention out of a timm model while it runs, without editing it.

While a watched layer runs, a `TorchFunctionMode` sees its call of `scaled_dot_product_attention`, or of `softmax` where
the layer is built without the fused kernel. A fused call is answered here instead: in blocks small enough for the
cache, each handed on before it is dropped, so that attention is computed once and no map is kept. All other layers run
as they always do.

A layer may answer its queries in several calls, as long as it goes through them in order, image after image. A layer
with a kernel of its own must leave it where `torch.overrides.has_torch_function` is true, as it is meanwhile; one that
does not is refused, because its queries have no answer.

Shape letters in this file:
    B images (or windows)   h heads   L queries of one call   T keys   D head dim
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from timm.layers import Attention, AttentionRope
from timm.models import beit, swin_transformer, swin_transformer_v2
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from timm_locat.errors import UserError

__all__ = ["AttentionLayer", "Block", "attention_layers", "model_name", "watch"]

WINDOWED = (swin_transformer.WindowAttention, swin_transformer_v2.WindowAttention)
"""Layers that attend within windows, each of which arrives as an image of its own."""

READABLE = (Attention, AttentionRope, EvaAttention, ParallelScalingBlock, RelPosAttention, beit.Attention, *WINDOWED)
"""Layers of timm, and their subclasses, whose attention is one softmax of one logit per query, key and head."""

SOFTMAX = (Tensor.softmax, torch.softmax, F.softmax)

BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Size of a block of logits. It and its exponentials are to stay in the cache of a core; a GPU wants larger calls."""

MASKED = -1e4
"""Stands for a logit of -inf, whose product with an attention of 0 would not be a number; exp of it is 0."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    index: int
    """Place in the model's order, from 0."""
    name: str
    """Name of the module, such as `blocks.0.attn`."""
    module: nn.Module

    @property
    def windowed(self) -> bool:
        """It attends within windows."""
        return isinstance(self.module, WINDOWED)

    @property
    def fixed(self) -> bool:
        """It has the same attention for every image and tells it: its module has `attention_maps() -> (h, T, T)`."""
        return hasattr(self.module, "attention_maps")


@dataclass(frozen=True)
class Block:
    """Some rows of the attention of some images. The receiver may overwrite both tensors."""

    layer: AttentionLayer
    logits: Tensor
    """(b, h, rows, T) float32 or wider, less the largest of each row."""
    weights: Tensor
    """Their exponentials: the attention but for a factor for each row."""
    first_image: int
    first_row: int
    """Token index of the first query."""


def model_name(model: nn.Module) -> str:
    """timm's name of a model, or its class where it was not made by timm."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(model).__name__


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model in order: timm's (see `READABLE`), and every module with `attention_maps`.

    A model that has such a method itself tells the attention of all its layers: name -> (h, T, T).

    Raises:
        UserError: It has none that can be read; the sentence names what it has instead.
    """
    if hasattr(model, "attention_maps"):
        return [AttentionLayer(i, name, _Told(m)) for i, (name, m) in enumerate(model.attention_maps().items())]
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, READABLE) or hasattr(module, "attention_maps")
    ]
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)})
        has = f"its layers with heads are {', '.join(kinds)}" if kinds else "it has no layer with heads"
        raise UserError(f"cannot read attention of {model_name(model)}: {has}; docs/locality.md says what can be read")
    return [AttentionLayer(index, name, module) for index, (name, module) in enumerate(found)]


class _Told(nn.Module):
    """Stands for a layer whose attention the model has told."""

    def __init__(self, maps: Tensor) -> None:
        super().__init__()
        self.maps = maps

    def attention_maps(self) -> Tensor:
        return self.maps


class _Watcher(TorchFunctionMode):
    """Sees the calls of the layer that is running; see the top of this file."""

    def __init__(self, name: str, receive: Callable[[Block], None]) -> None:
        super().__init__()
        self.name = name
        self.receive = receive
        self.layer: AttentionLayer | None = None
        self.images = self.rows = 0  # answered so far by the running layer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fused = func is F.scaled_dot_product_attention
        if not (fused or func in SOFTMAX) or args[0].ndim != 4 or (self.layer is not None and self.layer.fixed):
            return func(*args, **kwargs)
        if self.layer is None:
            if args[0].shape[2] == (args[1].shape[2] if fused else args[0].shape[3]):
                raise UserError(f"cannot read all attention of {self.name}: it also attends in layers not known here")
            return func(*args, **kwargs)
        with torch.autocast(args[0].device.type, enabled=False):  # measured in float32 whatever surrounds it
            if fused:
                return self._fused(*args, **kwargs)
            self._unfused(args[0])
        return func(*args, **kwargs)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The result of the fused call; `dropout_p` is 0 in eval mode."""
        images, heads, length, dim = query.shape
        tokens = key.shape[2]
        if enable_gqa:
            key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        if is_causal:
            attn_mask = torch.ones(length, tokens, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            attn_mask = attn_mask.expand(images, heads, length, tokens)
        scale = dim**-0.5 if scale is None else scale
        # Token-major, so that joining the heads afterwards needs no copy.
        out = value.new_empty(images, length, heads, value.shape[3]).transpose(1, 2)
        for some, rows in self._blocks(query, tokens):
            logits = _exact(query[some, :, rows]) * scale @ _exact(key[some]).transpose(-2, -1)
            if attn_mask is not None:
                logits = _add_mask(logits, attn_mask[some, :, rows])
            weights = _exponentials(logits, masked=attn_mask is not None)
            total = weights.sum(-1, keepdim=True)
            out[some, :, rows] = (weights @ _exact(value[some])).div_(total)
            self.receive(Block(self.layer, logits, weights, self.images + some.start, self.rows + rows.start))
        self._answered(images, length, tokens)
        return out

    def _unfused(self, logits: Tensor) -> None:
        images, _, length, tokens = logits.shape
        for some, rows in self._blocks(logits, tokens):
            own = _exact(logits[some, :, rows]).clone()
            weights = _exponentials(own, masked=True)
            self.receive(Block(self.layer, own, weights, self.images + some.start, self.rows + rows.start))
        self._answered(images, length, tokens)

    @staticmethod
    def _blocks(queries: Tensor, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Cut the (B, h, L, ...) queries of a call into images and rows whose logits fill a block."""
        images, heads, length, _ = queries.shape
        size = BLOCK_BYTES.get(queries.device.type, BLOCK_BYTES["cpu"])
        room = max(1, size // (heads * tokens * 4))  # rows of all heads
        some, rows = max(1, room // length), min(room, length)
        for i in range(0, images, some):
            for r in range(0, length, rows):
                yield slice(i, min(i + some, images)), slice(r, min(r + rows, length))

    def _answered(self, images: int, length: int, tokens: int) -> None:
        self.rows += length
        if self.rows == tokens:
            self.images, self.rows = self.images + images, 0
        elif images > 1 or self.rows > tokens:
            self._refuse(f"answers {self.rows} of {tokens} queries of {images} images in one call")

    def start(self, layer: AttentionLayer) -> None:
        self.layer, self.images, self.rows = layer, 0, 0

    def stop(self, images: int) -> None:
        """The layer is done with so many images (or windows)."""
        if not self.layer.fixed and (self.rows or self.images != images):
            self._refuse(f"answered {self.images} of {images} images")
        self.layer = None

    def _refuse(self, what: str) -> None:
        layer = self.layer
        raise UserError(f"cannot read attention of {layer.name}, a {type(layer.module).__name__}: it {what}")


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _add_mask(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)


def _exponentials(logits: Tensor, *, masked: bool) -> Tensor:
    """exp of the logits, from which the largest of each row is taken off in place."""
    logits -= logits.amax(dim=-1, keepdim=True)
    if masked:
        logits.clamp_(min=MASKED)
    return logits.exp()


@contextmanager
def watch(model: nn.Module, layers: list[AttentionLayer], receive: Callable[[Block], None]) -> Iterator[None]:
    """Hand every block of attention of the given layers to `receive` while their model runs inside.

    Layers that tell their attention themselves (`fixed`) give no blocks.

    Args:
        model: Is to run in eval mode and without gradients.
        layers: From `attention_layers`.
        receive: Called with each block, layer after layer.

    Raises:
        UserError: The model attends in a way that cannot be followed.
    """
    watcher = _Watcher(model_name(model), receive)
    handles = []
    try:
        for layer in layers:
            handles += [
                layer.module.register_forward_pre_hook(lambda module, args, layer=layer: watcher.start(layer)),
                layer.module.register_forward_hook(lambda module, args, output: watcher.stop(len(output))),
            ]
        with watcher:
            yield
    finally:
        for handle in handles:
            handle.remove()
