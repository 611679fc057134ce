"""What of a recipe does not go with the model in `model.path`, found before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimrl import device
from slimrl.config.load import LoadedRecipe, trains
from slimrl.config.problems import Problem
from slimrl.config.schema import Precision
from slimrl.models.architecture import architecture_of, check_architecture, weights_folder
from slimrl.models.checkpoint import check_checkpoint
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.planned_recipe import (
    NEEDS_TRANSFORMER_ENGINE,
    model_violations,
    transformer_engine_keys,
)
from slimrl.resync.buckets import too_small
from slimrl.runtime.engine_format import engine_transform


def model_problems(loaded: LoadedRecipe, *, devices: bool = True) -> list[Problem]:
    """Everything wrong with the checkpoint, and with the settings that must agree with it.

    Args:
        devices: the run is to start on this machine, or on ones like it; else what depends on that is left out.
    """
    path = Path(loaded.recipe.model.path)
    problems: list[Problem] = []

    def attempt(key: str, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ValueError as error:
            problems.append(loaded.problem(key, str(error)))
            return None

    attempt("model.path", lambda: check_checkpoint(path))
    if problems:
        return problems
    hf_config = read_hf_config(path)
    if loaded.command in ("train", "resync bench"):
        problems += _resync_problems(loaded, hf_config, devices)
    if trains(loaded.command):
        megatron = loaded.recipe.model.megatron
        if megatron:
            attempt(
                "model.megatron",
                lambda: check_architecture(weights_folder(Path(megatron)), architecture_of(hf_config)),
            )
        problems += [loaded.problem(*violation) for violation in model_violations(loaded, hf_config)]
        if devices and not device.has_transformer_engine():
            problems += [loaded.problem(key, NEEDS_TRANSFORMER_ENGINE) for key in transformer_engine_keys(loaded)]
    return problems


def _resync_problems(loaded: LoadedRecipe, hf_config: dict[str, Any], devices: bool) -> list[Problem]:
    """Weights that engines cannot be sent, or not in buckets of the recipe's size."""
    recipe = loaded.recipe
    try:
        transform = engine_transform(Path(recipe.model.path))
        weight_map = family_of(hf_config).weight_map(hf_config)
    except ValueError as error:
        return [loaded.problem("model.path", str(error))]
    if transform is not None and not devices:
        # In which precision the engines hold it depends on theirs.
        return []
    dtype = "bfloat16" if recipe.trainer.precision is Precision.bf16 else "float32"
    reason = too_small(weight_map.specs(dtype), recipe.resync.bucket_bytes, transform)
    return [loaded.problem("resync.bucket_bytes", reason)] if reason else []
