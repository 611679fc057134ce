"""Rules of `trainer.lora`: which linear layers of a model its adapters belong to."""

from collections.abc import Iterator
from typing import Any

from slimrl.config.hf_config import num_experts, stacks_experts
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import LoraConfig

ALL_LINEAR = "all-linear"
"""Word for every linear layer below that the model has."""

GROUPED_QUERY = ("q_proj", "k_proj", "v_proj")
LATENT_KEYS = ("kv_a_proj_with_mqa", "kv_b_proj")
LATENT_QUERY = ("q_a_proj", "q_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERT = ("w1", "w3", "w2")
"""The same three of an expert, in models that name them as Mixtral does."""
NAMED_AS_MIXTRAL = ("minimax_m2",)
"""Their `model_type`; they have experts in every layer, and no other MLP."""
LINEAR_LAYERS = (*GROUPED_QUERY, *LATENT_QUERY, *LATENT_KEYS, "o_proj", *MLP, *MIXTRAL_EXPERT)
"""Linear layers of attention, MLPs and experts, by the last part of their name in transformers. Not: embeddings, output
layer, routers, gates of shared experts, gated delta nets."""

FUSED = {"gate_up_proj": "gate_proj and up_proj", "qkv_proj": "q_proj, k_proj and v_proj"}
"""Layers that other libraries have -> the linear layers here that are in them."""

NOT_WITH_ADAPTERS = {
    "moe_grouped_gemm": "computes the experts of a rank in one layer, which takes no adapters",
    "moe_shared_expert_overlap": "calls the linear layers of shared experts apart from their communication",
    "dsa_indexer_loss_coeff": "has no effect: indexers get no adapters, and stay as they are",
}
"""Fields of `trainer.megatron` that are refused with adapters -> why."""


STACKED_EXPERTS = "This model's experts are one tensor in each layer, in which PEFT knows no linear layers."


def linear_layers(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """The linear layers of LINEAR_LAYERS that a model has and calls."""
    if not hf_config.get("kv_lora_rank"):
        attention = GROUPED_QUERY
    else:
        # Megatron's sparse attention reads the weight of kv_b_proj, where adapters would add nothing.
        keys = LATENT_KEYS[:1] if hf_config.get("index_topk") else LATENT_KEYS
        attention = (*(LATENT_QUERY if hf_config.get("q_lora_rank") else GROUPED_QUERY[:1]), *keys)
    # PEFT knows no layers within a tensor of all experts.
    return (*attention, "o_proj", *(() if stacks_experts(hf_config) else mlp_layers(hf_config)))


def mlp_layers(hf_config: dict[str, Any]) -> tuple[str, str, str]:
    """Gate, up and down of the model's MLPs and experts."""
    return MIXTRAL_EXPERT if hf_config.get("model_type") in NAMED_AS_MIXTRAL else MLP


def adapter_targets(lora: LoraConfig, hf_config: dict[str, Any]) -> tuple[str, ...]:
    """The linear layers of a model that get adapters, in the order of LINEAR_LAYERS; none with rank 0."""
    if not lora.rank:
        return ()
    return tuple(name for name in linear_layers(hf_config) if name in lora.targets or ALL_LINEAR in lora.targets)


def lora_violations(recipe: Recipe, hf_config: dict[str, Any] | None = None) -> Iterator[Violation]:
    """Targets that no model has, and settings that do not go with adapters; `hf_config` for the names of its layers."""
    lora, key = recipe.trainer.lora, "trainer.lora.targets"
    if not lora.rank:
        return
    known = (ALL_LINEAR, *LINEAR_LAYERS)
    for name in lora.targets:
        if name not in known:
            meant = suggestion(name, known) or f" Known are {', '.join(known)}."
            if name in FUSED:
                meant = f" It is {FUSED[name]} in one: name these."
            if name == "gate_up_proj" and hf_config is not None and stacks_experts(hf_config):
                meant = f" {STACKED_EXPERTS} Use {', '.join(linear_layers(hf_config))}."
            yield key, f"{name!r} is no linear layer that gets adapters.{meant}"
    if not lora.targets:
        yield key, f"names no layer. Use [{ALL_LINEAR}], or trainer.lora.rank 0 to train the whole model."
    if ALL_LINEAR in lora.targets and len(lora.targets) > 1:
        yield key, f"{ALL_LINEAR} is all of them. Leave the others out."
    for name, why in NOT_WITH_ADAPTERS.items():
        if recipe.trainer.megatron.get(name):
            yield f"trainer.megatron.{name}", f"{why}. Leave it out, or use trainer.lora.rank 0."
    if recipe.trainer.fp8 is not Fp8Scaling.off:
        yield "trainer.fp8", "is not tested with adapters. Use off, or trainer.lora.rank 0."
    if recipe.trainer.mtp.train:
        yield "trainer.mtp.train", "adapters are trained alone. Use false, or trainer.lora.rank 0."


def lora_model_warnings(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Layers that one may think have adapters."""
    lora = recipe.trainer.lora
    if lora.rank and ALL_LINEAR in lora.targets and stacks_experts(hf_config):
        layers = ", ".join(linear_layers(hf_config))
        yield "trainer.lora.targets", f"{ALL_LINEAR} leaves out the experts. {STACKED_EXPERTS} Trained are {layers}."


def lora_model_violations(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Targets that this model has not, or has fused."""
    lora, key = recipe.trainer.lora, "trainer.lora.targets"
    if not lora.rank:
        return
    for name in lora.targets:
        if name in LINEAR_LAYERS and name not in linear_layers(hf_config):
            wrong = f"the model has no {name}. It has"
            if name == "kv_b_proj" and hf_config.get("index_topk"):
                wrong = "sparse attention reads the weight of kv_b_proj without calling the layer. Use"
            yield key, f"{wrong} {', '.join(linear_layers(hf_config))}."
    targets = adapter_targets(lora, hf_config)
    gate, up, _ = mlp_layers(hf_config)
    if num_experts(hf_config) and (gate in targets) != (up in targets):
        missing = up if gate in targets else gate
        yield key, f"transformers fuses {gate} and {up} of experts, so they go together. Add {missing}."
