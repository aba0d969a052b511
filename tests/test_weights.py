"""The weights that come with the package: no network, the accuracy of their record, timm's ways of asking for them."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image

from timm_locat.data import DATASETS, decode_all, eval_transform, load
from timm_locat.errors import UserError
from timm_locat.hub.card import shipped_card
from timm_locat.models import create_model
from timm_locat.models.weights import LABELS, TAG, WEIGHTS

NAMES = sorted(path.name.removesuffix(".safetensors") for path in WEIGHTS.glob("*.safetensors"))
CARDS = Path(__file__).parents[1] / "hub_cards"


@pytest.fixture(scope="module")
def test_images():
    entry = DATASETS["fashion_mnist_mini"]
    transform = eval_transform((32, 32), 1.0, "bicubic", native_transform=entry.native_transform)
    images, labels = decode_all(load("fashion_mnist_mini", "test"), transform)
    return (images.float() / 255 - 0.5) / 0.5, labels


def record(name):
    return json.loads((WEIGHTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_shipped_weights_reach_the_accuracy_of_their_record(name, test_images):
    model = timm.create_model(name, pretrained=True).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.inference_mode():
        hits = (model(test_images[0]).argmax(1) == test_images[1]).float().mean().item()
    # Trained and tested in bfloat16, stored in half precision: a few of 1,000 images may change sides.
    assert 100 * hits == pytest.approx(record(name)["results"]["test_accuracy"], abs=0.7)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_weights_are_found_and_adapted_as_timm_does(name):
    architecture = name.removesuffix(f".{TAG}")
    assert name in timm.list_pretrained(f"{architecture}*") and name in timm.list_models(pretrained=True)
    assert tuple(timm.get_pretrained_cfg(name).label_names) == LABELS == DATASETS["fashion_mnist_mini"].names
    x = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    assert timm.create_model(name, pretrained=True, num_classes=3, img_size=48).eval()(x).shape == (1, 3)
    assert timm.create_model(name, pretrained=True, in_chans=1).eval()(x[:, :1, :32, :32]).shape == (1, 10)
    assert timm.create_model(name, pretrained=True, num_classes=0).eval()(x[..., :32, :32]).shape == (1, 192)
    plain, given = timm.create_model(architecture, pretrained=True), timm.create_model(name, pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), given.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_is_small_and_has_a_card_with_its_number(name):
    assert (WEIGHTS / f"{name}.safetensors").stat().st_size <= 5_000_000
    card = (CARDS / f"{name}.md").read_text()
    assert f"| {record(name)['results']['test_accuracy']:.1f} |" in card and f'"{name}"' in card


def test_plain_and_locat_are_shipped():
    assert {"vit_compact_patch4_32.fashion_mnist", "locatvit_compact_patch4_32.fashion_mnist"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_class_names_belong_to_the_weights(name):
    assert timm.create_model(name, pretrained=True).pretrained_cfg["label_names"] == LABELS
    assert "label_names" not in timm.create_model(name, depth=1).pretrained_cfg


@pytest.mark.parametrize("build", [timm.create_model, create_model])
def test_a_file_that_is_not_there_is_named(build, tmp_path):
    overlay = {"file": str(tmp_path / "gone.safetensors")}
    with pytest.raises(UserError, match=r"vit_compact_patch4_32: there is no file .*gone\.safetensors"):
        build(f"vit_compact_patch4_32.{TAG}", pretrained=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_what_its_record_gives(name):
    text = (CARDS / f"{name}.md").read_text()
    assert text == shipped_card(name, record(name)), "run `python -m timm_locat.study ship`, or write the cards anew"
    data = ModelCard.load(CARDS / f"{name}.md").data
    measured = {result.metric_name: result.metric_value for result in data.eval_results}
    run = record(name)["results"]
    assert measured == {"accuracy": run["test_accuracy"], "top-5 accuracy": run["test_top5"]}
    assert (data.library_name, data.license, data.model_name) == ("timm", "mit", name)


@pytest.mark.parametrize("name", NAMES)
def test_the_snippets_of_a_card_run_in_order(name, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    text = (CARDS / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4 and blocks[0].startswith("import timm_locat\n")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 50), (90, 20, 200)).save("picture.jpg")
    space = {}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), space)
    assert space["features"].shape == (1, 192, 8, 8) and len(space["names"]) == 10
    assert torch.equal(space["classifier"](space["x"]).logits, space["model"](space["x"]))
    assert space["backbone"]["model_name"] == name
