"""Measure the attention of a whole model over many images, keeping no map."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.locality.conventions import Conventions
from timm_locat.locality.measures import (
    GAUSSIANS,
    RowSums,
    Tally,
    measure,
    neighbourhood_recall,
    row_measures,
    row_sums,
)
from timm_locat.locality.places import Places, image_size
from timm_locat.locality.result import Locality
from timm_locat.locality.watch import AttentionLayer, Block, attention_layers, model_name, watch

__all__ = ["fixed_maps", "mean_attention", "record", "run_watched"]


def record(
    model: nn.Module,
    batches: Iterable[Tensor] = (),
    conventions: Conventions | None = None,
    *,
    recall: bool = False,
    permutation: Sequence[int] | Tensor | None = None,
) -> Locality:
    """Every measure of every head of a timm model, averaged over images.

    The model is used as it is, in eval mode and without gradients; its mode and hooks are put back. Its head is not
    run. Attention is computed once, in blocks that are measured and dropped; see `timm_locat.locality.watch`. A model
    whose layers all have an attention that does not depend on the image needs none: `batches` is not looked at.

    Args:
        model: Any timm model with attention that can be read.
        batches: (B, C, height, width) floating-point images, normalised as the model expects, all of one size; of a
            tuple (as data loaders give) the first. They are moved to the model's device and type.
        conventions: What the numbers mean; the default ones when None.
        recall: Measure `neighbourhood_recall` as well, which keeps one N x N mean map for each head meanwhile.
        permutation: Of the patches that the model is shown; see `neighbourhood_recall`.

    Raises:
        UserError: The model cannot be read (the sentence names why), or the images are none, not floating-point or
            of several sizes.
    """
    layers = attention_layers(model)
    recorder = _Recorder(model, layers, conventions or Conventions())
    means = _Means(layers, recorder.places) if recall else None

    def receive(block: Block) -> None:
        if means is not None:
            means.receive(block)  # first, because measuring overwrites the block
        recorder.receive(block)

    with recorder.reading_gaussians():
        run_watched(model, layers, batches, recorder.places, receive, recorder.finish)
    result = recorder.result()
    if means is not None:
        found = [
            neighbourhood_recall(attention, layout.grid, permutation)
            for attention, layout in zip(means.maps(), recorder.layouts(), strict=True)
        ]
        result.values["neighbourhood_recall"] = found
    return result


def mean_attention(model: nn.Module, batches: Iterable[Tensor] = ()) -> list[Tensor]:
    """Attention between patches, averaged over images.

    Args:
        model: As for `record`.
        batches: The same.

    Returns:
        For each layer (h, N, N) float32 on the CPU. What a patch pays to prefix tokens is missing from its row. Of
        attention within windows, N are the patches of a window, and the average is over windows as well.

    Raises:
        UserError: As for `record`.
    """
    layers = attention_layers(model)
    means = _Means(layers, Places(model, Conventions()))
    run_watched(model, layers, batches, means.places, means.receive)
    return means.maps()


def run_watched(
    model: nn.Module,
    layers: list[AttentionLayer],
    batches: Iterable[Tensor],
    places: Places,
    receive: Callable[[Block], None],
    finish: Callable[[int], None] = lambda images: None,
) -> None:
    """Show the images to the model; all attention goes to `receive`, the size of a batch that is done to `finish`.

    Nothing is run where no layer depends on the images.
    """
    if not hasattr(model, "forward_features"):
        raise UserError(f"expected a timm model, got {model_name(model)}; of a wrapper, pass the model inside")
    if all(layer.fixed for layer in layers):
        places.set_size(image_size(model))
        return
    parameter = next(model.parameters())
    with _evaluating(model):
        for batch in batches:
            images = batch[0] if isinstance(batch, tuple | list) else batch
            if not images.is_floating_point():
                raise UserError(f"images must be normalised floating-point numbers, got {images.dtype}")
            places.set_size(tuple(images.shape[-2:]))
            with torch.no_grad(), watch(model, layers, receive):
                model.forward_features(images.to(parameter.device, parameter.dtype))
            finish(len(images))
    if places.size is None:
        raise UserError("there were no images to measure attention on")


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
        self.places = Places(model, conventions)
        self.images = 0
        self.tallies = [Tally() for _ in layers]
        self.gaussians: dict[int, Tally] = {}
        self.layer: AttentionLayer | None = None  # whose blocks are coming in
        self.pending: list[RowSums] = []  # of that layer
        self.rows = [0] * len(layers)  # query patches answered in the batch at hand

    def receive(self, block: Block) -> None:
        """Sum up the rows of a block that belong to patches."""
        if block.layer is not self.layer:
            self._flush()
            self.layer = block.layer
        layout = self.places.of(block.layer, block.logits.shape[-1], block.logits.device)
        skip = max(0, layout.num_prefix - block.first_row)
        if skip < block.logits.shape[2]:
            first = block.first_row + skip - layout.num_prefix
            self.pending.append(row_sums(block.logits[:, :, skip:], block.weights[:, :, skip:], layout, first))

    def _flush(self) -> None:
        """Take the rows of a layer into its means."""
        if self.pending:
            rows = RowSums(*(torch.cat(parts, dim=1) for parts in zip(*self.pending, strict=True)))
            index = self.layer.index
            self.tallies[index].add(row_measures(rows, self.places.layouts[index], self.conventions))
            self.rows[index] += rows.own.shape[1]
            self.pending.clear()

    def finish(self, images: int) -> None:
        """A batch of so many images is through; every layer must have answered all of it."""
        self._flush()
        self.images += images
        for layer in self.layers:
            if layer.fixed:
                continue
            rows, self.rows[layer.index] = self.rows[layer.index], 0
            if not rows:
                raise UserError(f"cannot read attention of {layer.name}: the model did not run it")
            expected = images * self.places.queries(layer)
            if rows != expected:
                raise UserError(
                    f"cannot read attention of {layer.name}: it answered {rows} queries of patches, expected {expected}"
                )

    @contextmanager
    def reading_gaussians(self) -> Iterator[None]:
        """Read learned Gaussians of layers that have them.

        A module inside of an attention layer has them if it has a method `gaussians`, which takes the arguments of its
        `forward` and returns strength and standard deviation along rows and columns, (B, h, N) each.
        """
        handles = []
        for layer in self.layers:
            for module in layer.module.modules():
                if hasattr(module, "gaussians"):
                    tally = self.gaussians.setdefault(layer.index, Tally())
                    handles.append(
                        module.register_forward_pre_hook(lambda m, args, t=tally: _add_gaussians(t, m, args))
                    )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def layouts(self) -> list:
        return [self.places.layouts[layer.index] for layer in self.layers]

    def result(self) -> Locality:
        means = []
        for layer, tally in zip(self.layers, self.tallies, strict=True):
            mean = self._fixed(layer) if layer.fixed else tally.means()
            if not all(value is None or math.isfinite(value) for heads in mean.values() for value in heads):
                raise UserError(f"attention of {layer.name} is not finite; its weights or the images are not")
            means.append(mean)
        gaussians = None
        if self.gaussians:
            found = [
                self.gaussians[layer.index].means() if layer.index in self.gaussians else None for layer in self.layers
            ]
            gaussians = {
                name: [g[name] if g else [None] * len(m["mad"]) for g, m in zip(found, means, strict=True)]
                for name in GAUSSIANS
            }
        return Locality(
            model=model_name(self.model),
            conventions=self.conventions,
            images=self.images,
            size=self.places.size,
            layers=tuple(layer.name for layer in self.layers),
            grids=tuple(layout.grid for layout in self.layouts()),
            num_prefix=getattr(self.model, "num_prefix_tokens", 0),
            values={name: [mean[name] for mean in means] for name in means[0]},
            gaussians=gaussians,
        )

    def _fixed(self, layer: AttentionLayer) -> dict[str, list[float | None]]:
        """Measures of a layer that tells its attention."""
        maps = fixed_maps(layer)
        layout = self.places.of(layer, maps.shape[-1], maps.device)
        size = self.places.size
        patch = (size[0] / layout.grid[0], size[1] / layout.grid[1])
        return measure(
            maps, layout.grid, num_prefix=layout.num_prefix, conventions=self.conventions, patch_pixels=patch
        )


def fixed_maps(layer: AttentionLayer) -> Tensor:
    """(1, h, T, T) attention of a layer that tells it."""
    with torch.no_grad():
        return layer.module.attention_maps().detach().float().unsqueeze(0)


def _add_gaussians(tally: Tally, module: nn.Module, args: tuple) -> None:
    alpha, rows, columns = (x.transpose(0, 1).flatten(1) for x in module.gaussians(*args))
    tally.add({"alpha": (alpha, None), "sigma_rows": (rows, None), "sigma_columns": (columns, None)})


class _Means:
    """Mean maps between patches of all layers."""

    def __init__(self, layers: list[AttentionLayer], places: Places) -> None:
        self.layers = layers
        self.places = places
        self.sums: list[Tensor | None] = [None for _ in layers]
        self.counts = [0 for _ in layers]  # images (or windows) whose first row has been seen

    def receive(self, block: Block) -> None:
        """Add up a block."""
        images, heads, length, tokens = block.weights.shape
        index = block.layer.index
        if self.sums[index] is None:
            self.sums[index] = block.weights.new_zeros(heads, tokens, tokens)
        self.counts[index] += images if block.first_row == 0 else 0
        attention = block.weights / block.weights.sum(-1, keepdim=True)
        self.sums[index][:, block.first_row : block.first_row + length] += attention.sum(0)

    def maps(self) -> list[Tensor]:
        """(h, N, N) of each layer, on the CPU."""
        found = []
        for layer, total, count in zip(self.layers, self.sums, self.counts, strict=True):
            whole = fixed_maps(layer)[0] if layer.fixed else total / count
            prefix = self.places.of(layer, whole.shape[-1], whole.device).num_prefix
            found.append(whole[:, prefix:, prefix:].float().cpu())
        return found
