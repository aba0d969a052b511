"""Several processes: images are shared out, queries are gathered, and every process scores its own queries."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_rows", "exchange", "rank", "share", "total", "world"]

T = TypeVar("T")


def world() -> int:
    """Number of processes, 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if world() > 1 else 0


def share(indices: list[int]) -> list[int]:
    """This process's part of a list."""
    return indices[rank() :: world()]


def all_rows(rows: Tensor) -> list[Tensor]:
    """Every process's (n, D) rows; n may differ."""
    if world() == 1:
        return [rows]
    length = torch.tensor([len(rows)], device=rows.device)
    lengths = [torch.zeros_like(length) for _ in range(world())]
    dist.all_gather(lengths, length)
    most = max(int(n) for n in lengths)
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(world())]
    dist.all_gather(gathered, padded)
    return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]


def exchange(parcels: list[T]) -> list[T]:
    """Give parcel r to process r, and get one from every process, in their order."""
    if world() == 1:
        return parcels
    received: list[T | None] = [None] * world()
    for receiver, parcel in enumerate(parcels):
        dist.gather_object(parcel, received if receiver == rank() else None, dst=receiver)
    return received


def total(values: Tensor) -> Tensor:
    """Sum over the processes, in each of them."""
    if world() > 1:
        dist.all_reduce(values)
    return values
