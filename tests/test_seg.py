"""The segmentation commands: training that resumes, evaluation, inference, and what goes wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore")  # mmsegmentation's own

try:
    from seg import infer, test, train
    from seg.launch import read_config
    from seg.metric import class_iou
except ModuleNotFoundError as err:
    if err.name not in ("mmseg", "mmcv", "mmengine"):
        raise
    pytest.skip(str(err), allow_module_level=True)
else:
    import seg_fixtures
    from mmengine.dataset import Compose, pseudo_collate
    from mmseg.apis import inference_model
    from mmseg.datasets import transforms  # noqa: F401  (registers)
    from mmseg.evaluation.metrics import IoUMetric
    from mmseg.registry import DATASETS, MODELS

    from timm_locat._mmseg_repeat import SeedUpdate
    from timm_locat.errors import UserError

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "seg" / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data in ADE20K's layout, and a config file cut down to it."""
    folder = tmp_path_factory.mktemp("seg")
    seg_fixtures.ade20k(folder / "ade")
    cfg = read_config(str(CONFIGS / "ade20k/patch_head_locatvit_tiny.py"), {"data_root": str(folder / "ade")})
    seg_fixtures.small(cfg)
    cfg.model.backbone.update(trainable="all", model_args=dict(cfg.model.backbone.model_args, drop_path_rate=0.5))
    cfg.param_scheduler[0].total_steps = 6
    cfg.train_cfg.update(max_iters=6, val_interval=6)
    cfg.default_hooks.logger.interval = 1
    cfg.default_hooks.checkpoint.update(interval=3, save_best=None, max_keep_ckpts=-1)
    for step in cfg.tta_pipeline[1].transforms[0]:
        step.scale_factor = min(step.scale_factor, 1.0)
    cfg.dump(str(folder / "small.py"))
    return folder


def call(monkeypatch, command, *words):
    monkeypatch.setattr(sys, "argv", [f"seg.{command.__name__}", *map(str, words)])
    command.main()


@pytest.fixture(scope="module")
def run(folder):
    """A run of six updates that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        call(patch, train, folder / "small.py", "--work-dir", folder / "whole")
    return folder / "whole"


def losses(work_dir: Path) -> dict[int, float]:
    """Loss of each update by its number, over all sessions of a run."""
    lines = [json.loads(line) for file in sorted(work_dir.glob("*/vis_data/scalars.json")) for line in file.open()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(folder, run, monkeypatch, tmp_path):
    before = SeedUpdate.before_train_iter

    def stop(self, runner, *words, **named):
        if runner.iter == 4:
            raise KeyboardInterrupt
        before(self, runner, *words, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SeedUpdate, "before_train_iter", stop)
        call(patch, train, folder / "small.py", "--work-dir", tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4] and (tmp_path / "iter_3.pth").exists()
    torch.manual_seed(123), np.random.seed(123)  # another process is in another state
    call(monkeypatch, train, folder / "small.py", "--work-dir", tmp_path, "--resume")
    assert losses(tmp_path) == losses(run) and len(set(losses(run).values())) == 6
    weights = [torch.load(path / "iter_6.pth", weights_only=True)["state_dict"] for path in (run, tmp_path)]
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))


@pytest.mark.slow
def test_workers_draw_what_one_process_draws(folder, run, monkeypatch, tmp_path):
    call(
        monkeypatch,
        train,
        folder / "small.py",
        "--work-dir",
        tmp_path,
        "--cfg-options",
        "train_dataloader.num_workers=2",
    )
    assert losses(tmp_path) == losses(run)


def test_the_score_is_that_of_torchmetrics(folder, run, monkeypatch, tmp_path):
    jaccard = pytest.importorskip("torchmetrics").JaccardIndex
    call(monkeypatch, test, folder / "small.py", run / "iter_6.pth", "--work-dir", tmp_path / "work", "--out", tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    metric = jaccard(task="multiclass", num_classes=150, average="none", ignore_index=255)
    seen = set()
    for mask in sorted((folder / "ade/annotations/validation").glob("*.png")):
        truth = torch.from_numpy(np.array(Image.open(mask))).long() - 1
        truth[truth == -1] = 255
        guess = torch.from_numpy(np.array(Image.open(tmp_path / mask.name))).long() - 1
        metric.update(guess[None], truth[None])
        seen |= set(truth[truth != 255].tolist()) | set(guess[truth != 255].tolist())
    want = 100 * metric.compute()[sorted(seen)]
    assert record["results"]["mIoU"] == pytest.approx(want.mean().item(), abs=1e-4)
    assert sum(value is not None for value in record["results"]["IoU"].values()) == len(seen)


def test_large_counts_are_not_rounded():
    ones, many = torch.ones(1), torch.full((1,), 2.0**24)
    assert class_iou([(many, 2 * many), (ones, ones)]).item() == (2**24 + 1) / (2**25 + 1)


def test_flips_and_scales_are_averaged(folder, run, monkeypatch, tmp_path, capsys):
    call(
        monkeypatch,
        test,
        folder / "small.py",
        run / "iter_6.pth",
        "--tta",
        "--work-dir",
        tmp_path,
        "--show-dir",
        tmp_path / "shown",
    )
    assert re.search(r"mIoU \d+\.\d\d %", capsys.readouterr().out)
    assert len(list((tmp_path / "shown").rglob("*.png"))) >= 1


def test_two_processes_find_the_score_of_one(folder, run, monkeypatch, tmp_path):
    call(monkeypatch, test, folder / "small.py", run / "iter_6.pth", "--out", tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517"]
    words = ["-m", "seg.test", str(folder / "small.py"), str(run / "iter_6.pth"), "--out", str(tmp_path / "two")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name / "record.json").read_text())["results"] for name in ("one", "two"))
    assert one == two and done.stdout.count(f"mIoU {one['mIoU']:.2f} %") == 1


def test_images_are_segmented_with_a_legend(folder, run, monkeypatch, tmp_path, capsys):
    images = folder / "ade/images/validation"
    call(monkeypatch, infer, folder / "small.py", run / "iter_6.pth", images, "--out", tmp_path)
    report = json.loads((tmp_path / "predictions.json").read_text())
    assert [row["image"] for row in report] == [str(path) for path in sorted(images.iterdir())]
    for row in report:
        labels = np.array(Image.open(row["labels"]))
        assert list(labels.shape) == row["size"] and sum(row["classes"].values()) == pytest.approx(1)
        assert Image.open(row["overlay"]).width > labels.shape[1]


def test_a_legend_shows_the_largest_class_first():
    labels = np.array([[0, 2, 2, 2], [0, 2, 2, 2], [0, 2, 1, 2]])
    classes, palette = ("sky", "cat", "road"), [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert list(infer.shares(labels, classes).items()) == [("road", 8 / 12), ("sky", 3 / 12), ("cat", 1 / 12)]
    sheet = infer.overlay(Image.new("RGB", (4, 3)), labels, classes, palette)
    assert sheet.getpixel((0, 0)) == (127, 0, 0) and sheet.getpixel((3, 0)) == (0, 0, 127)
    assert sheet.getpixel((4 + 8 + 5, 4 + 8)) == (0, 0, 255)


def brightness_model(mode: str):
    """A segmentor whose features are the brightness of each patch and whose two classes are dark and light."""
    cfg = read_config(str(CONFIGS / "ade20k/patch_head_locatvit_tiny.py"), {})
    seg_fixtures.small(cfg)
    cfg.model.decode_head = dict(type="BNLinearHead", num_classes=2, norm_cfg=dict(type="BN"))
    cfg.model.test_cfg = dict(mode=mode, crop_size=(512, 512), stride=(341, 341))
    model = MODELS.build(cfg.model).eval()

    def brightness(x, **kwargs):
        return [F.avg_pool2d(x, 16).mean(1, keepdim=True).repeat(1, 48, 1, 1)]

    model.backbone.vit.forward_intermediates = brightness
    with torch.no_grad():
        model.decode_head.conv_seg.weight.copy_(torch.tensor([-1.0, 1.0])[:, None, None, None].expand(2, 48, 1, 1))
        model.decode_head.conv_seg.bias.zero_()
    cfg.test_pipeline = [dict(type="LoadImageFromFile"), dict(type="PackSegInputs")]
    model.cfg = cfg
    return model


@pytest.mark.parametrize("mode", ["whole", "slide"])
@pytest.mark.parametrize("size", [(100, 75), (513, 769), (2048, 512)])
def test_a_checkerboard_is_found_where_it_is(mode, size):
    rows, columns = np.mgrid[0 : size[0], 0 : size[1]] // 32
    board = (rows + columns) % 2
    image = np.repeat((255 * board).astype(np.uint8)[..., None], 3, 2)
    found = inference_model(brightness_model(mode), image).pred_sem_seg.data[0].numpy()
    assert found.shape == size
    inner = found[4:-4, 4:-4]
    agree = {
        (dy, dx): (inner == board[4 + dy : size[0] - 4 + dy, 4 + dx : size[1] - 4 + dx]).mean()
        for dy in range(-4, 5)
        for dx in range(-4, 5)
    }
    # A last patch that is half padding may move one edge by a pixel, and another shift is then as good, not better.
    assert agree[0, 0] == max(agree.values()) > 0.95


@pytest.mark.parametrize(
    ("config", "stored", "labels"),
    [
        ("ade20k/patch_head_locatvit_tiny", [0, 1, 150], [255, 0, 149]),
        ("pascal_context_59/patch_head_locatvit_tiny", [0, 1, 59], [255, 0, 58]),
        ("pascal_context_60/patch_head_locatvit_tiny", [0, 1, 59], [0, 1, 59]),
        ("coco_stuff164k/patch_head_locatvit_tiny", [0, 170, 255], [0, 170, 255]),
        ("cityscapes/linear_bn_locatvit_base", [0, 18, 255], [0, 18, 255]),
        ("voc12_aug/linear_bn_locatvit_tiny", [0, 20, 255], [0, 20, 255]),
    ],
)
def test_a_masks_numbers_become_labels_and_ignored_pixels_do_not_count(config, stored, labels, tmp_path):
    path = CONFIGS / f"{config}.py"
    root = getattr(seg_fixtures, path.parent.name)(tmp_path)
    cfg = read_config(str(path), {"data_root": str(root)})
    data = DATASETS.build(cfg.val_dataloader.dataset)
    row = data.get_data_info(0)
    height, width = np.array(Image.open(row["img_path"])).shape[:2]
    mask = np.zeros((height, width), np.uint8)
    mask[:, :] = stored[0]
    mask[:4], mask[4:6] = stored[1], stored[2]
    Image.fromarray(mask).save(row["seg_map_path"])
    sample = data[0]["data_samples"]
    got = sample.gt_sem_seg.data[0].numpy()
    assert [got[10, 0], got[0, 0], got[5, 0]] == labels
    guess = torch.from_numpy(got).clone()
    guess[guess == 255] = labels[1]
    metric = IoUMetric(iou_metrics=["mIoU"])
    metric.dataset_meta = data.metainfo
    metric.process({}, [{"pred_sem_seg": {"data": guess}, "gt_sem_seg": {"data": torch.from_numpy(got)}}])
    per_class = class_iou(metric.results)
    present = [label for label in labels if label != 255]
    assert per_class[present].tolist() == [1.0] * len(present) and per_class.isnan().sum() == len(per_class) - len(
        present
    )


def test_a_mask_with_a_class_too_many_is_named(folder, run, monkeypatch, tmp_path):
    root = seg_fixtures.ade20k(tmp_path / "ade")
    for split in ("training", "validation"):
        mask = sorted((root / "annotations" / split).glob("*.png"))[0]
        Image.fromarray(np.full_like(np.array(Image.open(mask)), 151)).save(mask)
    words = ("--cfg-options", f"data_root={root}")
    with pytest.raises(UserError, match=r"ADE_train_00000000.png holds class 150, but the head has classes 0 to 149"):
        call(monkeypatch, train, folder / "small.py", "--work-dir", tmp_path / "out", *words, "train_cfg.max_iters=3")
    with pytest.raises(UserError, match=r"ADE_valid_00000000.png holds class 150"):
        call(monkeypatch, test, folder / "small.py", run / "iter_6.pth", "--work-dir", tmp_path / "test", *words)


def sentence(monkeypatch, match, command, *words):
    with pytest.raises(UserError, match=match):
        call(monkeypatch, command, *words)


def test_data_that_are_not_there_or_half_copied_are_told_before_training(folder, monkeypatch, tmp_path):
    config = folder / "small.py"
    sentence(monkeypatch, r"there is no folder /no/where", train, config, "--cfg-options", "data_root=/no/where")
    root = seg_fixtures.ade20k(tmp_path / "ade")
    sorted((root / "annotations/validation").iterdir())[0].unlink()
    match = r"lacks 1 of 6 files, the first of them .*ADE_valid_00000000.png"
    sentence(monkeypatch, match, train, config, "--work-dir", tmp_path / "out", "--cfg-options", f"data_root={root}")
    for image in (root / "images/training").iterdir():
        image.unlink()
    sentence(monkeypatch, r"has no images in images/training", train, config, "--cfg-options", f"data_root={root}")


def test_a_missing_split_list_is_told(monkeypatch, tmp_path):
    root = seg_fixtures.pascal_context_59(tmp_path)
    (root / "ImageSets/SegmentationContext/val.txt").unlink()
    config = CONFIGS / "pascal_context_59/patch_head_locatvit_tiny.py"
    sentence(monkeypatch, r"val.txt is missing; is .* whole", train, config, "--cfg-options", f"data_root={root}")


def test_a_users_mistakes_are_sentences(folder, run, monkeypatch, tmp_path):
    config, checkpoint = folder / "small.py", run / "iter_6.pth"
    (tmp_path / "broken.py").write_text("model = dict(")
    sentence(monkeypatch, r"there is no config no.py", train, "no.py")
    sentence(monkeypatch, r"is no config that mmengine can read: SyntaxError", train, tmp_path / "broken.py")
    sentence(monkeypatch, r"holds a run; pass --resume", train, config, "--work-dir", run)
    sentence(monkeypatch, r"there is no checkpoint no.pth", test, config, "no.pth")
    torch.save({"state_dict": {}, "more": folder}, tmp_path / "foreign.pth")  # a path is no plain value
    (tmp_path / "text.pth").write_text("weights")
    for name in ("foreign", "text"):
        sentence(monkeypatch, r"is no checkpoint that can be trusted and read", test, config, tmp_path / f"{name}.pth")
    sentence(monkeypatch, r"there is no image or folder no.jpg", infer, config, checkpoint, "no.jpg")
    options = ("--cfg-options", "model.backbone.model_args.embed_dim=96")
    match = r"checkpoint is of another model than the config"
    sentence(monkeypatch, match, test, config, checkpoint, "--work-dir", tmp_path, *options)
    sentence(monkeypatch, match, infer, config, checkpoint, folder / "ade/images/validation", *options)
    if not torch.cuda.is_available():
        sentence(monkeypatch, r"--amp needs a GPU", train, config, "--amp", "--work-dir", tmp_path / "amp")


def test_a_sentence_is_all_that_a_command_says():
    command = [sys.executable, "-m", "seg.train", "no.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("error: there is no config no.py")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["train", "test"])
def test_mmsegmentations_own_tools_work_with_our_configs(tool, folder, run, tmp_path):
    import mmseg

    script = Path(mmseg.__file__).parent / ".mim" / "tools" / f"{tool}.py"
    source = tmp_path / "row.py"
    base = CONFIGS / "ade20k/patch_head_locatvit_tiny.py"
    source.write_text(f'_base_ = ["{base}"]\n' + "model = dict(backbone=dict(pretrained=False))\n")
    config = folder / "small.py" if tool == "test" else source
    words = [str(run / "iter_6.pth")] if tool == "test" else []
    options = [f"{k}.num_workers=0" for k in ("train_dataloader", "val_dataloader", "test_dataloader")]
    options += [f"{k}.persistent_workers=False" for k in ("train_dataloader", "val_dataloader", "test_dataloader")]
    options += [
        f"{k}.dataset.data_root={folder / 'ade'}" for k in ("train_dataloader", "val_dataloader", "test_dataloader")
    ]
    options += ["train_dataloader.batch_size=1", "train_cfg.max_iters=1", "train_cfg.val_interval=1"]
    command = [sys.executable, str(script), str(config), *words, "--work-dir", str(tmp_path / "work")]
    done = subprocess.run([*command, "--cfg-options", *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "mIoU" in done.stdout + done.stderr, done.stderr[-3000:]


def test_the_first_transform_seeds_the_others():
    from timm_locat._mmseg_repeat import Draw

    flip = Compose([dict(type="SeedDraw"), dict(type="PhotoMetricDistortion")])
    image = np.full((4, 6, 3), 100, np.uint8)

    def drawn(entropy):
        return flip(dict(img=image.copy(), sample_idx=Draw(0, entropy)))["img"]

    assert np.array_equal(drawn((0, 1)), drawn((0, 1)))
    assert len({drawn((0, number)).tobytes() for number in range(8)}) > 4
    assert pseudo_collate([{"a": 1}])["a"] == [1]
