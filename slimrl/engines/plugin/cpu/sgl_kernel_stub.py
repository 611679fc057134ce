"""Stands in for sgl_kernel, of which PyPI has the CUDA wheel only.

SGLang's CPU platform imports a few functions from it by name and reaches the optimised kernels through
torch.ops.sgl_kernel. Those for which it has torch code of its own do not exist here, so that it takes that code.
Given are one function that every model needs, the kernels of gated delta nets (delta_rule.py, short_convolution.py),
and those that Qwen3.5 has in addition (gates.py). The others belong to speculative decoding and cache transfers.
"""

import sys
import types

import torch
from torch import Tensor

from slimrl.engines.plugin.cpu import delta_rule, gates, short_convolution
from slimrl.engines.plugin.cpu.mock import enter, unavailable

_REFUSED = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def assign_req_to_token_pool_cpu(
    request_rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, cache_slots: Tensor, row_length: int
) -> None:
    """Write each request's new cache slots into its row of the table.

    Args:
        request_rows: [requests], row of each request.
        req_to_token: [rows, row_length], cache slot of every token of a request; changed in place.
        starts: [requests], first new position of each request.
        ends: [requests], one past the last.
        cache_slots: the new slots of all requests, one after the other.
        row_length: width of the table; known from the tensor here.
    """
    offset = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = cache_slots[offset : offset + end - start].to(req_to_token.dtype)
        offset += end - start


def install() -> bool:
    """Enter the stand-in; False, and nothing done, where sgl_kernel is imported."""
    if "sgl_kernel" in sys.modules:
        return False
    module = types.ModuleType("sgl_kernel")
    module.__dict__["__version__"] = "0.0.0"
    module.__dict__["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu
    for name in _REFUSED:
        module.__dict__[name] = unavailable(f"sgl_kernel.{name}")
    enter(module)
    delta_nets = types.ModuleType("sgl_kernel.mamba")
    delta_nets.__dict__.update(
        causal_conv1d_fn_cpu=short_convolution.causal_conv1d_fn,
        causal_conv1d_update_cpu=short_convolution.causal_conv1d_update,
        chunk_gated_delta_rule_cpu=delta_rule.chunk_gated_delta_rule,
    )
    enter(delta_nets)
    vars(torch.ops.sgl_kernel).update(
        fused_gdn_gating_cpu=delta_rule.gating,
        fused_sigmoid_gating_delta_rule_update_cpu=delta_rule.sigmoid_gating_delta_rule_update,
        fused_sigmoid_mul_cpu=gates.fused_sigmoid_mul,
        # For attention without a gate, which no model of a known family has.
        fused_qk_gemma_rmsnorm_cpu=unavailable("fused_qk_gemma_rmsnorm_cpu"),
        fused_qk_gemma_rmsnorm_with_gate_cpu=gates.fused_qk_gemma_rmsnorm_with_gate,
        fused_qkvzba_split_reshape_cat_contiguous_cpu=gates.fused_qkvzba_split_reshape_cat_contiguous,
    )
    return True
