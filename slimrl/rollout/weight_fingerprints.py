"""Fingerprints of an engine's loaded weights, asked for through SGLang's /weights_checker.

The route passes an action and a list of strings to WeightChecker.handle in each engine process and returns the
dictionary `checksums`; the hook here adds the action `slimrl_fingerprints`, for which the list (called
`skip_tensor_list` there) names Hugging Face tensors, None meaning all. engine_layout.py says where in the
engine's fused parameters each of them lies; shards of a tensor-parallel engine are gathered first.
"""

from collections.abc import Callable
from typing import Any

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
        ValueError: a name that the engine's model does not have; SGLang answers with the message.
    """
    if action != ACTION:
        return original(checker, action, allow_quant_error, skip_tensor_list, role=role)
    return {
        "checksums": engine_fingerprints(checker._get_model(), skip_tensor_list),
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def engine_fingerprints(model: Any, names: list[str] | None) -> dict[str, str]:
    """Hash by Hugging Face name; every tensor-parallel rank calls it with the same names and gets the same."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    from slimrl.models.engine_layout import EngineShape, engine_slices
    from slimrl.models.fingerprint import fingerprint

    group = get_parallel().tp_group
    shape = EngineShape.of_config(model.config, group.world_size)
    slices = {
        piece.hf_name: (parameter, piece)
        for engine_name, parameter in model.named_parameters()
        for piece in engine_slices(engine_name, shape)
    }
    if names is None:
        names = list(slices)
    if unknown := [name for name in names if name not in slices]:
        raise ValueError(f"no such tensors in the engine's model: {', '.join(unknown[:5])} ({len(unknown)} in all)")
    hashes = {}
    for name in names:
        parameter, piece = slices[name]
        local = piece.of(parameter.detach()).contiguous()
        if group.world_size > 1 and piece.shard_dim is not None:
            shards = [torch.empty_like(local) for _ in range(group.world_size)]
            torch.distributed.all_gather(shards, local, group=group.device_group)
            local = torch.cat(shards[:: piece.replicas], dim=piece.shard_dim)
        if piece.in_model_dtype:
            local = local.to(slices[_EMBEDDING][0].dtype)
        hashes[name] = fingerprint(local[: piece.rows])
    return hashes
