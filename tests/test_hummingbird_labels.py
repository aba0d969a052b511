"""Counts of patches, which of them enter the bank, and how labels of neighbours decode."""

import pytest
import torch
import torch.nn.functional as F
from scenes_of_patches import made_up
from torch import Tensor

from eval.hummingbird.labels import (
    OUT,
    CountLabels,
    PixelLabels,
    count_labels,
    decode_soft,
    draw,
    pack_ids,
    patch_ranks,
    unpack_ids,
)


def naive_counts(mask: Tensor, grid, classes, ignored) -> Tensor:
    height, width = mask.shape
    counts = torch.zeros(grid[0] * grid[1], classes, dtype=torch.int)
    for y in range(height):
        for x in range(width):
            if mask[y, x] != ignored:
                counts[y * grid[0] // height * grid[1] + x * grid[1] // width, mask[y, x].item()] += 1
    return counts


@pytest.mark.parametrize("size", [(8, 12), (9, 13), (31, 14)])
def test_counts_equal_counting_pixel_by_pixel_whether_or_not_sides_divide(size):
    g = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 6, (3, *size), generator=g)
    masks[masks == 5] = 255
    counts = count_labels(masks, (2, 3), 5, 255)
    for mask, got in zip(masks, counts, strict=True):
        assert torch.equal(got, naive_counts(mask, (2, 3), 5, 255))
    assert counts.sum() == (masks != 255).sum()


def test_a_mask_that_is_ignored_throughout_counts_nothing():
    assert count_labels(torch.full((1, 4, 4), 255), (2, 2), 3, 255).sum() == 0


def test_labels_beyond_8_bits_are_counted():
    mask = torch.full((1, 4, 4), 40_000, dtype=torch.int32)
    assert count_labels(mask, (2, 2), 40_001, None)[0, :, 40_000].tolist() == [4] * 4


def test_rare_classes_of_an_image_come_first_and_mixed_patches_last():
    # Class 0 has three patches of its own, class 1 one, and the last patch has both.
    counts = torch.tensor([[[4, 0], [4, 0], [0, 4], [4, 0], [2, 2]]])
    ranks = patch_ranks(counts, torch.ones(1, 5))
    # Patches that have class 0: 4; class 1: 2; so the scores are 4, 4, 2, 4, 6, and ties keep their order.
    assert ranks.tolist() == [[1, 2, 0, 3, 4]]


def test_the_uniform_numbers_scale_the_scores():
    counts = torch.tensor([[[4, 0], [4, 0], [0, 4]]])  # scores 2, 2, 1
    assert patch_ranks(counts, torch.tensor([[0.9, 0.1, 0.9]])).tolist() == [[2, 0, 1]]


def test_patches_with_too_few_counted_pixels_enter_no_bank():
    counts = torch.tensor([[[0, 0], [1, 0], [0, 2], [3, 1]]])
    ranks = patch_ranks(counts, torch.ones(1, 4), 2)
    assert (ranks[0, :2] >= OUT).all() and sorted(ranks[0, 2:].tolist()) == [0, 1]


def test_ids_can_be_unpacked_and_are_ordered_by_epoch_image_and_patch():
    ids = torch.cat([pack_ids(e, i, torch.tensor([0, 7])) for e in (0, 3) for i in (0, 2**27)])
    assert torch.equal(ids, ids.sort().values)
    assert [part[-1].item() for part in unpack_ids(ids)] == [3, 2**27, 7]


def test_a_seed_belongs_to_its_key():
    seeds = {draw(s, e, i, what) for s in range(3) for e in range(3) for i in range(3) for what in ("crop", "patch")}
    assert len(seeds) == 54 and all(0 <= seed < 2**63 for seed in seeds)
    assert draw(0, 1, 2, "crop") == draw(0, 1, 2, "crop")


def stores(counts: Tensor) -> list[CountLabels]:
    ids = torch.arange(len(counts)) * 10
    shuffled = torch.randperm(len(counts), generator=torch.Generator().manual_seed(3))
    halves = shuffled.split(len(counts) // 2 + 1)
    return [
        CountLabels(ids, counts),
        CountLabels(ids[shuffled], counts[shuffled]),
        CountLabels.joined([CountLabels(ids[half], counts[half]) for half in halves]),
        CountLabels(ids, counts).select(ids.flip(0)),
    ]


@pytest.mark.parametrize("store", range(4), ids=["in order", "shuffled", "joined", "selected"])
def test_soft_labels_equal_the_weighted_mean_of_shares(store):
    _, masks = made_up(images=4)
    counts = count_labels(masks, (4, 6), 5, None).flatten(0, 1)
    g = torch.Generator().manual_seed(1)
    neighbours = torch.randint(0, len(counts), (7, 3), generator=g)
    weights = torch.rand(7, 3, generator=g)
    shares = counts.float() / counts.sum(1, keepdim=True)
    wanted = (weights[:, :, None] * shares[neighbours]).sum(1)
    torch.testing.assert_close(stores(counts)[store].soft(weights, neighbours * 10), wanted)


def test_a_selection_holds_no_more_than_was_asked():
    counts = torch.eye(4, dtype=torch.int)
    one = stores(counts)[0].select(torch.tensor([20, 20, 0]))
    assert one.ids.tolist() == [0, 20] and one.classes.tolist() == [0, 2]


def test_decoding_equals_upsampling_every_class():
    g = torch.Generator().manual_seed(0)
    soft = torch.rand(12, 9, generator=g)
    soft[:, 2:6] = 0  # classes that no patch has
    full = F.interpolate(soft.T.reshape(1, 9, 3, 4), size=(10, 17), mode="bilinear").argmax(1)[0]
    assert torch.equal(decode_soft(soft, (3, 4), (10, 17)), full)


def test_one_class_decodes_to_itself_and_none_to_zero():
    soft = torch.zeros(4, 3)
    assert decode_soft(soft, (2, 2), (3, 3)).unique().tolist() == [0]
    soft[:, 2] = 0.5
    assert decode_soft(soft, (2, 2), (3, 3)).unique().tolist() == [2]


def test_a_vote_takes_the_commonest_label_at_each_place_and_skips_what_does_not_count():
    pixels = torch.tensor([[1, 2, -1], [1, 0, -1], [2, 0, 2], [2, -1, -1]])
    labels = PixelLabels(torch.tensor([5, 6, 7, 8]), pixels, 3)
    assert labels.vote(torch.tensor([[5, 6, 7], [5, 7, 8]])).tolist() == [[1, 0, 2], [2, 0, 2]]
    assert labels.vote(torch.tensor([[5, 6], [8, 5]])).tolist() == [[1, 0, 0], [1, 2, 0]]
