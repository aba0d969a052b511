"""Data sets by name and by path: the layouts that are read, and the sentences that refuse the others."""

import gzip
import hashlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import timm_locat.data
from timm_locat.data import DATASETS, load
from timm_locat.errors import UserError

datasets = pytest.importorskip("datasets")

EMBEDDED = Path(timm_locat.data.__file__).parent / "embedded"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def write_image(path, grey=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 2), grey).save(path)


def image_folder(root, **splits):
    """Image files as root/<split>/<class>/0.png, 1.png, ... for train={"cat": 2, ...}."""
    for split, classes in splits.items():
        for name, count in classes.items():
            for i in range(count):
                write_image(root / split / name / f"{i}.png", grey=i)
    return root


def table(labels, feature=None, greys=None):
    """A table with an image column and the given labels; image i has the grey i, or greys[i]."""
    greys = range(len(labels)) if greys is None else greys
    images = [Image.new("L", (3, 2), grey) for grey in greys]
    feature = feature or datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def class_label(*names):
    return datasets.ClassLabel(names=list(names))


def greys(data):
    return [data[i][0].getpixel((0, 0))[0] for i in range(len(data))]


# The embedded set


@pytest.mark.parametrize(("split", "per_class"), [("train", 500), ("test", 100)])
def test_the_embedded_set_is_balanced_and_of_the_stated_size(split, per_class):
    entry = DATASETS["fashion_mnist_mini"]
    data = load("fashion_mnist_mini", split)
    assert torch.bincount(data.labels).tolist() == [per_class] * entry.num_classes
    assert len(data.classes) == entry.num_classes and data.classes[9] == "Ankle boot"
    image, label = data[7]
    assert image.mode == "RGB" and (image.height, image.width) == entry.image_size
    assert label == data.labels[7]


def test_the_embedded_set_takes_at_most_4_5_megabytes():
    assert sum(file.stat().st_size for file in EMBEDDED.glob("*.parquet")) <= 4_500_000


def test_the_embedded_files_are_those_that_the_maker_wrote():
    # Pinned when they were written with pyarrow 26.0.1, so that a change is noticed where the source is absent too.
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in EMBEDDED.glob("*.parquet")}
    assert digests == {
        "fashion_mnist_mini-train.parquet": "608c60ee1e1b",
        "fashion_mnist_mini-test.parquet": "2c8634f259dc",
    }


def test_the_embedded_set_names_its_licence():
    text = (EMBEDDED / "LICENSE.fashion-mnist").read_text()
    assert "Copyright (c) 2017 Zalando SE, https://tech.zalando.com" in text


def embedded_rows(split, cache):
    """The columns of an embedded file as lists, read by `datasets` itself."""
    path = EMBEDDED / f"fashion_mnist_mini-{split}.parquet"
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(cache))
    return rows.cast_column("image", datasets.Image(decode=False))[:]


def maker():
    spec = importlib.util.spec_from_file_location("maker", EMBEDDED / "make_fashion_mnist_mini.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_the_embedded_images_are_those_of_the_original(tmp_path, split, prefix):
    pixels = gzip.decompress((DEBIAN / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DEBIAN / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:]
    rows = embedded_rows(split, tmp_path)
    assert len(set(rows["source_index"])) == len(rows["source_index"])
    for cell, label, source in zip(rows["image"], rows["label"], rows["source_index"], strict=True):
        assert label == labels[source]
        assert Image.open(io.BytesIO(cell["bytes"])).tobytes() == pixels[source * 784 : (source + 1) * 784]


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_maker_draws_the_embedded_rows_again(tmp_path):
    make = maker()
    _, labels = make.read_split(DEBIAN, "test")
    assert make.draw(labels, "test").tolist() == embedded_rows("test", tmp_path)["source_index"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\0\0\x08\x03" + b"\0\0\0\x02" + bytes(2), "magic number 2051, expected 2049"),
        (b"\0\0\x08\x01" + b"\0\0\0\x03" + bytes(3), r"states sizes \(3,\), expected \(2,\)"),
        (b"\0\0\x08\x01" + b"\0\0\0\x02" + bytes(1), "holds 1 values, expected 2"),
    ],
)
def test_the_maker_refuses_another_file(tmp_path, content, why):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=why):
        maker().read_idx(path, (2,))


# Names


def test_a_mistyped_name_gets_a_suggestion():
    with pytest.raises(UserError, match=r"'fashion_mnist-mini'; did you mean fashion_mnist_mini"):
        load("fashion_mnist-mini")


def test_a_path_that_leads_nowhere_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no data set, folder or parquet file '.*gone'"):
        load(tmp_path / "gone")


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "data.csv").touch()
    with pytest.raises(UserError, match=r"data\.csv: it is a file of another kind"):
        load(tmp_path / "data.csv")


def test_an_unknown_split_is_told_the_known_ones():
    with pytest.raises(UserError, match=r"one of train, training, test, .*, all, got 'tset'"):
        load("fashion_mnist_mini", "tset")


def test_the_known_set_is_not_given_undivided():
    with pytest.raises(UserError, match="it has train, test"):
        load("fashion_mnist_mini", "all")


@pytest.mark.parametrize(
    ("classes", "why"), [("cat", "be a list"), ([], "be a list"), ([1], "be a list"), (["a", "a"], "differ")]
)
def test_class_names_must_be_a_list_of_different_names(classes, why):
    with pytest.raises(UserError, match=f"classes must {why}"):
        load("fashion_mnist_mini", classes=classes)


# Image folders


def test_labels_of_a_folder_follow_the_sorted_training_classes(tmp_path):
    image_folder(tmp_path, train={"dog": 2, "cat": 1, "eel": 1}, test={"eel": 2, "cat": 1})
    train, test = load(tmp_path), load(tmp_path, "test")
    assert train.classes == test.classes == ("cat", "dog", "eel")
    assert train.labels.tolist() == [0, 1, 1, 2]
    assert test.labels.tolist() == [0, 2, 2]  # no dog there, and eel keeps its number
    assert test.source(1) == str(tmp_path / "test" / "eel" / "0.png")
    assert greys(test) == [0, 0, 1]
    assert test.name == str(tmp_path) and test.split == "test"


def test_images_below_subfolders_of_a_class_belong_to_it(tmp_path):
    write_image(tmp_path / "train" / "cat" / "tabby" / "0.png")
    assert load(tmp_path).labels.tolist() == [0]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_the_test_split_goes_by_any_of_its_names(tmp_path, name):
    image_folder(tmp_path, training={"cat": 1}, **{name: {"cat": 2}})
    assert len(load(tmp_path, "test")) == len(load(tmp_path, name)) == 2
    assert len(load(tmp_path, "train")) == 1


def test_of_two_splits_the_one_of_exactly_that_name_is_read(tmp_path):
    image_folder(tmp_path, train={"cat": 1}, test={"cat": 2}, val={"cat": 3})
    assert len(load(tmp_path, "test")) == 2 and len(load(tmp_path, "val")) == 3
    with pytest.raises(UserError, match="test and val but no validation"):
        load(tmp_path, "validation")


@pytest.mark.parametrize("split", ["train", "test"])
def test_undivided_folders_are_neither_training_nor_test_data(tmp_path, split):
    image_folder(tmp_path, cat={"": 2}, dog={"": 1})
    with pytest.raises(
        UserError, match=rf"expected image files as .*{split}/<class>/.* no split folders; ask for 'all'"
    ):
        load(tmp_path, split)
    assert load(tmp_path, "all").labels.tolist() == [0, 0, 1]


def test_divided_folders_are_not_given_undivided(tmp_path):
    image_folder(tmp_path, train={"cat": 1}, test={"cat": 1})
    with pytest.raises(UserError, match="is divided into train, test"):
        load(tmp_path, "all")


def test_a_missing_test_folder_is_not_replaced_by_the_training_folder(tmp_path):
    image_folder(tmp_path, train={"cat": 1})
    with pytest.raises(UserError, match=r"expected image files as .*test/<class>/.* but it has train"):
        load(tmp_path, "test")


def test_a_class_may_be_called_train(tmp_path):
    image_folder(tmp_path, bus={"": 1}, train={"": 2})
    assert load(tmp_path, "all").classes == ("bus", "train")


def test_a_test_class_that_training_lacks_is_named(tmp_path):
    image_folder(tmp_path, train={"cat": 1}, test={"cat": 1, "dog": 1})
    with pytest.raises(UserError, match=r"class folder .*test/dog is none of the 1 classes"):
        load(tmp_path, "test")


def test_an_empty_training_class_is_named(tmp_path):
    image_folder(tmp_path, train={"cat": 1})
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(UserError, match=r"class folder .*train/dog holds no image files"):
        load(tmp_path)


def test_given_classes_set_the_labels_and_stand_in_for_a_training_folder(tmp_path):
    image_folder(tmp_path, test={"cat": 1, "eel": 1})
    with pytest.raises(UserError, match="no train folder to tell which classes there are"):
        load(tmp_path, "test")
    data = load(tmp_path, "test", classes=["eel", "dog", "cat"])
    assert data.classes == ("eel", "dog", "cat") and data.labels.tolist() == [2, 0]


def test_files_that_are_no_images_are_counted_and_hidden_ones_ignored(tmp_path):
    image_folder(tmp_path, train={"cat": 1})
    hidden = (".0.png", ".cache/1.png", ".DS_Store")
    for name in ("a.txt", "b.TXT", "LICENSE", "tabby/c.json", *hidden):
        path = tmp_path / "train" / "cat" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_image(tmp_path / "train" / "stray.png")
    write_image(tmp_path / "train" / ".hidden_class" / "0.png")
    data = load(tmp_path)
    assert len(data) == 1 and data.classes == ("cat",)
    assert data.left_out == {".txt": 2, "(none)": 1, ".json": 1, ".png": 1}


@pytest.mark.parametrize("split", ["train", "all"])
def test_a_folder_without_images_is_refused(tmp_path, split):
    with pytest.raises(UserError, match="expected"):
        load(tmp_path, split)


def test_a_split_without_images_is_refused(tmp_path):
    image_folder(tmp_path, train={"cat": 1})
    (tmp_path / "test" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"expected image files as .*test/<class>/\.\.\., found none"):
        load(tmp_path, "test")


def test_a_damaged_file_is_named_when_it_is_read(tmp_path):
    image_folder(tmp_path, train={"cat": 2})
    (tmp_path / "train" / "cat" / "1.png").write_text("no picture")
    data = load(tmp_path)
    assert data[0][1] == 0
    with pytest.raises(UserError, match=r"cannot read image .*train/cat/1\.png"):
        data[1]


# Tables


def write_parquet(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        rows.to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("train", "test"),
        ("train-00000-of-00001", "validation-00000-of-00001"),
        ("mini-train", "mini-test"),
        ("train0", "val0"),
    ],
)
def test_parquet_files_are_told_apart_by_their_names(tmp_path, names):
    train, test = table([0, 1], class_label("cat", "dog")), table([1], class_label("cat", "dog"), greys=[9])
    write_parquet(tmp_path, **dict(zip(names, (train, test), strict=True)))
    assert load(tmp_path).labels.tolist() == [0, 1]
    data = load(tmp_path, "test")
    assert data.labels.tolist() == [1] and greys(data) == [9] and data.classes == ("cat", "dog")
    assert data.source(0) == f"parquet row 0 of {tmp_path / names[1]}.parquet"


def test_parquet_files_may_lie_in_a_folder_called_data(tmp_path):
    write_parquet(tmp_path / "data", train=table([0, 1]))
    assert load(tmp_path).classes == ("0", "1")


def test_several_parquet_files_of_a_split_follow_one_another(tmp_path):
    write_parquet(tmp_path, **{"train-00001-of-00002": table([1], greys=[7]), "train-00000-of-00002": table([0, 0])})
    data = load(tmp_path)
    assert data.labels.tolist() == [0, 0, 1] and greys(data) == [0, 1, 7]
    assert data.source(2) == data.source(-1) == f"parquet row 0 of {tmp_path / 'train-00001-of-00002.parquet'}"
    assert data.source(1).startswith("parquet row 1 of ")


def test_parquet_files_with_other_classes_are_not_mixed(tmp_path):
    parts = [table([0], class_label("cat", "dog")), table([0], class_label("dog", "cat"))]
    write_parquet(tmp_path, **{f"train-{i}": part for i, part in enumerate(parts)})
    with pytest.raises(UserError, match=r"train-1\.parquet has other columns or classes than .*train-0\.parquet"):
        load(tmp_path)


def test_a_single_parquet_file_is_read_whole_or_by_the_split_it_is_named_after(tmp_path):
    write_parquet(tmp_path, test=table([1, 0], class_label("a", "b")))
    path = tmp_path / "test.parquet"
    assert len(load(path, "all")) == len(load(path, "test")) == 2
    with pytest.raises(UserError, match=r"expected a file named train\*\.parquet .* but it has test"):
        load(path, "train")


def test_parquet_files_without_a_split_in_their_name_are_only_given_undivided(tmp_path):
    write_parquet(tmp_path, images=table([1, 0]))
    assert len(load(tmp_path, "all")) == 2
    with pytest.raises(UserError, match="nothing there names a split; ask for 'all'"):
        load(tmp_path, "train")


def test_parquet_files_of_no_split_are_counted_as_left_out(tmp_path):
    write_parquet(tmp_path, train=table([0]), extra=table([0]))
    assert load(tmp_path).left_out == {".parquet": 1}
    with pytest.raises(UserError, match="is divided into train"):
        load(tmp_path, "all")


def test_a_replaced_parquet_file_of_the_same_time_gives_the_new_images(tmp_path):
    path = write_parquet(tmp_path, train=table([0], greys=[10])) / "train.parquet"
    before = path.stat()
    assert greys(load(path)) == [10]
    write_parquet(tmp_path, train=table([0], greys=[20]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert greys(load(path)) == [20]


def test_loading_leaves_no_cache_behind(tmp_path, monkeypatch):
    write_parquet(tmp_path / "set", train=table([0]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load(tmp_path / "set")[0]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("off", [False, True])
def test_progress_bars_are_silent_while_loading_and_then_as_they_were(tmp_path, capfd, off):
    table([0]).save_to_disk(tmp_path / "set")
    capfd.readouterr()
    (datasets.disable_progress_bars if off else datasets.enable_progress_bars)()
    try:
        load(tmp_path / "set", "all")[0]
        assert datasets.are_progress_bars_disabled() == off and capfd.readouterr().err == ""
    finally:
        datasets.enable_progress_bars()


def test_large_parquet_files_are_refused_before_they_are_read(tmp_path, monkeypatch):
    write_parquet(tmp_path, train=table([0]))
    monkeypatch.setattr("timm_locat.data._tables.MAX_PARQUET_BYTES", 100)
    with pytest.raises(UserError, match=r"read into memory; stream it .*, or convert it once"):
        load(tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(UserError, match=r"cannot read .*train\.parquet: "):
        load(tmp_path)


def test_a_damaged_image_in_a_table_is_named_by_its_row(tmp_path):
    rows = datasets.Dataset.from_dict({"image": [{"bytes": b"no picture", "path": None}], "label": [0]})
    write_parquet(tmp_path, train=rows.cast_column("image", datasets.Image(decode=False)))
    with pytest.raises(UserError, match=r"cannot read image parquet row 0 of .*train\.parquet: "):
        load(tmp_path)[0]


def test_a_saved_dictionary_of_tables_is_read_by_split(tmp_path):
    splits = {"train": table([1, 0], class_label("cat", "dog")), "validation": table([1], class_label("cat", "dog"))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    assert load(tmp_path).labels.tolist() == [1, 0]
    data = load(tmp_path, "test")
    assert data.labels.tolist() == [1] and data.source(0) == f"row 0 of {tmp_path / 'validation'}"
    with pytest.raises(UserError, match="is divided into train, validation"):
        load(tmp_path, "all")


def test_a_saved_table_is_given_undivided_or_as_the_split_it_was_saved_from(tmp_path):
    table([1, 0]).save_to_disk(tmp_path / "plain")
    assert len(load(tmp_path / "plain", "all")) == 2
    with pytest.raises(UserError, match="nothing there names a split"):
        load(tmp_path / "plain", "test")
    datasets.Dataset(table([1, 0]).data, split=datasets.Split.TRAIN).save_to_disk(tmp_path / "train_only")
    assert greys(load(tmp_path / "train_only")) == [0, 1]
    with pytest.raises(UserError, match="but it has train"):
        load(tmp_path / "train_only", "test")


def test_string_labels_follow_the_sorted_strings_of_training(tmp_path):
    string = datasets.Value("string")
    write_parquet(tmp_path, train=table(["eel", "cat", "dog"], string), test=table(["eel"], string))
    assert load(tmp_path).labels.tolist() == [2, 0, 1]
    assert load(tmp_path, "test").labels.tolist() == [2]
    assert load(tmp_path, "test", classes=["eel", "cat"]).labels.tolist() == [0]


def test_a_string_label_that_training_lacks_is_named(tmp_path):
    string = datasets.Value("string")
    write_parquet(tmp_path, train=table(["cat"], string), test=table(["cat", "dog"], string))
    with pytest.raises(UserError, match=r"parquet row 1 of .*test\.parquet has label 'dog', which is none of the 1 "):
        load(tmp_path, "test")


def test_class_labels_in_another_order_are_brought_into_that_of_training(tmp_path):
    write_parquet(tmp_path, train=table([0, 1], class_label("cat", "dog")), test=table([0], class_label("dog", "cat")))
    data = load(tmp_path, "test")
    assert data.classes == ("cat", "dog") and data.labels.tolist() == [1]


def test_whole_number_labels_count_up_to_the_largest_of_training(tmp_path):
    write_parquet(tmp_path, train=table([0, 2]), test=table([1]))
    data = load(tmp_path, "test")
    assert data.classes == ("0", "1", "2") and data.labels.tolist() == [1]
    assert load(tmp_path, "test", classes=["x", "y"]).classes == ("x", "y")


@pytest.mark.parametrize("feature", [None, class_label("cat", "dog")])
def test_a_label_below_the_range_is_named(tmp_path, feature):
    write_parquet(tmp_path, train=table([1, -1], feature))
    with pytest.raises(UserError, match=r"parquet row 1 of .* has label -1, but the labels of 2 classes are 0\.\.1"):
        load(tmp_path)


def test_a_label_above_the_range_of_training_is_named(tmp_path):
    write_parquet(tmp_path, train=table([0, 1]), test=table([1, 2]))
    with pytest.raises(UserError, match=r"parquet row 1 of .*test\.parquet has label 2, but the labels of 2 classes"):
        load(tmp_path, "test")


def test_a_missing_label_is_named(tmp_path):
    write_parquet(tmp_path, train=table([0, None]))
    with pytest.raises(UserError, match=r"parquet row 1 of .*train\.parquet has nothing in column label"):
        load(tmp_path)


def test_whole_numbers_without_training_data_need_class_names(tmp_path):
    write_parquet(tmp_path, test=table([0, 1]))
    with pytest.raises(UserError, match="no training split beside it"):
        load(tmp_path, "test")
    assert load(tmp_path, "test", classes=["a", "b", "c"]).labels.tolist() == [0, 1]


def test_a_table_without_rows_is_refused(tmp_path):
    write_parquet(tmp_path, train=table([], class_label("cat")))
    with pytest.raises(UserError, match="has no rows"):
        load(tmp_path)


@pytest.mark.parametrize(("column", "what"), [("image", "image or img"), ("label", "label or labels or fine_label")])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, column, what):
    write_parquet(tmp_path, train=table([0]).remove_columns([column]).add_column("other", [1]))
    with pytest.raises(UserError, match=rf"expected a column named {what} .* got columns .*other"):
        load(tmp_path)


def test_the_only_columns_of_their_kind_are_taken_whatever_their_names(tmp_path):
    rows = table([1], class_label("a", "b")).rename_columns({"image": "photo", "label": "species"})
    write_parquet(tmp_path, train=rows)
    assert load(tmp_path).labels.tolist() == [1] and greys(load(tmp_path)) == [0]


def test_images_stored_as_plain_bytes_are_read(tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (3, 2), 5).save(buffer, "png")
    write_parquet(tmp_path, train=datasets.Dataset.from_dict({"image": [buffer.getvalue()], "label": [0]}))
    assert greys(load(tmp_path)) == [5]


def test_labels_of_another_kind_are_refused(tmp_path):
    write_parquet(tmp_path, train=table([0.5], datasets.Value("float32")))
    with pytest.raises(
        UserError, match=r"expected class labels, whole numbers or strings in column label .*, got float32"
    ):
        load(tmp_path)


# ImageData


def all_kinds(root):
    """The same two images as a folder, a parquet file and a saved table."""
    image_folder(root / "folder", train={"a": 2})
    write_parquet(root / "parquet", train=table([0, 0], class_label("a")))
    datasets.DatasetDict({"train": table([0, 0], class_label("a"))}).save_to_disk(root / "saved")
    return [load(root / kind) for kind in ("folder", "parquet", "saved")]


def test_data_survives_pickling(tmp_path):
    for data in all_kinds(tmp_path):
        again = pickle.loads(pickle.dumps(data))
        assert greys(again) == greys(data) == [0, 1]
        assert again.classes == ("a",) and again.source(1) == data.source(1)


def grey_and_label(batch):
    return [(image.getpixel((0, 0))[0], label) for image, label in batch]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_read_the_same_images(tmp_path):
    fork = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    for data in all_kinds(tmp_path):
        loader = DataLoader(data, batch_size=1, num_workers=2, collate_fn=grey_and_label, multiprocessing_context=fork)
        assert list(loader) == [[(0, 0)], [(1, 0)]]


def test_indices_count_from_either_end_and_stop_there(tmp_path):
    image_folder(tmp_path, train={"a": 2})
    data = load(tmp_path)
    assert data.source(-1) == data.source(1) and len(list(data)) == 2
    for wrong in (2, -3):
        with pytest.raises(IndexError, match="has 2 images"):
            data[wrong]


def test_importing_the_room_does_not_import_datasets():
    code = "import sys, timm_locat.data; print([m for m in ('datasets', 'pyarrow', 'pandas') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
