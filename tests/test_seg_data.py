"""`python -m seg.data check`: a good copy passes, and each way to spoil one is named."""

import sys

import numpy as np
import pytest
from PIL import Image
from segmentation_layouts import WRITERS, write_ade20k, write_cityscapes, write_coco_stuff164k, write_mask, write_voc

from seg.data import check, main
from timm_locat.data.scenes import write_scenes
from timm_locat.errors import run_cli

MASK = "annotations/training/ADE_train_00000001.png"


def faults(name, root, **options):
    return [fault for report in check(name, root, partial=True, **options) for fault in report.faults]


def run(monkeypatch, capsys, *arguments):
    """Status and what the command printed to standard output and error."""
    monkeypatch.setattr(sys, "argv", ["seg.data", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    printed = capsys.readouterr()
    return int(ended.value.code), printed.out, printed.err


@pytest.mark.parametrize("name", WRITERS)
def test_a_good_copy_has_no_faults_and_its_pixels_are_counted(name, tmp_path):
    reports = check(name, WRITERS[name](tmp_path), partial=True)
    assert [report.faults for report in reports] == [[]] * len(reports)
    for report in reports:
        height, width = (20, 40) if name == "cityscapes" else (20, 30)
        assert sum(report.pixels.values()) == report.pairs * height * width > 0
        assert (report.pixels[-1] > 0) == (name != "pascal_context_60")


def test_composed_scenes_have_no_faults(tmp_path):
    assert faults("composed", write_scenes(tmp_path / "s", train=2, val=1, size=(32, 48))) == []


def test_half_a_set_is_told_by_its_number_of_images(tmp_path):
    train, val = check("ade20k", write_ade20k(tmp_path))
    assert train.faults == ["train has 3 images with masks, the whole set has 20,210; copy it again"]
    assert len(val.faults) == 1 and "2,000" in val.faults[0]


def spoil_flavour(root):
    write_mask(root / MASK, (20, 30), (0, 1, 151))


def spoil_size(root):
    write_mask(root / MASK, (21, 30), (0, 1))


def spoil_colours(root):
    Image.new("RGB", (30, 20), (1, 2, 3)).save(root / MASK)


def spoil_lossy(root):
    Image.new("L", (30, 20)).save(root / MASK, "JPEG")  # a JPEG by the name of a PNG


def spoil_cut(root):
    (root / MASK).write_bytes((root / MASK).read_bytes()[:40])


def spoil_mask_missing(root):
    (root / MASK).unlink()


def spoil_image_missing(root):
    (root / "images/training/ADE_train_00000001.jpg").unlink()


def spoil_image(root):
    (root / "images/training/ADE_train_00000001.jpg").write_bytes(b"none")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_flavour, "it holds 151 (label 150) in"),
        (spoil_size, "it has 30x21 pixels, but its image has 30x20"),
        (spoil_colours, "it holds colours"),
        (spoil_lossy, "JPEG compresses by changing values"),
        (spoil_cut, "cannot read mask"),
        (spoil_mask_missing, "is an image without mask"),
        (spoil_image_missing, "is a mask without image"),
        (spoil_image, "cannot read image"),
    ],
)
def test_a_spoilt_file_is_the_one_fault_and_is_named(spoil, says, tmp_path):
    spoil(write_ade20k(tmp_path))
    (fault,) = faults("ade20k", tmp_path)
    assert says in fault and "ADE_train_00000001" in fault


def test_a_listed_image_that_is_not_there_is_named(tmp_path):
    (write_voc(tmp_path) / "VOCdevkit/VOC2012/JPEGImages/2008_000000.jpg").unlink()
    (fault,) = faults("voc", tmp_path, splits=["val"])
    assert "2008_000000.jpg is listed but not there" in fault


@pytest.mark.parametrize(
    ("write", "name", "right", "other"),
    [
        (write_cityscapes, "cityscapes", "_gtFine_labelTrainIds.png", "_gtFine_labelIds.png"),
        (write_coco_stuff164k, "coco_stuff164k", "_labelTrainIds.png", ".png"),
    ],
)
def test_the_other_flavour_of_ids_is_recognised(write, name, right, other, tmp_path):
    write(tmp_path)
    for path in tmp_path.rglob(f"*{right}"):
        path.write_bytes(path.with_name(path.name.replace(right, other)).read_bytes())
    assert len(faults(name, tmp_path)) == 5 and all("flavour of ids" in fault for fault in faults(name, tmp_path))


def test_exif_turns_the_image_before_sizes_are_compared(tmp_path):
    write_ade20k(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 30)).save(tmp_path / "images/training/ADE_train_00000001.jpg", exif=exif)
    assert faults("ade20k", tmp_path) == []


def test_the_command_names_ten_faults_counts_the_rest_and_fails(tmp_path, monkeypatch, capsys):
    write_ade20k(tmp_path)
    for i in range(12):
        write_mask(tmp_path / f"annotations/training/orphan_{i:02d}.png", (9, 9), (0, 1))
    status, out, _ = run(monkeypatch, capsys, "check", "ade20k", tmp_path, "--partial")
    assert status == 1 and "ade20k train: 3 images with masks" in out and "12 faults" in out
    assert " 10. " in out and " 11. " not in out and "and 2 more" in out
    assert "ADEChallengeData2016.zip" in out


def test_the_command_passes_a_good_copy_and_tells_what_never_occurs(tmp_path, monkeypatch, capsys):
    write_ade20k(tmp_path)
    arguments = ("check", "ade20k", tmp_path, "--partial", "--split", "val")
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 0 and "no faults" in out and "train" not in out
    assert "147 classes never occur: sky, floor, tree" in out and "26.7% of the pixels ignored" in out
    assert "val: 100%" in err


@pytest.mark.parametrize("arguments", [("check", "ade20k", "none"), ("check", "ade20k", ".", "--split", "test")])
def test_a_wrong_place_or_split_is_one_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 1 and "Traceback" not in out + err
    assert "there is no folder none" in out or "has no split test" in out


@pytest.mark.slow
def test_several_processes_find_the_same(tmp_path):
    spoil_flavour(write_ade20k(tmp_path))
    one, two = (check("ade20k", tmp_path, partial=True, processes=n) for n in (1, 2))
    assert one == two and len(one[0].faults) == 1


def test_labels_are_counted_after_zero_is_taken_out(tmp_path):
    write_ade20k(tmp_path)
    Image.fromarray(np.array([[0, 1], [1, 3]], np.uint8).repeat(10, 0).repeat(15, 1)).save(tmp_path / MASK)
    (train, _) = check("ade20k", tmp_path, partial=True)
    others = 2 * 20 * 8  # the first of four stripes in the two masks that were not replaced
    assert train.pixels[-1] == others + 150 and train.pixels[2] == 150
