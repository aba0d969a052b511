"""accelerate launch -q -m timm_locat.train RECIPE | evaluate MODEL DATA  [--help]"""

import logging
import sys

from timm_locat.errors import exit_with_sentence, require, run_cli


def main() -> None:
    """Read the recipe and its changes from the command line, and run it."""
    for module in ("accelerate", "datasets", "matplotlib", "tqdm"):
        require(module, "train", "training")
    tyro = require("tyro", "train", "training")
    from tqdm.contrib.logging import logging_redirect_tqdm

    from timm_locat.train.recipes import RECIPES, describe

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("timm_locat").setLevel(logging.INFO)
    if sys.argv[1:2] == ["evaluate"]:
        from timm_locat.train.evaluate import EvaluateConfig, run

        run(tyro.cli(EvaluateConfig, prog="python -m timm_locat.train evaluate", args=sys.argv[2:]))
        return

    configs = {name: (describe(name), recipe()) for name, recipe in RECIPES.items()}
    config = tyro.extras.overridable_config_cli(
        configs,
        prog="accelerate launch -q -m timm_locat.train",
        description="Train a model. RECIPE is a complete run; every setting of it can be changed by a flag behind it "
        "(RECIPE --help lists them). The run folder gets weights, metrics, curves and a record. "
        "`evaluate MODEL DATA` measures a model instead.",
    )
    recipe = next(word for word in sys.argv[1:] if word.replace("-", "_") in RECIPES).replace("-", "_")

    from timm_locat.train.engine import Interrupted, train

    try:
        with logging_redirect_tqdm():
            train(config, recipe)
    except Interrupted as stopped:
        exit_with_sentence(stopped)


if __name__ == "__main__":
    run_cli(main)
