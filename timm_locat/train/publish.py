"""Push a finished run to the Hub (`--push-to-hub`)."""

from typing import TYPE_CHECKING

from timm_locat.errors import UserError, require
from timm_locat.hub import push
from timm_locat.train.config import TrainConfig

if TYPE_CHECKING:
    from timm_locat.train.engine import Trainer

__all__ = ["check_publishing", "publish"]


def check_publishing(config: TrainConfig) -> None:
    """Refuse what would fail after the last epoch, before the first one.

    Raises:
        UserError: There is no token for the Hub.
    """
    if config.push_to_hub is None:
        return
    hub = require("huggingface_hub", "hub", "--push-to-hub")
    if hub.get_token() is None:
        raise UserError(
            "--push-to-hub needs a token for the Hub: run `hf auth login` first, or leave it out and push the run "
            "folder later with `python -m timm_locat.hub push`"
        )


def publish(trainer: "Trainer") -> None:
    """Push the folder of a finished run from the main process; nothing where the run does not ask for it.

    Raises:
        UserError: The Hub refuses. The run is complete on disk all the same.
    """
    name = trainer.config.push_to_hub
    if name is None or not trainer.is_main:
        return
    try:
        done = push(trainer.folder, name)
    except UserError as err:
        raise UserError(
            f"the run in {trainer.folder} is complete, but {err}. Afterwards: "
            f"python -m timm_locat.hub push {trainer.folder} {name}"
        ) from err
    trainer.log(f"{name} has all of it already" if done.commit is None else f"pushed: {done.url}")
