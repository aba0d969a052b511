"""The command line of a training run: a recipe, and what is changed of it."""

import logging
import sys
from typing import TYPE_CHECKING

from timm_locat.errors import exit_with_sentence, require
from timm_locat.train.config import TrainConfig

if TYPE_CHECKING:
    from timm_locat.train.engine import Trainer

__all__ = ["prepare", "run_recipe"]


def prepare() -> None:
    """Look for what training needs, and let its messages through.

    Raises:
        MissingExtra: A part of the extra `train` is not installed.
    """
    for module in ("accelerate", "datasets", "matplotlib", "tqdm", "tyro"):
        require(module, "train", "training")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("timm_locat").setLevel(logging.INFO)


def run_recipe(
    recipes: dict[str, tuple[str, TrainConfig]], trainer: "type[Trainer] | None" = None, *, prog: str, description: str
) -> None:
    """Run the recipe that the command line names, with its changes.

    Args:
        recipes: What each says about itself, and its configuration.
        trainer: What kind of training it is; None for that of a classifier.
        prog: The command, for help texts.
        description: The same.
    """
    prepare()
    import tyro
    from tqdm.contrib.logging import logging_redirect_tqdm

    config = tyro.extras.overridable_config_cli(recipes, prog=prog, description=description)
    recipe = next(word for word in sys.argv[1:] if word.replace("-", "_") in recipes).replace("-", "_")

    from timm_locat.train.engine import Interrupted, train

    try:
        with logging_redirect_tqdm():
            train(config, recipe, trainer)
    except Interrupted as stopped:
        exit_with_sentence(stopped)
