"""Replay of routing: the routers of this rank take experts that they are told, micro-batch by micro-batch.

1. A router asks its `RouterReplay` of megatron-core for the top-k of its scores. `LayerReplay` answers with the given
   experts and the router's own scores at them, so the router's gradient survives. A token without given experts gets
   the router's own top-k.
2. `RoutingReplay.replay` surrounds the forward pass of one micro-batch through one chunk and says which experts.
3. A layer whose activations are recomputed runs again in the backward pass, outside of that block. Its first run is
   then without gradient, so each router queues what such runs were given. All of Megatron's schedules run the backward
   passes of a chunk in the order of its forward passes.

Routers of layers for multi-token prediction choose for themselves.

T tokens of a micro-batch on this rank (under sequence parallelism its piece of them), L layers of the whole model,
E experts, K of them per token.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from slimrl.trainer.routers import model_routers


class RoutingReplay:
    """What the routers of this rank's chunks are to take, and how often they would have chosen otherwise."""

    def __init__(self, chunks: list[DistributedDataParallel], tensor: int, tensor_rank: int) -> None:
        """
        Args:
            tensor: ranks over which sequence parallelism shards the tokens; 1 without it.
            tensor_rank: of this rank.
        """
        self.tensor, self.piece = tensor, tensor_rank if tensor > 1 else 0
        self.in_pass, self.in_forward, self.trains = False, False, False
        self.given_TLK: Tensor | None = None
        self.valid_T: Tensor | None = None
        self.layers: list[LayerReplay] = []
        for router in model_routers(chunks):
            layer = LayerReplay(self, router.layer_number - 1)
            router.router_replay = layer
            self.layers.append(layer)
        device = next(chunks[0].parameters()).device
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)
        """Numbers of pairs of a token and a layer that were routed, that were replayed, and that would have chosen
        otherwise"""

    def start(self) -> None:
        """Begin a pass over micro-batches."""
        self.in_pass = True
        self.counts.zero_()
        for layer in self.layers:
            layer.again.clear()

    def finish(self) -> None:
        """End the pass. Every layer that was to run again in the backward pass has done so."""
        self.in_pass = False
        left = {layer.layer: len(layer.again) for layer in self.layers if layer.again}
        assert not left, f"micro-batches that were not recomputed, by layer: {left}"

    @contextmanager
    def replay(self, experts_TLK: Tensor | None, padding_T: Tensor) -> Iterator[None]:
        """Replay the experts in the forward pass of one micro-batch.

        Args:
            experts_TLK: int16, of all tokens of this context-parallel rank; -1 where the router chooses. None if it
                always does.
            padding_T: bool, these are not counted.
        """
        size = len(padding_T) // self.tensor
        piece = slice(self.piece * size, (self.piece + 1) * size)
        self.given_TLK = None if experts_TLK is None else experts_TLK[piece]
        self.valid_T = ~padding_T[piece]
        self.in_forward, self.trains = True, torch.is_grad_enabled()
        try:
            yield
        finally:
            self.in_forward, self.given_TLK, self.valid_T = False, None, None

    def summary(self) -> tuple[float | None, float | None]:
        """Fractions of the last pass that were replayed and changed, over all ranks; every rank calls it.

        Returns:
            The fraction of pairs of a token and a layer that were replayed, padding left out; and the fraction of
            these for which the router would have chosen other experts. None where nothing was routed or replayed.
        """
        totals = self.counts.clone()
        dist.all_reduce(totals)
        routed, replayed, otherwise = totals.tolist()
        return replayed / routed if routed else None, otherwise / replayed if replayed else None


class LayerReplay(RouterReplay):
    """The replay of one router. Not in megatron-core's global list of instances, which would outlive the model."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        """
        Args:
            layer: of the whole model, from 0.
        """
        self.replay, self.layer = replay, layer
        self.layer_number: int | None = layer + 1
        self.again: deque[Tensor | None] = deque()
        """Experts that first runs without gradient were given, in their order; int16 [T, K]"""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, K], differentiable, and int64 [T, K] experts, by falling score as torch.topk sorts them."""
        assert default_compute_topk is not None
        own_scores_TK, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given_TK = self._given()
        if given_TK is None:
            self._count(own_TK, None)
            return own_scores_TK, own_TK
        with torch.no_grad():
            given_TK, replayed_T = given_TK.long(), _is_complete(given_TK)
            self._count(own_TK, replayed_T, given_TK)
            taken_TK = torch.where(replayed_T[:, None], given_TK, own_TK)
            order_TK = scores.gather(1, taken_TK).argsort(dim=1, descending=True)
            taken_TK = taken_TK.gather(1, order_TK)
        return scores.gather(1, taken_TK), taken_TK

    def _given(self) -> Tensor | None:
        if not self.replay.in_forward:
            assert self.again or not self.replay.in_pass, "a router runs again that was not to"
            return self.again.popleft() if self.again else None
        given_TLK = self.replay.given_TLK
        given_TK = None if given_TLK is None else given_TLK[:, self.layer]
        if self.replay.trains and not torch.is_grad_enabled():
            self.again.append(given_TK)
        return given_TK

    def _count(self, own_TK: Tensor, replayed_T: Tensor | None, given_TK: Tensor | None = None) -> None:
        valid_T = self.replay.valid_T
        if valid_T is None:
            return
        counts = self.replay.counts
        counts[0] += valid_T.sum()
        if replayed_T is not None and given_TK is not None:
            counts[1] += (replayed_T & valid_T).sum()
            otherwise_T = (own_TK.sort(1).values != given_TK.sort(1).values).any(1)
            counts[2] += (otherwise_T & replayed_T & valid_T).sum()


def _is_complete(given_TK: Tensor) -> Tensor:
    """bool [T]: K different experts. An engine's row that it never wrote has the same expert K times."""
    sorted_TK = given_TK.sort(1).values
    return (sorted_TK[:, 0] >= 0) & (sorted_TK[:, 1:] != sorted_TK[:, :-1]).all(1)
