"""The tensor-parallel ranks of an SGLang engine, from within one of them."""

from typing import Any


class EngineRanks:
    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        group = get_parallel().tp_group
        self.kept: dict[str, Any] = vars(group)
        """Attributes that this process keeps from one request to the next, whichever of its models they are for."""
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.per_node: int = group.world_size // get_server_args().nnodes
        self._cpu_group: Any = group.cpu_group

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; all ranks call it."""
        if self.size == 1:
            return [value]
        import torch

        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._cpu_group)
        return values
