"""Where the tokens of each attention layer of a timm model lie in the image."""

import torch
from torch import nn

from timm_locat.errors import UserError
from timm_locat.locality.conventions import Conventions
from timm_locat.locality.measures import Layout, make_layout
from timm_locat.locality.watch import AttentionLayer, model_name

__all__ = ["Places", "image_size", "patch_grid"]


def _embedding(model: nn.Module) -> nn.Module:
    """The module that cuts images into patches; timm's NaFlexVit calls it otherwise."""
    for name in ("patch_embed", "embeds"):
        embed = getattr(model, name, None)
        if hasattr(embed, "dynamic_feat_size"):
            return embed
    raise UserError(f"cannot place the tokens of {model_name(model)}: it has no patch embedding that tells its grid")


def patch_grid(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Patch rows and columns of an image of so many pixels."""
    return tuple(_embedding(model).dynamic_feat_size(size))


def image_size(model: nn.Module) -> tuple[int, int]:
    """Height and width in pixels that a model was built for."""
    size = getattr(_embedding(model), "img_size", None)
    if size is None:
        raise UserError(f"{model_name(model)} was not built for one image size; build it with img_size=...")
    return tuple(size)


class Places:
    """The layout of every layer for images of one size, made when it is first asked for.

    Args:
        model: A timm model.
        conventions: Say in which unit distances are.
    """

    def __init__(self, model: nn.Module, conventions: Conventions) -> None:
        self.model = model
        self.conventions = conventions
        self.size: tuple[int, int] | None = None
        self.layouts: dict[int, Layout] = {}

    def set_size(self, size: tuple[int, int]) -> None:
        """State the size of the images to come.

        Raises:
            UserError: It was another one before.
        """
        if self.size not in (None, size):
            raise UserError(f"images must all have one size, got {self.size} and {size}; resize them alike")
        self.size = size

    def of(self, layer: AttentionLayer, tokens: int, device: torch.device) -> Layout:
        """The layout of a layer of so many tokens.

        Raises:
            UserError: The tokens are not those of the patch grid behind the model's prefix tokens.
        """
        if layer.index not in self.layouts:
            self.layouts[layer.index] = self._make(layer, tokens, device)
        return self.layouts[layer.index]

    def queries(self, layer: AttentionLayer) -> int:
        """Number of query patches of an image in a layer."""
        layout = self.layouts[layer.index]
        if layer.windowed:
            rows, columns = self._block(layer).input_resolution
            return rows * columns
        return layout.grid[0] * layout.grid[1]

    def _block(self, layer: AttentionLayer) -> nn.Module:
        return self.model.get_submodule(layer.name.rpartition(".")[0])

    def _make(self, layer: AttentionLayer, tokens: int, device: torch.device) -> Layout:
        num_prefix = 0 if layer.windowed else getattr(self.model, "num_prefix_tokens", 0)
        whole = tuple(self._block(layer).input_resolution) if layer.windowed else patch_grid(self.model, self.size)
        grid = tuple(layer.module.window_size) if layer.windowed else whole
        if layer.windowed and any(side % window for side, window in zip(whole, grid, strict=True)):
            raise UserError(
                f"{layer.name} cuts {whole[0]}x{whole[1]} tokens into windows of {grid[0]}x{grid[1]}, which needs "
                "padding that would be measured as well; take another img_size"
            )
        if tokens != num_prefix + grid[0] * grid[1]:
            raise UserError(
                f"cannot place the {tokens} tokens of {layer.name}: expected {num_prefix} prefix tokens and a grid of "
                f"{grid[0]}x{grid[1]}"
            )
        patch = (self.size[0] / whole[0], self.size[1] / whole[1])
        for layout in self.layouts.values():  # layers that are alike share one
            if (layout.grid, layout.num_prefix) == (grid, num_prefix) and self.conventions.unit != "pixels":
                return layout
        return make_layout(grid, num_prefix, self.conventions, patch, device)
