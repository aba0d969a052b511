"""Retrieval as a whole: the public code's numbers, a reading word for word, orders, banks, curves and refusals."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scenes_of_patches import made_up, source, task

from eval.hummingbird import PRESETS, ArraySource, Depth, Protocol, Segmentation, Setup, evaluate
from eval.hummingbird import evaluate as function
from eval.hummingbird.evaluate import quotas
from eval.hummingbird.labels import unpack_ids
from eval.hummingbird.naive import naive_miou
from eval.hummingbird.search import TorchExact
from timm_locat.errors import UserError

ROOT = Path(__file__).parents[1]
GOLDEN = np.load(Path(__file__).parent / "data" / "hummingbird.npz")
CLEAN = Protocol(bank_size=None, epochs=1, k=10)


def golden(part, *, ignored_as=None, batch=10):
    maps = torch.from_numpy(GOLDEN[f"{part}_features"]).transpose(1, 2).reshape(-1, 48, 8, 8)
    masks = torch.from_numpy(GOLDEN[f"{part}_masks"]).long()
    if ignored_as is not None:
        masks[masks == 255] = ignored_as
    return maps.contiguous(), masks


def golden_task(protocol):
    return Segmentation(protocol, [str(c) for c in range(21)], 255)


def run(protocol, train=None, val=None, *, ignore_index=None, batch=5, **more):
    train, val = train or made_up(seed=0), val or made_up(images=5, seed=1)
    return evaluate(
        protocol, task(protocol, ignore_index=ignore_index), source(train, batch), source(val, batch), **more
    )


class Spy:
    """A kept bank that also lets a test see its rows."""

    def __init__(self):
        self.rows, self.ids = [], []

    def add(self, rows, ids):
        self.rows.append(rows)
        self.ids.append(ids)

    def search(self, queries, k):
        scores, places = (queries @ torch.cat(self.rows).T).topk(k)
        return scores, torch.cat(self.ids)[places]

    def __len__(self):
        return sum(map(len, self.ids))


def bank_of(protocol, train, task, *, batch=5, sizes=()):
    """Ids and rows of each shell, as a plugged-in index receives them."""
    banks = []

    def make():
        banks.append(Spy())
        return banks[-1]

    setup = Setup(order="bank", index=make)
    _, found = evaluate(protocol, task, source(train, batch), source(train, batch), bank_sizes=sizes, setup=setup)
    return banks, found


# The public code


@pytest.mark.parametrize(("size", "key"), [(None, "unbounded"), (1920, "1920")])
def test_the_public_codes_scores_and_bank_are_met(size, key):
    protocol = replace(PRESETS["ohe-2.0"], bank_size=size)
    train, val = source(golden("train"), 10), source(golden("val"), 10)
    torch.manual_seed(7)
    results, _ = evaluate(protocol, golden_task(protocol), train, val)
    assert results["rows"] == GOLDEN[f"rows_{key}"]
    assert results["miou"] == pytest.approx(float(GOLDEN[f"miou_hungarian_{key}"]), abs=1e-6)
    assert results["miou_identity"] == pytest.approx(float(GOLDEN[f"miou_identity_absent0_{key}"]), abs=1e-6)
    assert results["miou_present"] == pytest.approx(float(GOLDEN[f"miou_identity_present_{key}"]), abs=1e-6)

    torch.manual_seed(7)
    (bank,), _ = bank_of(protocol, golden("train"), golden_task(protocol), batch=10)
    features, labels = torch.cat(bank.rows).double().sum(0), torch.zeros(21, dtype=torch.float64)
    np.testing.assert_allclose(features.numpy(), GOLDEN[f"bank_features_sum_{key}"], atol=2e-4, rtol=1e-6)
    masks = golden("train", ignored_as=0)[1]
    _, images, patches = unpack_ids(torch.cat(bank.ids))
    tiles = masks.unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).flatten(1, 2)
    labels += torch.bincount(tiles[images, patches].flatten(), minlength=21).double() / 64
    np.testing.assert_allclose(labels.numpy(), GOLDEN[f"bank_labels_sum_{key}"], rtol=1e-6)


def test_the_clean_protocol_meets_the_public_code_where_that_code_makes_no_slip():
    protocol = replace(PRESETS["hbird"], bank_size=None)
    train, val = source(golden("train", ignored_as=0)), source(golden("val"))
    results, _ = evaluate(protocol, golden_task(protocol), train, val)
    assert results["miou"] == pytest.approx(float(GOLDEN["miou_identity_present_unbounded"]), abs=1e-6)


def test_absent_classes_tell_the_means_apart():
    protocol = replace(CLEAN, average="all")
    results, _ = run(protocol, made_up(noise=0.2), made_up(seed=1, images=5, classes=3, noise=0.2))
    assert results["classes_present"] == 3 and set(results["class_iou"]) == {"class 0", "class 1", "class 2"}
    assert results["miou"] == pytest.approx(sum(results["class_iou"].values()) / 5)
    assert results["miou_present"] == pytest.approx(sum(results["class_iou"].values()) / 3)


# A reading word for word


@pytest.mark.parametrize("ignored", [None, 255])
@pytest.mark.parametrize("k", [1, 7])
def test_the_score_equals_a_reading_word_for_word(ignored, k):
    train, val = made_up(ignore_index=ignored), made_up(images=5, seed=1, ignore_index=ignored)
    protocol = replace(CLEAN, k=k, min_valid=0.0)
    results, _ = run(protocol, train, val, ignore_index=ignored)
    assert results["miou"] == pytest.approx(naive_miou(train, val, 5, ignored, k=k), abs=1e-6)


def test_features_that_say_the_label_reach_the_ceiling():
    looks = torch.eye(5)
    scenes = []
    for seed in (0, 1):
        masks = torch.randint(0, 5, (6, 4, 6), generator=torch.Generator().manual_seed(seed))
        maps = looks[masks].permute(0, 3, 1, 2)
        scenes.append((maps.contiguous(), masks.repeat_interleave(4, 1).repeat_interleave(4, 2)))
    results, _ = run(CLEAN, *scenes)
    assert results["miou"] == pytest.approx(results["ceiling"], abs=1e-6) and 0.4 < results["ceiling"] < 1


def test_the_ceiling_is_one_where_every_patch_is_a_pixel():
    results, _ = run(CLEAN, made_up(patch=1, grid=(8, 9)), made_up(patch=1, grid=(8, 9), images=3, seed=1))
    assert results["ceiling"] == 1.0


def test_features_that_say_nothing_score_like_guessing_by_frequency():
    train, val = made_up(images=20), made_up(images=8, seed=1)
    noise = [torch.randn(a[0].shape, generator=torch.Generator().manual_seed(s)) for s, a in enumerate((train, val))]
    results, _ = run(replace(CLEAN, k=100), (noise[0], train[1]), (noise[1], val[1]))
    commonest = torch.bincount(train[1].flatten()).argmax().item()
    share = (val[1] == commonest).float().mean().item()
    assert results["pixel_accuracy"] == pytest.approx(share, abs=0.1)


# One result, however it is computed


def same(first, second):
    """Equal results and neighbours, up to the time they took."""
    results = [{key: value for key, value in run[0].items() if key != "seconds"} for run in (first, second)]
    assert results[0] == results[1]
    assert torch.equal(first[1].ids, second[1].ids)
    torch.testing.assert_close(first[1].scores, second[1].scores, rtol=0, atol=1e-6)


MANY = {"bank_sizes": (60, 150), "ks": (1, 4), "betas": (0.1,)}


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_passing_rows_and_a_kept_bank_give_the_same(distance):
    protocol = replace(CLEAN, bank_size=100, epochs=2, distance=distance)
    same(run(protocol, **MANY), run(protocol, setup=Setup(order="bank"), **MANY))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_batch_size_changes_nothing(batch):
    protocol = replace(CLEAN, bank_size=100, epochs=2)
    same(run(protocol, **MANY), run(protocol, batch=batch, **MANY))


def test_the_sizes_of_blocks_change_nothing():
    def small(distance):
        knn = TorchExact(distance)
        knn.block_rows, knn.query_tile = 37, 11
        return knn

    same(run(CLEAN), run(CLEAN, setup=Setup(knn=small)))


def test_forgetting_labels_that_nobody_needs_changes_nothing(monkeypatch):
    protocol = replace(CLEAN, bank_size=100, epochs=2, distance="l2")
    kept = run(protocol, **MANY)
    monkeypatch.setattr(sys.modules[function.__module__], "FORGET_EVERY", 10)
    same(kept, run(protocol, batch=2, **MANY))


def test_a_single_image_of_a_single_class_works():
    maps, masks = made_up(images=1)
    results, _ = run(replace(CLEAN, k=5), (maps, masks * 0), (maps, masks * 0))
    assert results["miou"] == 1.0 and results["classes_present"] == 1


class FaissClient:
    """A bank kept by faiss's own index with ids, as a client of a vector database would keep one."""

    def __init__(self, width=8):
        faiss = pytest.importorskip("faiss")
        self.index = faiss.IndexIDMap(faiss.IndexFlatIP(width))

    def add(self, rows, ids):
        self.index.add_with_ids(rows.numpy(), ids.numpy())

    def search(self, queries, k):
        scores, ids = self.index.search(queries.numpy(), k)
        return torch.from_numpy(scores), torch.from_numpy(ids)

    def __len__(self):
        return self.index.ntotal


def test_an_index_of_another_kind_can_be_plugged_in_and_is_held_against_exact_search():
    protocol = replace(CLEAN, bank_size=100, epochs=2)
    exact, wanted = run(protocol, **MANY)
    results, found = run(protocol, setup=Setup(order="bank", index=FaissClient), **MANY)
    assert torch.equal(found.ids, wanted.ids) and results["curve"] == exact["curve"]
    assert results["index"] == {"queries": 5 * 24, "recall": 1.0, "label_agreement": 1.0} and exact["index"] is None


class Forgetful(Spy):
    """Finds only rows of even images, so that its recall can be worked out."""

    def search(self, queries, k):
        ids = torch.cat(self.ids)
        even = unpack_ids(ids)[1] % 2 == 0
        scores, places = (queries @ torch.cat(self.rows)[even].T).topk(k)
        return scores, ids[even][places]


def test_the_recall_of_an_index_is_the_share_of_exact_neighbours_that_it_finds():
    _, wanted = run(CLEAN)
    results, found = run(CLEAN, setup=Setup(order="bank", index=Forgetful))
    hits = [len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), wanted.ids.tolist(), strict=True)]
    assert (
        results["index"]["recall"] == pytest.approx(sum(hits) / found.ids.numel()) and results["index"]["recall"] < 0.9
    )
    assert 0 < results["index"]["label_agreement"] < 1


# The bank


def all_ids(banks):
    return torch.cat([ids for bank in banks for ids in bank.ids])


@pytest.mark.parametrize("size", [7, 24, 100, 288])
def test_a_bank_has_exactly_the_rows_that_were_asked(size):
    protocol = replace(CLEAN, bank_size=size, epochs=2, k=3)
    train = made_up(images=12)
    banks, found = bank_of(protocol, train, task(protocol))
    epochs, images, _ = unpack_ids(all_ids(banks))
    given = torch.bincount(epochs * 12 + images, minlength=24)
    assert len(banks[0]) == found.rows == size and given.max() - given.min() <= 1


def test_a_bank_larger_than_all_patches_has_all_patches():
    protocol = replace(CLEAN, bank_size=10**6)
    banks, found = bank_of(protocol, made_up(), task(protocol))
    assert found.rows == 12 * 24 and len(all_ids(banks).unique()) == 12 * 24


def test_a_smaller_bank_is_part_of_a_larger_one_and_the_same_as_by_itself():
    sizes = (30, 100, 250)
    protocol = replace(CLEAN, bank_size=30, epochs=2)
    shells, _ = bank_of(protocol, made_up(), task(protocol), sizes=sizes)
    for number, size in enumerate(sizes):
        alone, _ = bank_of(replace(protocol, bank_size=size), made_up(), task(protocol))
        together = all_ids(shells[: number + 1])
        assert torch.equal(together.sort().values, all_ids(alone).sort().values) and len(together) == size
    column = {row["bank_size"]: row["miou"] for row in run(protocol, bank_sizes=sizes)[0]["curve"]}
    for size in sizes:
        assert column[size] == run(replace(protocol, bank_size=size))[0]["miou"]


def test_no_ignored_patch_enters_the_bank():
    train = made_up(ignore_index=255)
    banks, _ = bank_of(replace(CLEAN, min_valid=0.5), train, task(CLEAN, ignore_index=255))
    _, images, patches = unpack_ids(all_ids(banks))
    tiles = train[1].unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2)
    valid = (tiles != 255).float().mean(2)
    assert (valid[images, patches] >= 0.5).all() and len(images) == (valid >= 0.5).sum() < 12 * 24


def test_every_epoch_and_seed_chooses_other_patches():
    protocol = replace(CLEAN, bank_size=100, epochs=2)
    banks, _ = bank_of(protocol, made_up(), task(protocol))
    epochs, images, patches = unpack_ids(all_ids(banks))
    first, second = ({(i, p) for e, i, p in zip(epochs, images, patches, strict=True) if e == n} for n in (0, 1))
    other, _ = bank_of(replace(protocol, seed=1), made_up(), task(protocol))
    assert first != second and set(all_ids(banks).tolist()) != set(all_ids(other).tolist())


def test_quotas_add_up_and_grow_with_the_bank():
    protocol = Protocol(epochs=2)
    before = torch.zeros(2, 7, dtype=torch.long)
    for size in range(1, 60):
        quota = quotas(protocol, 7, size)
        assert quota.sum() == size and (quota >= before).all()
        before = quota


def test_the_public_codes_quota_is_the_whole_part_and_refuses_what_makes_that_code_fail():
    public = PRESETS["ohe-2.0"]
    assert (quotas(public, 7, 57) == 4).all()
    with pytest.raises(UserError, match="a bank needs 14 rows, got 13"):
        quotas(public, 7, 13)


# Curves, depth, tuning


def test_every_point_of_the_curves_equals_a_run_of_its_own():
    protocol = replace(CLEAN, bank_size=100)
    curve = run(protocol, **MANY)[0]["curve"]
    assert len(curve) == 3 * 3 * 2
    for row in curve:
        own = replace(protocol, bank_size=row["bank_size"], k=row["k"], beta=row["beta"])
        assert row["miou"] == run(own)[0]["miou"]


def test_depth_of_a_plane_is_found_again():
    heights = torch.linspace(1, 3, 32)[:, None].expand(32, 48).repeat(4, 1, 1)
    patches = torch.nn.functional.avg_pool2d(heights[:, None], 8)
    maps = torch.cat([patches.cos(), patches.sin()], 1)  # the angle between two features grows with the distance
    results, _ = evaluate(replace(CLEAN, k=4), Depth(), ArraySource(maps, heights), ArraySource(maps, heights))
    assert results["rmse"] == pytest.approx(results["ceiling"], abs=1e-3) and results["ceiling"] < 0.1
    wrong, _ = evaluate(replace(CLEAN, k=4), Depth(), ArraySource(maps, heights), ArraySource(maps.roll(3, 2), heights))
    assert wrong["rmse"] > 5 * results["rmse"]


def test_pixels_without_depth_do_not_count():
    heights = torch.rand(2, 8, 8) + 1
    maps = torch.randn(2, 4, 4, 4)
    holes = heights.clone()
    holes[:, :4] = torch.nan
    holes[:, 4:, :4] = 0
    results, _ = evaluate(replace(CLEAN, k=2), Depth(), ArraySource(maps, holes), ArraySource(maps, holes))
    assert math.isfinite(results["rmse"])


def test_a_vote_at_every_place_can_beat_the_soft_ceiling():
    scenes = made_up(noise=0.01, images=8)
    vote = replace(CLEAN, decode="vote", k=1)
    results, _ = run(vote, scenes, scenes)
    assert results["miou"] == results["ceiling"] == 1.0 > run(replace(CLEAN, k=1), scenes, scenes)[0]["miou"]


def test_tuning_holds_a_tenth_of_the_images_out_and_takes_the_best():
    protocol = replace(PRESETS["capi-knn"])
    results, found = run(protocol, made_up(images=30))
    tuned = results["tuned"]
    assert results["images"]["bank"] == 27 and len(tuned["miou"]) == 8
    assert tuned["miou"][f"{tuned['distance']}, k = {tuned['k']}"] == max(tuned["miou"].values())
    _, images, _ = unpack_ids(found.ids)
    assert len(images.unique()) <= 27


def test_standardising_makes_scale_and_shift_of_a_channel_irrelevant():
    train, val = made_up(), made_up(images=5, seed=1)
    scale, shift = torch.logspace(-2, 2, 8).view(1, 8, 1, 1), torch.arange(8.0).view(1, 8, 1, 1)
    moved = [(maps * scale + shift, masks) for maps, masks in (train, val)]
    standard = replace(CLEAN, standardise=True, distance="l2")
    scores = [run(standard, *pair)[0]["miou"] for pair in ((train, val), moved)]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    assert run(CLEAN, *moved)[0]["miou"] != run(CLEAN, train, val)[0]["miou"]


# Protocols


def test_every_field_changes_the_hash_and_presets_differ():
    base = Protocol()
    other = {
        "img_size": (64, 96), "resize": "bicubic", "pixels": "std-0.255", "features": "after_prr", "layer": -2,
        "norm": False, "augment": False, "epochs": 3, "bank_size": 5, "quota": "floor", "draws": "global", "seed": 1,
        "ignored": "class-0", "min_valid": 0.1, "standardise": True, "distance": "l2", "k": 7, "beta": 0.5,
        "decode": "vote", "tune": True, "average": "all", "match": "hungarian", "precision": "float16",
    }  # fmt: skip
    assert set(other) == {f.name for f in fields(Protocol)}
    hashes = {replace(base, **{name: value}).hash for name, value in other.items()}
    assert len(hashes | {base.hash}) == len(other) + 1
    assert len({preset.hash for preset in PRESETS.values()}) == len(PRESETS)
    assert Protocol(**asdict(base)).hash == base.hash


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k", 0, "k must be at least 1, got 0"),
        ("beta", 0.0, "beta must be above 0"),
        ("min_valid", 1.5, "share from 0 to 1, got 1.5"),
        ("img_size", (0, 8), "height and width"),
        ("distance", "manhattan", "one of cosine, l2, got 'manhattan'"),
        ("bank_size", 0, "bank_size must be at least 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(Protocol(), **{field: value})


# Refusals


class Named(ArraySource):
    """Images with names, which counts the batches it gave."""

    given = 0

    def name(self, index):
        return f"holiday_{index}.jpg"

    def batches(self, indices, epoch):
        for batch in super().batches(indices, epoch):
            self.given += 1
            yield batch


def refusal(train=None, val=None, protocol=CLEAN, **more):
    """What is said, and how many batches the bank had cost by then."""
    arrays = Named(*(train or made_up()), 2), Named(*(val or made_up(images=5, seed=1)), 2)
    with pytest.raises(UserError) as caught:
        evaluate(protocol, task(protocol, ignore_index=255), *arrays, **more)
    return str(caught.value), arrays[0].given


def test_features_that_are_not_numbers_name_the_image():
    maps, masks = made_up(images=5)
    maps[3, 2, 1, 4] = torch.nan
    assert "holiday_3.jpg gives features that are not finite" in refusal(val=(maps, masks))[0]
    assert "holiday_3.jpg gives features that are not finite" in refusal(train=(maps, masks))[0]


def test_a_patch_without_direction_names_the_image():
    maps, masks = made_up(images=5)
    maps[4, :, 1, 4] = 0
    assert "holiday_4.jpg gives a patch whose features are all zero" in refusal(val=(maps, masks))[0]


def test_labels_that_no_class_has_name_the_image():
    maps, masks = made_up(images=5)
    masks[2, 0, 0] = 5
    said, _ = refusal(train=(maps, masks))
    assert "mask of image holiday_2.jpg must hold labels in 0..4 or 255 (ignored), it has 0..5" in said


@pytest.mark.parametrize("setup", [Setup(), Setup(order="bank")])
def test_a_bank_of_fewer_rows_than_neighbours_is_refused_after_one_batch(setup):
    said, batches = refusal(protocol=replace(CLEAN, bank_size=9), setup=setup)
    assert "the bank can have 9 rows at most, and k is 10" in said and batches == 1


def test_a_bank_that_ignored_pixels_leave_too_small_is_refused():
    maps, masks = made_up()
    said, _ = refusal(train=(maps, torch.full_like(masks, 255)))
    assert "the bank of all patches has 0 rows, and k is 10" in said


def test_grids_that_differ_are_refused():
    said, _ = refusal(val=made_up(grid=(5, 6), images=2))
    assert "one grid of patches, got 4x6 for image holiday_0.jpg after 5x6" in said


def test_an_index_needs_a_bank_that_is_kept():
    assert "needs the order bank" in refusal(setup=Setup(index=Spy))[0]


def test_a_vote_needs_a_grid_that_divides_the_image():
    maps, masks = made_up()
    said, _ = refusal((maps, masks[:, :15]), (maps, masks[:, :15]), replace(CLEAN, decode="vote"))
    assert "grid must divide the image, got a grid of 4x6 for 15x24" in said


# Memory

GROWTH = """
import sys, json, torch
from eval.hummingbird import ArraySource, Protocol, Segmentation, evaluate
from timm_locat.memory import resident_peak

class Endless(ArraySource):
    "As many images as asked, made when they are needed."
    def __init__(self, images): self.images = images
    def __len__(self): return self.images
    def batches(self, indices, epoch):
        from eval.hummingbird import Batch
        for start in range(0, len(indices), 8):
            some = list(indices[start:start + 8])
            g = torch.Generator().manual_seed(some[0])
            maps = torch.randn(len(some), 64, 16, 16, generator=g)
            yield Batch(some, maps, torch.randint(0, 4, (len(some), 64, 64), generator=g))
    def masks(self, indices):
        return (torch.zeros(64, 64, dtype=torch.long) for _ in indices)

import eval.hummingbird.evaluate
sys.modules["eval.hummingbird.evaluate"].FORGET_EVERY = 2**14
protocol = Protocol(bank_size=None, epochs=1)
task = Segmentation(protocol, list("abcd"))
results, _ = evaluate(protocol, task, Endless(int(sys.argv[1])), Endless(2))
print(json.dumps([results["rows"], resident_peak()]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a process its memory")
def test_memory_does_not_grow_with_the_bank():
    peaks = {}
    for images in (160, 640):
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, str(images)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        rows, peaks[images] = json.loads(done.stdout)
        assert rows == images * 256
    bank_bytes = (640 - 160) * 256 * 64 * 4  # 31 MB of features that a bank would have kept
    assert peaks[640] - peaks[160] < bank_bytes / 3
