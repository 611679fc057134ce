"""What a model with sparse attention needs of the machine: a GPU, or contexts of which an indexer chooses all."""

from typing import Any

from slimrl import device
from slimrl.config.load import SERVING, LoadedRecipe
from slimrl.config.problems import Problem


def sparse_attention_problems(loaded: LoadedRecipe, hf_config: dict[str, Any]) -> list[Problem]:
    """Nothing for a model without indexers, or with devices that have kernels for them."""
    chosen, longest = hf_config.get("index_topk"), loaded.recipe.rollout.max_trajectory_tokens
    if not chosen or loaded.command not in SERVING or device.device_type() == "cuda" or longest <= chosen:
        return []
    text = (
        f"{longest}: SGLang has no sparse attention on a CPU. Up to index_topk, {chosen} tokens, it is dense. "
        f"Use {chosen} or less."
    )
    return [loaded.problem("rollout.max_trajectory_tokens", text)]
