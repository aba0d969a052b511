"""accelerate launch -q -m timm_locat.train RECIPE | evaluate MODEL DATA  [--help]"""

import sys

from timm_locat.errors import run_cli
from timm_locat.train.command import prepare, run_recipe


def main() -> None:
    """Read the recipe and its changes from the command line, and run it."""
    prepare()
    if sys.argv[1:2] == ["evaluate"]:
        import tyro

        from timm_locat.train.evaluate import EvaluateConfig, run

        run(tyro.cli(EvaluateConfig, prog="python -m timm_locat.train evaluate", args=sys.argv[2:]))
        return

    from timm_locat.train.recipes import RECIPES, describe

    run_recipe(
        {name: (describe(name), recipe()) for name, recipe in RECIPES.items()},
        prog="accelerate launch -q -m timm_locat.train",
        description="Train a model. RECIPE is a complete run; every setting of it can be changed by a flag behind it "
        "(RECIPE --help lists them). The run folder gets weights, metrics, curves and a record. "
        "`evaluate MODEL DATA` measures a model instead.",
    )


if __name__ == "__main__":
    run_cli(main)
