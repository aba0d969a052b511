"""Exact search: against sorting everything, with ties, in blocks of any size, and with faiss."""

import pytest
import torch
import torch.nn.functional as F

from eval.hummingbird.search import ExactBank, FaissExact, RunningTopK, TorchExact, merge_lists


def vectors(n, seed, width=16, unit=True):
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    return F.normalize(rows, dim=1) if unit else rows


def naive(queries, rows, ids, k, distance):
    """Every score in float64, sorted by (-score, id)."""
    scores = queries.double() @ rows.double().T
    if distance == "l2":
        scores = 2 * scores - rows.double().square().sum(1)
    order = [sorted(range(len(rows)), key=lambda r: (-q[r].item(), ids[r].item()))[:k] for q in scores]
    places = torch.tensor(order)
    return scores.gather(1, places), ids[places]


def small(knn, block_rows, query_tile=5):
    knn.block_rows, knn.query_tile = block_rows, query_tile
    return knn


ENGINES = {
    "torch": TorchExact,
    "shortlist": lambda distance: TorchExact(distance, shortlist=True),
    "faiss": FaissExact,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("distance", ["cosine", "l2"])
@pytest.mark.parametrize("chunks", [(300,), (1, 7, 250, 42), (64, 64, 64, 64, 44)])
def test_rows_in_any_portions_give_the_neighbours_of_sorting_everything(engine, distance, chunks):
    if engine == "faiss":
        pytest.importorskip("faiss")
    rows, queries = vectors(300, 0, unit=distance == "cosine"), vectors(13, 1)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(2))[:300]
    best = RunningTopK(queries, 6, small(ENGINES[engine](distance), 64))
    for part, names in zip(rows.split(chunks), ids.split(chunks), strict=True):
        best.add(part, names)
    scores, found = best.result()
    wanted_scores, wanted = naive(queries, rows, ids, 6, distance)
    assert torch.equal(found, wanted) and best.rows == 300
    torch.testing.assert_close(scores, wanted_scores.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("portion", [1, 9, 40, 200])
def test_equal_rows_go_by_their_ids_however_they_arrive(portion):
    rows = vectors(5, 0).repeat(40, 1)  # each row 40 times
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    queries = vectors(7, 2)
    best = RunningTopK(queries, 12, small(TorchExact(), 40))
    for part, names in zip(rows.split(portion), ids.split(portion), strict=True):
        best.add(part, names)
    _, found = best.result()
    winners = (queries @ rows[:5].T).argmax(1)
    for got, winner in zip(found, winners, strict=True):
        assert got.tolist() == sorted(ids[winner::5].tolist())[:12]


def test_float16_rows_find_what_float32_rows_of_the_same_values_find():
    rows, queries = vectors(200, 0).half(), vectors(9, 1).half()
    found = []
    for dtype in (torch.float16, torch.float32):
        best = RunningTopK(queries.to(dtype), 5, small(TorchExact(), 64))
        best.add(rows.to(dtype), torch.arange(200))
        found.append(best.result())
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0], found[1][0])


def test_a_kept_bank_and_passing_rows_give_the_same():
    rows, queries, ids = vectors(230, 0), vectors(21, 1), torch.arange(230)
    best, bank = RunningTopK(queries, 4, small(TorchExact(), 64)), ExactBank(small(TorchExact(), 64))
    for part, names in zip(rows.split(50), ids.split(50), strict=True):
        best.add(part, names)
        bank.add(part, names)
    assert len(bank) == 230
    for first, second in zip(best.result(), bank.search(queries, 4), strict=True):
        assert torch.equal(first, second)


def test_merging_the_lists_of_two_halves_gives_the_list_of_the_whole():
    rows, queries, ids = vectors(100, 0), vectors(5, 1), torch.arange(100)
    halves = [naive(queries, rows[part], ids[part], 7, "cosine") for part in (slice(0, 60), slice(60, 100))]
    scores, found = merge_lists(*halves, 7)
    wanted = naive(queries, rows, ids, 7, "cosine")
    assert torch.equal(found, wanted[1]) and torch.equal(scores, wanted[0])


def test_fewer_rows_than_neighbours_leave_marked_places():
    best = RunningTopK(vectors(2, 0), 5, TorchExact())
    best.add(vectors(3, 1), torch.arange(3))
    scores, ids = best.result()
    assert (ids[:, 3:] == -1).all() and (scores[:, 3:] == -torch.inf).all() and (ids[:, :3] >= 0).all()


def test_live_ids_are_the_neighbours_and_those_that_wait():
    best = RunningTopK(vectors(2, 0), 1, small(TorchExact(), 4))
    best.add(vectors(6, 1), torch.arange(6))
    live = set(best.live().tolist())
    assert {4, 5} <= live and len(live) <= 4


def test_keeping_features_in_16_bits_changes_one_label_in_a_thousand_at_most():
    looks, g = vectors(20, 0), torch.Generator().manual_seed(1)
    classes = torch.randint(0, 20, (6000,), generator=g)
    rows = F.normalize(looks[classes] + 0.2 * torch.randn(6000, 16, generator=g), dim=1)
    rows, queries, labels = rows[1000:], rows[:1000], classes[1000:]
    guesses = []
    for dtype in (torch.float32, torch.float16):
        best = RunningTopK(queries.to(dtype), 30, TorchExact())
        best.add(rows.to(dtype), torch.arange(5000))
        guesses.append(labels[best.result()[1]].mode(dim=1).values)
    assert (guesses[0] == guesses[1]).float().mean() >= 0.999
