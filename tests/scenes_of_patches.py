"""Made-up features and masks for retrieval: patches look like their commonest class, plus noise."""

import torch

from eval.hummingbird import ArraySource, Segmentation


def made_up(images=12, grid=(4, 6), patch=4, classes=5, width=8, noise=1.0, seed=0, ignore_index=None):
    """(N, D, H, W) maps and (N, height, width) masks of rectangles on class 0; sides of the grid differ."""
    g = torch.Generator().manual_seed(seed)
    size = grid[0] * patch, grid[1] * patch
    masks = torch.zeros(images, *size, dtype=torch.long)
    for mask in masks:
        for _ in range(3):
            top, left = (int(torch.randint(0, side - 3, (1,), generator=g)) for side in size)
            label = int(torch.randint(0, classes, (1,), generator=g))
            mask[top : top + size[0] // 2, left : left + size[1] // 2] = label
        if ignore_index is not None:
            mask[: patch + 1, : 2 * patch] = ignore_index
    looks = torch.randn(classes + 1, width, generator=torch.Generator().manual_seed(99))
    corners = masks[:, patch // 2 :: patch, patch // 2 :: patch].clamp_max(classes)
    maps = looks[corners].permute(0, 3, 1, 2) + noise * torch.randn(images, width, *grid, generator=g)
    return maps.contiguous(), masks


def source(arrays, batch=5):
    return ArraySource(*arrays, batch)


def task(protocol, classes=5, ignore_index=None):
    return Segmentation(protocol, [f"class {c}" for c in range(classes)], ignore_index)
