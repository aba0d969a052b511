"""Scores of label maps against counting by hand."""

import math

import pytest
import torch

from timm_locat.metrics import class_iou, confusion, matched, mean_iou, pixel_accuracy


def labels(seed, classes=4, shape=(3, 5, 7)):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def naive_confusion(target, prediction, classes, ignored):
    counts = [[0] * classes for _ in range(classes)]
    for true, guess in zip(target.flatten().tolist(), prediction.flatten().tolist(), strict=True):
        if true != ignored:
            counts[true][guess] += 1
    return torch.tensor(counts)


@pytest.mark.parametrize("ignored", [None, 2, 255])
def test_a_confusion_matrix_equals_counting_pixel_by_pixel(ignored):
    target, prediction = labels(0), labels(1)
    if ignored == 255:
        target[0] = 255
    got = confusion(target, prediction, 4, ignored)
    assert torch.equal(got, naive_confusion(target, prediction, 4, ignored))


def test_a_16_bit_mask_counts_like_any_other():
    target, prediction = labels(0, 300), labels(1, 300)
    assert torch.equal(confusion(target.to(torch.int16), prediction, 300), naive_confusion(target, prediction, 300, -1))


def test_iou_is_intersection_over_union_of_sets_of_pixels():
    target, prediction = labels(0), labels(1)
    iou = class_iou(confusion(target, prediction, 4))
    for c in range(4):
        both, either = ((target == c) & (prediction == c)).sum(), ((target == c) | (prediction == c)).sum()
        assert iou[c].item() == pytest.approx((both / either).item())


def test_the_three_means_differ_by_absent_classes_alone():
    target, prediction = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])
    matrix = confusion(target, prediction, 5)  # IoU 1, 0.5, 0 (only predicted), and two classes without a pixel
    assert mean_iou(matrix, "present") == pytest.approx(1.5 / 2)
    assert mean_iou(matrix, "finite") == pytest.approx(1.5 / 3)
    assert mean_iou(matrix, "all") == pytest.approx(1.5 / 5)
    assert pixel_accuracy(matrix) == 0.75


def test_the_hungarian_match_undoes_a_renaming_and_never_lowers_the_score():
    target = labels(0)
    renamed = (target + 1) % 4
    matrix = confusion(target, renamed, 4)
    assert mean_iou(matrix) == 0 and mean_iou(matrix, match="hungarian") == 1
    assert torch.equal(matched(matrix), confusion(target, target, 4))
    for seed in range(5):
        matrix = confusion(target, labels(seed + 2), 4)
        assert mean_iou(matrix, "all", "hungarian") >= mean_iou(matrix, "all")


def test_no_counted_pixel_gives_no_number():
    ignored = torch.full((3, 3), 255)
    matrix = confusion(ignored, labels(0, shape=(3, 3)), 4, 255)
    assert matrix.sum() == 0
    assert math.isnan(mean_iou(matrix)) and math.isnan(pixel_accuracy(matrix)) and mean_iou(matrix, "all") == 0


@pytest.mark.parametrize(("target", "message"), [(4, r"target must lie in 0..3, got 4..4"), (-1, "got -1..-1")])
def test_a_class_out_of_range_is_refused(target, message):
    with pytest.raises(ValueError, match=message):
        confusion(torch.tensor([target]), torch.tensor([0]), 4)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        confusion(torch.zeros(2, 3), torch.zeros(3, 2), 4)
