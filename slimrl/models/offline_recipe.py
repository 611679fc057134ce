"""Checks of a recipe on a machine that may lack its model and its data. Torch-free.

The start of a run refuses what is refused here, and also checks the files and the devices.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.config.check import check_recipe, file_violations
from slimrl.config.critic import with_critic
from slimrl.config.functions import absent_modules, function_violations, reward_warnings
from slimrl.config.load import SERVING, Command, LoadedRecipe, is_needed, read_recipe, trains
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.problems import Problem, RecipeError, Violation
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import ResyncConfig
from slimrl.config.schema.speculative import DraftMode
from slimrl.config.speculative_rules import own_layer_violations
from slimrl.config.tracking_rules import tracking_warnings
from slimrl.config.wrapper import wrapper_of
from slimrl.models.draft import num_draft_layers
from slimrl.models.family import family_of, is_of_a_family
from slimrl.models.hf_config import (
    SCALE_SUFFIX,
    config_for_planning,
    nearest_published,
    published_model,
    unpacked_shapes,
    unsendable_format,
)
from slimrl.models.indexer_rules import indexer_violations
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.published_index import index_names, published_tensors
from slimrl.models.tensor_names import experts_apart, find_mismatches, left_out
from slimrl.models.wrapped_layout import text_shapes

NEEDS_TRANSFORMER_ENGINE = "needs a GPU and Transformer Engine."

RECOMPUTED_WITHOUT_OUTPUT = ("layernorm", "mla_up_proj", "moe_act")
"""Modules of `recompute_modules` whose output is dropped too, with parts of Transformer Engine."""

EMULATION_HINT = "trainer.fp8_emulation: true computes the numbers of FP8 without them."


@dataclass(frozen=True, kw_only=True)
class OfflineRecipe:
    """A recipe that passed all rules, with its model's config.json."""

    loaded: LoadedRecipe
    hf_config: dict[str, Any]
    """config.json of its model; empty if it is not known and not needed."""
    model: str
    """A few words on where the model's config is from."""
    notes: tuple[Problem, ...]
    """Warnings: probable mistakes, and what a start needs and this machine lacks."""
    teacher_config: dict[str, Any] | None = None
    """config.json of the teacher that the run starts; None without one, or if it is not known."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def sft(self) -> bool:
        """Whether the recipe is for `slimrl sft`, which has no engines."""
        return self.loaded.command == "sft"


def read_offline(
    path: Path | str,
    overrides: Sequence[str],
    command: Command,
    *,
    files: bool = False,
    model_needed: bool = True,
    in_image: bool = False,
) -> OfflineRecipe:
    """Read and check a recipe. If its model's folder is not here, the published model of that name stands in for it.

    Args:
        files: refuse missing files and modules, instead of noting them.
        model_needed: refuse a model that is neither here nor published, instead of skipping the rules that need it.
        in_image: the run sees a container's files, so that a missing program of an agent is noted in any case.

    Raises:
        RecipeError: with all problems found.
    """
    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None:
        raise RecipeError(problems)
    for key, message in file_violations(loaded.recipe, command):
        if files or key not in ("model.path", "teacher.path"):
            in_question = not files or (in_image and key.startswith("agent."))
            problems.append(loaded.problem(key, message, warning=in_question))
    problems += [loaded.problem(*violation) for violation in function_violations(loaded.recipe, command)]
    problems += [loaded.problem(*violation, warning=not files) for violation in absent_modules(loaded.recipe, command)]
    problems += [loaded.problem(*violation, warning=True) for violation in reward_warnings(loaded.recipe, command)]
    hf_config, model = None, "not known here; nothing was checked against it"
    folder = Path(loaded.recipe.model.path)
    try:
        hf_config, model = config_for_planning(folder)
    except ValueError as error:
        if os.path.exists(folder) or (model_needed and not files):
            problems.append(loaded.problem("model.path", f"{error}."))
        elif meant := nearest_published(folder):
            message = f"{folder}: no such folder. Did you mean {folder.parent / meant}?"
            problems.append(loaded.problem("model.path", message, warning=True))
    problems += [loaded.problem(*violation, warning=True) for violation in tracking_warnings(loaded.recipe, command)]
    teacher_config = _teacher_config(loaded, problems) if is_needed("teacher", command) else None
    # Of a model of no family, `model_violations` says that.
    understood = hf_config if hf_config is not None and is_of_a_family(hf_config) else None
    for problem in check_recipe(loaded.recipe, understood, command, teacher_config=teacher_config):
        problems.append(loaded.problem(problem.key, problem.message, warning=problem.warning))
    if hf_config is not None:
        problems += [loaded.problem(*violation) for violation in model_violations(loaded, hf_config)]
        problems += [loaded.problem(*violation) for violation in _bucket_violations(loaded, hf_config)]
        if command in ("train", "resync estimate") and (refused_format := unsendable_format(hf_config)):
            problems.append(loaded.problem("model.path", f"{loaded.recipe.model.path}: {refused_format}."))
        problems += [loaded.problem(*violation) for violation in _draft_violations(loaded, hf_config)]
        problems += [loaded.problem(*violation) for violation in _index_violations(loaded, hf_config)]
    if importlib.util.find_spec("transformer_engine") is None:
        lacks = "This machine lacks it and would refuse the run."
        problems += [
            loaded.problem(key, f"{message} {lacks}", warning=True)
            for key, message in transformer_engine_violations(loaded)
        ]
    if refused := [problem for problem in problems if not problem.warning]:
        raise RecipeError(refused)
    return OfflineRecipe(
        loaded=loaded, hf_config=hf_config or {}, model=model, notes=tuple(problems), teacher_config=teacher_config
    )


def _teacher_config(loaded: LoadedRecipe, problems: list[Problem]) -> dict[str, Any] | None:
    """config.json of the teacher that the run starts; None if there is none or it is not known, which is noted."""
    path = loaded.recipe.teacher.path
    if not path:
        return None
    try:
        return config_for_planning(Path(path))[0]
    except ValueError as error:
        missing = not os.path.exists(path)
        problems.append(loaded.problem("teacher.path", f"{error}.", warning=missing))
        return None


def model_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """A model that no family builds or without the layers to train, groups of ranks that its engines do not form,
    fields of `trainer.megatron` without effect, and layouts that sparse attention does not have."""
    try:
        family = family_of(hf_config)
        architecture = family.megatron_config(hf_config)
    except ValueError as error:
        yield "model.path", f"{loaded.recipe.model.path}: {error}."
        return
    if loaded.command in SERVING and not family.attention_groups and loaded.recipe.rollout.engine_attention_dp > 1:
        groups, kind = loaded.recipe.rollout.engine_attention_dp, hf_config["model_type"]
        text = f"{groups}: SGLang shards attention of {kind} over all ranks of an engine. Use 1."
        yield "rollout.engine_attention_dp", text
    if trains(loaded.command):
        yield from with_critic(partial(_fields_of_experts, architecture), loaded.recipe, loaded.command)
        yield from with_critic(partial(indexer_violations, hf_config, architecture), loaded.recipe, loaded.command)
        yield from _mtp_violations(loaded.recipe, architecture)


OF_SOME_EXPERTS = {
    "moe_router_bias_update_rate": "moe_router_enable_expert_bias",
    "moe_shared_expert_overlap": "moe_shared_expert_intermediate_size",
}
"""Fields of `trainer.megatron` -> what a model with experts must have for them to have an effect."""
MISSING = {
    "num_moe_experts": "experts",
    "moe_router_enable_expert_bias": "bias of its experts",
    "moe_shared_expert_intermediate_size": "shared experts",
}
"""Fields that a family sets for some models -> in words."""


def _fields_of_experts(architecture: MegatronModelConfig, recipe: Recipe) -> Iterator[Violation]:
    """Fields that have no effect in this model."""
    model = architecture.transformer
    for name, value in recipe.trainer.megatron.items():
        lacks = "num_moe_experts" if not model.get("num_moe_experts") else OF_SOME_EXPERTS.get(name, "num_moe_experts")
        if name.startswith("moe_") and value and not model.get(lacks):
            yield f"trainer.megatron.{name}", f"has no effect: the model has no {MISSING[lacks]}. Leave it out."


def _mtp_violations(recipe: Recipe, architecture: MegatronModelConfig) -> Iterator[Violation]:
    if not recipe.trainer.mtp.train:
        return
    if not architecture.mtp_layers:
        yield "trainer.mtp.train", "true, but the model has no layers for multi-token prediction. Use false."
    elif architecture.tie_embeddings and recipe.trainer.parallel.pipeline > 1:
        # Megatron would give the last stage an embedding and an output layer, of which it trains one.
        yield (
            "trainer.mtp.train",
            "true: an output layer tied to the embedding needs trainer.parallel.pipeline 1.",
        )


def _bucket_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Buckets smaller than a row of the embedding; a start checks every tensor."""
    recipe, columns = loaded.recipe, int(hf_config.get("hidden_size") or 0)
    row = columns * recipe.trainer.precision.element_bytes
    given = recipe.resync.bucket_bytes
    if loaded.command in ("train", "resync estimate") and given < row:
        default = ResyncConfig().bucket_bytes
        yield (
            "resync.bucket_bytes",
            f"{given} bytes are too few: one row of model.embed_tokens.weight needs {row}, and other tensors may be "
            f"wider. The default is {default}.",
        )


def _draft_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Problems of the draft model's layers, as far as config.json tells; a start also looks whether the checkpoint has
    their tensors."""
    if loaded.command not in SERVING or loaded.recipe.rollout.speculative.mode is not DraftMode.mtp:
        return
    try:
        num_layers = num_draft_layers(hf_config)
    except ValueError:  # of no family, which `model_violations` says
        return
    yield from own_layer_violations(loaded.recipe, num_layers)


def _index_violations(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Tensors of the published model that is not here yet, by name and shape; a start checks those of its files."""
    path = Path(loaded.recipe.model.path)
    name = next((name for name in (path.name, published_model(path.name)) if name in index_names()), None)
    if name is None or os.path.exists(path):
        return
    try:
        weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    except ValueError:  # of no family, which `model_violations` says
        return
    shapes = {tensor: spec.shape for tensor, spec in published_tensors(name, expert_ranges=True).items()}
    shapes, wrapper = unpacked_shapes(shapes), wrapper_of(hf_config)
    if wrapper is not None:
        shapes = text_shapes(hf_config, shapes)
    aside = left_out(shapes, hf_config)
    shapes = {
        tensor: shape for tensor, shape in shapes.items() if tensor not in aside and not tensor.endswith(SCALE_SUFFIX)
    }
    shapes = experts_apart(weight_map, shapes, expert_ranges=True)
    # Experts of a wrapped model that were stacked have been named one by one.
    found = find_mismatches(weight_map, shapes, expert_ranges=wrapper is None or wrapper.stacked is None)
    lines = [*found.lines(), *(f"{tensor}: of another shape" for tensor in found.misshaped)]
    if lines:
        yield "model.path", f"{path}: the published {name} does not fit its config: {'; '.join(lines)}."


def transformer_engine_violations(loaded: LoadedRecipe) -> list[Violation]:
    """Settings that need Transformer Engine, for a machine without it."""
    return with_critic(_needs_engine, loaded.recipe, loaded.command) if trains(loaded.command) else []


def _needs_engine(recipe: Recipe) -> Iterator[Violation]:
    trainer = recipe.trainer
    names = [name for name, value in trainer.megatron.items() if value and MEGATRON_VERDICTS[name].transformer_engine]
    for module in trainer.megatron.get("recompute_modules") or ():
        if module in RECOMPUTED_WITHOUT_OUTPUT:
            yield "trainer.megatron.recompute_modules", f"{module} {NEEDS_TRANSFORMER_ENGINE}"
    # Its Adam keeps states in other precisions; the CPU-offloaded optimizer has its own.
    if trainer.megatron.get("use_precision_aware_optimizer") and not trainer.megatron.get("optimizer_cpu_offload"):
        names.append("use_precision_aware_optimizer")
    yield from ((f"trainer.megatron.{name}", NEEDS_TRANSFORMER_ENGINE) for name in names)
    if trainer.fp8 is not Fp8Scaling.off and not trainer.fp8_emulation:
        yield "trainer.fp8", f"{trainer.fp8.value} {NEEDS_TRANSFORMER_ENGINE} {EMULATION_HINT}"
