"""Reading attention out of a timm model while it runs, without editing it and with its fused kernels left on.

While a watched layer runs, a `TorchFunctionMode` sees its call of `scaled_dot_product_attention`, or of `softmax` where
the layer is built without the fused kernel. Both tell the logits: from query, key, mask and scale, or as the argument.
They are made once more in small blocks and handed on; the layer gets its own result and never knows.

A layer may answer its queries in several calls, as long as it goes through them in order, image after image.

Shape letters in this file:
    B images (or windows)   h heads   L queries of one call   T keys   D head dim
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from timm_locat.errors import UserError

__all__ = ["AttentionLayer", "Block", "attention_layers", "watch"]

READABLE = (Attention,)
"""Layers of timm, and their subclasses, whose attention is one softmax of one logit per query, key and head."""

BLOCK_BYTES = {"cpu": 2**20}
"""Size of a block of logits. On a CPU it and its exponentials are to stay in the cache of a core."""
OTHER_BLOCK_BYTES = 2**26
"""The same on other devices, where many small calls would be slow."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    index: int
    """Place in the model's order, from 0."""
    name: str
    """Name of the module, such as `blocks.0.attn`."""
    module: nn.Module


@dataclass(frozen=True)
class Block:
    """Some rows of the attention logits of some images."""

    layer: AttentionLayer
    logits: Tensor
    """(b, h, rows, T) float32 or wider; the receiver may overwrite it."""
    first_image: int
    first_row: int
    """Token index of the first query."""
    masked: bool
    """Some logits may be -inf."""


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model in order.

    Raises:
        UserError: It has none that can be read; the sentence names what it has instead.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, READABLE)]
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)})
        has = f"its layers with heads are {', '.join(kinds)}" if kinds else "it has no layer with heads"
        raise UserError(f"cannot read attention of {type(model).__name__}: {has}; see docs/locality.md for what can be")
    return [AttentionLayer(index, name, module) for index, (name, module) in enumerate(found)]


class _Watcher(TorchFunctionMode):
    """Sees the calls of the layer that is running; see the top of this file."""

    def __init__(self, receive: Callable[[Block], None]) -> None:
        super().__init__()
        self.receive = receive
        self.layer: AttentionLayer | None = None
        self.images = self.rows = 0  # answered so far by the running layer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.layer is not None:
            if func is F.scaled_dot_product_attention:
                self._fused(*args, **(kwargs or {}))
            elif func in (Tensor.softmax, torch.softmax, F.softmax):
                self._unfused(args[0])
        return result

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
    ) -> None:
        images, heads, length, dim = query.shape
        tokens = key.shape[2]
        if enable_gqa:
            key = key.repeat_interleave(heads // key.shape[1], dim=1)
        if is_causal:
            attn_mask = torch.ones(length, tokens, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            attn_mask = attn_mask.expand(images, heads, length, tokens)
        scale = dim**-0.5 if scale is None else scale

        def logits(some: slice, rows: slice) -> Tensor:
            made = _exact(query[some, :, rows]) * scale @ _exact(key[some]).transpose(-2, -1)
            if attn_mask is None:
                return made
            mask = attn_mask[some, :, rows]
            return made.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else made.add_(mask)

        self._blocks(logits, images, heads, length, tokens, masked=attn_mask is not None)

    def _unfused(self, logits: Tensor) -> None:
        images, heads, length, tokens = logits.shape

        def copy(some: slice, rows: slice) -> Tensor:
            return _exact(logits[some, :, rows]).clone()

        self._blocks(copy, images, heads, length, tokens, masked=True)

    def _blocks(
        self,
        logits: Callable[[slice, slice], Tensor],
        images: int,
        heads: int,
        length: int,
        tokens: int,
        *,
        masked: bool,
    ) -> None:
        """Cut one call into blocks, hand them on, and keep count of what the layer has answered."""
        device = logits(slice(0, 0), slice(0, 0)).device
        room = max(1, BLOCK_BYTES.get(device.type, OTHER_BLOCK_BYTES) // (heads * tokens * 4))  # rows of all heads
        some, rows = max(1, room // length), min(room, length)
        # float32 whatever the surrounding autocast.
        with torch.autocast(device.type, enabled=False):
            for i in range(0, images, some):
                for r in range(0, length, rows):
                    here = logits(slice(i, min(i + some, images)), slice(r, min(r + rows, length)))
                    self.receive(Block(self.layer, here, self.images + i, self.rows + r, masked))
        self.rows += length
        if self.rows == tokens:
            self.images, self.rows = self.images + images, 0
        elif images > 1 or self.rows > tokens:
            self._refuse(f"answers {self.rows} of {tokens} queries of {images} images in one call")

    def start(self, layer: AttentionLayer) -> None:
        self.layer, self.images, self.rows = layer, 0, 0

    def stop(self, images: int) -> None:
        """The layer is done with a batch of so many images."""
        if self.rows or not self.images or self.images != images:
            self._refuse(f"answered {self.images} of {images} images")
        self.layer = None

    def _refuse(self, what: str) -> None:
        layer = self.layer
        raise UserError(f"cannot read attention of {layer.name}, a {type(layer.module).__name__}: it {what}")


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@contextmanager
def watch(layers: list[AttentionLayer], receive: Callable[[Block], None]) -> Iterator[None]:
    """Hand every block of attention logits of the given layers to `receive` while their model runs inside.

    Raises:
        UserError: A layer computes its attention in a way that cannot be followed.
    """
    watcher = _Watcher(receive)
    handles = []
    try:
        for layer in layers:
            handles += [
                layer.module.register_forward_pre_hook(lambda module, args, layer=layer: watcher.start(layer)),
                layer.module.register_forward_hook(lambda module, args, output: watcher.stop(len(args[0]))),
            ]
        with watcher:
            yield
    finally:
        for handle in handles:
            handle.remove()
