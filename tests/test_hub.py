"""Publishing: what is exported comes back equal, one commit a push, and nothing from outside is trusted."""

import errno
import json
import random
import shutil
import struct
import sys

import pytest
import timm
import torch
from fake_hub import FakeHub, http_error
from huggingface_hub import ModelCard

from timm_locat.errors import UserError
from timm_locat.hub import __main__ as command_line
from timm_locat.hub import export, model_card, package, pull, push, remote, verify, write_card
from timm_locat.hub.contents import CARD, CONFIG, FILES, PROBE, RECORD, WEIGHTS, load_folder
from timm_locat.hub.probe import check_probe
from timm_locat.record import write_record

SMALL = dict(img_size=(32, 48), patch_size=16, depth=1, embed_dim=32, num_heads=2, num_classes=6)
REPO = "someone/model"
SHIPPED = "locatvit_compact_patch4_32.fashion_mnist"


def small(name="locatvit_tiny", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A complete folder of a small model; tests copy it before they change it."""
    base = tmp_path_factory.mktemp("hub")
    export(small(), base / "run", label_names=list("abcdef"))
    write_record(
        base / "run" / RECORD,
        protocol="train/v1",
        results=dict(test_accuracy=61.25, test_top5=98.5, test_images=1_000, train_images=5_000)
        | dict(image_passes=20_000, parameters=1_234, seconds=120.0, mixed_precision="bf16"),
        config=dict(
            model="hf-hub:someone/start@main", data=dict(name="fashion_mnist_mini", protocol="none"), pretrained=True
        )
        | dict(epochs=4, global_batch_size=25, peak_lr=1e-3, weight_decay=0.05),
        seed=0,
    )
    package(base / "run", base / "folder")
    return base / "folder"


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "folder")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "WAIT", 0.0)
    return FakeHub(tmp_path / "cache")


# Round trips


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("locatvit_tiny", {}),
        ("locatvit_tiny", {"in_chans": 1}),
        ("locatvit_tiny", {"img_size": (48, 64), "gaug_grid": (2, 3)}),
        ("locatjumbo_tiny", {"jumbo_tokens": 2}),
        ("vit_posattn", {"patch_size": 16}),
        ("vit_tiny_patch16_224", {}),
    ],
)
def test_what_is_pushed_comes_back_equal(name, kwargs, hub, tmp_path):
    model = small(name, **kwargs)
    model.reset_classifier(4)
    export(model, tmp_path / "run")
    push(tmp_path / "run", REPO, api=hub)
    again = timm.create_model(f"local-dir:{pull(REPO, tmp_path / 'got', api=hub)}", pretrained=True).eval()
    channels, height, width = again.pretrained_cfg["input_size"]
    x = torch.randn(2, kwargs.get("in_chans", channels), height, width)
    assert again(x).shape == (2, 4) and torch.equal(again(x), model(x))
    assert verify(tmp_path / "got")[2] == "probe: logits within 0.0e+00"


def test_half_precision_comes_back_as_the_same_numbers(hub, tmp_path):
    model = small().half()
    export(model, tmp_path / "run")
    push(tmp_path / "run", REPO, api=hub)
    again = timm.create_model(f"local-dir:{pull(REPO, tmp_path / 'got', api=hub)}", pretrained=True).eval()
    x = torch.randn(1, 3, 32, 48)
    assert torch.equal(again(x), model.float()(x))


def test_transformers_reads_the_folder(exported):
    transformers = pytest.importorskip("transformers")
    classifier = transformers.AutoModelForImageClassification.from_pretrained(exported).eval()
    x = torch.randn(1, 3, 32, 48)
    model = load_folder(exported)
    for a, b in zip(classifier.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    # Memory is aligned otherwise, which the last digit may show.
    torch.testing.assert_close(classifier(x).logits, model(x), rtol=0, atol=1e-6)
    assert classifier.config.id2label[5] == "f"


def test_a_folder_holds_all_that_is_published_and_nothing_else(exported):
    assert {path.name for path in exported.iterdir()} == set(FILES)
    assert "card: licence mit, 2 results" in verify(exported)


# Pushing


def test_the_second_push_makes_no_commit(folder, hub):
    assert push(folder, REPO, api=hub).files == dict.fromkeys(FILES, "new")
    commits = dict(hub.repos[REPO]["commits"])
    again = push(folder, REPO, api=hub)
    assert again.commit is None and set(again.files.values()) == {"same"}
    assert hub.repos[REPO]["commits"] == commits


def test_a_push_sends_what_has_changed_in_one_commit(folder, hub):
    push(folder, REPO, private=True, api=hub)
    assert hub.repos[REPO]["private"]
    text = (folder / CARD).read_text()
    (folder / CARD).write_text(text[: text.index("<!-- Generated")] + "More.\n")
    before = len(hub.repos[REPO]["commits"])
    done = push(folder, REPO, api=hub)
    assert {name for name, state in done.files.items() if state == "changed"} == {CARD}
    assert len(hub.repos[REPO]["commits"]) == before + 1
    assert hub.model_info(REPO).sha == done.commit


def test_branches_pull_requests_and_tags(folder, hub, tmp_path):
    done = push(folder, REPO, create_pr=True, api=hub)
    assert done.url.endswith("/discussions/1") and set(hub._files(REPO, None)[1]) == {".gitattributes"}
    push(folder, REPO, revision="next", tag="v1", api=hub)
    assert set(hub._files(REPO, None)[1]) == {".gitattributes"}
    assert load_folder(pull(REPO, tmp_path / "got", revision="v1", api=hub))
    with pytest.raises(UserError, match="cannot be tagged"):
        push(folder, REPO, create_pr=True, tag="v2", api=hub)


def test_a_dry_run_makes_nothing(folder, hub):
    done = push(folder, REPO, dry_run=True, revision="next", tag="v1", api=hub)
    assert done.files == dict.fromkeys(FILES, "new") and hub.repos == {} and hub.calls == ["model_info"]


def test_a_card_that_was_taken_over_by_hand_is_kept(folder, hub):
    own = "---\nlibrary_name: timm\nlicense: cc-by-4.0\n---\nMine.\n"
    (folder / CARD).write_text(own)
    push(folder, REPO, api=hub)
    assert hub._files(REPO, None)[1][CARD].decode() == own
    with pytest.raises(UserError, match="written by hand"):
        write_card(folder)


# When the Hub or the disk refuses


@pytest.mark.parametrize("call", ["create_repo", "model_info", "create_commit"])
@pytest.mark.parametrize(
    "error", [http_error(500), http_error(503), http_error(429), ConnectionError("cut"), TimeoutError()]
)
def test_what_passes_is_tried_again(call, error, folder, hub):
    hub.fail[call] = [error]
    assert push(folder, REPO, api=hub).commit is not None
    assert set(hub._files(REPO, None)[1]) == {".gitattributes", *FILES}


@pytest.mark.parametrize(
    ("error", "advice", "calls"),
    [
        (http_error(401), "hf auth login", 1),
        (http_error(403), "write access", 1),
        (http_error(409), "in the meantime", 1),
        (http_error(412), "in the meantime", 1),
        (http_error(400), "refused with status 400", 1),
        (http_error(500), "run the command again", remote.ATTEMPTS),
        (ConnectionResetError("cut"), "run the command again", remote.ATTEMPTS),
    ],
)
@pytest.mark.parametrize("call", ["create_repo", "model_info", "create_commit"])
def test_what_stays_is_one_sentence_and_nothing_is_published(call, error, advice, calls, folder, hub):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.fail[call] = [error] * 9
    with pytest.raises(UserError, match=rf"cannot push to {REPO}: .*{advice}"):
        push(folder, REPO, api=hub)
    assert hub.calls.count(call) == calls
    assert all(set(files) <= {".gitattributes"} for repo in hub.repos.values() for files in repo["commits"].values())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (http_error(401), "hf auth login"),
        (http_error(500), "run the command again"),
        (ConnectionError("cut"), "run the command again"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room"),
    ],
)
@pytest.mark.parametrize("call", ["model_info", "snapshot_download"])
def test_a_pull_that_fails_leaves_no_folder(call, error, advice, folder, hub, tmp_path):
    push(folder, REPO, api=hub)
    hub.fail[call] = [error] * 9
    with pytest.raises(UserError, match=rf"cannot pull {REPO}: .*{advice}"):
        pull(REPO, tmp_path / "got", api=hub)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_there_is_named(hub, folder, tmp_path):
    with pytest.raises(UserError, match="no such repository"):
        pull("someone/gone", tmp_path / "got", api=hub)
    push(folder, REPO, api=hub)
    with pytest.raises(UserError, match="no such branch, tag or commit"):
        pull(REPO, tmp_path / "got", revision="v9", api=hub)
    with pytest.raises(UserError, match="no model 'gone'"):
        push("gone", REPO, api=hub)
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        pull(REPO, tmp_path / "got", api=hub)


# What comes from outside


@pytest.mark.parametrize("name", ["pytorch_model.bin", "old/weights.pth", "x.pkl"])
def test_a_pickle_is_refused_before_anything_is_fetched(name, folder, hub, tmp_path):
    hub.put(REPO, {p.name: p.read_bytes() for p in folder.iterdir()} | {name: b"cos\nsystem\n(S'true'\ntR."})
    with pytest.raises(UserError, match="may run code"):
        pull(REPO, tmp_path / "got", api=hub)
    assert "snapshot_download" not in hub.calls
    with pytest.raises(UserError, match="may run code"):
        push(folder, REPO, api=hub)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:x"])
def test_a_path_that_climbs_out_is_refused(name, folder, hub, tmp_path):
    hub.put(REPO, {p.name: p.read_bytes() for p in folder.iterdir()} | {name: b""})
    with pytest.raises(UserError, match="leads out of the folder"):
        pull(REPO, tmp_path / "got", api=hub)
    assert "snapshot_download" not in hub.calls


def test_a_file_that_is_no_part_of_a_model_is_refused(folder):
    (folder / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"notes\.txt, which is no part"):
        verify(folder)


def damaged(data, kind):
    size = struct.unpack("<Q", data[:8])[0]
    return {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "oversized header": struct.pack("<Q", 2**62) + data[8:],
        "header past the end": struct.pack("<Q", len(data) * 2) + data[8:],
        "flipped bit": data[: size + 20] + bytes([data[size + 20] ^ 1]) + data[size + 21 :],
        "flipped exponent": data[: size + 11] + b"\x7f" + data[size + 12 :],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["truncated", "empty", "oversized header", "header past the end", "flipped bit", "flipped exponent"]
)
def test_damaged_weights_are_refused(kind, folder):
    (folder / WEIGHTS).write_bytes(damaged((folder / WEIGHTS).read_bytes(), kind))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "vit_of_nobody"}, "'vit_of_nobody', which timm"),
        ({"architecture": None}, r'create_model\("locatvit_base", pretrained=True\)'),
        ({"architecture": "vit_tiny_patch16_224"}, "unknown|missing|another shape"),
        ({"model_args": {**SMALL, "depth": 2}}, "missing"),
        ({"model_args": {**SMALL, "embed_dim": 64}}, "of another shape"),
        ({"model_args": {**SMALL, "embed_dim": 2**40, "depth": 1}}, "of another shape|cannot be|can be built"),
        ({"model_args": {"nonsense": 1}}, "does not describe a locatvit_tiny"),
        ({"model_args": {"checkpoint_path": "x.pth"}}, "no plain build arguments"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change, message, folder):
    config = json.loads((folder / CONFIG).read_text()) | change
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(UserError, match=message):
        verify(folder)


def test_a_logit_that_has_moved_is_refused(folder):
    config = json.loads((folder / CONFIG).read_text())
    config["pretrained_cfg"]["mean"] = [0.1, 0.1, 0.1]
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not say what it said"):
        verify(folder)


def test_mutated_files_are_refused_or_read_right(exported, tmp_path):
    """200 of them; nothing else than a sentence may come out, and what loads says what it said."""
    pick, refused = random.Random(0), 0
    folder = shutil.copytree(exported, tmp_path / "folder")
    for number in range(200):
        name = (CONFIG, WEIGHTS, PROBE)[number % 3]
        clean = (exported / name).read_bytes()
        (folder / name).write_bytes(mutate(clean, pick))
        try:
            assert check_probe(load_folder(folder), folder) <= 1e-3
        except UserError as err:
            refused += 1
            assert str(folder) in str(err)
        (folder / name).write_bytes(clean)
    assert 100 < refused < 200


def mutate(data, pick):
    data, header = bytearray(data), min(len(data), 2_000)
    for _ in range(pick.choice((1, 1, 3))):
        place = pick.choice((pick.randrange(len(data)), pick.randrange(header)))
        what = pick.randrange(4)
        if what == 0:
            data[place] ^= 1 << pick.randrange(8)
        elif what == 1:
            del data[place : place + pick.randrange(1, 9)]
        elif what == 2:
            data[place:place] = bytes(pick.randrange(256) for _ in range(4))
        else:
            data[place] = ord(pick.choice("0123456789"))
    return bytes(data)


# The command line


def run(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hub", *map(str, words)])
    command_line.main()
    return capsys.readouterr().out


def test_every_subcommand_tells_what_it_did(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setattr(remote, "hub_api", lambda: hub)
    assert "probe: logits within" in run(["export", SHIPPED, tmp_path / "made"], monkeypatch, capsys)
    assert "nothing was sent" in run(["push", tmp_path / "made", REPO, "--dry-run"], monkeypatch, capsys)
    assert "pushed: http://hub/" in run(["push", tmp_path / "made", REPO], monkeypatch, capsys)
    assert "no commit was made" in run(["push", tmp_path / "made", REPO], monkeypatch, capsys)
    assert "local-dir:" in run(["pull", REPO, "--folder", tmp_path / "got"], monkeypatch, capsys)
    assert "record: train/v1" in run(["verify", REPO], monkeypatch, capsys)
    assert "README.md" in run(["card", tmp_path / "got", "--repo-id", REPO], monkeypatch, capsys)
    assert f"hf-hub:{REPO}" in (tmp_path / "got" / CARD).read_text()


# A card


def described(name, **config):
    """A card of a run on this data set."""
    record = dict(
        protocol="train/v1",
        results=dict(test_accuracy=61.25, test_top5=98.5, test_images=10, train_images=20, image_passes=40)
        | dict(parameters=1_234, seconds=120.0, mixed_precision="no"),
        config=dict(model="x", data=dict(name=name, protocol="none"), pretrained=False)
        | dict(epochs=4, global_batch_size=25, peak_lr=1e-3, weight_decay=0.05),
        **dict(command="python -m x", seed=0, commit="abc", machine=dict(cuda=None, cores=2)),
    )
    return model_card(
        dict(architecture="locatvit_tiny", num_classes=2) | config, record, load=f"hf-hub:{REPO}", repo_id=REPO
    )


@pytest.mark.parametrize(
    ("name", "datasets", "shown"),
    [
        ("/home/me/secret/pets", None, "pets"),
        ("timm/oxford-iiit-pet", ["timm/oxford-iiit-pet"], "timm/oxford-iiit-pet"),
        ("fashion_mnist", ["zalando-datasets/fashion_mnist"], "fashion_mnist"),
    ],
)
def test_a_card_names_the_data_and_no_path(name, datasets, shown):
    text = described(name)
    data = ModelCard(text).data
    assert data.datasets == datasets and data.eval_results[0].dataset_name == shown
    assert "secret" not in text and f"`{shown}` test" in text and "float32" in text


def test_a_card_marks_the_papers_number_as_the_papers():
    text = described("imagenet1k")
    assert "reports 73.94 % top-1 on ImageNet-1k. That is the paper's number, not one of ours." in text
    assert ModelCard(text).data.eval_results[0].metric_value == 61.25 and len(ModelCard(text).data.eval_results) == 1


def test_a_model_without_a_record_claims_nothing():
    text = model_card(dict(architecture="locatvit_tiny", num_classes=2), None, load="locatvit_tiny")
    assert "None were recorded." in text and ModelCard(text).data.eval_results is None
    assert ModelCard(text).data.license == "mit"


def test_a_fine_tuned_model_names_what_it_started_from(exported):
    assert ModelCard.load(exported / CARD).data.base_model == "someone/start"
