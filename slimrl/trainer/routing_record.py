"""Which experts every token takes in a pass without gradient, and by how much, recorded by forward hooks.

T tokens of a micro-batch on this context-parallel rank, L layers of the whole model, E experts, K of them for a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class RoutingRecord:
    """Records every router of this rank's chunks between `start` and `take`."""

    def __init__(self, chunks: list[DistributedDataParallel], num_layers: int, topk: int, tensor: int) -> None:
        """
        Args:
            num_layers: of the whole model.
            topk: experts of a token.
            tensor: ranks over which sequence parallelism spreads the tokens; 1 without it.
        """
        self.num_layers, self.topk, self.tensor = num_layers, topk, tensor
        self.device = next(chunks[0].parameters()).device
        self.routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.passes: dict[int, list[tuple[Tensor, Tensor]]] | None = None
        """By layer, in the order of the micro-batches: experts [T, K] and margins [T], of this rank's piece of T"""
        for router in self.routers:
            router.register_forward_hook(self._record)

    def start(self) -> None:
        """Forget what was recorded and record from here on."""
        self.passes = {router.layer_number - 1: [] for router in self.routers}

    def take(self, num_tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What was recorded, of all layers, on every pipeline stage; every rank of the model calls it.

        Args:
            num_tokens: T of each micro-batch, in the order of the passes.

        Returns:
            For each micro-batch int32 [T, L, K], the experts in no particular order, -1 where there are fewer or the
            layer has no router; and float32 [T, L], the lowest score of a chosen expert minus the highest of another
            (logits under softmax, sigmoid plus bias otherwise), -inf where the layer has no router.
        """
        assert self.passes is not None, "start comes first"
        passes, self.passes = self.passes, None
        return [self._whole(number, tokens, passes) for number, tokens in enumerate(num_tokens)]

    def _whole(self, number: int, tokens: int, passes: dict[int, list[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
        """All tokens and layers of one micro-batch."""
        piece = tokens // self.tensor
        experts_TLK = torch.full((piece, self.num_layers, self.topk), -1, dtype=torch.int32, device=self.device)
        margin_TL = torch.full((piece, self.num_layers), -torch.inf, device=self.device)
        for layer, recorded in passes.items():
            experts_TLK[:, layer], margin_TL[:, layer] = recorded[number]
        return self._over_ranks(experts_TLK), self._over_ranks(margin_TL)

    def _over_ranks(self, values: Tensor) -> Tensor:
        """The pieces of the tensor-parallel ranks one after another, layers from whichever stage has them."""
        if self.tensor > 1:
            parts = [torch.empty_like(values) for _ in range(self.tensor)]
            dist.all_gather(parts, values, group=mpu.get_tensor_model_parallel_group())
            values = torch.cat(parts)
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group())
        return values

    @torch.no_grad()
    def _record(self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if self.passes is None:
            return
        assert isinstance(router, TopKRouter)
        chosen_TE = output[1]
        scores_TE = router.gating(args[0]).reshape(chosen_TE.shape).float()
        if router.score_function == "sigmoid":
            scores_TE = scores_TE.sigmoid()
            if router.expert_bias is not None:
                scores_TE = scores_TE + router.expert_bias
        lowest_T = scores_TE.masked_fill(~chosen_TE, torch.inf).amin(-1)
        highest_T = scores_TE.masked_fill(chosen_TE, -torch.inf).amax(-1)
        taken_TK, experts_TK = chosen_TE.int().topk(self.topk, dim=-1)
        experts_TK = torch.where(taken_TK > 0, experts_TK, -1).int()
        self.passes[router.layer_number - 1].append((experts_TK, lowest_T - highest_T))
