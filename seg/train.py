"""Train a segmentor: `python -m seg.train CONFIG`, or `torchrun --nproc_per_node N -m seg.train CONFIG`."""

from pathlib import Path

import torch

from seg.launch import check_data, finish, launch, parser, read_config
from timm_locat.errors import UserError, run_cli

from mmengine.runner import Runner  # isort: skip  (after the cure in seg.launch)

__all__ = ["main"]


def main() -> None:
    """Command line."""
    args = _parse()
    cfg = read_config(args.config, args.cfg_options)
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(Path("work_dirs") / Path(args.config).stem)
    cfg.visualizer.name = cfg.work_dir  # mmengine keeps one per name, with the folder of the first
    cfg.resume = args.resume
    if not args.resume and any(Path(cfg.work_dir).glob("*.pth")):
        raise UserError(f"{cfg.work_dir} holds a run; pass --resume to go on there, or another --work-dir")
    if args.amp:
        if not torch.cuda.is_available():
            raise UserError("--amp needs a GPU, and there is none; leave it out")
        cfg.optim_wrapper.update(type="AmpOptimWrapper", loss_scale="dynamic")
    check_data(cfg, "train_dataloader", "val_dataloader")
    launch(cfg)
    try:
        Runner.from_cfg(cfg).train()
    finally:
        finish()


def _parse():
    made = parser(__doc__, checkpoint=False)
    made.add_argument("--work-dir", help="folder for logs and checkpoints (default: work_dirs/ and the config's name)")
    made.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the work dir, if any")
    made.add_argument("--amp", action="store_true", help="half precision where it is safe; needs a GPU")
    return made.parse_args()


if __name__ == "__main__":
    run_cli(main)
