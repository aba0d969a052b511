"""Measure the attention of a whole model over many images, keeping no map."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.locality.conventions import Conventions
from timm_locat.locality.measures import Layout, RowSums, Tally, make_layout, row_measures, row_sums
from timm_locat.locality.result import Locality
from timm_locat.locality.watch import AttentionLayer, Block, attention_layers, watch

__all__ = ["record"]


def record(model: nn.Module, batches: Iterable[Tensor], conventions: Conventions | None = None) -> Locality:
    """Every measure of every head of a timm model, averaged over images.

    The model is used as it is, in eval mode and without gradients; its mode and hooks are put back. Its head is not
    run. Attention is recomputed block by block beside the model's own, which keeps its fused kernel.

    Args:
        model: Any timm model with attention that can be read.
        batches: (B, C, height, width) floating-point images, normalised as the model expects, all of one size; of a
            tuple (as data loaders give) the first. They are moved to the model's device and type.
        conventions: What the numbers mean; the default ones when None.

    Raises:
        UserError: The model cannot be read (the sentence names why), or the images are none, not floating-point or
            of several sizes.
    """
    layers = attention_layers(model)
    if not hasattr(model, "forward_features"):
        raise UserError(f"expected a timm model, got {type(model).__name__}; of a wrapper, pass the model inside")
    recorder = _Recorder(model, layers, conventions or Conventions())
    parameter = next(model.parameters())
    with _evaluating(model), torch.no_grad(), watch(layers, recorder.receive):
        for batch in batches:
            images = batch[0] if isinstance(batch, tuple | list) else batch
            if not images.is_floating_point():
                raise UserError(f"images must be normalised floating-point numbers, got {images.dtype}")
            recorder.start(images)
            model.forward_features(images.to(parameter.device, parameter.dtype))
            recorder.finish()
    return recorder.result()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is back in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class _Recorder:
    """Running means of all layers; what it holds does not grow with the number of images or the size of a map."""

    def __init__(self, model: nn.Module, layers: list[AttentionLayer], conventions: Conventions) -> None:
        self.model = model
        self.layers = layers
        self.conventions = conventions
        self.images = 0
        self.size: tuple[int, int] | None = None
        self.tallies = [Tally() for _ in layers]
        self.layouts: dict[int, Layout] = {}
        self.pending: list[list[RowSums]] = [[] for _ in layers]

    def start(self, images: Tensor) -> None:
        """Get ready for a batch."""
        size = tuple(images.shape[-2:])
        if self.size not in (None, size):
            raise UserError(f"images must all have one size, got {self.size} and {size}; resize them alike")
        self.size = size
        self.images += len(images)

    def receive(self, block: Block) -> None:
        """Sum up the rows of a block that belong to patches."""
        index = block.layer.index
        if index not in self.layouts:
            self.layouts[index] = self._layout(block)
        layout = self.layouts[index]
        skip = max(0, layout.num_prefix - block.first_row)
        if skip < block.logits.shape[2]:
            first = block.first_row + skip - layout.num_prefix
            self.pending[index].append(row_sums(block.logits[:, :, skip:], layout, first, masked=block.masked))

    def _layout(self, block: Block) -> Layout:
        """Where the tokens of a layer lie."""
        num_prefix = getattr(self.model, "num_prefix_tokens", 0)
        grid = tuple(self.model.patch_embed.dynamic_feat_size(self.size))
        tokens = block.logits.shape[-1]
        if tokens != num_prefix + grid[0] * grid[1]:
            raise UserError(
                f"cannot place the {tokens} tokens of {block.layer.name}: expected {num_prefix} prefix tokens and a "
                f"grid of {grid[0]}x{grid[1]}"
            )
        patch = (self.size[0] / grid[0], self.size[1] / grid[1])
        for layout in self.layouts.values():
            if layout.grid == grid:
                return layout
        return make_layout(grid, num_prefix, self.conventions, patch, block.logits.device)

    def finish(self) -> None:
        """Take the batch into the means."""
        for index, pending in enumerate(self.pending):
            if not pending:
                raise UserError(f"cannot read attention of {self.layers[index].name}: the model did not run it")
            rows = RowSums(*(torch.cat(parts, dim=1) for parts in zip(*pending, strict=True)))
            self.tallies[index].add(row_measures(rows, self.layouts[index], self.conventions))
            pending.clear()

    def result(self) -> Locality:
        if self.images == 0:
            raise UserError("there were no images to measure attention on")
        means = [tally.means() for tally in self.tallies]
        for layer, mean in zip(self.layers, means, strict=True):
            if not all(value is None or math.isfinite(value) for heads in mean.values() for value in heads):
                raise UserError(f"attention of {layer.name} is not finite; its weights or the images are not")
        return Locality(
            model=_name(self.model),
            conventions=self.conventions,
            images=self.images,
            size=self.size,
            layers=tuple(layer.name for layer in self.layers),
            grids=tuple(self.layouts[layer.index].grid for layer in self.layers),
            num_prefix=getattr(self.model, "num_prefix_tokens", 0),
            values={name: [mean[name] for mean in means] for name in means[0]},
        )


def _name(model: nn.Module) -> str:
    """timm's name of a model, or its class where it was not made by timm."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(model).__name__
