"""Fields of `rollout.sglang` that lay out an engine's weights, and which of their values a resync supports."""

from collections.abc import Iterator, Mapping
from typing import Any

from slimrl.config.problems import Violation

SGLANG_LAYOUTS: dict[str, Any] = {
    "dp_size": 1,
    "moe_dp_size": 1,
    "dwdp_size": 1,
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "dcp_replicate_q_proj": None,
    "enable_prefill_cp": False,
    "enable_cp_tp_group_sharing": False,
    "enable_cp_decode_attn_tp": False,
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
    "enable_shared_experts_attn_tp": False,
    "shared_experts_tp_size": None,
    "enable_dense_mlp_attn_tp": False,
    "moe_dense_tp_size": None,
    "enable_megamoe_for_layernorm_sp": False,
    "ep_join_rank_offset": 0,
    "elastic_ep_initial_size": None,
    "max_ep_size": None,
    "moe_a2a_backend": "none",
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "enable_eplb": False,
    "elastic_ep_backend": "none",
    "enable_elastic_expert_backup": False,
    "ep_join_mode": None,
    "enable_waterfill": False,
    "enforce_shared_experts_fusion": False,
    "enable_paged_experts": False,
    "kt_weight_path": None,
    "kt_num_gpu_experts": None,
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "modelopt_quant": None,
    "modelopt_checkpoint_restore_path": None,
    "quantize_and_serve": False,
    "rl_quant_profile": None,
    "custom_weight_loader": None,
    "checkpoint_engine_wait_weights_before_ready": False,
    "weight_cache_mode": "off",
    "enable_nvidia_megakernel": False,
    "enable_amd_monokernel": False,
    "enable_lora": None,
    "lora_paths": None,
}
"""Fields of ServerArgs that may lay out weights in ways that models/engine_layout.py does not describe -> SGLang's
default, the one value that a recipe may give."""

SGLANG_CHOICES = {
    "moe_runner_backend": ("auto", "triton", "deep_gemm"),
    "fp8_gemm_runner_backend": ("auto", "triton", "deep_gemm"),
    "load_format": ("auto", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "dummy"),
    "model_impl": ("auto", "sglang"),
}
"""Fields some of whose values lay out loaded weights anew, or name them otherwise -> the values that do not."""

PACKING_KERNELS = ("moe_runner_backend", "fp8_gemm_runner_backend")
"""Fields for which SGLang chooses kernels on a GPU of compute capability 10 or newer that reorder the rows of experts,
or store FP8 with other scales. Only triton leaves weights there as they are loaded."""

INSTEAD = {
    **dict.fromkeys(("dp_size", "moe_dp_size"), "Use rollout.num_engines for replicas."),
    "enable_dp_attention": "Use rollout.engine_attention_dp.",
    **dict.fromkeys(
        ("pp_size", "attn_cp_size", "dcp_size", "enable_prefill_cp", "moe_dense_tp_size", "moe_a2a_backend"),
        "Use rollout.engine_tp and engine_ep.",
    ),
}
"""Advice for some of these fields; the others should be left out."""


def layout_violations(given: Mapping[str, Any]) -> Iterator[Violation]:
    """Fields of `rollout.sglang` whose engine could not be updated."""
    for name, default in SGLANG_LAYOUTS.items():
        value = given.get(name)
        # None and False are not passed to SGLang.
        if value is not None and value is not False and value != default:
            instead = INSTEAD.get(name, "Leave it out.")
            yield f"rollout.sglang.{name}", f"{value}: a resync cannot place weights in such an engine. {instead}"
    if (mode := given.get("disaggregation_mode")) not in (None, "null"):
        yield (
            "rollout.sglang.disaggregation_mode",
            f"{mode}: engines of a rollout prefill and decode. Leave it out.",
        )
    for name, choices in SGLANG_CHOICES.items():
        value = given.get(name)
        if value is not None and value not in choices:
            yield (
                f"rollout.sglang.{name}",
                f"{value}: a resync cannot place weights in such an engine. Use {' or '.join(choices)}.",
            )


def plain_kernels(given: Mapping[str, Any]) -> dict[str, str]:
    """The kernels for a GPU of compute capability 10 or newer, which leave weights as they are loaded.

    Raises:
        ValueError: the recipe asks for others.
    """
    for name in PACKING_KERNELS:
        if (value := given.get(name)) not in (None, "triton"):
            raise ValueError(
                f"rollout.sglang.{name}: {value} stores weights on this GPU in a layout in which a resync cannot place "
                "them. Use triton, or leave it out."
            )
    return dict.fromkeys(PACKING_KERNELS, "triton")
