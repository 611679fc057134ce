"""Fields that the passthrough sections may set: those of the installed megatron-core and SGLang.

A field that slimrl sets itself is refused with the key to use instead.
"""

from collections.abc import Iterable
from typing import Any

from slimrl.config.package_fields import FieldType, megatron_fields, sglang_fields
from slimrl.config.problems import suggestion

MEGATRON = ("trainer.megatron", "critic.trainer.megatron")

OWNED = {
    "trainer.megatron": {
        "tensor_model_parallel_size": "trainer.parallel.tensor",
        "pipeline_model_parallel_size": "trainer.parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "trainer.parallel.virtual_pipeline",
        "expert_model_parallel_size": "trainer.parallel.expert",
        "expert_tensor_parallel_size": "trainer.parallel.expert_tensor",
        "context_parallel_size": "trainer.parallel.context",
        "sequence_parallel": "trainer.parallel.sequence",
        "lr": "trainer.optimizer.lr",
        "min_lr": "trainer.optimizer.min_lr",
        "weight_decay": "trainer.optimizer.weight_decay",
        "adam_beta1": "trainer.optimizer.beta1",
        "adam_beta2": "trainer.optimizer.beta2",
        "adam_eps": "trainer.optimizer.eps",
        "clip_grad": "trainer.optimizer.clip_grad",
        "use_distributed_optimizer": "trainer.optimizer.distributed",
        "bf16": "trainer.precision",
        "fp16": "trainer.precision",
        "params_dtype": "trainer.precision",
        "pipeline_dtype": "trainer.precision",
        "fp8": "trainer.fp8",
        "fp8_recipe": "trainer.fp8",
        "main_grads_dtype": "trainer.megatron.grad_reduce_in_fp32",
        "mtp_num_layers": "trainer.mtp.train and the config.json of model.path",
        "mtp_loss_scaling_factor": "trainer.mtp.loss_weight",
        "mtp_detach_heads": "slimrl: the loss of these layers reaches no other weights",
        "mtp_use_repeated_layer": "the config.json of model.path",
    },
    "rollout.sglang": {
        "model_path": "model.path",
        "tp_size": "rollout.engine_tp",
        "ep_size": "rollout.engine_ep",
        "attn_dp_size": "rollout.engine_attention_dp",
        "nnodes": "rollout.engine_nodes",
        "node_rank": "slimrl, for each node of an engine",
        "dist_init_addr": "slimrl, for each engine",
        "enable_memory_saver": "rollout.colocated",
        "enable_return_routed_experts": "rollout.routed_experts",
        "dtype": "trainer.precision",
        "random_seed": "seed",
        "quantization": "the config.json of model.path",
        "json_model_override_args": "the config.json of model.path",
        "host": "slimrl, for each engine",
        "port": "slimrl, for each engine",
        "device": "slimrl, by what the machine has",
        "weight_version": "slimrl, at each resync",
        "speculative_algorithm": "rollout.speculative.mode",
        "speculative_draft_model_path": "rollout.speculative.draft_model",
        **dict.fromkeys(
            ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
            "rollout.speculative.num_draft_tokens",
        ),
        "disable_shared_experts_fusion": "slimrl: a resync places shared experts apart from the routed ones",
    },
}
"""Fields that a section refuses, and what sets them: a key of the recipe, the model, or slimrl."""

OWNED["teacher.sglang"] = {
    "model_path": "teacher.path",
    "tp_size": "teacher.engine_tp",
    "ep_size": "teacher.engine_ep",
    **dict.fromkeys(("dp_size", "attn_dp_size"), "teacher.num_engines"),
    "pp_size": "teacher.engine_tp and teacher.engine_nodes",
    "nnodes": "teacher.engine_nodes",
    "dtype": "trainer.precision",
    "random_seed": "seed",
    **{name: OWNED["rollout.sglang"][name] for name in ("node_rank", "dist_init_addr", "host", "port", "device")},
    **dict.fromkeys(
        ("enable_memory_saver", "enable_return_routed_experts", "disaggregation_mode", "weight_version"),
        "slimrl: a teacher keeps its memory and its weights, and only scores",
    ),
}

OWNED["critic.trainer.megatron"] = {
    name: owner.replace("trainer.", "critic.trainer.") for name, owner in OWNED["trainer.megatron"].items()
}

LATENT_ATTENTION = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "cache_mla_latents",
    "mla_down_proj_fusion",
)
"""Fields of multi-latent attention and rotary positions, which no recipe sets: trainer and engines both take them from
the model's config.json."""

DELTA_NETS = (
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "moe_shared_expert_gate",
)
"""Fields of models with gated delta nets. In another model some of them would change what its weights mean."""


def passthrough_fields(section: str) -> dict[str, FieldType]:
    """Fields that a passthrough section may set.

    Raises:
        ValueError: the package is not installed, or its version is not supported.
    """
    return (megatron_fields if section in MEGATRON else sglang_fields)()


def field_problem(section: str, name: str, value: Any, fields: dict[str, FieldType]) -> str | None:
    """What is wrong with `section.name: value`, or None."""
    owned = OWNED[section]
    if name in owned:
        return f"is set by {owned[name]}."
    if section in MEGATRON and name in (*LATENT_ATTENTION, *DELTA_NETS):
        return "is the model's: trainer and engines take their layers from the config.json of model.path."
    if name not in fields:
        return "no such field in the installed version." + suggestion(name, fields)
    field = fields[name]
    if field.accepts(value):
        wrong = field.unknown(value)
        return _not_one_of(wrong[0], field.words) if wrong else None
    if not field.types - {type(None)} and not field.choices:
        return f"is a {field.text}, which a recipe cannot hold."
    if field.choices and not field.types - {type(None)}:
        return _not_one_of(value, field.choices)
    return f"expected {field.text}, got {value!r}."


def _not_one_of(value: Any, choices: Iterable[Any]) -> str:
    known = [str(choice) for choice in choices]
    return f"{value!r} is not one of {', '.join(known)}." + suggestion(str(value), known)
