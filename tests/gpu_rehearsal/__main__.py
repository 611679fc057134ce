"""`python -m gpu_rehearsal CARD RECIPE... [--without FLAG] [--installed PACKAGE]`: JSON on the last line.

Of each recipe it has what was decided, or what was raised and where. FLAG is left out of the engine's command line;
PACKAGE is said to be installed.
"""

import argparse
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from gpu_rehearsal import transformer_engine
from gpu_rehearsal.cards import CARDS, pretend
from gpu_rehearsal.stand_ins import install_engine_packages, normal, pretend_installed


def main(card: str, recipes: list[str], without: list[str], installed: list[str]) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    pretend(CARDS[card])
    transformer_engine.install()
    install_engine_packages()
    pretend_installed({normal(name): "99" for name in installed})
    print(json.dumps({path: rehearse(Path(path), without) for path in recipes}))


def rehearse(path: Path, without: list[str]) -> dict[str, Any]:
    """What is decided for the trainer and for the engines of a recipe, or what is raised."""
    from gpu_rehearsal.engine import rehearse_engine
    from gpu_rehearsal.recipe import published
    from gpu_rehearsal.trainer import rehearse_trainer
    from slimrl.config.load import intended_command
    from slimrl.models.offline_recipe import read_offline

    planned = read_offline(path, [], intended_command(path), model_needed=False)
    if "dsa_kernel_backend" in planned.loaded.recipe.trainer.megatron:
        # Kernels of tilelang have no stand-ins.
        overrides = ["trainer.megatron.dsa_kernel_backend=none"]
        planned = read_offline(path, overrides, intended_command(path), model_needed=False)
    hf_config = published(planned.hf_config)
    try:
        found = {"trainer": rehearse_trainer(planned, hf_config)}
        with tempfile.TemporaryDirectory() as folder:
            engine = None if planned.sft else rehearse_engine(planned, hf_config, Path(folder), without)
        return {**found, "engine": engine}
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
        where = "".join(traceback.format_exception(error)[-4:])
        return {"raised": f"{type(error).__name__}: {error}", "where": where}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--installed", action="append", default=[])
    given = parser.parse_args()
    main(given.card, given.recipes, given.without, given.installed)
