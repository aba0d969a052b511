import math
import sys

import pytest
import torch
from PIL import Image, ImageSequence

from eval.tables import theory_transfer_table
from timm_locat.errors import UserError, run_cli
from timm_locat.record import read_record
from timm_locat.theory import (
    Activation,
    Descent,
    Structure,
    World,
    accuracy,
    attentions,
    chance,
    gradients,
    idealised,
    patch_association,
    realistic,
    refit,
    score,
    solutions,
    transfer,
)
from timm_locat.theory.__main__ import main
from timm_locat.theory.plots import animate_growth, interval


def mean(values):
    return sum(values) / len(values)


def few(**changes):
    """A small world and model: 2 seeds, 5 images, 3 sets of 2 patches, 4 features; not square anywhere."""
    worlds = [World(Structure(num_sets=3, set_size=2, features=4, **changes), seed) for seed in range(2)]
    images, labels = map(torch.stack, zip(*(w.sample(5) for w in worlds), strict=True))
    draw = torch.Generator().manual_seed(0)
    return images, labels, torch.randn(2, 4, generator=draw), torch.randn(2, 6, 6, generator=draw)


def test_sets_are_a_partition_into_equal_parts():
    world = World(Structure(num_sets=5, set_size=3), 1)
    assert world.set_of_D.bincount().tolist() == [3] * 5
    assert world.set_of_D.tolist() != sorted(world.set_of_D.tolist())


def test_one_set_carries_the_label_and_noise_is_orthogonal_to_the_feature():
    world = World(Structure(), 0)
    images, labels = world.sample(200)
    strength = images @ world.feature_F
    torch.testing.assert_close(strength, strength.round(), atol=1e-5, rtol=0)
    agrees = (strength.round() == labels[:, None]).int()
    per_set = torch.zeros(200, 6, dtype=torch.int32).index_add_(1, world.set_of_D, agrees)
    assert (per_set.amax(1) == 4).all()


def test_clutter_and_noise_have_the_rates_asked_for():
    world = World(Structure(clutter=0.2, noise=0.5, features=9), 0)
    images, _ = world.sample(2000)
    present = ((images @ world.feature_F).abs() > 0.5).double().mean().item()
    assert present == pytest.approx(1 / 6 + 5 / 6 * 0.2, abs=0.01)
    rest = images - (images @ world.feature_F)[..., None] * world.feature_F
    assert rest.pow(2).sum(-1).mean().item() == pytest.approx(8 * 0.5**2, rel=0.02)


def test_a_new_feature_keeps_the_sets():
    world = World(Structure(), 0)
    sets, feature = world.set_of_D.clone(), world.feature_F
    world.new_feature()
    assert torch.equal(world.set_of_D, sets) and (world.feature_F @ feature).abs() < 0.95


def test_score_is_the_formula_in_plain_loops():
    images, _, v, logits = few()
    found = score(images, v, logits, Activation(power=5, linear=0.3))
    for s in range(2):
        weights = logits[s].softmax(-1)
        for n in range(5):
            total = 0.0
            for i in range(6):
                z = 6 * sum(float(weights[i, j] * (v[s] @ images[s, n, j])) for j in range(6))
                total += z**5 + 0.3 * z
            assert float(found[s, n]) == pytest.approx(total, rel=1e-3)


def test_gradients_are_those_of_autograd():
    images, labels, v, logits = (t.double() for t in few())
    v.requires_grad_()
    logits.requires_grad_()
    activation = Activation()
    loss = torch.nn.functional.softplus(-labels * score(images, v, logits, activation)).mean(-1)
    wanted = torch.autograd.grad(loss.sum(), (v, logits))
    found = gradients(images, labels, v.detach(), logits.detach(), activation)
    for a, b in zip(found, (loss.detach(), *wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_a_score_of_zero_or_nan_is_wrong():
    found = accuracy(torch.tensor([[0.0, math.nan, 2.0, -1.0]]), torch.tensor([[1.0, 1.0, 1.0, -1.0]]))
    assert found.tolist() == [0.5]


def test_association_is_full_for_the_true_sets_and_expected_by_chance_for_equal_entries():
    sets = torch.tensor([[0, 1, 2, 0, 1, 2]])
    true = (sets[:, :, None] == sets[:, None, :]).float()
    assert [t.item() for t in patch_association(true, sets)] == [1, 1]
    exact, recall = patch_association(torch.zeros(1, 6, 6), sets)
    assert exact.item() == 0 and recall.item() == pytest.approx(2 / 6)
    exact, recall = patch_association(2 * torch.eye(6)[None], sets)
    assert exact.item() == 0 and recall.item() == pytest.approx(chance(6, 2, diagonal_first=True)[1])


@pytest.mark.parametrize("diagonal_first", [False, True])
def test_chance_is_what_random_rows_give(diagonal_first):
    draw = torch.Generator().manual_seed(0)
    logits = torch.rand(4000, 6, 6, generator=draw) + 5 * diagonal_first * torch.eye(6)
    exact, recall = patch_association(logits, torch.tensor([0, 1, 0, 1, 0, 1]).expand(4000, 6))
    wanted = chance(6, 3, diagonal_first=diagonal_first)
    assert [exact.mean().item(), recall.mean().item()] == pytest.approx(wanted, abs=0.01)


def check_association(seeds):
    trained, control = (realistic(Structure(), Descent(diagonal=d), seeds) for d in (2.0, 0.0))
    assert mean(trained.test_accuracy) >= 0.97
    assert mean(trained.recall) >= 0.90 and min(trained.recall) >= 0.75
    assert abs(mean(control.test_accuracy) - mean(trained.test_accuracy)) <= 0.02
    assert mean(control.recall) <= 0.30


def test_three_seeds_find_their_sets_and_without_a_diagonal_do_not():
    check_association(range(3))


@pytest.mark.slow
def test_twenty_seeds_find_their_sets_and_without_a_diagonal_do_not():
    check_association(range(20))


def test_the_diagonal_is_never_trained_and_a_frozen_attention_does_not_move():
    structure = Structure(num_sets=3, set_size=2, features=4)
    trained = realistic(structure, Descent(steps=20), [0], samples=50, test_samples=10)
    assert (trained.logits_SDD.diagonal(dim1=1, dim2=2) == 2).all()
    assert trained.logits_SDD.abs().sum() > 2 * 6
    frozen = realistic(structure, Descent(steps=20, lr_attention=0), [0], samples=50, test_samples=10)
    assert torch.equal(frozen.logits_SDD[0], 2 * torch.eye(6))


def test_a_seed_gives_the_same_model_alone_and_among_others():
    options = dict(samples=50, test_samples=10)
    structure, descent = Structure(num_sets=3, set_size=2, features=4), Descent(steps=20)
    alone = realistic(structure, descent, [5], **options)
    among = realistic(structure, descent, [4, 5], **options)
    torch.testing.assert_close(alone.logits_SDD[0], among.logits_SDD[1])


@pytest.mark.parametrize(("num_sets", "rate"), [(16, 1.0), (16, 100.0), (64, 1.0), (64, 100.0)])
def test_large_images_and_wild_rates_stay_finite(num_sets, rate):
    structure = Structure(num_sets=num_sets, noise=0.5)
    descent = Descent(steps=40, lr_v=0.01 * rate, lr_attention=5 * rate)
    trained = realistic(structure, descent, [0], samples=100, test_samples=50)
    assert trained.v_SF.isfinite().all() and trained.logits_SDD.isfinite().all()
    assert all(math.isfinite(value) for point in trained.course for value in point["loss"])


def test_without_the_limit_on_a_step_the_cubic_overflows():
    structure, descent = Structure(num_sets=16, noise=0.5), Descent(steps=40, max_step=1e30)
    with pytest.raises(UserError, match=r"diverged: at step \d+ .* lower lr_v, lr_attention or max_step"):
        realistic(structure, descent, [0], samples=100, test_samples=50)


def test_an_idealised_descent_that_diverges_says_so():
    with pytest.raises(UserError, match="diverged"):
        idealised(Structure(num_sets=3, set_size=2), Descent(steps=40, lr_v=1e300, max_step=1e300))


def test_the_expectation_is_that_of_the_samples():
    structure = Structure(num_sets=3, set_size=2, features=4, noise=0.0)
    descent = Descent(steps=1, diagonal=1.0, start_v=0.2)
    exact = idealised(structure, descent)[0]
    world = World(structure, 0)
    images, labels = world.sample(40_000)
    v = 0.2 * world.feature_F[None]
    loss = gradients(images[None], labels[None], v, torch.eye(6)[None], descent.activation, attention=False)[0]
    assert exact["loss"] == pytest.approx(loss.item(), rel=0.01)


def test_in_the_idealised_setting_attention_within_the_sets_grows_and_without_a_diagonal_does_not():
    structure = Structure(num_sets=4)
    last = idealised(structure, Descent(steps=100))[-1]
    assert last["within"] > 0.1 > 0 > last["across"]
    control = idealised(structure, Descent(steps=100, diagonal=0.0))[-1]
    assert control["within"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Structure(num_sets=1), "num_sets must be at least 2, got 1"),
        (lambda: Structure(clutter=1.5), r"in \[0, 1\], got 1.5"),
        (lambda: Structure(noise=-1.0), "noise must be .* got -1.0"),
        (lambda: Activation(power=4), "power must be odd and at least 3, got 4"),
        (lambda: Descent(steps=0), "steps must be at least 1, got 0"),
        (lambda: Descent(lr_v=math.nan), "lr_v must be a finite number of at least 0, got nan"),
        (lambda: Descent(max_step=0.0), "max_step must be positive"),
        (lambda: idealised(Structure(num_sets=20), Descent()), "takes at most 50,000; use fewer or smaller sets"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence(build, words):
    with pytest.raises(UserError, match=words):
        build()


QUICK = [
    "--seeds", "2", "--samples", "60", "--descent.steps", "16",
    "--structure.num-sets", "3", "--structure.set-size", "2", "--structure.features", "4",
]  # fmt: skip
WRITTEN = {
    "association": {"growth.png", "growth.gif", "sets.png", "course.png", "idealised.png"},
    "controls": {"controls.png"},
    "transfer": {"transfer.png"},
}


@pytest.fixture
def cli(monkeypatch):
    threads = torch.get_num_threads()

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["theory", *words])
        run_cli(main)

    yield call
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_command_prints_a_table_and_writes_a_record_and_pictures(name, tmp_path, cli, capsys):
    more = ["--sizes", "3", "6"] if name == "transfer" else []
    cli(name, *QUICK, *more, "--out", str(tmp_path))
    said = capsys.readouterr()
    assert said.err == "" and "recall" in said.out
    record = read_record(tmp_path / f"theory-{name}-v1__2_seeds.json")
    assert record["config"]["seeds"] == 2 and record["seed"] == [0, 1]
    assert {path.name for path in tmp_path.iterdir()} == {*WRITTEN[name], f"theory-{name}-v1__2_seeds.json"}
    assert all((tmp_path / picture).stat().st_size > 5000 for picture in WRITTEN[name])


def test_the_animation_has_a_frame_for_every_recorded_step(tmp_path):
    structure, descent = Structure(num_sets=3, set_size=2, features=4), Descent(steps=16)
    trained = realistic(structure, descent, [0], samples=20, test_samples=10, records=3)
    animate_growth(trained, tmp_path / "growth.gif")
    with Image.open(tmp_path / "growth.gif") as gif:
        frames = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(gif)]
    assert len(frames) == len(set(frames)) == len(trained.frames) == 4


def test_one_seed_has_no_interval(tmp_path, cli):
    assert interval([0.7]) is None
    cli("transfer", *QUICK, "--seeds", "1", "--sizes", "3", "6", "--out", str(tmp_path))
    record = read_record(tmp_path / "theory-transfer-v1__1_seeds.json")
    assert record["results"]["curves"]["uniform"][0]["interval"] is None
    assert "(" not in theory_transfer_table([record])


def test_help_names_the_experiments(cli, capsys):
    cli("--help")
    said = capsys.readouterr().out
    assert all(name in said for name in WRITTEN)


def test_the_command_refuses_a_file_as_its_folder_in_one_sentence(tmp_path, cli, capsys):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(SystemExit, match="1"):
        cli("association", "--out", str(file))
    assert capsys.readouterr().err == f"error: --out must name a folder, and {file} is a file\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("association", "--seeds", "0"), "seeds must be at least 1"),
        (("transfer", "--sizes", "4", "2"), "sizes must be increasing"),
        (("nonsense",), "expected an experiment, association or controls or transfer, got 'nonsense'"),
        ((), "got none"),
        (("association", "--structure.clutter", "2"), "Error parsing structure: clutter is a probability"),
    ],
)
def test_the_command_refuses_wrong_words(words, said, cli, capsys):
    with pytest.raises(SystemExit, match=r"[12]"):
        cli(*words)
    assert said in capsys.readouterr().err


def test_the_association_run_at_sizes_too_large_for_the_expectation_says_so(tmp_path, cli, capsys):
    words = [*QUICK, "--structure.num-sets", "20", "--structure.set-size", "4", "--out", str(tmp_path)]
    cli("association", *words)
    assert "takes at most 50,000" in capsys.readouterr().out
    assert read_record(tmp_path / "theory-association-v1__2_seeds.json")["results"]["idealised"] is None


def test_frozen_attention_of_the_true_sets_transfers_best():
    structure = Structure(num_sets=16, features=64, noise=0.3, clutter=0.1)
    world = World(structure, 0)
    descent = Descent(steps=300, lr_v=0.001)
    kinds = attentions(torch.zeros(64, 64), world.set_of_D, descent)
    found = refit(world, kinds, [40, 160], descent)
    assert all(found["true sets"][i] > max(found["diagonal"][i], found["uniform"][i]) + 0.05 for i in range(2))
    assert found["pretrained"] == found["uniform"]  # the same matrix gives the same answer


def test_a_transfer_meets_a_new_feature_with_the_old_attention():
    structure = Structure(num_sets=3, set_size=2, features=4)
    short = Descent(steps=10)
    found = transfer(structure, short, short, [0, 1], [4, 8], samples=40)
    assert set(found["accuracy"]) == {"pretrained", "diagonal", "uniform", "true sets"}
    assert all(len(rows) == 2 and all(len(row) == 2 for row in rows) for rows in found["accuracy"].values())


def test_the_global_sum_rule_generalises_with_recall_by_chance():
    found = solutions(Structure(), Descent(steps=5), [0], samples=50)
    assert found["global sum"].accuracy[0] > 0.9
    assert found["global sum"].recall[0] == pytest.approx(4 / 24)
    assert found["frozen diagonal"].recall[0] == pytest.approx(chance(24, 4, diagonal_first=True)[1])


def test_an_interval_holds_the_mean_and_shrinks_with_more_seeds():
    values = [0.8, 0.9, 1.0, 0.7]
    low, high = interval(values)
    assert 0.7 <= low < 0.85 < high <= 1.0
    wide = high - low
    low, high = interval(values * 9)
    assert high - low < wide / 2
