"""What of a recipe does not go with the model in `model.path`, found before anything starts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slimrl import device
from slimrl.config.load import LoadedRecipe, trains
from slimrl.config.problems import Problem
from slimrl.models.architecture import architecture_of, check_architecture, weights_folder
from slimrl.models.checkpoint import check_checkpoint
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.runtime.engine_format import engine_transform

TRAINING_FIELDS = ("hidden_dropout", "attention_dropout", "moe_router_load_balancing_type")
"""Fields of `trainer.megatron` that a family sets and a recipe may set otherwise; all others are the model itself."""

NEED_TRANSFORMER_ENGINE = ("fp8", "fp4", "moe_grouped_gemm", "tp_comm_overlap")


def model_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Everything wrong with the checkpoint, and with the settings that must agree with it."""
    path = Path(loaded.recipe.model.path)
    problems: list[Problem] = []

    def attempt(key: str, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ValueError as error:
            problems.append(Problem(key=key, message=str(error), where=loaded.provenance.get(key, loaded.path)))
            return None

    attempt("model.path", lambda: check_checkpoint(path))
    if problems:
        return problems
    hf_config = read_hf_config(path)
    if loaded.command == "train":
        attempt("model.path", lambda: engine_transform(path))
    if trains(loaded.command):
        megatron = loaded.recipe.model.megatron
        if megatron:
            attempt(
                "model.megatron",
                lambda: check_architecture(weights_folder(Path(megatron)), architecture_of(hf_config)),
            )
        problems += _megatron_problems(loaded, hf_config)
    return problems


def _megatron_problems(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Problem]:
    given = loaded.recipe.trainer.megatron
    of_the_model = family_of(hf_config).megatron_config(hf_config).transformer.keys() - set(TRAINING_FIELDS)
    for name, value in given.items():
        if name in of_the_model:
            message = "is the model's, and comes from the config.json of model.path."
        elif name in NEED_TRANSFORMER_ENGINE and value and not device.has_transformer_engine():
            message = "needs a GPU and Transformer Engine."
        else:
            continue
        key = f"trainer.megatron.{name}"
        yield Problem(key=key, message=message, where=loaded.provenance.get(key, loaded.path))
