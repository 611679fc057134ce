"""Rules of a trainer of sparse attention: layers without an indexer take the choice of the one before that has it."""

from collections.abc import Iterator
from typing import Any

from slimrl.config.pipeline_stages import first_layers
from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.models.families.deepseek_v32 import indexed_layers
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.megatron_config import MegatronModelConfig


def indexer_violations(
    hf_config: dict[str, Any], architecture: MegatronModelConfig, recipe: Recipe
) -> Iterator[Violation]:
    megatron = recipe.trainer.megatron
    if not architecture.sparse_attention:
        for name, value in megatron.items():
            if name.startswith("dsa_") and value:
                yield f"trainer.megatron.{name}", "has no effect: the model has no sparse attention. Leave it out."
        return
    yield from _stages(hf_config, recipe)
    yield from _recomputed(architecture, recipe)
    yield from _without_indexer(hf_config, recipe)
    exchange = megatron.get("cp_comm_type")
    kinds = exchange if isinstance(exchange, list) else [exchange or "allgather"]
    if recipe.trainer.parallel.context > 1 and any(str(kind).replace("_", "") != "allgather" for kind in kinds):
        yield "trainer.megatron.cp_comm_type", f"{exchange}: sparse attention has allgather alone. Leave it out."


def _stages(hf_config: dict[str, Any], recipe: Recipe) -> Iterator[Violation]:
    """Stages that begin with a layer that needs the choice of a layer on another one."""
    indexed = indexed_layers(hf_config)
    starts = first_layers(recipe.trainer, int(hf_config["num_hidden_layers"]))
    if wrong := [layer for layer in starts if layer not in indexed]:
        yield (
            "trainer.parallel.pipeline",
            f"{recipe.trainer.parallel.pipeline}: stages begin with the layers {', '.join(map(str, wrong))}, which "
            "take the choice of the indexer of the layer before. Those with an indexer are "
            f"{', '.join(map(str, indexed))}.",
        )


def _recomputed(architecture: MegatronModelConfig, recipe: Recipe) -> Iterator[Violation]:
    """Recomputed layers that would take the choice of the layer for multi-token prediction.

    Megatron keeps choices by the layer's number, and both that layer and the model's first one have the number 1.
    """
    model, megatron = architecture.transformer, recipe.trainer.megatron
    shares_first = model["dsa_indexer_topk_freq"] > 1 and model["dsa_indexer_skip_topk_offset"] == 1
    if not (recipe.trainer.mtp.train and shares_first and recipe.trainer.parallel.pipeline == 1):
        return
    granularity, modules = megatron.get("recompute_granularity"), megatron.get("recompute_modules") or ["core_attn"]
    if granularity == "full" or (granularity == "selective" and "core_attn" in modules):
        yield (
            "trainer.mtp.train",
            "true: layers without an indexer would recompute attention with the choice of the layer for multi-token "
            "prediction. Use false, recompute no attention (trainer.megatron.recompute_granularity), or "
            "trainer.parallel.pipeline above 1.",
        )


def _without_indexer(hf_config: dict[str, Any], recipe: Recipe) -> Iterator[Violation]:
    """Layers for multi-token prediction that Megatron, which numbers them from the first on, builds without the indexer
    that each has."""
    count = num_mtp_layers(hf_config) if recipe.trainer.mtp.train else 0
    if wrong := sorted(set(range(count)) - set(indexed_layers(hf_config))):
        yield (
            "trainer.mtp.train",
            f"true: of the {count} layers for multi-token prediction megatron-core would build number "
            f"{' and '.join(str(layer + 1) for layer in wrong)} without an indexer, as the model's own layer of that "
            "number. Use false.",
        )
