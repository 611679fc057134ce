"""Checks a recipe against the model in `model.path` before anything starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl import device
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.config.critic import with_critic
from slimrl.config.load import SERVING, LoadedRecipe, trains
from slimrl.config.problems import Problem, Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.speculative import DraftMode
from slimrl.config.speculative_rules import own_layer_violations, sends_drafts
from slimrl.models.architecture import architecture_of, check_architecture, weights_folder
from slimrl.models.draft import num_draft_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.models.offline_recipe import model_violations, transformer_engine_violations
from slimrl.resync.bucket_size import too_few_bytes
from slimrl.rollout.task.engine_format import engine_transform
from slimrl.runtime.checks.sparse_attention_check import sparse_attention_problems

STATE_CACHE: dict[str, tuple[Any, ...]] = {
    "mamba_radix_cache_strategy": ("no_buffer", "auto"),
    "disable_overlap_schedule": (True,),
    "page_size": (1,),
}
"""Fields of `rollout.sglang` -> the values with which SGLang caches states of gated delta nets on a CPU."""

NOT_EMULATED_HERE = (
    "rounds around Megatron's own layers, and this machine computes with Transformer Engine's. Leave it out to compute "
    "in FP8."
)


NOT_DETERMINISTIC = "megatron-core's deterministic mode has no packed sequences in gated delta nets."


def model_problems(loaded: LoadedRecipe, *, devices: bool) -> list[Problem]:
    """All problems of the checkpoint, and of the settings that must agree with it.

    Args:
        devices: the run starts on this machine or one like it; else checks that depend on devices are skipped.
    """
    path = Path(loaded.recipe.model.path)
    try:
        has_mtp = check_checkpoint(path)
    except ValueError as error:
        return [loaded.problem("model.path", str(error))]
    hf_config = read_hf_config(path)
    problems = []
    if loaded.command in SERVING:
        layers = num_draft_layers(hf_config) if has_mtp else 0
        problems += _speculation_problems(loaded, mtp_layers=layers, devices=devices)
        if wrong := family_of(hf_config).unserved(hf_config):
            problems.append(loaded.problem("model.path", wrong))
    if family_of(hf_config).linear_attention:
        problems += _delta_net_problems(loaded)
        problems += _linear_attention_problems(loaded, hf_config) if devices else []
    problems += sparse_attention_problems(loaded, hf_config) if devices else []
    if loaded.command in ("train", "resync bench"):
        problems += _resync_problems(loaded, hf_config, devices)
    problems += [loaded.problem(*violation) for violation in model_violations(loaded, hf_config)]
    if trains(loaded.command):
        megatron = loaded.recipe.model.megatron
        if megatron:
            try:
                check_architecture(weights_folder(Path(megatron)), architecture_of(hf_config))
            except ValueError as error:
                problems.append(loaded.problem("model.megatron", str(error)))
        if loaded.recipe.trainer.mtp.train and not has_mtp and family_of(hf_config).has_mtp:
            lacks = f"true, but {path} has no tensors of the layers for multi-token prediction. Use false."
            problems.append(loaded.problem("trainer.mtp.train", lacks))
        if devices:
            problems += [loaded.problem(*violation) for violation in _kernel_violations(loaded)]
    return problems


def _speculation_problems(loaded: LoadedRecipe, *, mtp_layers: int, devices: bool) -> list[Problem]:
    """What `rollout.speculative` needs of the machine and of the checkpoint."""
    mode, key = loaded.recipe.rollout.speculative.mode, "rollout.speculative.mode"
    problems = []
    if mode is not DraftMode.off and devices and device.device_type() != "cuda":
        without = f"{mode.value}: without a GPU SGLang takes the likeliest tokens instead of sampling. Use off."
        problems.append(loaded.problem(key, without))
    return problems + [loaded.problem(*violation) for violation in own_layer_violations(loaded.recipe, mtp_layers)]


def _kernel_violations(loaded: LoadedRecipe) -> list[Violation]:
    """Settings that need kernels which this machine's packages or GPU do not have."""
    found = with_critic(_apex, loaded.recipe, loaded.command)
    if not device.has_transformer_engine():
        return found + transformer_engine_violations(loaded)
    found += with_critic(_fp8, loaded.recipe, loaded.command)
    wrong = device.attention_problem()
    return [*found, ("model.path", wrong)] if wrong else found


def _apex(recipe: Recipe) -> Iterator[Violation]:
    for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute"):
        if recipe.trainer.megatron.get(name) and not device.has_apex():
            yield f"trainer.megatron.{name}", "needs a GPU and apex (docs/install.md). Leave it out."


def _fp8(recipe: Recipe) -> Iterator[Violation]:
    """What Transformer Engine's layers on this machine's GPU cannot compute."""
    if recipe.trainer.fp8_emulation:
        yield "trainer.fp8_emulation", NOT_EMULATED_HERE
    elif wrong := device.fp8_problem(recipe.trainer.fp8):
        yield "trainer.fp8", wrong


def _delta_net_problems(loaded: LoadedRecipe) -> list[Problem]:
    """What megatron-core cannot do with gated delta nets on any device."""
    if trains(loaded.command) and loaded.recipe.trainer.megatron.get("deterministic_mode"):
        return [loaded.problem("trainer.megatron.deterministic_mode", f"{NOT_DETERMINISTIC} Leave it out.")]
    return []


def _linear_attention_problems(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> list[Problem]:
    """What a model with gated delta nets needs and this machine lacks."""
    family, problems = family_of(hf_config), []
    on_gpu = device.device_type() == "cuda"
    if loaded.command in SERVING and not on_gpu:
        problems += _state_cache_problems(loaded, family.name)
    if trains(loaded.command) and on_gpu and not device.has_delta_net_kernels():
        reason = (
            f"a {family.name} trains on a GPU with the kernels of flash-linear-attention, which are not installed. "
            "Install fla-core as in requirements/gpu.txt."
        )
        problems.append(loaded.problem("model.path", reason))
    if trains(loaded.command) and on_gpu and loaded.recipe.deterministic:
        problems.append(loaded.problem("deterministic", f"{NOT_DETERMINISTIC} Use false."))
    return problems


def _state_cache_problems(loaded: LoadedRecipe, family: str) -> list[Problem]:
    sglang = loaded.recipe.rollout.sglang
    if sglang.get("disable_radix_cache"):
        return []
    return [
        loaded.problem(
            f"rollout.sglang.{name}",
            f"{sglang[name]}: SGLang caches no states of a {family} so on a CPU. Leave it out, or set "
            "rollout.sglang.disable_radix_cache.",
        )
        for name, allowed in STATE_CACHE.items()
        if sglang.get(name) not in (None, *allowed)
    ]


def _resync_problems(loaded: LoadedRecipe, hf_config: dict[str, Any], devices: bool) -> list[Problem]:
    """Weights that cannot be sent to engines at all, or not in buckets of the recipe's size."""
    recipe = loaded.recipe
    try:
        transform = engine_transform(Path(recipe.model.path))
        weight_map = family_of(hf_config).weight_map(hf_config, mtp=sends_drafts(recipe)).without_copies()
    except ValueError as error:
        return [loaded.problem("model.path", str(error))]
    if transform is not None and not devices:
        # The engines' format depends on their devices.
        return []
    reason = too_few_bytes(weight_map.specs(recipe.trainer.precision.dtype), recipe, transform)
    return [loaded.problem("resync.bucket_bytes", reason)] if reason else []
