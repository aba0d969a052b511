"""accelerate launch -q -m timm_locat.train.dino RECIPE [--help]"""

from timm_locat.errors import require, run_cli
from timm_locat.train.command import run_recipe


def main() -> None:
    """Read the recipe and its changes from the command line, and run it."""
    require("lightly", "dino", "DINO")
    from timm_locat.train.dino.recipes import RECIPES, describe
    from timm_locat.train.dino.trainer import DinoTrainer

    run_recipe(
        {name: (describe(name), recipe()) for name, recipe in RECIPES.items()},
        DinoTrainer,
        prog="accelerate launch -q -m timm_locat.train.dino",
        description="Pretrain a model without labels, by DINO. RECIPE is a complete run; every setting of it can be "
        "changed by a flag behind it (RECIPE --help lists them). The run folder gets the teacher as a timm model "
        "without head, metrics, curves and a record.",
    )


if __name__ == "__main__":
    run_cli(main)
