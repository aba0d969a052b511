"""Data sets by name that are stored as image files, the tables of the Hub, and what holds for all known sets."""

import re
from pathlib import Path

import pytest
from layouts import WNIDS, image, write_imagenet, write_mini_imagenet, write_tiny_imagenet
from PIL import Image
from timm.data import ImageNetInfo

from timm_locat.data import DATASETS, load
from timm_locat.errors import UserError

datasets = pytest.importorskip("datasets")


def corner(data, i):
    return data[i][0].getpixel((0, 0))


# Tiny-ImageNet


@pytest.fixture
def tiny(tmp_path, small):
    """Tiny-ImageNet's zip unpacked, with three classes."""
    small("tiny_imagenet", num_classes=3, train=6, test=4)
    root = tmp_path / "tiny-imagenet-200"
    write_tiny_imagenet(root)
    return root


def test_tiny_imagenet_is_read_as_it_unpacks(tiny):
    train, test = load("tiny_imagenet", root=tiny.parent), load("tiny_imagenet", "test", root=tiny)
    assert (
        train.classes == test.classes == ("goldfish", "Egyptian cat", "reel")
    )  # reel: timm knows what words.txt lacks
    assert train.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert train.left_out == {".txt": 3} and corner(train, 3) == (10, 10, 10)
    assert test.labels.tolist() == [2, 0, 0, 1] and corner(test, 2) == (102, 102, 102)
    assert test.source(3) == str(tiny / "val" / "images" / "val_3.JPEG")


@pytest.mark.parametrize("split", ["test", "val", "validation"])
def test_tiny_imagenet_is_recognised_by_its_path(tiny, split):
    assert load(tiny).classes == load("tiny_imagenet", root=tiny).classes
    data = load(tiny, split, classes=["Egyptian cat", "goldfish", "reel"])
    assert data.labels.tolist() == [2, 1, 1, 0]
    with pytest.raises(UserError, match="is divided into train and val"):
        load(tiny, "all")


def test_tiny_imagenets_validation_images_may_be_sorted_into_class_folders(tiny):
    for line in (tiny / "val" / "val_annotations.txt").read_text().splitlines():
        name, wnid = line.split()[:2]
        (tiny / "val" / wnid).mkdir(exist_ok=True)
        (tiny / "val" / "images" / name).rename(tiny / "val" / wnid / name)
    data = load(tiny, "test")
    assert data.labels.tolist() == [0, 0, 1, 2] and [corner(data, i)[0] for i in (0, 1, 2, 3)] == [101, 102, 103, 100]
    assert data.left_out == {".txt": 1}
    (tiny / "val" / "images").rmdir()
    assert load(tiny, "test").labels.tolist() == [0, 0, 1, 2]


def test_what_tiny_imagenets_annotations_do_not_name_is_left_out(tiny):
    image(tiny / "val" / "images" / "extra.png")
    (tiny / "val" / "images" / "notes.md").touch()
    image(tiny / "val" / "images" / "._val_0.JPEG")
    data = load(tiny, "val")
    assert len(data) == 4 and data.left_out == {".png": 1, ".md": 1}


def test_an_annotation_of_an_image_that_is_not_there_is_named(tiny):
    (tiny / "val" / "images" / "val_2.JPEG").unlink()
    with pytest.raises(UserError, match=r"val_annotations\.txt names 1 images, val_2\.JPEG the first, that are not in"):
        load(tiny, "test")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("val_9.JPEG\tn09999999\t0", r"line 5 of .* names no class of wnids\.txt: 'val_9\.JPEG\\tn09999999"),
        ("val_9.JPEG", r"line 5 of .* names no class"),
        (f"val_1.JPEG\t{WNIDS[0]}\t0", "line 5 of .* names an image a second time"),
    ],
)
def test_a_wrong_annotation_is_named(tiny, line, why):
    with (tiny / "val" / "val_annotations.txt").open("a") as file:
        file.write(line)
    with pytest.raises(UserError, match=why):
        load(tiny, "test")


def test_a_half_copied_tiny_imagenet_is_refused(tiny):
    folder = tiny / "train" / WNIDS[1]
    (folder / "images" / f"{WNIDS[1]}_1.JPEG").unlink()
    with pytest.raises(UserError, match="has 5 images of the train split of tiny_imagenet, expected 6"):
        load("tiny_imagenet", root=tiny)
    assert len(load(tiny)) == 5  # by its path, a part will do
    (folder / "images" / f"{WNIDS[1]}_0.JPEG").unlink()
    with pytest.raises(UserError, match=rf"class folder .*{WNIDS[1]} holds no image files"):
        load(tiny)
    folder.rename(tiny / "train" / "moved")
    with pytest.raises(
        UserError, match=rf"lacks the folders of 1 of the 3 classes in wnids\.txt, {WNIDS[1]} the first"
    ):
        load(tiny)
    (tiny / "val" / "val_annotations.txt").unlink()
    with pytest.raises(UserError, match=r"expected .*val_annotations\.txt, or class folders in .*val, found neither"):
        load(tiny, "val")


def test_another_number_of_classes_is_not_tiny_imagenet(tiny, small):
    small("tiny_imagenet", num_classes=200)
    with pytest.raises(UserError, match="has 3 classes, tiny_imagenet has 200; is it that set"):
        load("tiny_imagenet", root=tiny)


# ImageNet and mini-ImageNet


def test_imagenets_labels_are_timms_whichever_classes_are_there(tmp_path, small):
    small("imagenet1k", train=3, test=2)
    order = ImageNetInfo().label_names()
    write_imagenet(tmp_path, (999, 7, 134), (517, 134))
    train, test = load("imagenet1k", root=tmp_path), load("imagenet1k", "test", root=tmp_path)
    assert train.labels.tolist() == [7, 134, 999] and train.left_out == {".txt": 1}
    assert test.labels.tolist() == [134, 517] and corner(test, 1) == (5, 5, 5)
    assert len(set(test.classes)) == 1000 and test.classes == train.classes and test.classes[0] == "tench"
    assert test.classes[134] == f"crane ({order[134]})" and test.classes[517] == f"crane ({order[517]})"
    assert load("imagenet1k", "test", root=tmp_path, classes=train.classes).labels.tolist() == [134, 517]


def test_imagenets_validation_images_in_one_folder_are_refused(tmp_path):
    image(tmp_path / "train" / "n01440764" / "0.JPEG")
    image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    for name, root in (("imagenet1k", tmp_path), (tmp_path, None)):
        with pytest.raises(UserError, match=r"val holds image files without class folders, so that nothing says what"):
            load(name, "val", root=root)


def test_a_folder_of_no_imagenet_class_is_named(tmp_path):
    image(tmp_path / "train" / "n00000000" / "0.JPEG")
    with pytest.raises(UserError, match=r"class folder .*n00000000 is none of the 1000 classes"):
        load("imagenet1k", root=tmp_path)


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_mini_imagenet_has_three_splits(tmp_path, small, validation):
    small("mini_imagenet", num_classes=3, train=4, validation=2, test=1)
    write_mini_imagenet(tmp_path, validation)
    assert load("mini_imagenet", root=tmp_path).classes == ("goldfish", "Egyptian cat", "reel")
    assert load("mini_imagenet", root=tmp_path).labels.tolist() == [0, 1, 2, 2]
    assert load("mini_imagenet", "validation", root=tmp_path).labels.tolist() == [0, 1]
    assert load("mini_imagenet", "test", root=tmp_path).labels.tolist() == [2]


# The Hub


def table(labels, names, label_column="label", image_column="image"):
    """A table with images of the greys 0, 1, ..."""
    features = {image_column: datasets.Image(), label_column: datasets.ClassLabel(names=list(names))}
    images = [Image.new("L", (3, 2), i) for i in range(len(labels))]
    rows = {image_column: images, label_column: list(labels)}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.fixture
def hub(monkeypatch):
    """Tables that `load_dataset` then returns, by id and configuration."""
    there = {}

    def load_dataset(repo, config=None):
        if (repo, config) not in there:
            raise ConnectionError(f"Couldn't reach '{repo}' on\nthe Hub")
        return datasets.DatasetDict(there[repo, config])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return there


@pytest.mark.parametrize("name", [name for name in DATASETS if DATASETS[name].hub])
def test_a_named_set_that_cannot_be_fetched_says_what_to_do(hub, name):
    repo = re.escape(DATASETS[name].hub.repo)
    with pytest.raises(
        UserError, match=rf"cannot fetch {repo}.* \(Couldn't reach .* on the Hub\); .*root=.*which holds"
    ):
        load(name)


def test_named_sets_come_from_the_hub_with_the_same_classes(hub):
    names = list(DATASETS["cifar100"].names)
    names[26] = "cra"  # as it is spelt there
    splits = {"train": table((26, 99), names, "fine_label", "img"), "test": table((3,), names, "fine_label", "img")}
    hub["uoft-cs/cifar100", None] = splits
    data = load("cifar100")
    assert data.labels.tolist() == [26, 99] and data.classes == DATASETS["cifar100"].names
    assert corner(data, 1) == (1, 1, 1) and data.source(1) == "row 1 of split train of uoft-cs/cifar100 on the Hub"
    assert load("cifar100", "val", classes=data.classes).labels.tolist() == [3]


def test_the_hubs_configuration_and_split_names_are_known(hub):
    digits = DATASETS["svhn"].names
    splits = {"train": table((1,), digits), "test": table((2, 2), digits), "extra": table((3, 0, 5), digits)}
    hub["ufldl-stanford/svhn", "cropped_digits"] = splits
    assert load("svhn", "extra").labels.tolist() == [3, 0, 5] and load("svhn", "test").labels.tolist() == [2, 2]
    names = [f"{wnid}, x" for wnid in ImageNetInfo().label_names()]
    unlabelled = table((0,), names).map(lambda row: {"label": -1})
    hub["ILSVRC/imagenet-1k", None] = {
        "train": table((5,), names),
        "validation": table((7, 999), names),
        "test": unlabelled,
    }
    assert load("imagenet1k", "test").labels.tolist() == [7, 999]


def test_wordnet_ids_of_the_hub_become_words(hub, small):
    small("tiny_imagenet", num_classes=3)
    hub["zh-plus/tiny-imagenet", None] = {"train": table((2,), sorted(WNIDS)), "valid": table((0, 1), sorted(WNIDS))}
    data = load("tiny_imagenet", "test")
    assert data.classes == ("goldfish", "Egyptian cat", "reel") and data.labels.tolist() == [0, 1]


def test_a_copy_on_the_hub_with_other_labels_is_refused(hub):
    swapped = [*DATASETS["cifar10"].names[:8], "truck", "ship"]
    hub["uoft-cs/cifar10", None] = {"train": table((0,), swapped)}
    with pytest.raises(UserError, match="has 'truck' as label 8, not as cifar10 has it"):
        load("cifar10")
    hub["uoft-cs/cifar10", None] = {"train": table((0,), swapped[:3])}
    with pytest.raises(UserError, match="uoft-cs/cifar10 has 3 classes, cifar10 has 10"):
        load("cifar10")


def test_the_hubs_tables_may_lie_in_root(tmp_path, small):
    small("tiny_imagenet", num_classes=3, train=1, test=2)
    (tmp_path / "data").mkdir()
    table((2,), sorted(WNIDS)).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    table((0, 1), sorted(WNIDS)).to_parquet(tmp_path / "data" / "valid-00000-of-00001.parquet")
    assert load("tiny_imagenet", "test", root=tmp_path).labels.tolist() == [0, 1]


def test_any_data_set_of_the_hub_is_read_by_its_id(hub):
    hub["someone/pets", None] = {"train": table((1, 0), "ab"), "validation": table((1,), "ab")}
    hub["someone/pets", "large.v2"] = {"train": table((0,), "cd"), "difficult": table((1, 1), "dc")}
    data = load("someone/pets")
    assert data.labels.tolist() == [1, 0] and data.classes == ("a", "b") and data.name == "someone/pets"
    assert load("someone/pets", "test").labels.tolist() == [1]
    assert load("someone/pets", "test", classes=["b", "a"]).labels.tolist() == [0]
    data = load("someone/pets:large.v2", "difficult")
    assert data.classes == ("c", "d") and data.labels.tolist() == [0, 0]
    with pytest.raises(
        UserError, match=r"a split named test in someone/pets:large\.v2 on the Hub, but it has train, d"
    ):
        load("someone/pets:large.v2", "test")


def test_a_missing_path_that_looks_like_a_hub_id_is_told_both(hub, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot fetch data/pets from the Hub .*if data/pets was meant as a path"):
        load("data/pets")
    with pytest.raises(UserError, match=r"there is no data set, folder or parquet file 'data/pets'"):
        load(Path("data/pets"))
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "data" / "pets" / "train" / "cat" / "0.png")
    assert len(load("data/pets")) == 1


# Names and facts


@pytest.mark.parametrize("name", [name for name in DATASETS if DATASETS[name].open_local])
def test_a_root_without_the_sets_files_is_named(tmp_path, name):
    for split in DATASETS[name].sizes:
        with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}.*"):
            load(name, split, root=tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*gone; root must be one that holds"):
        load(name, root=tmp_path / "gone")


def test_root_goes_with_names_that_have_files_of_their_own(tmp_path):
    with pytest.raises(UserError, match=r"root goes with the name of a set \(fashion_mnist_mini, .*leave it out"):
        load(tmp_path, root=tmp_path)
    with pytest.raises(UserError, match="fashion_mnist_mini is shipped with this package; leave root out"):
        load("fashion_mnist_mini", root=tmp_path)


@pytest.mark.parametrize(("name", "split"), [("cifar10", "extra"), ("svhn", "more"), ("tiny_imagenet", "all")])
def test_a_split_that_a_named_set_lacks_is_refused(tmp_path, name, split):
    with pytest.raises(UserError, match=f"{split!r}|no split {split}"):
        load(name, split, root=tmp_path)


@pytest.mark.parametrize("name", DATASETS)
def test_the_facts_of_a_set_agree_with_one_another(name):
    entry = DATASETS[name]
    assert entry.names is None or len(set(entry.names)) == entry.num_classes
    assert bool(entry.files) != bool(entry.hub and entry.open_local and entry.layouts)
    assert {"train", "test"} <= set(entry.sizes) and set(entry.files) in (set(), set(entry.sizes))
    assert entry.hflip_ok == (name != "svhn")
