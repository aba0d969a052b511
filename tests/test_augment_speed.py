"""The benchmark of augmentation: it times what it says, and its bar has a status. No test asserts a time."""

import pytest
import torch

from eval import __main__ as command
from eval import augment_speed, speed
from eval.tables import augment_table
from timm_locat.data import PROTOCOLS, Protocol
from timm_locat.errors import UserError
from timm_locat.record import read_record

NAMES = ("baseline", "deit")


def config(**changes):
    return augment_speed.Config(**{"protocols": NAMES, "batch": 2, "rounds": 3, "threads": 1} | changes)


def made_up(asked, share=0.02):
    """Results as `measure` returns them, of protocols that all take one share of a step."""
    seconds = {augment_speed.STEP: [1.0, 4.0, 2.0], augment_speed.AGAIN: [1.1, 4.4, 2.2]}
    seconds |= {name: [share * s for s in seconds[augment_speed.STEP]] for name in asked.protocols}
    return seconds, 0.5


def test_a_step_trains_and_augmentation_draws_anew_for_the_recipes_data(monkeypatch):
    seen = []
    plain = Protocol.apply

    def apply(self, images, labels, num_classes, generator):
        seen.append((self, images.clone(), plain(self, images, labels, num_classes, generator)[0]))
        return seen[-1][2], labels

    monkeypatch.setattr(Protocol, "apply", apply)
    steps = augment_speed.make_steps(config(recipe="vit_compact_svhn_modern", protocols=("modern", "deit")))
    assert list(steps) == ["step", "step again", "modern", "deit"]
    for name in ("modern", "modern", "deit", "deit"):
        steps[name]()
    assert seen[0][0] == PROTOCOLS["modern"].for_data("svhn") != PROTOCOLS["modern"]
    assert torch.equal(seen[0][1], seen[1][1]) and not torch.equal(seen[0][2], seen[1][2])
    assert seen[2][1].shape == (2, 3, 32, 32) and not torch.equal(seen[2][1], seen[3][1])  # cropped image by image


def test_a_step_moves_the_weights(monkeypatch):
    models = []
    build = augment_speed.build_model
    monkeypatch.setattr(augment_speed, "build_model", lambda *a, **k: models.append(build(*a, **k)) or models[0])
    step = augment_speed.make_steps(config())[augment_speed.STEP]
    before = models[0].head.weight.clone()
    step()
    assert not torch.equal(models[0].head.weight, before) and models[0].head.weight.grad is None


@pytest.mark.parametrize(("share", "strict", "status"), [(0.049, True, 0), (0.051, True, 1), (0.051, False, 0)])
def test_only_strict_turns_a_missed_bar_into_a_status(tmp_path, monkeypatch, share, strict, status):
    monkeypatch.setattr(augment_speed, "make_steps", lambda asked: {})
    monkeypatch.setattr(augment_speed, "time_rounds", lambda steps, asked: made_up(asked, share))
    text, found = augment_speed.run(config(strict=strict, out=tmp_path / "run.json"))
    assert found == status and f"{100 * share:.2f} %" in text and "had a core only 50%" in text
    results = read_record(tmp_path / "run.json")["results"]
    assert results["protocols"]["deit"]["us_per_image"] == pytest.approx(1e6 * share * 2 / 2)  # 2 s, 2 images
    assert results["step_again"]["median"] == pytest.approx(1.1)
    assert f"| `deit` | {1e6 * share:.0f} | {100 * share:.2f} %" in augment_table([read_record(tmp_path / "run.json")])


def test_the_command_writes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "MIN_SAMPLE_S", 1e-3)
    out = tmp_path / "run.json"
    words = ["speed", "augment", "--protocols", *NAMES, "--batch", "2", "--rounds", "3", "--threads", "1"]
    command.main([*words, "--out", str(out)])
    record = read_record(out)
    assert record["protocol"] == "augment-speed/v1" and set(record["results"]["protocols"]) == set(NAMES)
    assert {len(times) for times in record["results"]["seconds"].values()} == {3}
    assert f"record: {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recipe": "vit"}, "there is no recipe 'vit'"),
        ({"protocols": ("modern", "moderm")}, "got moderm"),
        ({"protocols": ()}, "names no protocol"),
        ({"rounds": 2}, "--rounds must be at least 3, got 2"),
        ({"batch": 1}, "--batch must be at least 2, got 1"),
        ({"bar": 0.0}, "--bar must be a share above 0"),
    ],
)
def test_nonsense_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**changes)


def test_mistakes_that_show_later_are_refused_too(tmp_path):
    with pytest.raises(UserError, match="5,000 images, fewer than a batch of 5,001; lower --batch"):
        augment_speed.make_steps(config(batch=5001))
    with pytest.raises(UserError, match="must name a file"):
        augment_speed.run(config(out=tmp_path))
