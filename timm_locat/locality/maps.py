"""Attention maps of chosen query patches of one image, and their picture over it."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from timm_locat.errors import UserError
from timm_locat.locality.conventions import Conventions
from timm_locat.locality.places import Places
from timm_locat.locality.plots import new_figure, save_png
from timm_locat.locality.recorder import fixed_maps, run_watched
from timm_locat.locality.watch import Block, attention_layers

__all__ = ["draw_maps", "query_maps"]


def query_maps(model: nn.Module, image: Tensor, queries: Sequence[tuple[int, int]]) -> list[Tensor]:
    """What some patches of an image attend to, in every layer.

    Args:
        model: As for `record`; attention within windows is not supported.
        image: (C, height, width), normalised as the model expects.
        queries: Row and column of each query patch.

    Returns:
        For each layer (h, queries, rows, columns): the attention paid to patches. What is missing to 1 is paid to
        prefix tokens.

    Raises:
        UserError: The model cannot be read, or a query lies outside of its grid.
    """
    layers = attention_layers(model)
    if any(layer.windowed for layer in layers):
        raise UserError("maps over an image need attention over the whole image, not within windows")
    places = Places(model, Conventions())
    rows: list[dict[int, Tensor]] = [{} for _ in layers]

    def wanted(layout) -> list[int]:
        for row, column in queries:
            if not (0 <= row < layout.grid[0] and 0 <= column < layout.grid[1]):
                raise UserError(f"there is no patch ({row}, {column}) in a grid of {layout.grid[0]}x{layout.grid[1]}")
        return [layout.num_prefix + row * layout.grid[1] + column for row, column in queries]

    def receive(block: Block) -> None:
        layout = places.of(block.layer, block.weights.shape[-1], block.weights.device)
        for token in wanted(layout):
            if 0 <= token - block.first_row < block.weights.shape[2]:
                weights = block.weights[0, :, token - block.first_row]
                rows[block.layer.index][token] = weights / weights.sum(-1, keepdim=True)

    run_watched(model, layers, [image.unsqueeze(0)], places, receive)
    found = []
    for layer, seen in zip(layers, rows, strict=True):
        if layer.fixed:
            whole = fixed_maps(layer)[0]
            seen = {token: whole[:, token] for token in range(whole.shape[1])}
        layout = places.of(layer, next(iter(seen.values())).shape[-1], torch.device("cpu"))
        picked = torch.stack([seen[token] for token in wanted(layout)], dim=1)
        found.append(picked[..., layout.num_prefix :].unflatten(-1, layout.grid).float().cpu())
    return found


def draw_maps(
    maps: Sequence[Tensor],
    pixels: Tensor,
    queries: Sequence[tuple[int, int]],
    path: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    title: str = "",
) -> None:
    """Attention of the query patches over the image as a PNG: a row for each query, a column for each layer.

    Heads are averaged. Each map is shown from 0 to its own largest value, which stands under it.

    Args:
        maps: From `query_maps`.
        pixels: uint8 (3, height, width), the image as it looks.
        queries: Those of the maps.
        path: Ends in `.png`.
        layers: Which layers to show; at most 6, spread evenly, when None.
        title: Says which model and image it is.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    if layers is None:
        count = min(6, len(maps))
        layers = sorted({round(i * (len(maps) - 1) / max(1, count - 1)) for i in range(count)})
    figure = new_figure(1.6 * (len(layers) + 1), 1.75 * len(queries) + 0.5)
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(queries), len(layers) + 1, squeeze=False)
    picture = pixels.permute(1, 2, 0).cpu().numpy()
    high, wide = pixels.shape[1:]
    grid = maps[0].shape[-2:]
    for i, (row, column) in enumerate(queries):
        # The corners of the query patch in pixels; imshow puts the middle of the first pixel at 0.
        top, left = row * high / grid[0] - 0.5, column * wide / grid[1] - 0.5
        for axis, layer in zip(axes[i], [None, *layers], strict=True):
            axis.imshow(picture, interpolation="nearest")
            if layer is not None:
                attention = maps[layer][:, i].mean(0)
                extent = (-0.5, wide - 0.5, high - 0.5, -0.5)
                axis.imshow(attention.numpy(), cmap="magma", vmin=0, alpha=0.75, extent=extent, interpolation="nearest")
                axis.set_xlabel(f"up to {attention.max():.3f}", fontsize=7, labelpad=2)
                axis.set_title(f"layer {layer}" if i == 0 else "", fontsize=8)
            box = axis.add_patch(_rectangle(left, top, wide / grid[1], high / grid[0]))
            box.set_clip_on(False)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[i][0].set_ylabel(f"row {row}, column {column}", fontsize=7)
    save_png(figure, path)


def _rectangle(left: float, top: float, width: float, height: float):
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, fill=False, edgecolor="#56B4E9", linewidth=1.5)
