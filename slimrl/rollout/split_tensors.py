"""Rows of a tensor that is larger than a bucket, copied to where they belong in an engine's parameters.

SGLang's own loading takes whole tensors alone. engine_layout.py says which parameter holds a Hugging Face tensor, and
which shard of it this process has.
"""

from typing import Any

from torch import Tensor


def load_rows(model: Any, parts: list[tuple[str, int, Tensor]]) -> None:
    """Copy each (Hugging Face name, first row, rows) into the model, as far as this process holds them.

    Raises:
        ValueError: a name that the engine's model does not have.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    from slimrl.models.engine_layout import EngineShape, engine_slices

    parallel = get_parallel()
    rank, num_ranks = parallel.tp_group.rank_in_group, parallel.tp_group.world_size
    shape = EngineShape.of_config(model.config, num_ranks, parallel.moe_ep_size)
    wanted = {name for name, _, _ in parts}
    slices = {
        piece.hf_name: (parameter, piece)
        for engine_name, parameter in model.named_parameters()
        for piece in engine_slices(engine_name, shape)
        if piece.hf_name in wanted
    }
    with torch.no_grad():
        for name, start, rows in parts:
            if name not in slices:
                raise ValueError(f"no such tensor in the engine's model: {name}")
            parameter, piece = slices[name]
            held = piece.holding(rank, num_ranks)
            if held is not None:
                copy_rows(piece.of(parameter), rows, start, piece.shard_dim, held.shard)


def copy_rows(shard: Tensor, rows: Tensor, start: int, shard_dim: int | None, index: int) -> None:
    """Copy what a shard holds of some rows of the whole tensor.

    Args:
        shard: part `index` of equal parts along `shard_dim`, or the whole where it is None; padding may follow
            the whole's last row or column.
        rows: of the whole tensor, all columns, from row `start` on.
    """
    if shard_dim == 1:
        columns = shard.shape[1]
        rows = rows[:, index * columns : (index + 1) * columns]
        shard = shard[:, : rows.shape[1]]
    first = index * shard.shape[0] if shard_dim == 0 else 0
    low, high = max(start, first), min(start + rows.shape[0], first + shard.shape[0])
    if low < high:
        shard[low - first : high - first].copy_(rows[low - start : high - start])
