"""`python -m eval hummingbird`: record, report, picture, engines and sentences."""

import json

import pytest
import torch
import tyro
from PIL import Image

import eval.__main__ as command
from eval.hummingbird.command import Config, file_name, run
from eval.hummingbird.protocol import PRESETS
from timm_locat.errors import UserError
from timm_locat.record import read_record

SMALL = {"model": "raw-pixels:8", "img_size": (32, 48), "scenes": (12, 4), "epochs": 1, "bank_size": "150", "k": 10}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("hummingbird") / "record.json"
    text, status = run(Config(**SMALL, bank_sizes=("100", "all"), out=path))
    return path, text, status


def test_a_run_writes_a_record_that_says_everything(done):
    path, _, status = done
    record = read_record(path)
    results = record["results"]
    assert status == 0 and record["protocol"] == "hummingbird/v1" and record["config"]["model"] == "raw-pixels:8"
    assert results["protocol_hash"] == Config(**SMALL).settings().hash
    assert results["settings"]["k"] == 10 and results["settings"]["min_valid"] == 0.5
    assert results["rows"] == 150 and results["grid"] == [4, 6] and results["images"] == {"bank": 12, "queries": 4}
    assert {(row["bank_size"], row["k"]) for row in results["curve"]} == {
        (size, k) for size in (100, 150, None) for k in (1, 5, 10)
    }
    assert 0 <= results["miou"] <= results["miou_hungarian"] <= 1 and results["miou"] < results["ceiling"] <= 1
    assert set(results["seconds"]) >= {"features", "labels", "search", "score"} and results["index"] is None


def test_the_report_has_the_hash_every_class_and_a_row_of_markdown(done):
    path, text, _ = done
    results = read_record(path)["results"]
    assert results["protocol_hash"] in text and f"{100 * results['miou']:.2f}" in text
    assert all(name in text for name in results["class_iou"])
    assert f"| `raw-pixels:8` | composed | hbird `{results['protocol_hash']}` | 150 |" in text


def test_the_picture_lies_beside_the_record(done):
    with Image.open(done[0].with_suffix(".png")) as picture:
        assert picture.width > 500 and len(picture.convert("RGB").getcolors(2**24)) > 1000


@pytest.mark.parametrize("engine", ["faiss", "faiss-ivfpq"])
def test_faiss_gives_the_same_score_and_an_index_says_how_near_it_came(done, engine, tmp_path):
    pytest.importorskip("faiss")
    run(Config(**{**SMALL, "bank_size": "all"}, engine=engine, pictures=0, out=tmp_path / "record.json"))
    results = read_record(tmp_path / "record.json")["results"]
    exact = next(row for row in read_record(done[0])["results"]["curve"] if row["bank_size"] is None and row["k"] == 10)
    if engine == "faiss":
        assert results["miou"] == pytest.approx(exact["miou"], abs=1e-3) and results["index"] is None
    else:
        assert results["index"]["queries"] == 4 * 24 and 0.5 < results["index"]["recall"] <= 1
        assert 0.5 < results["index"]["label_agreement"] <= 1


def write_pairs(folder, seed, count=4, top=2):
    """Images of noise and masks of two halves, as files of the same names."""
    g = torch.Generator().manual_seed(seed)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        pixels = torch.randint(0, 256, (40, 50, 3), generator=g, dtype=torch.uint8)
        mask = torch.zeros(40, 50, dtype=torch.uint8)
        mask[:, 25:] = top
        mask[:3] = 255
        pixels[mask == top] //= 4
        Image.fromarray(pixels.numpy()).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask.numpy()).save(folder / "masks" / f"{number}.png")
    return folder / "images", folder / "masks"


def test_folders_of_images_and_masks_are_evaluated(tmp_path):
    folders = {"train_folders": write_pairs(tmp_path / "a", 0), "val_folders": write_pairs(tmp_path / "b", 1)}
    config = Config(**SMALL, **folders, classes=("dark", "odd", "bright"), out=tmp_path / "record.json")
    run(config)
    results = read_record(tmp_path / "record.json")["results"]
    assert set(results["class_iou"]) == {"dark", "bright"} and results["images"] == {"bank": 4, "queries": 4}
    assert results["miou"] > 0.8


def test_a_mask_with_a_class_too_many_is_refused_before_the_model_runs(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the model ran")

    monkeypatch.setattr("eval.hummingbird.features.Extractor.__call__", never)
    folders = {"train_folders": write_pairs(tmp_path / "a", 0, top=3), "val_folders": write_pairs(tmp_path / "b", 1)}
    with pytest.raises(UserError, match=r"0\.png.*3"):
        run(Config(**SMALL, **folders, classes=("dark", "odd", "bright"), out=tmp_path / "record.json"))


def test_a_mask_of_another_size_is_refused_before_the_model_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.hummingbird.features.Extractor.__call__", lambda *_: pytest.fail("the model ran"))
    folders = {"train_folders": write_pairs(tmp_path / "a", 0), "val_folders": write_pairs(tmp_path / "b", 1)}
    Image.new("L", (49, 40)).save(tmp_path / "a" / "masks" / "2.png")
    with pytest.raises(UserError, match=r"2\.png"):
        run(Config(**SMALL, **folders, classes=("dark", "odd", "bright"), out=tmp_path / "record.json"))


def test_the_seed_chooses_another_bank(done, tmp_path):
    run(Config(**SMALL, seed=1, pictures=0, out=tmp_path / "record.json"))
    assert read_record(tmp_path / "record.json")["results"]["miou"] != read_record(done[0])["results"]["miou"]


def test_a_protocol_by_name_is_what_runs_and_changes_show_in_the_hash():
    assert Config(model="x", protocol="dip").settings() == PRESETS["dip"]
    hashes = {Config(model="x", protocol=name).settings().hash for name in PRESETS}
    assert len(hashes) == len(PRESETS)
    assert Config(model="x", bank_size="all").settings().bank_size is None
    assert Config(model="x", k=7).settings().hash not in hashes


def test_records_of_different_settings_have_different_names():
    configs = [{}, {"k": 7}, {"untrained": True}, {"engine": "faiss"}, {"ks": (1,)}, {"seed": 1}, {"protocol": "dip"}]
    names = {file_name(config, config.settings()) for config in (Config(model="a/b", **c) for c in configs)}
    assert len(names) == len(configs) and not any("/" in name for name in names)


def test_every_option_can_be_said_on_the_command_line():
    words = [
        "--model",
        "m",
        "--img-size",
        "32",
        "48",
        "--bank-size",
        "all",
        "--bank-sizes",
        "10",
        "20",
        "--ks",
        "1",
        "2",
        "--k",
        "3",
        "--norm",
        "False",
        "--layer",
        "-2",
    ]
    config = tyro.cli(Config, args=words)
    protocol = config.settings()
    assert protocol.img_size == (32, 48) and protocol.bank_size is None and not protocol.norm and protocol.layer == -2
    assert config.bank_sizes == ("10", "20")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, "nowhere"),
        (
            {"k": 500, "bank_size": "150"},
            "the bank can have 150 rows at most, and k is 500; lower k",
        ),
        ({"device": "nonsense"}, "torch cannot use the device 'nonsense'; use --device cpu"),
        ({"model": "vit_tinny"}, "there is no model 'vit_tinny'"),
        ({"engine": "faiss-ivfpq", "protocol": "dip"}, "searches by cosine, and this protocol by l2"),
        ({"engine": "faiss-ivfpq", "order": "queries"}, "needs the order bank"),
        ({"bank_size": "3", "protocol": "ohe-2.0"}, "a bank needs 12 rows, got 3"),
    ],
)
def test_mistakes_end_in_one_sentence(changes, message, tmp_path):
    if changes.get("engine"):
        pytest.importorskip("faiss")
    with pytest.raises(UserError) as caught:
        run(Config(**{**SMALL, **changes}, out=tmp_path / "record.json"))
    assert message in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bank_size": "many"}, "a number of rows above 0, or all, got 'many'"),
        ({"img_size": (0,)}, "at least 1 pixel"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"beta": -1.0}, "beta must be above 0"),
        ({"model_kwargs": "[]"}, "must be a JSON object"),
        ({"val_folders": ("a", "b")}, "go together"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"model": "m", **changes})


def test_the_command_is_listed():
    assert "hummingbird" in command.usage()
    assert json.dumps(command.SUBCOMMANDS["hummingbird"][0]) == '"eval.hummingbird.command"'
