"""What a model with sparse attention needs: contexts that an engine serves, and stages that begin with an indexer."""

from typing import Any

from slimrl import device
from slimrl.config.load import SERVING, LoadedRecipe, trains
from slimrl.config.problems import Problem
from slimrl.models.families.deepseek_v32 import indexed_layers
from slimrl.models.family import family_of


def sparse_attention_problems(loaded: LoadedRecipe, hf_config: dict[str, Any], *, devices: bool) -> list[Problem]:
    """Nothing for a model without indexers.

    Args:
        devices: the run starts on this machine or one like it.
    """
    chosen = hf_config.get("index_topk")
    if family_of(hf_config).name not in ("deepseek_v32", "glm_moe_dsa") or not chosen:
        return []
    problems, longest = [], loaded.recipe.rollout.max_trajectory_tokens
    if devices and loaded.command in SERVING and device.device_type() != "cuda" and longest > chosen:
        text = (
            f"{longest}: SGLang has no sparse attention on a CPU. Up to index_topk, {chosen} tokens, it is dense. "
            f"Use {chosen} or less."
        )
        problems.append(loaded.problem("rollout.max_trajectory_tokens", text))
    if trains(loaded.command) and (wrong := _stages_without_indexer(loaded, hf_config)):
        problems.append(loaded.problem("trainer.parallel.pipeline", wrong))
    return problems


def _stages_without_indexer(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> str:
    """Names the first layers of stages that need the choice of a layer on another one; empty if there are none."""
    from slimrl.trainer.layout.source_layout import planned_stages

    stages = planned_stages(loaded.recipe.trainer, family_of(hf_config).megatron_config(hf_config))
    first = {layer for held in stages for layer in held if layer - 1 not in held}
    wrong = sorted(first - set(indexed_layers(hf_config)))
    if not wrong:
        return ""
    size = loaded.recipe.trainer.parallel.pipeline
    return (
        f"{size}: stages begin with the layers {', '.join(map(str, wrong))}, which take the choice of the indexer of "
        f"the layer before. Those with an indexer are {', '.join(map(str, indexed_layers(hf_config)))}."
    )
