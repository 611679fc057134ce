"""A recipe read on a machine where its model and its data need not be, and what can be known of it there.

Everything here is torch-free. What is refused here is refused at the start of a run too; a start also looks into the
files, and at the devices.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.config.check import check_recipe, file_violations
from slimrl.config.functions import absent_modules, function_violations
from slimrl.config.load import Command, LoadedRecipe, read_recipe, trains
from slimrl.config.problems import Problem, RecipeError, Violation
from slimrl.config.schema import Precision, ResyncConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import config_for_planning, nearest_published

TRAINING_FIELDS = ("hidden_dropout", "attention_dropout", "moe_router_load_balancing_type")
"""Fields of `trainer.megatron` that a family sets and a recipe may set otherwise; all others are the model itself."""

OF_TRANSFORMER_ENGINE = ("fp8", "fp4", "moe_grouped_gemm", "tp_comm_overlap")
"""Fields of `trainer.megatron` that only its layers have."""

NEEDS_TRANSFORMER_ENGINE = "needs a GPU and Transformer Engine."


@dataclass(frozen=True, kw_only=True)
class PlannedRecipe:
    """A recipe that no rule refuses."""

    loaded: LoadedRecipe
    hf_config: dict[str, Any]
    """config.json of its model; empty where that is not known and need not be."""
    model: str
    """A few words on where that is from."""
    notes: tuple[Problem, ...]
    """Warnings: what is probably not meant, and what a start needs that is not on this machine."""


def read_planned(
    path: Path | str, overrides: Sequence[str], command: Command, *, files: bool = False, model_needed: bool = True
) -> PlannedRecipe:
    """Read and check a recipe whose model, if its folder is not here, is the published one of the folder's name.

    Args:
        files: refuse what a start would not find on this machine, instead of noting it.
        model_needed: refuse a model that is neither here nor published, instead of leaving out the rules that need it.

    Raises:
        RecipeError: it is refused, with all the reasons that can be seen at once.
    """
    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None:
        raise RecipeError(problems)
    notes: list[Problem] = []
    for key, message in file_violations(loaded.recipe, command):
        if files or key != "model.path":
            (problems if files else notes).append(loaded.problem(key, message, warning=not files))
    for key, message in function_violations(loaded.recipe, command):
        problems.append(loaded.problem(key, message))
    for key, message in absent_modules(loaded.recipe, command):
        (problems if files else notes).append(loaded.problem(key, message, warning=not files))
    hf_config, model = None, "not known here, so that nothing was checked against it"
    folder = Path(loaded.recipe.model.path)
    try:
        hf_config, model = config_for_planning(folder)
    except ValueError as error:
        if folder.exists() or (model_needed and not files):
            problems.append(loaded.problem("model.path", f"{error}."))
        elif meant := nearest_published(folder):
            message = f"{folder}: no such folder. Did you mean {folder.parent / meant}?"
            notes.append(loaded.problem("model.path", message, warning=True))
    for problem in check_recipe(loaded.recipe, hf_config, command):
        found = loaded.problem(problem.key, problem.message, warning=problem.warning)
        (notes if problem.warning else problems).append(found)
    if hf_config is not None:
        problems += [loaded.problem(*violation) for violation in model_violations(loaded, hf_config)]
        problems += [loaded.problem(*violation) for violation in _bucket_violations(loaded, hf_config)]
    if importlib.util.find_spec("transformer_engine") is None:
        absent = f"{NEEDS_TRANSFORMER_ENGINE} It is not here, where the run would be refused."
        notes += [loaded.problem(key, absent, warning=True) for key in transformer_engine_keys(loaded)]
    if problems:
        raise RecipeError(problems)
    return PlannedRecipe(loaded=loaded, hf_config=hf_config or {}, model=model, notes=tuple(notes))


def model_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """A model that no family builds, and fields of `trainer.megatron` that would make another one of it."""
    try:
        architecture = family_of(hf_config).megatron_config(hf_config)
    except ValueError as error:
        yield "model.path", f"{loaded.recipe.model.path}: {error}."
        return
    if trains(loaded.command):
        for name in loaded.recipe.trainer.megatron:
            if name in architecture.transformer and name not in TRAINING_FIELDS:
                yield f"trainer.megatron.{name}", "is the model's, and comes from the config.json of model.path."


def _bucket_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Buckets that do not hold the least that can be sent of any model; a start looks at each of its tensors."""
    recipe, columns = loaded.recipe, int(hf_config.get("hidden_size") or 0)
    row = columns * (2 if recipe.trainer.precision is Precision.bf16 else 4)
    given = recipe.resync.bucket_bytes
    if loaded.command in ("train", "resync estimate") and given < row:
        default = ResyncConfig().bucket_bytes
        yield (
            "resync.bucket_bytes",
            f"{given} bytes are too few: one row of model.embed_tokens.weight needs {row}, and others may be wider. "
            f"{default} is the default.",
        )


def transformer_engine_keys(loaded: LoadedRecipe) -> list[str]:
    """Keys of the recipe that only Transformer Engine can follow."""
    given = loaded.recipe.trainer.megatron if trains(loaded.command) else {}
    names = [name for name in OF_TRANSFORMER_ENGINE if given.get(name)]
    # Its Adam is what keeps states in other precisions; the optimizer on the host brings its own.
    if given.get("use_precision_aware_optimizer") and not given.get("optimizer_cpu_offload"):
        names.append("use_precision_aware_optimizer")
    return [f"trainer.megatron.{name}" for name in names]
