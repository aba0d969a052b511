"""Evaluate a segmentor: `python -m seg.test CONFIG CHECKPOINT`, or with torchrun in front for several processes."""

import math
import statistics
from pathlib import Path
from typing import Any

from seg.launch import check_data, finish, launch, parser, read_config, untrained
from timm_locat.errors import UserError, run_cli
from timm_locat.record import write_record

from mmengine.dist import is_main_process  # isort: skip  (after the cure in seg.launch)
from mmengine.runner import Runner  # isort: skip

import seg.metric  # noqa: F401  (registers)

__all__ = ["evaluate", "main"]


def evaluate(cfg: Any, checkpoint: str, *, tta: bool = False) -> dict[str, Any] | None:
    """Scores of a checkpoint on the test set of a config.

    Returns:
        `mIoU`, `aAcc` and `mAcc` in percent, and `IoU`: percent by class name, None for a class that is neither in the
        masks nor predicted. None in all processes but the first.
    """
    untrained(cfg, checkpoint)
    cfg.test_evaluator.type = "ClassIoU"
    cfg.visualizer.name = cfg.work_dir
    if tta:
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
        cfg.model = dict(**cfg.tta_model, module=cfg.model)
    runner = Runner.from_cfg(cfg)
    scores = runner.test()
    if not is_main_process():
        return None
    per_class = runner.test_loop.evaluator.metrics[0].per_class
    present = [value for value in per_class.values() if not math.isnan(value)]
    return {
        **scores,
        "mIoU": statistics.fmean(present),
        "IoU": {k: None if math.isnan(v) else v for k, v in per_class.items()},
    }


def main() -> None:
    """Command line."""
    args = _parse()
    cfg = read_config(args.config, args.cfg_options)
    cfg.work_dir = args.work_dir or str(Path(args.checkpoint).parent / "test")
    if args.tta and "tta_pipeline" not in cfg:
        raise UserError(f"{args.config} has no tta_pipeline; leave out --tta")
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)  # the stock metric's second process does not wait for it
        cfg.test_evaluator.output_dir = args.out
    if args.show_dir:
        cfg.default_hooks.visualization.draw = True
        cfg.visualizer.save_dir = args.show_dir
    check_data(cfg, "test_dataloader")
    settings = cfg.to_dict()
    launch(cfg)
    try:
        scores = evaluate(cfg, args.checkpoint, tta=args.tta)
    finally:
        finish()
    if scores is None:
        return
    print(f"mIoU {scores['mIoU']:.2f} %")
    if args.out:
        path = Path(args.out) / "record.json"
        config = {"config": args.config, "checkpoint": args.checkpoint, "tta": args.tta, "settings": settings}
        write_record(path, protocol="segmentation/v1", results=scores, config=config, seed=None)


def _parse():
    made = parser(__doc__)
    made.add_argument(
        "--tta", action="store_true", help="average over scales and flips, as the config's tta_pipeline says"
    )
    made.add_argument("--out", help="folder for predicted masks (PNG, numbers as in the data set) and record.json")
    made.add_argument("--show-dir", help="folder for predictions painted over images")
    made.add_argument("--work-dir", help="folder for logs (default: test/ beside the checkpoint)")
    return made.parse_args()


if __name__ == "__main__":
    run_cli(main)
