"""`python -m gpu_rehearsal CARD RECIPE... [--without FLAG]`: a JSON object on the last line.

Of each recipe it has what was decided, or what was raised and where. FLAG is left out of the engine's command line.
"""

import argparse
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from gpu_rehearsal.cards import CARDS, pretend
from gpu_rehearsal.stand_ins import install_engine_packages


def main(card: str, recipes: list[str], without: list[str]) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    pretend(CARDS[card])
    install_engine_packages()
    from gpu_rehearsal.engine import rehearse_engine
    from slimrl.config.load import intended_command
    from slimrl.models.offline_recipe import read_offline

    found: dict[str, Any] = {}
    for recipe in recipes:
        path = Path(recipe)
        planned = read_offline(path, [], intended_command(path), model_needed=False)
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[recipe] = {"engine": None if planned.sft else rehearse_engine(planned, Path(folder), without)}
            except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
                where = "".join(traceback.format_exception(error)[-4:])
                found[recipe] = {"raised": f"{type(error).__name__}: {error}", "where": where}
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--without", action="append", default=[])
    given = parser.parse_args()
    main(given.card, given.recipes, given.without)
