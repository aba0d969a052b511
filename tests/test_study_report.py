"""What is made of finished runs: intervals, effects, the report, and the weights that are shipped."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from studies import add_weights, fake_study, without_weights

from timm_locat.errors import UserError
from timm_locat.models.weights import LABELS
from timm_locat.record import read_record
from timm_locat.study import Settings
from timm_locat.study.grid import FACTORS
from timm_locat.study.report import write_report
from timm_locat.study.results import Row, effects, interval, read_rows
from timm_locat.study.ship import ShipConfig
from timm_locat.study.ship import run as ship


def fake(condition, value, seed=0):
    return Row("m", "d", condition, seed, {"results": {"y": value}}, Path())


COMBINATIONS = FACTORS["protocol"]


def truth(condition):
    on = COMBINATIONS[condition]
    return 10 + 2 * ("aa" in on) - 5 * ("cm" in on) + 3 * ("aa" in on and "cm" in on)


def test_effects_of_a_known_factorial_are_found():
    rows = [fake(name, truth(name) + e, seed) for name in COMBINATIONS for seed, e in enumerate((-0.01, 0.01))]
    found, source = effects([*rows, fake("cutout", 99)], "y", COMBINATIONS)
    values = {effect.name: effect.value for effect in found}
    # Averaged over the other components: aa gives 2 without cm and 5 with it, cm gives -5 and -2.
    expected = {"aa": 3.5, "cm": -3.5, "ls": 0.0, "aa x cm": 1.5, "aa x ls": 0.0, "cm x ls": 0.0, "aa x cm x ls": 0.0}
    assert values == pytest.approx(expected, abs=1e-9) and "8 degrees of freedom" in source
    scatter = math.sqrt(8 * 2 * 0.01**2 / 8)
    half = 2.306004135 * 2 * scatter / math.sqrt(16)  # t of 0.975 at 8 degrees of freedom
    assert all(effect.half == pytest.approx(half, rel=1e-6) for effect in found)


def test_effects_of_single_runs_take_the_highest_interaction_for_error():
    found, source = effects([fake(name, truth(name)) for name in COMBINATIONS], "y", COMBINATIONS)
    assert len(found) == 6 and "one seed per condition" in source


def test_some_seeds_more_are_enough_for_an_error():
    rows = [fake(name, truth(name)) for name in COMBINATIONS] + [fake("cm", truth("cm") + e, 1) for e in (-0.3, 0.3)]
    found, source = effects(rows, "y", COMBINATIONS)
    assert len(found) == 7 and "scatter of seeds in cm, " in source and "(2 degrees of freedom)" in source
    assert {effect.name for effect in found if effect.clear} == {"aa", "cm", "aa x cm"}


def test_effects_of_a_part_of_a_factorial_are_not_told():
    found, sentence = effects([fake("baseline", 1.0), fake("cm", None)], "y", {"baseline": (), "cm": ("cm",)})
    assert found == [] and sentence == "No run yet of cm: effects cannot be told apart."


def test_intervals_are_those_of_student():
    found = interval([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3) and found.half == pytest.approx(
        4.302652730 * np.std([1, 2, 4], ddof=1) / 3**0.5
    )
    assert interval([5.0, None]).half is None and interval([5.0]).text(1) == "5.0 (one seed)"
    assert interval([None]).text() == "none"


ACCURACIES = {"baseline": (70.0, 71.0, 72.0), "cm": (74.0, 76.0, 78.0), "modern": (80.0, 80.5, 81.0)}


def numbers(condition, seed):
    """Accuracy and least distance of a made-up run: CutMix halves the distance."""
    accuracy = ACCURACIES.get(condition, (60.0,))[seed]
    return accuracy, (0.2 if "cm" in FACTORS["protocol"][condition] else 0.4) + 0.01 * seed


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    """A finished protocol study of one seed, of three for three conditions, and its report."""
    settings = Settings(study="protocol", data=("cifar10",), more_seeds="baseline,modern,cm=3", image_passes=60_000)
    out = fake_study(tmp_path_factory.mktemp("study"), settings, numbers)
    return out, write_report(out).read_text()


def test_the_report_has_means_and_intervals_beside_the_papers_numbers(protocol):
    _, text = protocol
    half = 4.302652730 * 2 / 3**0.5  # t of 0.975 at 2 degrees of freedom, times deviation over root of the number
    assert f"| cm | 3 | 76.0 ± {half:.1f} | 0.210 ± 0.025 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| ls |"))
    assert line.startswith("| ls | 1 | 60.0 (one seed) | 0.400 (one seed) |") and line.endswith("| at least 0.210 |")
    assert "with baseline and 0.210 ± 0.025 with modern; the paper's numbers, on CIFAR-100, are 0.316 and 0.008" in text


def test_the_report_says_what_was_run_and_that_it_is_not_all(protocol):
    _, text = protocol
    assert "14 of 14 runs are finished." in text and "the models are not fully trained" not in text
    assert (
        "Uniform attention over 8 x 8 patches, which an untrained model comes close to, has a distance of 0.418" in text
    )


def test_the_report_gives_effects_and_says_where_their_error_comes_from(protocol):
    _, text = protocol
    assert text.count("The error is the scatter of seeds in baseline, cm, modern, taken to be the same") == 4
    least = text[text.index("effects on least distance of a head") :]
    found = re.search(r"\| cm \| (\S+) \| (\S+) \.\. (\S+) \| yes \|", least)
    # Four conditions with CutMix have means of 0.21, 0.21, 0.2 and 0.2, those without 0.41, 0.4, 0.4 and 0.4. Seeds
    # deviate by 0.01, so the mean of a condition by that over the root of its number; t is of 6 degrees of freedom.
    change, half = 0.205 - 0.4025, 2.446912 * 0.01 * math.sqrt((5 + 3 / 3) / 16)
    assert [float(word) for word in found.groups()] == pytest.approx([change, change - half, change + half], abs=6e-4)


def test_the_report_tells_where_the_most_local_head_looks(protocol):
    _, text = protocol
    assert (
        "gives 5.0 % to itself (uniform: 1.5 %), 60.0 % to the 8 patches around (uniform: 10.1 %), 3.0 % to the class "
        "token (uniform: 1.5 %). Most above uniform is the share of the 8 patches around, 5.9 times." in text
    )
    assert "| modern | 2 | 1 | 0 | 0.220 | 5.0 % | 60.0 % | 3.0 % | 0.220 | 3.0 % |" in text


def test_the_page_holds_every_picture_and_every_table(protocol):
    out, text = protocol
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == text.count("![") == len(list(out.glob("*.png"))) == 5
    assert page.count("<tr>") == sum(line.startswith("| ") and "---" not in line for line in text.splitlines())
    assert not any(word in page for word in ("http:", "https:", "<script", "<link"))


def test_the_report_needs_neither_data_nor_weights_nor_the_place_of_the_runs(protocol, tmp_path):
    out, text = protocol
    assert write_report(without_weights(out, tmp_path / "elsewhere")).read_text() == text


def test_the_report_says_what_keeps_its_numbers_from_being_the_whole_story(tmp_path):
    settings = Settings(study="embedded", seeds=1, conditions=("plain", "locat", "permuted"))
    text = write_report(fake_study(tmp_path, settings, lambda condition, seed: (70.0, 0.3))).read_text()
    assert "training accuracy (on augmented images) is as low as 50 %: the models are not fully trained." in text
    assert "| plain | 1 |" in text and "| locat | 1 |" in text and text.count("embedded: conditions") == 1
    assert "No run yet of gaug, prr: effects cannot be told apart." in text
    assert "In permuted the patches of all images are in one other order" in text


def test_several_data_sets_have_a_part_of_the_report_each(tmp_path):
    settings = Settings(study="pooling", data=("cifar10", "svhn"), conditions=("baseline-token",))
    out = fake_study(tmp_path, settings, lambda condition, seed: (70.0, 0.3))
    text = write_report(out).read_text()
    for data in settings.data:
        assert f"vit_compact_patch4_32 on {data}: conditions" in text
        assert (out / f"vit_compact_patch4_32_{data}_plane.png").exists()


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no study folder"):
        write_report(tmp_path)
    settings = Settings(study="dose", conditions=("cm0.0",))
    run = next((fake_study(tmp_path, settings, lambda condition, seed: (70.0, 0.3)) / "cells").iterdir())
    (run / "record.json").unlink()
    with pytest.raises(UserError, match="there is no finished run in"):
        write_report(tmp_path)


@pytest.fixture
def embedded(tmp_path):
    """Finished runs of both shipped models, two seeds each; the second one is the better."""
    settings = Settings(study="embedded", seeds=2, conditions=("plain", "locat"))
    out = fake_study(tmp_path / "study", settings, lambda condition, seed: (70.0 + seed, 0.3))
    for folder in (out / "cells").iterdir():
        add_weights(folder, LABELS)
    return out


def test_the_best_seed_is_shipped_in_half_precision(embedded, tmp_path):
    told = ship(ShipConfig(folder=embedded, to=tmp_path / "weights", cards=tmp_path / "cards"))
    assert "locatvit_compact_patch4_32.fashion_mnist: seed 1, 71.0 %" in told
    for row in (row for row in read_rows(embedded) if row.seed == 1):
        name = f"{row.model}.fashion_mnist"
        shipped = load_file(tmp_path / "weights" / f"{name}.safetensors")
        trained = load_file(row.folder / "model.safetensors")
        assert shipped.keys() == trained.keys()
        for key, value in trained.items():
            assert shipped[key].dtype == torch.float16 and torch.equal(shipped[key], value.half())
        seeds = {"accuracy_of_all_seeds": [70.0, 71.0]}
        assert read_record(tmp_path / "weights" / f"{name}.json") == row.record | seeds
        card = (tmp_path / "cards" / f"{name}.md").read_text()
        assert "| 71.0 | 99.0 | 1 |" in card
        assert "best of 2 seeds" in card and "mean 70.5 %, from 70.0 to 71.0 %" in card


def test_weights_of_other_classes_are_not_shipped(embedded, tmp_path):
    for folder in (embedded / "cells").iterdir():
        add_weights(folder, LABELS[::-1])
    with pytest.raises(UserError, match="was trained on the classes"):
        ship(ShipConfig(folder=embedded, to=tmp_path / "weights", cards=tmp_path / "cards"))
    assert not (tmp_path / "weights").exists()
