"""`python -m timm_locat.train evaluate`: its counts against a plain loop, and its sentences."""

import json

import pytest
import timm
import torch
from accelerate import Accelerator
from PIL import Image

from timm_locat.errors import UserError
from timm_locat.hub import export
from timm_locat.record import read_record
from timm_locat.train.evaluate import EvaluateConfig, describe, run, summarise
from timm_locat.train.scores import evaluate, in_step


def test_counts_equal_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 7, generator=generator), torch.randint(6, (50,), generator=generator)
    source = [(logits[:30], labels[:30]), (logits[30:], labels[30:])]
    results = summarise(evaluate(lambda x: x, source, lambda x: x, Accelerator(), 7), tuple("abcdefg"))
    assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    confusion = [[0] * 7 for _ in range(7)]
    top5 = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        order = sorted(range(7), key=lambda k: -row[k])
        confusion[label][order[0]] += 1
        top5 += label in order[:5]
    assert results["confusion"] == confusion and results["samples"] == 50
    assert results["top5"] == pytest.approx(2 * top5)
    assert results["accuracy"] == pytest.approx(2 * sum(confusion[k][k] for k in range(7)))
    assert results["per_class"][0]["recall"] == pytest.approx(100 * confusion[0][0] / sum(confusion[0]))
    assert results["per_class"][6]["recall"] is None and "-" in describe(results)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_processes_in_step_make_as_many_passes(count):
    idled = []
    batches = list(in_step([(torch.zeros(1), torch.zeros(1))] * count, 3, lambda: idled.append(1)))
    assert len(batches) == count and len(idled) == 3 - count


@pytest.fixture
def colours(tmp_path):
    """Two classes whose alphabetical order is not that of the model's logits, and a model that tells them apart."""
    for split in ("train", "test"):
        for name, level in (("bright", 250), ("dark", 5)):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (level, level, level)).save(tmp_path / split / name / f"{i}.png")
    model = timm.create_model(
        "vit_compact_patch4_32", img_size=8, depth=0, num_classes=2, global_pool="avg", class_token=False
    )
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.patch_embed.proj.weight[0].fill_(0.1)
        model.fc_norm.weight.fill_(1)
        model.head.weight[1, 0] = 1.0  # logit 1 is brightness
        model.head.weight[0, 0] = -1.0
    export(model, tmp_path / "model", label_names=["dark", "bright"])
    return tmp_path


def test_labels_follow_the_exported_class_names(colours):
    results = run(EvaluateConfig(model=f"local-dir:{colours / 'model'}", data=str(colours), out=colours / "e.json"))
    assert results["accuracy"] == 100 and [row["class"] for row in results["per_class"]] == ["dark", "bright"]
    record = read_record(colours / "e.json")
    assert record["protocol"] == "evaluate/v1" and record["results"] == json.loads(json.dumps(results))


def test_another_number_of_classes_is_refused(colours):
    model = timm.create_model("vit_compact_patch4_32", img_size=8, depth=1, num_classes=3)
    export(model, colours / "three")
    with pytest.raises(UserError, match=r"has 3 classes and .* has 2; give the data that it was trained for"):
        run(EvaluateConfig(model=f"local-dir:{colours / 'three'}", data=str(colours)))
