"""`python -m eval speed hummingbird`: what it compares and writes. No test asserts a time."""

import pytest
import torch

from eval import hummingbird_speed as speed
from timm_locat.record import read_record

SMALL = {"rows": 200, "queries": 8, "width": 16, "k": 5, "scenes": (6, 2), "img_size": 32, "patch": 8, "classes": 9}


def test_both_readings_and_all_searches_do_the_same_work():
    pytest.importorskip("faiss")
    config = speed.Config(**SMALL)
    steps = speed.search_steps(config)
    found = {name: steps[name]()[1] for name in steps}
    assert torch.equal(found["torch"], found["faiss"])
    assert torch.equal(found["torch"], torch.from_numpy(found["faiss.knn"]))
    assert speed.evaluation_step(config)() == pytest.approx(speed.naive_step(config)(), abs=1e-6)


def test_the_record_has_ratios_bars_and_outcomes(monkeypatch, tmp_path):
    pytest.importorskip("faiss")
    peaks = {"evaluation": 10.0, "naive": 100.0}
    monkeypatch.setattr(speed, "cpu_peak", lambda make, what: peaks[what])
    text, status = speed.run(speed.Config(**SMALL, rounds=3, out=tmp_path / "record.json"))
    results = read_record(tmp_path / "record.json")["results"]
    assert status == 0 and results["memory_ratio"] == 0.1 and results["outcomes"]["memory"] == "met"
    for name in ("torch", "faiss", "evaluation"):
        median, bar = results["ratios"][name]["median"], results["bars"][name]
        assert results["outcomes"][name] == ("met" if median <= bar else "missed")
        assert f"{median:.3f}" in text
    assert len(results["samples"]["naive"]) == 3


@pytest.mark.parametrize(
    ("change", "message"), [({"rounds": 2}, "at least 3"), ({"patch": 5}, "divide"), ({"rows": 3}, "at least 5")]
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        speed.Config(**{**SMALL, **change})
