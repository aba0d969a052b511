"""Streams: every row once in whatever order and parts, labels as without streaming, and what cannot be streamed."""

import itertools
import pickle

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from timm_locat.data import DATASETS, load
from timm_locat.data.streams import StreamRow
from timm_locat.errors import UserError

datasets = pytest.importorskip("datasets")
from datasets.splits import SplitDict  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402

ROWS = (5, 2, 9)
"""Of three files; written in groups of four rows, so that there are six shards: 4, 1, 2, 4, 4, 1."""


def table(numbers, names="ab", **columns):
    """Image i is all of grey i, of class i % len(names)."""
    labels = [i % len(names) for i in numbers]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    images = [Image.new("L", (3, 2), i) for i in numbers]
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def write_files(folder, split="train", rows=ROWS, **options):
    files, first = [], 0
    for i, count in enumerate(rows):
        files.append(folder / f"{split}-{i:05d}-of-{len(rows):05d}.parquet")
        table(range(first, first + count), **options).to_parquet(files[-1], batch_size=4)
        first += count
    return files


class Hub:
    """What `load_dataset(..., streaming=True)` returns, by id: tables streamed from files, with or without a length."""

    def __init__(self, root):
        self.root, self.there = root, {}

    def add(self, repo, stated, **splits):
        files = {}
        for split, options in splits.items():
            files[split] = [str(file) for file in write_files(self.root, split, **options)]
        self.there[repo] = files, stated

    def load_dataset(self, repo, config=None, streaming=False):
        assert streaming
        files, stated = self.there[repo]
        loaded = LOAD_DATASET("parquet", data_files=files, streaming=True)
        for split, streamed in loaded.items():
            if stated:
                rows = sum(1 for _ in streamed)
                streamed.info.splits = SplitDict.from_split_dict([{"name": split, "num_examples": rows}])
        return loaded


LOAD_DATASET = datasets.load_dataset


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    return hub


@pytest.fixture(params=["parquet", "saved", "hub", "hub without a length"])
def stream(request, tmp_path, hub, monkeypatch):
    """The same 16 images streamed from each kind of source."""
    if request.param.startswith("hub"):
        hub.add("someone/greys", request.param == "hub", train={})
        return load("someone/greys", streaming=True)
    if request.param == "saved":
        monkeypatch.setattr("timm_locat.data._tables.SAVED_SHARD_ROWS", 5)
        datasets.DatasetDict(train=table(range(16))).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        write_files(tmp_path / "data")
    return load(tmp_path / "data", streaming=True)


def greys(stream):
    return [image.getpixel((1, 1))[0] for image, _ in stream]


def numbers(rows):
    return [(row.shard, row.row) for row in rows]


# Every row once


def test_a_stream_gives_what_loading_gives(stream):
    assert greys(stream) == list(range(16)) and [label for _, label in stream] == [0, 1] * 8
    assert stream.classes == ("a", "b") and isinstance(stream, IterableDataset)


@pytest.mark.parametrize("buffer", [1, 5, 100])
def test_shuffling_gives_every_image_once_in_an_order_set_by_the_seed(stream, buffer):
    orders = [greys(stream.shuffled(seed, buffer)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2] and orders[0] != list(range(16))
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert all(label == grey % 2 for grey, (_, label) in zip(orders[0], stream.shuffled(3, buffer), strict=True))


@pytest.mark.parametrize("count", [1, 3, 5, 20])  # the shards are 3 or 6: most of these do not divide them
@pytest.mark.parametrize("buffer", [1, 4])
def test_parts_neither_overlap_nor_leave_anything_out(stream, count, buffer):
    parts = [greys(stream.shuffled(7, buffer).part(i, count)) for i in range(count)]
    assert sorted(itertools.chain(*parts)) == list(range(16))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_and_workers_neither_lose_nor_double_an_image(stream, workers, ranks):
    seen = []
    for rank in range(ranks):
        mine = stream.shuffled(1, 4).part(rank, ranks)
        loader = DataLoader(mine, batch_size=None, num_workers=workers, collate_fn=lambda sample: sample)
        seen.append(sorted(image.getpixel((0, 0))[0] for image, _ in loader))
        assert seen[-1] == sorted(greys(mine))  # workers share out this rank's part, and nothing else
    assert sorted(itertools.chain(*seen)) == list(range(16))


@pytest.mark.parametrize("part", [(0, 1), (1, 3)])
def test_a_stream_can_be_entered_anywhere(stream, part):
    order = stream.shuffled(5, 4).part(*part)
    whole = numbers(order.rows())
    assert all(numbers(order.rows(first)) == whole[first:] for first in range(len(whole) + 1))


def test_shards_of_which_nothing_is_left_are_not_read_again(tmp_path):
    write_files(tmp_path, rows=(4, 4, 4, 4))
    order = load(tmp_path, streaming=True).shuffled(5, 2)
    rest = list(order.rows(10))
    for shard in {0, 1, 2, 3} - {row.shard for row in rest}:
        order.shards[shard].file.unlink()
    assert numbers(order.rows(10)) == numbers(rest)
    with pytest.raises(UserError, match="cannot read"):
        list(order.rows())


def test_a_part_reads_only_its_own_shards(tmp_path):
    files = write_files(tmp_path, rows=(4, 4, 4, 4))
    mine = load(tmp_path, streaming=True).part(1, 2)
    for file in files[:2]:
        file.unlink()
    assert greys(mine) == list(range(8, 16))


def test_a_stream_survives_pickling(stream):
    assert greys(pickle.loads(pickle.dumps(stream.shuffled(2, 3)))) == greys(stream.shuffled(2, 3))


def test_a_buffer_spreads_neighbours(tmp_path):
    write_files(tmp_path, rows=(200,))
    near, far = (greys(load(tmp_path, streaming=True).shuffled(0, buffer)) for buffer in (1, 100))
    assert sum(b - a == 1 for a, b in itertools.pairwise(near)) >= 150  # the shards of four changed places as wholes
    assert sum(b - a == 1 for a, b in itertools.pairwise(far)) < 20


# Lengths, labels, names


def test_a_length_is_known_where_something_states_it(stream, request):
    stated = "without" not in request.node.callspec.id
    assert stream.num_images == (16 if stated else None)


def test_tables_and_streams_call_a_row_the_same(tmp_path, hub):
    write_files(tmp_path)
    data, stream = load(tmp_path), load(tmp_path, streaming=True)
    assert [stream.source(row) for row in stream.rows()] == [data.source(i) for i in range(16)]
    datasets.DatasetDict(train=table(range(3))).save_to_disk(tmp_path / "saved")
    data, stream = load(tmp_path / "saved"), load(tmp_path / "saved", streaming=True)
    assert [stream.source(row) for row in stream.rows()] == [data.source(i) for i in range(3)]
    hub.add("someone/greys", True, train={})
    stream = load("someone/greys", streaming=True)
    assert stream.source(StreamRow(2, 1, b"", 0)) == "row 1 of shard 2 of split train of someone/greys on the Hub"


def test_a_damaged_image_is_named(tmp_path):
    rows = {"image": [{"bytes": b"no image", "path": None}], "label": [0]}
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["a"])})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"cannot read image parquet row 0 of .*train\.parquet"):
        greys(load(tmp_path, streaming=True))


def test_labels_follow_the_training_split_or_the_given_classes(tmp_path, hub):
    for split, names in (("train", "ab"), ("test", "ba")):
        write_files(tmp_path, split, rows=(2,), names=names)
    hub.add("someone/greys", True, train={"rows": (2,)}, test={"rows": (2,)})
    for name, labels in ((tmp_path, [1, 0]), ("someone/greys", [0, 1])):
        stream = load(name, "test", streaming=True)
        assert [row.label for row in stream.rows()] == labels and stream.classes == ("a", "b")
        stream = load(name, "test", streaming=True, classes=["c", "b", "a"])
        assert [row.label for row in stream.rows()] == [2 - k for k in labels] and stream.classes == ("c", "b", "a")
        with pytest.raises(UserError, match=r"row \d of .* has label 'b', which is none of the 1 classes"):
            list(load(name, "test", streaming=True, classes=["a"]).rows())


def test_a_named_set_streams_with_its_own_classes(tmp_path, small, hub):
    names = DATASETS["cifar10"].names
    small("cifar10", train=16, test=3)
    write_files(tmp_path, "train", names=names)
    hub.add("uoft-cs/cifar10", True, train={"names": names})
    for root in (tmp_path, None):
        stream = load("cifar10", "train", root=root, streaming=True, classes=names[::-1])
        assert [label for _, label in stream][:3] == [9, 8, 7] and stream.num_images == 16
    small("cifar10", train=17)
    with pytest.raises(UserError, match=r"has 16 images of the train split of cifar10, expected 17"):
        load("cifar10", "train", root=tmp_path, streaming=True)


def test_the_embedded_set_streams_like_any_other():
    data, stream = load("fashion_mnist_mini", "test"), load("fashion_mnist_mini", "test", streaming=True)
    assert torch.tensor([row.label for row in stream.rows()]).equal(data.labels)
    assert next(iter(stream))[0].tobytes() == data[0][0].tobytes()


def hub_labels(hub, labels, feature):
    rows = datasets.Dataset.from_dict({"image": [b"x"] * len(labels), "label": labels})
    rows.cast_column("label", feature).to_parquet(hub.root / "odd.parquet")
    hub.there["someone/odd"] = {"train": [str(hub.root / "odd.parquet")]}, False


@pytest.mark.parametrize(("labels", "dtype"), [([1, 0], "int64"), (["b", "a"], "string")])
def test_labels_of_the_hub_that_are_no_class_labels_need_names(hub, labels, dtype):
    hub_labels(hub, labels, datasets.Value(dtype))
    with pytest.raises(UserError, match=r"(whole numbers|strings) as labels, which streaming does not read ahead"):
        load("someone/odd", streaming=True)
    assert [row.label for row in load("someone/odd", streaming=True, classes=["a", "b"]).rows()] == [1, 0]


@pytest.mark.parametrize(
    ("label", "what"), [(2, "label 2, but those of 2 classes are 0..1"), (None, "label None, which")]
)
def test_a_wrong_label_of_the_hub_is_named_when_it_is_read(hub, label, what):
    hub_labels(hub, [0, label], datasets.Value("int64"))
    with pytest.raises(UserError, match=rf"row 1 of shard 0 of split train of someone/odd on the Hub has {what}"):
        list(load("someone/odd", streaming=True, classes=["a", "b"]).rows())


# Mistakes


def test_what_cannot_be_streamed_says_so(tmp_path):
    folder = tmp_path / "pictures" / "train" / "cat"
    folder.mkdir(parents=True)
    Image.new("L", (2, 2)).save(folder / "0.png")
    with pytest.raises(
        UserError, match=r"pictures cannot be streamed, which is for parquet files.*leave streaming out"
    ):
        load(tmp_path / "pictures", streaming=True)
    with pytest.raises(UserError, match="cannot be streamed"):
        load("cifar10", root=tmp_path, streaming=True)


def test_a_connection_that_breaks_is_told_in_a_sentence(hub, monkeypatch):
    hub.add("someone/greys", True, train={})
    stream = load("someone/greys", streaming=True)
    (hub.root / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(UserError, match=r"cannot go on reading shard 1 of split train of someone/greys on the Hub"):
        list(stream)


def test_nonsense_is_refused(tmp_path):
    write_files(tmp_path)
    stream = load(tmp_path, streaming=True)
    with pytest.raises(UserError, match="must hold at least 1 image, got 0"):
        stream.shuffled(0, 0)
    with pytest.raises(UserError, match=r"a part must be in 0..1, got 2"):
        stream.part(2, 2)
