"""`python -m timm_locat.train` where accelerate may shard on a CPU, as torch can: it leaves FSDP out there in silence.

All else is accelerate's own: what it reads from the launch file, how it shards, clips and gathers. With STOP_AFTER=N in
the environment the run is stopped after N updates and taken up again.
"""

import contextlib
import os
import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from timm_locat.errors import run_cli
from timm_locat.train.__main__ import main
from timm_locat.train.engine import Trainer

plain_init, plain_update = AcceleratorState.__init__, Trainer._train_update
updates_left = int(os.environ.get("STOP_AFTER", 0))


def init(self, *args, **kwargs):
    """With what `AcceleratorState` does at its end for processes that have a GPU each."""
    plain_init(self, *args, **kwargs)
    self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin()
    if self._mixed_precision != "no":
        self.fsdp_plugin.set_mixed_precision(self._mixed_precision)


def update(self):
    global updates_left
    updates_left -= 1
    self.stop.made = updates_left == 0
    return plain_update(self)


AcceleratorState.__init__, Trainer._train_update = init, update
if updates_left:
    with contextlib.suppress(SystemExit):
        main()
    assert updates_left == 0
    sys.argv += ["--resume", "auto"]
run_cli(main)
