"""How evenly routers spread tokens over experts, observed during training by forward hooks.

Counts leave padding out and are added over all ranks, so they do not depend on the layout.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RouterSummary:
    """NaN both where the model has no router."""

    expert_load_max_over_mean: float
    """Tokens of the busiest expert over the mean of its layer's experts; the mean over layers. 1 is perfect balance."""
    router_entropy: float
    """Of the router's distribution over all experts, natural log; the mean over tokens and layers."""


class RouterStats:
    """Collects from every router of this rank's chunks while `observe` is open."""

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
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        num_experts = routers[0].config.num_moe_experts if routers else 0
        device = next(chunks[0].parameters()).device
        self.counts_LE = torch.zeros((num_layers, num_experts), dtype=torch.float64, device=device)
        self.entropy_L2 = torch.zeros((num_layers, 2), dtype=torch.float64, device=device)
        for router in routers:
            router.register_forward_hook(self._record)

    def reset(self) -> None:
        self.counts_LE.zero_()
        self.entropy_L2.zero_()

    @contextmanager
    def observe(self, padding_T: Tensor) -> Iterator[None]:
        """Count the tokens of one micro-batch, unless this is a pass without gradient.

        A recomputation in the backward pass falls outside and is not counted twice.

        Args:
            padding_T: bool, this context-parallel rank's tokens.
        """
        self.valid_T = ~padding_T if torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self.valid_T = None

    def summary(self) -> RouterSummary:
        """Over all ranks, on all ranks; every rank calls it."""
        # A pipeline stage without a router has narrower counts than the others, so widths are agreed first.
        width = torch.tensor([self.counts_LE.shape[1]], device=self.counts_LE.device)
        dist.all_reduce(width, op=dist.ReduceOp.MAX)
        if not width.item():
            return RouterSummary(expert_load_max_over_mean=math.nan, router_entropy=math.nan)
        totals = self.counts_LE.new_zeros((len(self.counts_LE), int(width) + 2))
        totals[:, : self.counts_LE.shape[1]] = self.counts_LE
        totals[:, -2:] = self.entropy_L2
        dist.all_reduce(totals)
        routed = totals[totals[:, -1] > 0]
        counts_LE, entropy_L, tokens_L = routed[:, :-2], routed[:, -2], routed[:, -1]
        return RouterSummary(
            expert_load_max_over_mean=float((counts_LE.amax(1) / counts_LE.mean(1)).mean()),
            router_entropy=float(entropy_L.sum() / tokens_L.sum()),
        )

    @torch.no_grad()
    def _record(self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if self.valid_T is None:
            return
        assert isinstance(router, TopKRouter)
        routing_map_TE = output[1]
        valid_T = self.valid_T
        if self.sequence_parallel:
            piece = len(routing_map_TE)
            valid_T = valid_T[self.tensor_rank * piece : (self.tensor_rank + 1) * piece]
        logits_TE = router.gating(args[0]).reshape(routing_map_TE.shape).float()
        log_p_TE = logits_TE.log_softmax(-1)
        entropy_T = -(log_p_TE.exp() * log_p_TE).sum(-1)
        layer = router.layer_number - 1
        self.counts_LE[layer] += (routing_map_TE & valid_T[:, None]).sum(0)
        self.entropy_L2[layer, 0] += torch.where(valid_T, entropy_T, 0.0).double().sum()
        self.entropy_L2[layer, 1] += valid_T.sum()
