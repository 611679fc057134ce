"""Stands in for sgl_kernel, of which PyPI has the CUDA wheel only.

SGLang's CPU platform imports a few functions from it by name; the optimised kernels are reached through
torch.ops.sgl_kernel, which does not exist here, so SGLang takes its own torch code for them.
One function is needed and given; the others belong to speculative decoding and cache transfers.
"""

import sys
import types

from torch import Tensor

from slimrl.sglang_plugin.cpu.mock import enter, unavailable

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
    return True
