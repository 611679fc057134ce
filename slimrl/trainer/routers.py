"""What forward hooks record of the routers: their balance during training, the experts of every token without gradient.

T tokens of a micro-batch on this context-parallel rank, L layers of the whole model, E experts, K of them per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class RouterStats:
    """How evenly every router of this rank's chunks spreads the tokens within `observe` over experts.

    Counts leave out padding and are summed over all ranks, so they do not depend on the layout.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], num_layers: int, tensor_rank: int, sequence_parallel: bool
    ) -> None:
        """
        Args:
            num_layers: of the whole model.
            tensor_rank: of this rank.
            sequence_parallel: each tensor-parallel rank routes its own piece of the tokens.
        """
        self.tensor_rank, self.sequence_parallel = tensor_rank, sequence_parallel
        self.valid_T: Tensor | None = None
        routers = _hooked(chunks, self._record)
        num_experts = routers[0].config.num_moe_experts if routers else 0
        device = next(chunks[0].parameters()).device
        self.counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.float64, device=device)
        self.entropy_L2 = torch.zeros((num_layers, 2), dtype=torch.float64, device=device)

    def reset(self) -> None:
        self.counts_LE.zero_()
        self.entropy_L2.zero_()

    @contextmanager
    def observe(self, padding_T: Tensor) -> Iterator[None]:
        """Count the tokens of one micro-batch, except in a pass without gradient.

        Recomputation happens in the backward pass, outside of the block, so no token counts twice.

        Args:
            padding_T: bool, this context-parallel rank's tokens.
        """
        self.valid_T = ~padding_T if torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self.valid_T = None

    def summary(self) -> dict[str, Any]:
        """Balance and certainty of the routers, over all ranks; every rank calls it.

        Returns:
            The fields of UpdateResult about routers; empty if the model has none.
        """
        # A pipeline stage without a router has narrower counts, so the ranks first agree on the width.
        width = torch.tensor([self.counts_LE.shape[1]], device=self.counts_LE.device)
        dist.all_reduce(width, op=dist.ReduceOp.MAX)
        if not width.item():
            return {}
        totals = self.counts_LE.new_zeros((len(self.counts_LE), int(width) + 2))
        totals[:, : self.counts_LE.shape[1]] = self.counts_LE
        totals[:, -2:] = self.entropy_L2
        dist.all_reduce(totals)
        layers = torch.nonzero(totals[:, -1])[:, 0]
        counts_LE, entropy_L, tokens_L = totals[layers, :-2], totals[layers, -2], totals[layers, -1]
        load_L = counts_LE.amax(1) / counts_LE.mean(1)
        worst, index = load_L.max(0)
        return {
            "expert_load_max_over_mean": float(load_L.mean()),
            "expert_load_worst": float(worst),
            "expert_load_worst_layer": float(layers[index]),
            "dead_experts": float((counts_LE == 0).sum()),
            "router_entropy": float(entropy_L.sum() / tokens_L.sum()),
            "expert_load": dict(zip(layers.tolist(), counts_LE.round().long().cpu().numpy(), strict=True)),
        }

    @torch.no_grad()
    def _record(self, router: TopKRouter, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if self.valid_T is None or (self.tensor_rank and not self.sequence_parallel):
            # Without sequence parallelism the first tensor-parallel rank counts the tokens that all of them have.
            return
        routing_map_TE = output[1]
        valid_T = self.valid_T
        if self.sequence_parallel:
            piece = len(routing_map_TE)
            valid_T = valid_T[self.tensor_rank * piece : (self.tensor_rank + 1) * piece]
        log_p_TE = _logits(router, args, routing_map_TE).log_softmax(-1)
        entropy_T = -(log_p_TE.exp() * log_p_TE).sum(-1)
        layer = router.layer_number - 1
        self.counts_LE[layer] += (routing_map_TE & valid_T[:, None]).sum(0)
        self.entropy_L2[layer, 0] += torch.where(valid_T, entropy_T, 0.0).double().sum()
        self.entropy_L2[layer, 1] += valid_T.sum()


class RoutingRecord:
    """Records every router of this rank's chunks between `start` and `take`."""

    def __init__(self, chunks: list[DistributedDataParallel], num_layers: int, topk: int, tensor: int) -> None:
        """
        Args:
            num_layers: of the whole model.
            topk: experts per token.
            tensor: ranks over which sequence parallelism shards the tokens; 1 without it.
        """
        self.num_layers, self.topk, self.tensor = num_layers, topk, tensor
        self.device = next(chunks[0].parameters()).device
        self.routers = _hooked(chunks, self._record)
        self.passes: dict[int, list[tuple[Tensor, Tensor]]] | None = None
        """Records of each layer, in the order of the micro-batches: experts [T, K] and margins [T], of this rank's
        piece of T; None while nothing is recorded"""

    def start(self) -> None:
        """Clear the record and start recording."""
        self.passes = {router.layer_number - 1: [] for router in self.routers}

    def take(self, num_tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Stop recording and return the record of all layers, on every pipeline stage; every rank calls it.

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
        """Concatenate the pieces of the tensor-parallel ranks and combine the layers of the pipeline stages."""
        if self.tensor > 1:
            parts = [torch.empty_like(values) for _ in range(self.tensor)]
            dist.all_gather(parts, values, group=mpu.get_tensor_model_parallel_group())
            values = torch.cat(parts)
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group())
        return values

    @torch.no_grad()
    def _record(self, router: TopKRouter, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if self.passes is None:
            return
        chosen_TE = output[1]
        scores_TE = _logits(router, args, chosen_TE)
        if router.score_function == "sigmoid":
            scores_TE = scores_TE.sigmoid()
            if router.expert_bias is not None:
                scores_TE = scores_TE + router.expert_bias
        lowest_T = scores_TE.masked_fill(~chosen_TE, torch.inf).amin(-1)
        highest_T = scores_TE.masked_fill(chosen_TE, -torch.inf).amax(-1)
        taken_TK, experts_TK = chosen_TE.int().topk(self.topk, dim=-1)
        experts_TK = torch.where(taken_TK > 0, experts_TK, -1).int()
        self.passes[router.layer_number - 1].append((experts_TK, lowest_T - highest_T))


def model_routers(chunks: list[DistributedDataParallel]) -> list[TopKRouter]:
    """The routers of the model's own layers, without those of layers for multi-token prediction, which repeat the
    numbers of the first layers."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    return [module for module in modules if isinstance(module, TopKRouter) and not module.is_mtp_layer]


def _hooked(chunks: list[DistributedDataParallel], hook: Callable[[TopKRouter, Any, Any], None]) -> list[TopKRouter]:
    """The routers of the model's own layers; each calls `hook` after its forward pass."""
    routers = model_routers(chunks)
    for router in routers:
        router.register_forward_hook(hook)
    return routers


def _logits(router: TopKRouter, args: tuple[Any, ...], routing_map_TE: Tensor) -> Tensor:
    return router.gating(args[0]).reshape(routing_map_TE.shape).float()
