"""Fingerprints of an engine's loaded weights, through SGLang's /weights_checker.

The route passes an action and a list of strings to WeightChecker.handle in each engine process and returns the
dictionary `checksums`; the hook here adds the action `slimrl_fingerprints`, for which the list (called
`skip_tensor_list` there) names Hugging Face tensors, None meaning all. engine_layout.py says where in the
engine's fused parameters each of them lies. Ranks hash their shards in place, and the hashes are added. Every copy of a
replicated tensor is hashed. A draft model answers for its own tensors (`selector` of the request).
The action `slimrl_kept` gives what each rank keeps in the same way (kept_tensors.py).
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slimrl.engines.plugin.kept_tensors import KEPT, kept_report

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slimrl.models.engine_slice import EngineShape, EngineSlice, Holding

ACTION = "slimrl_fingerprints"

_EMBEDDING = "model.embed_tokens.weight"


def around_handle(
    original: Callable[..., dict[str, Any] | None],
    checker: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: list[str] | None = None,
    *,
    role: str,
) -> dict[str, Any] | None:
    """Hook of WeightChecker.handle.

    Raises:
        ValueError: the engine's model has no such tensor; SGLang answers with the message.
    """
    if action == KEPT:
        answer = kept_report(checker._get_model())
    elif action == ACTION:
        answer = engine_fingerprints(checker._get_model(), skip_tensor_list)
    else:
        return original(checker, action, allow_quant_error, skip_tensor_list, role=role)
    return {
        "checksums": answer,
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def engine_fingerprints(model: Any, names: list[str] | None) -> dict[str, str]:
    """Hashes by Hugging Face name; all ranks of an engine call it with the same names and get the same result."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    from slimrl.engines.plugin.weight_updates import named_parameters
    from slimrl.models.engine_slice import EngineShape

    parallel = get_parallel()
    group = parallel.tp_group
    shape = EngineShape.of_config(model.config, group.world_size, parallel.moe_ep_size, parallel.attn_dp_size)
    num_copies, table = rank_hashes(dict(named_parameters(model)), shape, group.rank_in_group, names)
    if group.world_size > 1:
        torch.distributed.all_reduce(table, group=group.cpu_group)
    return fingerprints(num_copies, table)


def fingerprints(num_copies: dict[str, int], table: "Tensor") -> dict[str, str]:
    """Fingerprints by name, from the sum of all ranks' tables; copies that differ are joined, so that they equal no
    fingerprint."""
    from slimrl.models.fingerprint import as_hex

    rows = zip(num_copies.items(), table.tolist(), strict=True)
    return {name: "/".join(dict.fromkeys(as_hex(x % 2**64) for x in row[:copies])) for (name, copies), row in rows}


def rank_hashes(
    parameters: "dict[str, Tensor]", shape: "EngineShape", rank: int, names: list[str] | None
) -> "tuple[dict[str, int], Tensor]":
    """Hashes of what one rank holds.

    Args:
        parameters: the rank's, by the engine's names.
        names: None for all tensors that the parameters hold.

    Returns:
        Copies of each tensor in the engine, and int64 [names, ranks]: the hash of each copy, modulo 2^64; 0 where this
        rank has no such copy.

    Raises:
        ValueError: the parameters hold nothing of a name.
    """
    import torch

    from slimrl.models.engine_layout import engine_slices

    slices: dict[str, list[tuple[str, EngineSlice]]] = {}
    for parameter in parameters:
        for piece in engine_slices(parameter, shape):
            slices.setdefault(piece.hf_name, []).append((parameter, piece))
    if names is None:
        names = list(slices)
    if unknown := [name for name in names if name not in slices]:
        raise ValueError(f"no such tensors in the engine's model: {', '.join(unknown[:5])} ({len(unknown)} in all)")
    table = torch.zeros(len(names), shape.tensor_parallel, dtype=torch.int64)
    num_copies = {}
    for row, name in enumerate(names):
        num_copies[name] = slices[name][0][1].num_copies(shape.tensor_parallel)
        for parameter, piece in slices[name]:
            held = piece.holding(rank, shape.tensor_parallel)
            if held is not None:
                value = _shard_hash(parameters[parameter], piece, held, parameters[_EMBEDDING].dtype)
                table[row, held.copy] += value - 2**64 if value >= 2**63 else value
    return num_copies, table


def _shard_hash(parameter: "Tensor", piece: "EngineSlice", held: "Holding", model_dtype: "torch.dtype") -> int:
    from slimrl.models.fingerprint import partial_hash

    local = piece.of(parameter.detach())
    if piece.in_model_dtype:
        local = local.to(model_dtype)
    if piece.shard_dim is None:
        return partial_hash(local)
    first = held.shard * local.shape[piece.shard_dim]
    if piece.shard_dim == 1:
        columns = piece.size or held.shards * local.shape[1]
        return partial_hash(local[:, : max(0, columns - first)], first, columns)
    offset = piece.first_row * math.prod(local.shape[1:]) + held.shard * local.numel()
    if piece.size is not None:
        local = local[: max(0, piece.size - first)]
    return partial_hash(local, offset)
