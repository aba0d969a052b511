"""Exact nearest neighbours of many queries in a bank that arrives in blocks, and the bank as something to search.

All queries are known ahead, so nothing needs an index: a block of rows passes by all queries, a running list keeps the
best k of each, and the block is dropped. Memory does not depend on how many rows pass. Equal scores go to the lower id.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from timm_locat.errors import UserError, require

__all__ = ["ExactBank", "FaissExact", "FaissIvfPq", "Knn", "RunningTopK", "Search", "TorchExact", "merge_lists"]

Distance = Literal["cosine", "l2"]
Tile = tuple[slice, Tensor, Tensor]


class Search(Protocol):
    """A bank to search: the three methods that an index or a vector database has to offer."""

    def add(self, rows: Tensor, ids: Tensor) -> None:
        """Take in (n, D) rows and their (n,) int64 ids."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(Q, k) scores, highest first, and ids of the k best rows of each of (Q, D) queries; k is at most `len`.

        A score is the inner product for cosine (all vectors have length 1), and for l2 what is left of the negative
        squared distance without the query's own square: 2 q.r - |r|^2.
        """

    def __len__(self) -> int:
        """Number of rows."""


class Knn(Protocol):
    """Exact search of one block of rows."""

    block_rows: int
    """Rows of a block; fewer only at the end of a bank."""

    def tiles(self, queries: Tensor, block: Tensor, k: int) -> Iterator[Tile]:
        """For slices of the queries, the scores and positions in the block of the min(k, len(block)) best rows."""


class TorchExact:
    """Matrix product and top-k, on any device that torch has.

    Args:
        distance: What the scores are.
        shortlist: Take 4k candidates by a bfloat16 product and rank them again in float32. A GPU gains by it, and it
            finds 0.9995 of the neighbours or more; None does so on CUDA only.
    """

    block_rows = 16_384
    query_tile = 1024

    def __init__(self, distance: Distance = "cosine", *, shortlist: bool | None = None) -> None:
        self.distance, self.shortlist = distance, shortlist
        self._scores = torch.empty(0)

    def tiles(self, queries: Tensor, block: Tensor, k: int) -> Iterator[Tile]:
        rows = len(block)
        # A multiple of 64 columns spares the product its edges, where equal rows could get unequal last bits.
        block = F.pad(block.float(), (0, 0, 0, -rows % 64))
        squares = block.square().sum(1) if self.distance == "l2" else None
        shortlist = queries.is_cuda if self.shortlist is None else self.shortlist
        coarse = block.bfloat16() if shortlist else None
        for start in range(0, len(queries), self.query_tile):
            part = slice(start, min(start + self.query_tile, len(queries)))
            tile = queries[part].float()
            if coarse is None:
                scores, places = _top(self._product(tile, block, squares)[:, :rows], k)
            else:
                rough = (tile.bfloat16() @ coarse.T).float()
                rough = rough if squares is None else rough.mul_(2).sub_(squares)
                places = rough[:, :rows].topk(min(4 * k, rows)).indices.sort(1).values
                fine = torch.bmm(block[places], tile[:, :, None])[:, :, 0]
                fine = fine if squares is None else fine.mul_(2).sub_(squares[places])
                scores, best = _top(fine, k)
                places = places.gather(1, best)
            yield part, scores, places

    def _product(self, tile: Tensor, block: Tensor, squares: Tensor | None) -> Tensor:
        shape = (len(tile), len(block))
        if self._scores.device != tile.device or self._scores.numel() < shape[0] * shape[1]:
            self._scores = torch.empty(shape[0] * shape[1], device=tile.device)
        scores = self._scores[: shape[0] * shape[1]].view(shape)
        torch.mm(tile, block.T, out=scores)
        return scores if squares is None else scores.mul_(2).sub_(squares)


class FaissExact:
    """faiss's exact search of raw arrays, without an index and without a copy, on the CPU.

    Equal scores come in faiss's order where they straddle the k-th place.
    """

    block_rows = 131_072

    def __init__(self, distance: Distance = "cosine") -> None:
        self.distance = distance
        self._faiss = require("faiss", "faiss", "--engine faiss")

    def tiles(self, queries: Tensor, block: Tensor, k: int) -> Iterator[Tile]:
        if queries.is_cuda:
            raise UserError("--engine faiss searches on the CPU; use --device cpu, or --engine torch on CUDA")
        faiss = self._faiss
        metric = faiss.METRIC_L2 if self.distance == "l2" else faiss.METRIC_INNER_PRODUCT
        wide = queries.float()
        found, places = faiss.knn(wide.numpy(), block.float().numpy(), min(k, len(block)), metric=metric)
        scores = torch.from_numpy(found)
        if self.distance == "l2":
            scores = wide.square().sum(1, keepdim=True) - scores
        yield slice(0, len(queries)), scores, torch.from_numpy(places)


class FaissIvfPq:
    """A `Search` by inverted lists and 4 bit product codes, ranked again by float16 rows: approximate, on the CPU.

    For banks above about 10^6 rows. It is built at the first search, and cannot grow after that.

    Args:
        distance: What the scores are; cosine only.
        probes: Lists that a query looks into.
        candidates: Rows that are ranked again, as a multiple of k.
    """

    def __init__(self, distance: Distance = "cosine", *, probes: int = 64, candidates: int = 8) -> None:
        if distance != "cosine":
            raise UserError(f"--engine faiss-ivfpq searches by cosine, and this protocol by {distance}; take another")
        self._faiss = require("faiss", "faiss", "--engine faiss-ivfpq")
        self.probes, self.candidates = probes, candidates
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._index = None
        self._ids = torch.empty(0, dtype=torch.int64)

    def add(self, rows: Tensor, ids: Tensor) -> None:
        if self._index is not None:
            raise ValueError("rows must be added before the first search")
        self._rows.append((rows.cpu(), ids))

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self._index is None:
            self._build()
        options = self._faiss.IndexRefineSearchParameters(
            k_factor=self.candidates, base_index_params=self._faiss.SearchParametersIVF(nprobe=self.probes)
        )
        scores, places = self._index.search(queries.float().cpu().numpy(), k, params=options)
        scores, places = torch.from_numpy(scores), torch.from_numpy(places)
        ids = torch.where(places >= 0, self._ids[places.clamp_min(0)], -1)
        return scores.masked_fill(places < 0, -torch.inf), ids

    def __len__(self) -> int:
        return len(self._ids) + sum(len(ids) for _, ids in self._rows)

    def _build(self) -> None:
        rows = torch.cat([part for part, _ in self._rows]).float().numpy()
        self._ids = torch.cat([ids for _, ids in self._rows])
        self._rows = []
        lists = max(1, min(4096, len(rows) // 100))  # 1024 lists for 102,400 rows
        parts = max(p for p in range(1, rows.shape[1] // 4 + 1) if rows.shape[1] % p == 0)
        kind = f"IVF{lists},PQ{parts}x4fs,Refine(SQfp16)"
        self._index = self._faiss.index_factory(rows.shape[1], kind, self._faiss.METRIC_INNER_PRODUCT)
        self._index.train(rows)
        self._index.add(rows)


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row and their columns, in any order; of equal scores the lowest columns."""
    if scores.shape[1] <= k:
        return scores.clone(), torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    values, places = scores.topk(k + 1)  # one more, to see whether a tie straddles the end
    last = values[:, k - 1 : k]
    (tied,) = (last == values[:, k:])[:, 0].nonzero(as_tuple=True)
    values, places = values[:, :k].contiguous(), places[:, :k].contiguous()
    if len(tied):
        rows, last = scores[tied], last[tied]
        equal = rows == last
        missing = k - (rows > last).sum(1, keepdim=True)
        kept = (rows > last) | (equal & (equal.cumsum(1) <= missing))
        columns = kept.nonzero()[:, 1].view(-1, k)
        places[tied], values[tied] = columns, rows.gather(1, columns)
    return values, places


def merge_lists(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The k best of two lists of (Q, *) scores and ids: highest score first, the lower id where scores are equal."""
    scores, ids = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    by_id = ids.argsort(dim=1)
    scores, ids = scores.gather(1, by_id), ids.gather(1, by_id)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), ids.gather(1, order)


class RunningTopK:
    """The k best rows for each query among all rows so far.

    Args:
        queries: (Q, D) float32 or float16; their device is where the search runs.
        k: Neighbours of a query.
        knn: Exact search of a block.
    """

    def __init__(self, queries: Tensor, k: int, knn: Knn) -> None:
        self.queries, self.k, self.knn = queries, k, knn
        self.rows = 0
        shape, device = (len(queries), k), queries.device
        self._scores = torch.full(shape, -torch.inf, device=device)
        self._ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._waiting_rows = 0

    def add(self, rows: Tensor, ids: Tensor) -> None:
        """Let (n, D) rows with (n,) int64 ids pass by. Blocks are of one size, however the rows arrive."""
        self.rows += len(rows)
        while len(rows):
            taken = self.knn.block_rows - self._waiting_rows
            self._waiting.append((rows[:taken], ids[:taken]))
            self._waiting_rows += len(rows[:taken])
            rows, ids = rows[taken:], ids[taken:]
            if self._waiting_rows == self.knn.block_rows:
                self._flush()

    def result(self) -> tuple[Tensor, Tensor]:
        """(Q, k) scores, highest first, and ids. Where fewer than k rows came, the rest is -inf and -1."""
        self._flush()
        return self._scores, self._ids

    def live(self) -> Tensor:
        """Ids that are neighbours now, or may still become some; on the CPU."""
        waiting = [ids.cpu() for _, ids in self._waiting]
        found = self._ids.unique().cpu()
        return torch.cat([found[found >= 0], *waiting])

    def _flush(self) -> None:
        if not self._waiting:
            return
        blocks, ids = zip(*self._waiting, strict=True)
        block = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(self.queries.device)
        names = (ids[0] if len(ids) == 1 else torch.cat(ids)).to(self.queries.device)
        self._waiting, self._waiting_rows = [], 0
        for part, scores, places in self.knn.tiles(self.queries, block, self.k):
            found = scores, names[places]
            self._scores[part], self._ids[part] = merge_lists((self._scores[part], self._ids[part]), found, self.k)


class ExactBank:
    """A `Search` that keeps its rows and searches all of them.

    Args:
        knn: Exact search of a block.
        device: Where to search; rows stay where they come from.
    """

    def __init__(self, knn: Knn, device: torch.device | str = "cpu") -> None:
        self.knn, self.device = knn, device
        self._blocks: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, ids: Tensor) -> None:
        self._blocks.append((rows, ids))

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = RunningTopK(queries.to(self.device), k, self.knn)
        for rows, ids in self._blocks:
            best.add(rows, ids)
        return best.result()

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self._blocks)
