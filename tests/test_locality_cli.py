"""`python -m timm_locat.locality`, the pictures, and results beside each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from timm_locat.errors import UserError, run_cli
from timm_locat.hub import export
from timm_locat.locality import MEASURES, Conventions, Locality
from timm_locat.locality.__main__ import Images, main
from timm_locat.locality.maps import draw_maps
from timm_locat.locality.plots import draw_course, draw_distances, draw_gaussians, draw_plane
from timm_locat.record import read_record
from timm_locat.train.samples import patch_order

ROOT = Path(__file__).parents[1]
TINY = json.dumps({"depth": 2, "embed_dim": 16, "num_heads": 2})
SOME = ["--untrained", "--data", "fashion_mnist_mini", "--images", 6, "--model-kwargs", TINY]


def command(monkeypatch, *words):
    """The command in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["timm_locat.locality", *map(str, words)])
    try:
        run_cli(main)
    except SystemExit as left:
        return left.code
    return 0


def made_up(layers=2, *, missing=False, **changes):
    """A result of layers of two heads with all measures 0.5, one head without distance where `missing`."""
    table = {name: [[0.5, 0.5] for _ in range(layers)] for name in MEASURES}
    if missing:
        table["mad"][0][1] = None
    fields = dict(
        model="made up", conventions=Conventions(), images=1, size=(12, 16), layers=tuple("abcdefghi"[:layers]),
        grids=((3, 4),) * layers, num_prefix=1, values=table,
    )  # fmt: skip
    return Locality(**(fields | changes))


# Command line


def test_the_command_prints_a_table_and_leaves_numbers_and_pictures(tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "folder"
    assert command(monkeypatch, "locatvit_compact_patch4_32", *SOME, "--recall", "--out", out) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and "least distance of a head" in shown.out and "by chance: 0.104" in shown.out
    assert "sigma rows" in shown.out
    assert sorted(p.name for p in out.iterdir()) == [
        "distances.png", "gaussians.png", "locality.json", "maps.png", "plane.png"
    ]  # fmt: skip
    record = read_record(out / "locality.json")
    assert record["protocol"] == "locality/v1" and record["seed"] == 0 and record["config"]["images"] == 6
    result = Locality.load(out / "locality.json")
    assert result.images == 6 and len(result.values["neighbourhood_recall"]) == 2
    assert f"{result.summary()['min_mad_over_heads']:.4f}" in shown.out


def test_the_permutation_of_a_training_is_undone_for_recall(tmp_path, monkeypatch, capsys):
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    order = patch_order(64, 3)
    rows, columns = rows[order], columns[order]  # where in the image the i-th token comes from
    near = ((rows[:, None] - rows).abs() <= 1) & ((columns[:, None] - columns).abs() <= 1)
    net = timm.create_model("vit_posattn_compact_patch4_32", depth=1, embed_dim=16, num_heads=2, free_logits=True)
    with torch.no_grad():
        net.attn_logits[..., 1:, 1:] = 5.0 * near
    export(net, tmp_path / "run")
    words = [f"local-dir:{tmp_path / 'run'}", "--recall", "--out", tmp_path / "out"]
    found = []
    for more in ([], ["--permute-patches", 3]):
        assert command(monkeypatch, *words, *more) == 0
        found.append(Locality.load(tmp_path / "out" / "locality.json").values["neighbourhood_recall"])
    assert max(found[0][0]) < 0.3 and found[1] == [[1, 1]]


def test_a_permutation_without_recall_is_refused(monkeypatch, capsys):
    assert command(monkeypatch, "vit_compact_patch4_32", *SOME, "--permute-patches", 3) == 2
    assert "needs --recall" in capsys.readouterr().err


def test_two_models_are_put_beside_each_other(tmp_path, monkeypatch, capsys):
    words = ["vit_compact_patch4_32", *SOME, "--against", "locatvit_compact_patch4_32", "--preset", "convit"]
    assert command(monkeypatch, *words, "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "difference" in shown and "distance in patches, prefix tokens: drop" in shown
    record = read_record(tmp_path / "locality.json")
    assert record["against"]["model"] == "locatvit_compact_patch4_32" and record["results"]["model"] == words[0]
    assert record["results"]["conventions"] == {"prefix": "drop", "unit": "patches", "entropy": "patches"}
    with Image.open(tmp_path / "plane.png") as image:
        assert image.width == 2 * 630


def test_the_same_command_gives_the_same_numbers(tmp_path, monkeypatch):
    for name in "ab":
        assert command(monkeypatch, "vit_compact_patch4_32", *SOME, "--out", tmp_path / name) == 0
    first, second = (Locality.load(tmp_path / name / "locality.json") for name in "ab")
    assert first == second


def test_the_images_are_spread_over_the_split(monkeypatch):
    from timm_locat.locality.__main__ import Config
    from timm_locat.models import create_model

    config = Config(model="vit_compact_patch4_32", data="fashion_mnist_mini", images=4, batch_size=3)
    images = Images(config, config.model, create_model(config.model))
    assert images.ids == [0, 250, 500, 750] and [len(x) for x in images] == [3, 1]


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["vit_compact_patch4_32", "--untrained"], 1, "say with --data which images to measure"),
        (["vit_compact_patch4_33", *SOME], 1, "there is no model 'vit_compact_patch4_33'"),
        (["vit_compact_patch4_32", *SOME, "--data", "/not/there"], 1, "there is no data set, folder or parquet file"),
        (["resnet18", "--untrained", "--data", "fashion_mnist_mini"], 1, "cannot read attention of resnet18"),
        (["vit_compact_patch4_32", *SOME, "--img-size", 30], 1, "multiple of the 4x4 patch"),
        (["vit_compact_patch4_32", *SOME, "--images", 0], 2, "images must be at least 1, got 0"),
        (["vit_compact_patch4_32", *SOME, "--conventions.unit", "miles"], 2, "miles"),
        (["vit_compact_patch4_32", *SOME, "--out", __file__], 1, "--out must name a folder"),
        (["vit_compact_patch8_64", "--data", "fashion_mnist_mini"], 1, "has no published weights"),
    ],
)
def test_mistakes_end_in_a_sentence(tmp_path, monkeypatch, capsys, words, status, sentence):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words) == status
    shown = capsys.readouterr()
    assert sentence in shown.out + shown.err and "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


def test_measuring_needs_neither_the_trainer_nor_the_readers_of_data():
    code = "import sys, timm_locat.locality; print([m for m in sys.modules if m.startswith('timm_locat.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "timm_locat.train" not in done.stdout and "timm_locat.data" not in done.stdout


# Pictures


@pytest.mark.parametrize("layers", [1, 2, 9])
@pytest.mark.parametrize("draw", [draw_distances, draw_plane])
def test_pictures_of_heads_are_drawn_for_any_depth(tmp_path, draw, layers):
    draw([made_up(layers, missing=True), made_up(layers, images=0)], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and image.width > 2 * image.height


def test_a_picture_of_gaussians_is_drawn(tmp_path):
    table = {"alpha": [[0.7, 0.1]] * 9, "sigma_rows": [[1.0, 2.0]] * 9, "sigma_columns": [[1.0, 0.5]] * 9}
    draw_gaussians(made_up(9, gaussians=table), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
    with pytest.raises(UserError, match="made up has no learned Gaussians to draw"):
        draw_gaussians(made_up(), tmp_path / "b.png")


def test_a_course_with_gaps_is_drawn(tmp_path):
    draw_course({0: made_up(missing=True), 10: made_up()}, tmp_path / "a.png", "a run")
    draw_course({0: made_up(1)}, tmp_path / "b.png", "one point of one layer")
    assert (tmp_path / "a.png").stat().st_size > 10_000 < (tmp_path / "b.png").stat().st_size


def test_maps_are_drawn_over_an_image_that_is_not_square(tmp_path):
    maps = [torch.rand(2, 2, 3, 4) for _ in range(9)]
    pixels = torch.randint(256, (3, 48, 64), dtype=torch.uint8)
    draw_maps(maps, pixels, [(0, 0), (2, 3)], tmp_path / "a.png", title="a title")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (1680, 600)


def test_results_counted_differently_are_not_drawn_together(tmp_path):
    with pytest.raises(UserError, match="all counted by the same conventions"):
        draw_plane([made_up(), made_up(conventions=Conventions(unit="pixels"))], tmp_path / "a.png")


# Comparison


def test_a_comparison_has_both_numbers_and_their_difference():
    far = made_up()
    near = made_up(values=far.values | {"mad": [[0.1, 0.3], [0.5, None]]})
    found = far.compare(near)
    assert found["summary"]["min_mad_over_heads"] == [0.5, 0.1, pytest.approx(-0.4)]
    assert found["layers"]["mad"] == [[0.5, pytest.approx(0.2), pytest.approx(-0.3)], [0.5, 0.5, 0.0]]
    assert "min_mad_layer" not in found["summary"] and found["models"] == ["made up", "made up"]
    assert far.compare(made_up(3))["layers"] is None


def test_what_was_counted_differently_is_not_compared():
    with pytest.raises(UserError, match="only what was counted alike can be compared"):
        made_up().compare(made_up(conventions=Conventions(prefix="drop")))
