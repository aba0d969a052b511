"""The evaluation: fill the bank, find neighbours, let their labels speak, and score that.

Two orders give the same rows. `queries` keeps the queries and lets the training set pass by, so that memory does not
depend on the bank; `bank` keeps the bank, for an index or a vector database that has to be built first.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eval.hummingbird.labels import OUT, CountLabels, ValueLabels, draw, pack_ids, patch_ranks
from eval.hummingbird.protocol import Protocol
from eval.hummingbird.ranks import all_rows, exchange, share, total, world
from eval.hummingbird.search import ExactBank, Knn, RunningTopK, Search, TorchExact, merge_lists
from eval.hummingbird.sources import Batch, Source
from timm_locat.errors import UserError

__all__ = ["Neighbours", "Order", "Setup", "evaluate", "quotas"]

Order = Literal["queries", "bank"]
Progress = Callable[[Sequence[int], str], Any]

FORGET_EVERY = 2**20
"""Rows after which labels of rows that are nobody's neighbour are dropped."""
SAMPLE = 1024
"""Queries that an index is compared with exact search on."""
TUNED_K = (1, 3, 10, 30)
"""Numbers of neighbours that `tune` chooses from, as CAPI does."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How to compute it. None of this changes the score, apart from an index that is not exact."""

    order: Order = "queries"
    """What is kept: see the module."""
    knn: Callable[[str], Knn] = TorchExact
    """Exact search of a block, for a distance."""
    index: Callable[[], Search] | None = None
    """Makes an empty bank of another kind; it needs the order `bank`."""
    device: torch.device | str = "cpu"
    """Where the search runs."""
    progress: Progress = lambda batches, text: batches
    """Wraps an iterable of images with a bar."""


@dataclass(frozen=True)
class Neighbours:
    """What was found for the queries of this process."""

    images: list[int]
    """Numbers of the query images."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    scores: Tensor
    """(Q, k) cosine similarities of the neighbours, nearest first; the queries are the images' patches in order."""
    ids: Tensor
    """(Q, k) ids of the neighbours; see `labels.unpack_ids`."""
    labels: Any
    """Labels of the neighbours."""
    rows: int
    """Rows in the bank, over all processes."""
    agreement: dict[str, float] | None = None
    """How an index that is plugged in compares with exact search; see `_agreement`."""

    def image(self, number: int) -> tuple[Tensor, Tensor]:
        """(N, k) scores and ids of the patches of the image at a place in `images`."""
        patches = self.grid[0] * self.grid[1]
        part = slice(number * patches, (number + 1) * patches)
        return self.scores[part], self.ids[part]


@dataclass
class _Clock:
    """Seconds by what they were spent on."""

    seconds: Counter = field(default_factory=Counter)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start


def quotas(protocol: Protocol, images: int, size: int | None) -> Tensor:
    """Patches that each image may give to a bank.

    Args:
        protocol: `spread` shares are equal but for one patch, which goes to images that a seeded shuffle puts first, so
            that they add up to the size; a larger bank has every patch of a smaller one.
        images: Number of training images.
        size: Rows of the bank; None takes every patch.

    Returns:
        (epochs, images) int64.
    """
    shape = (protocol.epochs, images)
    if size is None:
        return torch.full(shape, OUT)
    base, rest = divmod(size, protocol.epochs * images)
    if protocol.quota == "floor":
        if base == 0:
            raise UserError(
                f"this protocol takes at least one patch of every image and epoch, so a bank needs "
                f"{protocol.epochs * images} rows, got {size}; ask for more, or use the protocol hbird"
            )
        return torch.full(shape, base)
    shuffled = torch.randperm(protocol.epochs * images, generator=_generator(protocol.seed, "quota"))
    return (base + (shuffled < rest)).view(shape)


def evaluate(
    protocol: Protocol,
    task: Any,
    train: Source,
    queries: Source,
    *,
    bank_sizes: Sequence[int | None] = (),
    ks: Sequence[int] = (),
    betas: Sequence[float] = (),
    setup: Setup | None = None,
) -> tuple[dict[str, Any], Neighbours]:
    """Score features by retrieval.

    Args:
        protocol: The settings.
        task: `tasks.Segmentation` or `tasks.Depth`.
        train: Images of the bank.
        queries: Images that are scored.
        bank_sizes: More sizes to report in the same pass. Each is a subset of the next larger.
        ks: More numbers of neighbours to report; they cost no search.
        betas: More temperatures to report; they cost no search.
        setup: How to compute it.

    Returns:
        The results, ready for a record, the same in every process; and the neighbours at the protocol's own settings.

    Raises:
        UserError: Features that are not finite or all zero, grids that differ, labels that no class has, or a bank of
            fewer rows than neighbours; the sentence names the image.
    """
    setup = setup or Setup()
    if setup.index is not None and setup.order != "bank":
        raise UserError("an index has to be built before it is searched; it needs the order bank, got queries")
    if world() > 1 and (setup.order != "queries" or protocol.draws != "seeded"):
        raise UserError("several processes need --order queries and a protocol with seeded draws; use one process")
    if not len(train) or not len(queries):
        raise UserError(f"retrieval needs images on both sides, got {len(train)} to search and {len(queries)} queries")
    pool, tuned = list(range(len(train))), None
    if protocol.tune:
        protocol, pool, tuned = _tune(protocol, task, train, setup)
    asked = _Asked(protocol, bank_sizes, ks, betas)
    run = _Run(protocol, task, train, pool, asked, setup)
    found = run.neighbours(queries, list(range(len(queries))))
    results = run.scores(queries, found)
    own = asked.sizes.index(protocol.bank_size)
    results |= {
        "images": {"bank": len(pool), "queries": len(queries)},
        "grid": list(found[own].grid),
        "seconds": {name: round(seconds, 3) for name, seconds in run.clock.seconds.items()},
        "tuned": tuned,
        "index": found[own].agreement,
    }
    k = protocol.k
    mine = found[own]
    return results, replace(mine, scores=mine.scores[:, :k], ids=mine.ids[:, :k])


class _Asked:
    """Every bank size, k and beta to report, the protocol's own among them."""

    def __init__(self, protocol: Protocol, sizes: Sequence[int | None], ks: Sequence[int], betas: Sequence[float]):
        finite = sorted({size for size in (*sizes, protocol.bank_size) if size is not None})
        self.sizes: list[int | None] = [*finite, *([None] if None in (*sizes, protocol.bank_size) else [])]
        self.ks = sorted({*ks, protocol.k})
        self.betas = sorted({*betas, protocol.beta}) if protocol.decode == "soft" else [protocol.beta]
        if min([*finite, *self.ks]) < 1 or self.betas[0] <= 0:
            raise UserError(f"bank sizes, k and beta must be above 0, got {finite}, {self.ks} and {self.betas}")


class _Run:
    """One bank and the queries against it."""

    def __init__(
        self, protocol: Protocol, task: Any, train: Source, pool: list[int], asked: _Asked, setup: Setup
    ) -> None:
        self.protocol, self.task, self.train, self.pool = protocol, task, train, pool
        self.asked, self.setup, self.clock = asked, setup, _Clock()
        self.k = asked.ks[-1]
        places = torch.full((len(train),), -1)
        places[pool] = torch.arange(len(pool))
        # (sizes, epochs, images): what one image may give to each bank
        self.quota = torch.stack([quotas(protocol, len(pool), size) for size in asked.sizes])[:, :, places]
        self.grid: tuple[int, int] | None = None
        self.shift: Tensor | None = None
        self.norms: list[ValueLabels] = []
        self.labels: list[Any] = []
        self.label_rows = 0

    # What is found

    def neighbours(self, queries: Source, images: list[int]) -> list[Neighbours]:
        """The neighbours in each bank of the patches of these images."""
        if self.protocol.standardise:
            with self.clock("statistics of the features"):
                self._standardise()
        mine = share(images)
        if self.setup.order == "queries":
            rows = self._queries(queries, mine)
            gathered = all_rows(rows)
            everyone = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
            shells = [RunningTopK(everyone, self.k, self._knn()) for _ in self.asked.sizes]
            self._fill(shells)
            with self.clock("search"):
                found = [shell.result() for shell in shells]
            lengths = [len(part) for part in gathered]
            counts = [shell.rows for shell in shells]
        else:
            plugged = self.setup.index is not None
            make = self.setup.index or self._bank
            banks = [make() for _ in self.asked.sizes]
            exact = [self._bank() for _ in self.asked.sizes] if plugged else []
            self._fill([*banks, *exact])
            counts = [len(bank) for bank in banks]
            rows, found = self._search(banks, queries, mine)
            lengths = [len(rows)]
            columns = self._columns(found, counts, rows, lengths, mine)
            return self._compared(columns, exact, counts, rows) if plugged else columns
        return self._columns(found, counts, rows, lengths, mine)

    def _compared(
        self, columns: list[Neighbours], exact: list[Search], counts: list[int], rows: Tensor
    ) -> list[Neighbours]:
        """The columns, each with how an index agrees with exact search on up to `SAMPLE` queries."""
        sample = torch.arange(len(rows))
        if len(rows) > SAMPLE:
            sample = torch.randperm(len(rows), generator=_generator(self.protocol.seed, "sample"))[:SAMPLE]
        queries = rows[sample]
        found = [_padded(*bank.search(queries, min(self.k, len(bank))), self.k) for bank in exact]
        wanted = self._columns(found, counts, queries, [len(queries)], [])
        return [
            replace(column, agreement=_agreement(column, sample, one, self.protocol))
            for column, one in zip(columns, wanted, strict=True)
        ]

    def _knn(self) -> Knn:
        return self.setup.knn(self.protocol.distance)

    def _bank(self) -> Search:
        return ExactBank(self._knn(), self.setup.device)

    def _columns(
        self, found: list[tuple[Tensor, Tensor]], counts: list[int], rows: Tensor, lengths: list[int], mine: list[int]
    ) -> list[Neighbours]:
        """Shells become banks, and every process gets what all others found for its queries."""
        columns, merged, held = [], None, 0
        labels = self._joined(self.labels)
        for shell, size, asked in zip(found, total(torch.tensor(counts)).tolist(), self.asked.sizes, strict=True):
            shell = tuple(part.cpu() for part in shell)
            merged = shell if merged is None else merge_lists(merged, shell, self.k)
            held += size
            if held < self.k:
                raise UserError(
                    f"the bank of {'all patches' if asked is None else asked} has {held} rows, and k is {self.k}; "
                    "lower k or enlarge the bank"
                )
            parcels = []
            for scores, ids in zip(*(part.split(lengths) for part in merged), strict=True):
                known = ids[ids >= 0]
                norms = self._joined(self.norms).select(known) if self.norms else None
                parcels.append((scores, ids, labels.select(known), norms))
            parts = exchange(parcels)
            best = parts[0][:2]
            for part in parts[1:]:
                best = merge_lists(best, part[:2], self.k)
            wanted = best[1]
            one = type(labels).joined([part[2] for part in parts]).select(wanted.flatten())
            scores = best[0]
            if self.protocol.distance == "l2":
                norms = ValueLabels.joined([part[3] for part in parts])
                scores = _cosine(scores, wanted, norms, rows)
            columns.append(Neighbours(mine, self.grid, scores, wanted, one, held))
        return columns

    # Queries

    def _queries(self, source: Source, images: list[int]) -> Tensor:
        """(Q, D) patches of these images, on the device that searches."""
        rows = [self._rows(batch, source).flatten(0, 1) for batch in self._batches(source, images, None, "queries")]
        return torch.cat(rows).to(self.setup.device)

    def _search(self, banks: list[Search], source: Source, images: list[int]) -> tuple[Tensor, list[Any]]:
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in banks]
        rows = []
        for batch in self._batches(source, images, None, "queries"):
            some = self._rows(batch, source).flatten(0, 1)
            rows.append(some)
            with self.clock("search"):
                for part, bank in zip(parts, banks, strict=True):
                    part.append(_padded(*bank.search(some, min(self.k, len(bank))), self.k))
        found = [tuple(torch.cat(column) for column in zip(*part, strict=True)) for part in parts]
        return torch.cat(rows), found

    def _batches(self, source: Source, images: list[int], epoch: int | None, what: str) -> Iterator[Batch]:
        """Batches with a bar, their time on the clock as that of features."""
        batches = iter(source.batches(images, epoch))
        bar = iter(self.setup.progress(images, what))
        while True:
            with self.clock("features"):
                batch = next(batches, None)
            for _ in batch.indices if batch else ():
                next(bar, None)
            if batch is None:
                next(bar, None)  # lets the bar close itself
                return
            yield batch

    def _rows(self, batch: Batch, source: Source) -> Tensor:
        """(B, N, D) patches of a batch as they are searched."""
        self._check_maps(batch, source)
        rows = batch.maps.flatten(2).transpose(1, 2).float()
        if self.shift is not None:
            rows = (rows - self.shift) / self.scale
        if self.protocol.distance == "cosine":
            rows = rows / rows.norm(dim=2, keepdim=True)
        if self.protocol.precision == "float16":
            rows = rows.half()
            self._refuse(~rows.isfinite().all(2).all(1), batch, source, "features beyond the range of float16")
        return rows.contiguous()

    def _check_maps(self, batch: Batch, source: Source) -> None:
        maps = batch.maps
        if maps.ndim != 4:
            raise UserError(f"features must come as (B, D, H, W) maps, got a shape of {tuple(maps.shape)}")
        grid = (maps.shape[2], maps.shape[3])
        if self.grid is None:
            self.grid = grid
            self.task.check_grid(tuple(batch.masks.shape[-2:]), grid)
        if grid != self.grid:
            raise UserError(
                f"all images must give one grid of patches, got {grid[0]}x{grid[1]} for image "
                f"{source.name(batch.indices[0])} after {self.grid[0]}x{self.grid[1]}; resize them alike"
            )
        self._refuse(
            ~maps.isfinite().flatten(1).all(1), batch, source, "features that are not finite (NaN or infinite)"
        )
        if self.protocol.distance == "cosine":
            empty = (maps == 0).all(1).flatten(1).any(1)
            self._refuse(empty, batch, source, "a patch whose features are all zero, which has no direction")

    def _refuse(self, wrong: Tensor, batch: Batch, source: Source, what: str) -> None:
        if wrong.any():
            name = source.name(batch.indices[int(wrong.nonzero()[0, 0])])
            raise UserError(f"image {name} gives {what}; check the model's weights and precision, or remove the image")

    # The bank

    def _fill(self, banks: Sequence[Search | RunningTopK]) -> None:
        mine = share(self.pool)
        for epoch in range(self.protocol.epochs):
            what = "bank" if self.protocol.epochs == 1 else f"bank, pass {epoch + 1} of {self.protocol.epochs}"
            for batch in self._batches(self.train, mine, epoch, what):
                rows, ids, shells = self._chosen(batch, epoch)
                with self.clock("search"):
                    for number, bank in enumerate(banks):
                        here = shells == number % len(self.asked.sizes)
                        bank.add(rows[here.to(rows.device)], ids[here])
                self._forget(banks)

    def _chosen(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that a batch gives to the banks, their ids, and the smallest bank that each belongs to."""
        rows = self._rows(batch, self.train)
        if not self.labels:
            self._check_rows()
        with self.clock("labels"):
            for index, mask in zip(batch.indices, batch.masks, strict=True):
                self.task.check(mask, self.train.name(index))
            counts = self.task.bank_counts(batch.masks, self.grid)
            size = tuple(batch.masks.shape[-2:])
            pixels = size[0] * size[1] / (self.grid[0] * self.grid[1])
            least = max(1, round(self.protocol.min_valid * pixels))
            ranks = patch_ranks(counts, self._uniform(batch, epoch), least)
            quota = self.quota[:, epoch, batch.indices]
            shells = (ranks[None] >= quota[:, :, None]).sum(0)
            chosen = shells < len(self.asked.sizes)
            patches = torch.arange(counts.shape[1])
            ids = torch.stack([pack_ids(epoch, index, patches) for index in batch.indices])[chosen]
            self.labels.append(self.task.bank_labels(ids, batch.masks, counts, chosen, self.grid))
            picked = rows[chosen.to(rows.device)]
            if self.protocol.distance == "l2":
                self.norms.append(ValueLabels(ids, picked.float().norm(dim=1).cpu()))
            self.label_rows += len(ids)
        return picked, ids, shells[chosen]

    def _uniform(self, batch: Batch, epoch: int) -> Tensor:
        patches = self.grid[0] * self.grid[1]
        if self.protocol.draws == "global":
            # As the public code: only a bank that is bounded draws, one number for each patch of a batch.
            bounded = self.asked.sizes != [None]
            return torch.rand(len(batch.indices), patches) if bounded else torch.zeros(len(batch.indices), patches)
        seed = self.protocol.seed
        return torch.stack([torch.rand(patches, generator=_generator(seed, epoch, i, "patch")) for i in batch.indices])

    def _forget(self, banks: Sequence[Search | RunningTopK]) -> None:
        """Drop labels of rows that are nobody's neighbour any more, so that they do not grow with the bank."""
        if self.label_rows < FORGET_EVERY or self.setup.order != "queries":
            return
        with self.clock("labels"):
            live = torch.cat([bank.live() for bank in banks]).unique()
            self.labels = [self._joined(self.labels).select(live)]
            self.norms = [self._joined(self.norms).select(live)] if self.norms else []
            self.label_rows = 0

    def _check_rows(self) -> None:
        """Before the first search: the smallest bank has to have k rows, if every patch that it may take is valid."""
        patches = self.grid[0] * self.grid[1]
        rows = int(self.quota[0][:, self.pool].clamp_max(patches).sum())
        if rows < self.k:
            raise UserError(f"the bank can have {rows} rows at most, and k is {self.k}; lower k or enlarge the bank")

    def _standardise(self) -> None:
        sums = None
        for batch in self._batches(self.train, share(self.pool), 0, "statistics"):
            self._check_maps(batch, self.train)
            rows = batch.maps.flatten(2).transpose(1, 2).flatten(0, 1).double()
            new = torch.stack([torch.ones_like(rows[0]) * len(rows), rows.sum(0), rows.square().sum(0)])
            sums = new if sums is None else sums + new
        count, first, second = total(sums)
        self.shift = (first / count).float()
        deviation = (second / count - (first / count).square()).clamp_min(0).sqrt().float()
        self.scale = torch.where(deviation > 0, deviation, torch.ones_like(deviation))

    @staticmethod
    def _joined(parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else type(parts[0]).joined(parts)

    # Scores

    def scores(self, queries: Source, columns: list[Neighbours]) -> dict[str, Any]:
        """Every bank size, k and beta, scored; the protocol's own numbers lie at the top."""
        task, protocol, grid = self.task, self.protocol, self.grid
        keys = [(c, k, b) for c in range(len(columns)) for k in self.asked.ks for b in self.asked.betas]
        sums, ceiling = {key: task.empty() for key in keys}, task.empty()
        with self.clock("score"):
            for place, mask in enumerate(queries.masks(columns[0].images)):
                task.check(mask, queries.name(columns[0].images[place]))
                size = tuple(mask.shape)
                ceiling += task.score(mask, task.ceiling(mask, grid))
                for c, k, beta in keys:
                    scores, ids = columns[c].image(place)
                    weights = (scores[:, :k] / beta).softmax(1)
                    predicted = task.predict(columns[c].labels, weights, ids[:, :k], grid, size)
                    sums[c, k, beta] += task.score(mask, predicted)
        sums = {key: task.summary(total(value)) for key, value in sums.items()}
        own = (self.asked.sizes.index(protocol.bank_size), protocol.k, protocol.beta)
        curve = [
            {"bank_size": self.asked.sizes[c], "rows": columns[c].rows, "k": k, "beta": beta, **sums[c, k, beta]}
            for c, k, beta in keys
        ]
        best = task.summary(total(ceiling))
        return {
            **sums[own],
            "rows": columns[own[0]].rows,
            "ceiling": best.get("miou_present", best.get("rmse")),
            "curve": curve,
        }


def _generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(draw(*key))


def _padded(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    missing = k - scores.shape[1]
    if not missing:
        return scores, ids
    none = scores.new_full((len(scores), missing), -torch.inf), ids.new_full((len(ids), missing), -1)
    return torch.cat([scores, none[0]], 1), torch.cat([ids, none[1]], 1)


def _cosine(scores: Tensor, ids: Tensor, norms: ValueLabels, queries: Tensor) -> Tensor:
    """Cosine similarities from the scores of the search by squared distance."""
    rows = norms.values[torch.searchsorted(norms.ids, ids)]
    own = queries.float().norm(dim=1, keepdim=True).cpu()
    return (scores + rows.square()) / (2 * rows * own).clamp_min(1e-12)


def _agreement(found: Neighbours, sample: Tensor, exact: Neighbours, protocol: Protocol) -> dict[str, float]:
    """Share of the exact neighbours that an index found, and of the patches whose commonest class it keeps."""
    k = protocol.k
    ids, scores = found.ids[sample, :k], found.scores[sample, :k]
    hits = (ids[:, :, None] == exact.ids[:, None, :k]).any(1)
    results = {"queries": len(sample), "recall": hits.double().mean().item()}
    if isinstance(found.labels, CountLabels):
        soft = [
            labels.soft((s / protocol.beta).softmax(1), i).argmax(1)
            for labels, s, i in ((found.labels, scores, ids), (exact.labels, exact.scores[:, :k], exact.ids[:, :k]))
        ]
        results["label_agreement"] = (soft[0] == soft[1]).double().mean().item()
    return results


def _tune(protocol: Protocol, task: Any, train: Source, setup: Setup) -> tuple[Protocol, list[int], dict[str, Any]]:
    """Choose k and distance on a tenth of the images, which a seeded shuffle picks; the others stay in the bank."""
    if len(train) < 2:
        raise UserError("this protocol chooses k on a tenth of the training images and needs 2 at least, got 1")
    order = torch.randperm(len(train), generator=_generator(protocol.seed, "tune")).tolist()
    held = sorted(order[: max(1, len(train) // 10)])
    pool = sorted(set(order) - set(held))
    scores: dict[tuple[int, str], float] = {}
    for distance in ("cosine", "l2"):
        one = replace(protocol, tune=False, distance=distance, k=TUNED_K[0])
        run = _Run(one, task, train, pool, _Asked(one, (), TUNED_K, ()), setup)
        results = run.scores(train, run.neighbours(train, held))
        scores |= {(row["k"], distance): row["miou"] for row in results["curve"]}
    k, distance = max(scores, key=lambda key: scores[key])
    chosen = {"k": k, "distance": distance, "miou": {f"{d}, k = {n}": score for (n, d), score in scores.items()}}
    return replace(protocol, tune=False, k=k, distance=distance), pool, chosen
