"""Every config of seg/ builds and trains on its data set's official layout."""

import copy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # mmsegmentation's own

try:
    from seg.launch import check_data, read_config
except ModuleNotFoundError as err:
    if err.name not in ("mmseg", "mmcv", "mmengine"):
        raise
    pytest.skip(str(err), allow_module_level=True)
else:
    import seg_fixtures
    from mmengine.runner import Runner
    from mmseg.registry import DATASETS, MODELS

    from seg.launch import _without_syncbn

CONFIGS = Path(__file__).parents[1] / "seg" / "configs"
ROWS = sorted(p for p in CONFIGS.glob("*/*.py") if p.parent.name not in ("_base_", "composed"))
ONE_OF_EACH = [
    "ade20k/patch_head_locatvit_tiny",
    "ade20k/upernet_swin_tiny",
    "ade20k/setr_naive_vit_base",
    "pascal_context_59/upernet_locatvit_base",
    "pascal_context_60/patch_head_vit_tiny",
    "coco_stuff164k/patch_head_locatvit_tiny_reg",
    "cityscapes/linear_bn_locatvit_base",
    "voc12_aug/linear_bn_vit_tiny",
    "ade20k/segmenter_locatvit_base",
]
CLASSES = dict(ade20k=150, pascal_context_59=59, pascal_context_60=60, coco_stuff164k=171, cityscapes=19, voc12_aug=21)


def row_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {name: getattr(seg_fixtures, name)(tmp_path_factory.mktemp(name)) for name in CLASSES}


def reduced(path: Path, roots: dict[str, Path]):
    cfg = read_config(str(path), {"data_root": str(roots[path.parent.name])})
    seg_fixtures.small(cfg)
    return cfg


def test_every_data_set_has_configs():
    assert {path.parent.name for path in ROWS} == set(CLASSES) and set(ONE_OF_EACH) <= {row_id(path) for path in ROWS}


@pytest.mark.parametrize("path", ROWS, ids=row_id)
def test_a_config_says_what_it_is_and_how_to_run_it(path):
    opening = path.read_text().split('"""')[1]
    relative = path.relative_to(CONFIGS.parents[1])
    assert f"python -m seg.train {relative} --cfg-options data_root=/" in opening
    assert "mIoU" in opening or "Reproduces no number" in opening
    cfg = read_config(str(path), {})
    assert cfg.model.decode_head.num_classes == CLASSES[path.parent.name]
    images = cfg.train_dataloader.batch_size * cfg.train_cfg.max_iters
    assert (
        f"{cfg.train_cfg.max_iters:,} updates of {cfg.train_dataloader.batch_size} crops, {images:,} image" in opening
    )


@pytest.mark.parametrize("path", ROWS, ids=row_id)
def test_a_config_builds_its_model_data_and_optimiser_and_learns(path, roots):
    cfg = reduced(path, roots)
    _without_syncbn(cfg.model)
    check_data(cfg, "train_dataloader", "val_dataloader")
    data = DATASETS.build(cfg.train_dataloader.dataset)
    model = MODELS.build(cfg.model)
    wrapper = Runner.build_optim_wrapper(type("Bare", (), {"model": model})(), cfg.optim_wrapper)
    before = copy.deepcopy(model.state_dict())
    model.train()
    for _ in range(2):
        samples = [data[0], data[1]]
        batch = {key: [sample[key] for sample in samples] for key in samples[0]}
        losses = model.train_step(batch, wrapper)
        assert all(torch.isfinite(value).all() for value in losses.values())
    changed = {
        name.partition(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    frozen = cfg.model.backbone.get("trainable") == "none"
    assert "decode_head" in changed and ("backbone" in changed) != frozen


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if row_id(p) in ONE_OF_EACH else pytest.mark.slow) for p in ROWS], ids=row_id
)
def test_a_config_trains_validates_and_resumes(path, roots, tmp_path):
    def run(updates: int, resume: bool):
        cfg = reduced(path, roots)
        cfg.work_dir, cfg.resume = str(tmp_path), resume
        cfg.train_cfg.update(max_iters=updates, val_interval=2)
        cfg.default_hooks.checkpoint.update(interval=1, save_best=None)
        runner = Runner.from_cfg(cfg)
        runner.train()
        return runner

    first = run(2, resume=False)
    assert first.iter == 2 and 0 <= first.message_hub.get_scalar("val/mIoU").current() <= 100
    again = run(3, resume=True)
    assert again.iter == 3 and again.train_loop.max_iters == 3
