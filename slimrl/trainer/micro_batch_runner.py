"""Passes over micro-batches through Megatron's schedule: log-probs without gradient, and one optimizer update.

T tokens of a micro-batch on this rank, V rows of its vocabulary shard.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from slimrl.algorithms.objective import LossFunction
from slimrl.base.spans import SPANS
from slimrl.data.packing import MicroBatch
from slimrl.data.training import Layout, LogProbs, UpdateResult
from slimrl.trainer.build import unwrap
from slimrl.trainer.local_batch import LocalBatch, gather_context, shard_context
from slimrl.trainer.mtp import MtpLoss
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.output_rows import only_rows, spread
from slimrl.trainer.routers import RouterStats, RoutingRecord
from slimrl.trainer.routing_replay import RoutingReplay
from slimrl.trainer.vocab_parallel import vocab_parallel_logprobs
from slimrl.trainer.weights import names_not_finite


class MicroBatchRunner:
    """Runs micro-batches through this rank's model chunks."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: Optimizer,
        layout: Layout,
        *,
        vocab_size: int,
        chunk_tokens: int,
        mtp: MtpLoss | None = None,
        replays_routing: bool = False,
    ) -> None:
        """
        Args:
            vocab_size: real tokens, without the padding of the embedding.
            chunk_tokens: tokens whose logits become log-probs at a time.
            mtp: trains the chunks' layers for multi-token prediction.
            replays_routing: routers take the `replay_experts` of micro-batches that have them.
        """
        self.mtp = mtp
        self.chunks, self.optimizer, self.layout = chunks, optimizer, layout
        self.vocab_size, self.chunk_tokens = vocab_size, chunk_tokens
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        """Function that is called with the number of micro-batches of a pass that are done, and their total."""
        self.done, self.total = 0, 0
        self.accumulated: tuple[dict[str, float], float, int] | None = None
        """Reported sums, denominator and number of tokens of the gradients that wait for `step`"""
        self._found: list[tuple[LocalBatch, Tensor, Tensor]] = []
        """Log-probs and entropies that the loss saw, by micro-batch"""
        self._by_token: list[dict[str, Tensor]] | None = None
        """What the loss reported of each token, by micro-batch; None if nothing is recorded"""
        self.recorded: dict[int, dict[str, np.ndarray]] = {}
        """float32 [T] by name, what the loss of `accumulate` reported of each token of a whole micro-batch, by the
        micro-batch's place; on the last pipeline stage"""
        config = unwrap(chunks[0]).config
        self.router_stats = RouterStats(chunks, config.num_layers, layout.tensor_rank, config.sequence_parallel)
        self.routing_shape = (config.num_layers, config.moe_router_topk, config.num_moe_experts or 0)
        """Number of layers, of experts per token, and of experts of a layer"""
        self.routing_record: RoutingRecord | None = None
        self.routing_replay: RoutingReplay | None = None
        if config.num_moe_experts is not None:
            pieces = layout.tensor if config.sequence_parallel else 1
            self.routing_record = RoutingRecord(chunks, config.num_layers, config.moe_router_topk, pieces)
            if replays_routing:
                self.routing_replay = RoutingReplay(chunks, pieces, layout.tensor_rank)
        self.output_options = output_options(chunks[-1])
        # The layers for multi-token prediction read all tokens.
        self.output_layer = None if mtp is not None else _layer_of_rows(chunks[-1])
        self.overlaps_param_gather = optimizer.megatron.config.overlap_param_gather

    @property
    def data_group(self) -> Any:
        """The data-parallel process group of this rank."""
        return mpu.get_data_parallel_group()

    def compute_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        *,
        routing: bool = False,
        record_replay: bool = False,
    ) -> list[LogProbs] | None:
        """Log-probs of the targets and entropies, without gradient and without dropout; every rank calls it. Those of
        targets that do not count mean nothing.

        Args:
            routing: also report the experts of each token, if the model has any.
            record_replay: set the micro-batches' `replay_experts` to the experts of this pass, on every rank.

        Returns:
            One for each micro-batch on the last pipeline stage, None on other stages. Only the output rank gets the
            experts.
        """
        for chunk in self.chunks:
            chunk.eval()
        record = self.routing_record if routing or record_replay else None
        if record is not None:
            record.start()

        def collect(logprobs_T: Tensor, entropy_T: Tensor, batch: LocalBatch) -> tuple[LocalBatch, Tensor, Tensor]:
            return batch, logprobs_T, entropy_T

        with torch.no_grad():
            outputs = self._run(micro_batches, temperature, collect, forward_only=True)
        routes: list[tuple[Tensor, ...]] = [()] * len(micro_batches)
        if record is not None:
            routes = list(record.take([len(batch.tokens) // self.layout.context for batch in micro_batches]))
        if record_replay:
            assert record is not None, "a model without experts has no routing to replay"
            group = mpu.get_context_parallel_group()
            for whole, (experts_TLK, _) in zip(micro_batches, routes, strict=True):
                gathered_TLK = gather_context(experts_TLK, shard_context(whole, group))
                whole.replay_experts = gathered_TLK.short().cpu().numpy()
        if not routing:
            routes = [()] * len(micro_batches)
        if not self.layout.is_last_stage:
            return None
        return self._whole(outputs, routes)

    def compute_losses(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """(log-probs, losses) of the targets, float32 [T] each, without gradient and without dropout; every rank calls
        it. Losses are not divided by anything; those of targets that do not count are 0.

        Returns:
            As `compute_logprobs`.
        """
        for chunk in self.chunks:
            chunk.eval()

        def collect(logprobs_T: Tensor, entropy_T: Tensor, batch: LocalBatch) -> tuple[LocalBatch, Tensor, Tensor]:
            return batch, logprobs_T, loss_function(logprobs_T, entropy_T, batch).losses_T

        with torch.no_grad():
            outputs = self._run(micro_batches, temperature, collect, forward_only=True)
        if not self.layout.is_last_stage:
            return None
        whole = [[gather_context(values_T, batch) for values_T in values] for batch, *values in outputs]
        return [(logprobs_T.float().cpu().numpy(), losses_T.float().cpu().numpy()) for logprobs_T, losses_T in whole]

    def weights_not_finite(self) -> list[str]:
        """Names in the whole model of this rank's weights that are not finite."""
        return names_not_finite(self.chunks)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        *,
        denominator: float,
        temperature: float,
        logprobs: bool = False,
        recorded: Collection[int] = (),
    ) -> list[LogProbs] | None:
        """Gradients of the loss over all micro-batches of all ranks, for `step`; every rank calls it.

        Args:
            denominator: the summed loss is divided by it.
            temperature: divides the logits, as in the rollout.
            logprobs: also return the log-probs that the loss saw, as `compute_logprobs` does.
            recorded: places of sequences; what the loss reports of the tokens of their micro-batches is kept in
                `recorded`.

        Raises:
            ValueError: the update batch has no tokens.
        """
        num_tokens = self._count_tokens(micro_batches)
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        self.router_stats.reset()
        # Megatron divides all gradients by the number of tokens; this factor leaves the denominator alone.
        loss_scale = num_tokens / denominator
        collect = functools.partial(self._compute_loss, loss_function, loss_scale)
        self._found, self._by_token = [], [] if recorded else None
        if self.mtp is not None:
            self.mtp.start_update(micro_batches, num_tokens)
        reported = self._run(micro_batches, temperature, collect, forward_only=False)
        self.accumulated = self._reduce(reported), denominator, num_tokens
        found, self._found = self._found, []
        self.recorded = self._whole_by_token(micro_batches, [batch for batch, *_ in found], recorded)
        return self._whole(found) if logprobs and self.layout.is_last_stage else None

    def train_update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        *,
        denominator: float,
        temperature: float,
    ) -> UpdateResult:
        """`accumulate`, then `step`."""
        self.accumulate(micro_batches, loss_function, denominator=denominator, temperature=temperature)
        return self.step()

    def has_finite_gradient(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        *,
        denominator: float,
        temperature: float,
    ) -> bool:
        """Whether an update with these micro-batches would be made; changes neither weights nor the optimizer's state.
        Every rank calls it. The random numbers of dropout, if there is any, are used up as in an update.

        Args:
            denominator, temperature: as in `accumulate`.
        """
        # A pass may move the biases of routers.
        kept = [(buffer, buffer.clone()) for chunk in self.chunks for buffer in unwrap(chunk).buffers()]
        self.accumulate(micro_batches, loss_function, denominator=denominator, temperature=temperature)
        self.accumulated = None
        finite = math.isfinite(self.optimizer.gradient_norm())
        for buffer, value in kept:
            buffer.copy_(value)
        return finite

    def step(self, *, skip: bool = False) -> UpdateResult:
        """Do one optimizer step with the gradients of `accumulate`, unless these or the loss are not finite; every rank
        calls it.

        Args:
            skip: leave the weights as they are anyway.
        """
        assert self.accumulated is not None, "accumulate comes first"
        (sums, denominator, num_tokens), self.accumulated = self.accumulated, None
        with SPANS("optimizer"):
            finite = math.isfinite(sums["loss"]) and math.isfinite(sums.get("mtp_loss", 0.0))
            grad_norm = self.optimizer.step(finite=finite and not skip)
        if self.overlaps_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        of_routers = self.router_stats.summary()
        if self.layout.rank:
            # It is large, and the driver reads the first rank's.
            of_routers.pop("expert_load", None)
        replayed, changed = (None, None) if self.routing_replay is None else self.routing_replay.summary()
        return UpdateResult(
            sums=sums,
            denominator=denominator,
            grad_norm=grad_norm,
            skipped=not math.isfinite(grad_norm),
            lr=self.optimizer.lr,
            num_tokens=num_tokens,
            replayed_fraction=replayed,
            replay_changed_fraction=changed,
            **of_routers,
        )

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        temperature: float,
        collect: Callable[[Tensor, Tensor, LocalBatch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """The results of `collect` for each micro-batch, in order; empty on all but the last pipeline stage."""
        multiple = self.layout.micro_batch_multiple
        assert micro_batches, "a rank needs at least one micro-batch"
        assert len(micro_batches) % multiple == 0, (len(micro_batches), multiple)
        self._show_progress(0, len(micro_batches))
        group = mpu.get_context_parallel_group()
        # Every model chunk gets the same micro-batches, which are sharded once.
        mtp_layers = self.mtp.num_layers if self.mtp is not None and not forward_only else 0
        shards = (shard_context(batch, group, mtp_layers=mtp_layers) for batch in micro_batches)
        copies = itertools.tee(shards, len(self.chunks))
        several = len(self.chunks) > 1
        if self.routing_replay is not None:
            self.routing_replay.start()
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=functools.partial(self._forward, temperature, collect),
            data_iterator=list(copies) if several else copies[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(len(batch.tokens) for batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        if self.routing_replay is not None:
            self.routing_replay.finish()
        return results

    def _forward(
        self, temperature: float, collect: Callable[..., Any], batches: Iterator[LocalBatch], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Megatron's forward step: the model's output, and the function that the last stage applies to it."""
        batch = next(batches)
        mtp_options = {} if batch.mtp is None else {"output_processor_context": batch.mtp.tokens_DT}
        output_layer = self.output_layer if model is self.chunks[-1] else None
        with ExitStack() as stack:
            stack.enter_context(self.router_stats.observe(batch.padding_T))
            if self.routing_replay is not None:
                stack.enter_context(self.routing_replay.replay(batch.replay_experts_TLK, batch.padding_T))
            if output_layer is not None:
                stack.enter_context(only_rows(output_layer, batch.counted_R))
            output = model(
                batch.tokens_T[None],
                batch.position_ids_T[None],
                None,
                packed_seq_params=batch.packed_seq_params,
                **self.output_options,
                **mtp_options,
            )
        if model is self.chunks[-1]:
            self._show_progress(self.done + 1, self.total)

        logprobs_of = functools.partial(self._of_tokens, temperature=temperature)

        def finish(output: Any, non_loss_data: bool = False) -> Any:
            # squeeze, since the backward of [0] allocates a second gradient of all logits.
            if output_layer is not None:
                of_rows = logprobs_of(output.squeeze(0), batch.targets_T[batch.counted_R])
                logprobs_T, entropy_T = (spread(values_R, batch.counted_R, len(batch.mask_T)) for values_R in of_rows)
                return collect(logprobs_T, entropy_T, batch)
            if batch.mtp is None:
                return collect(*logprobs_of(output.squeeze(0), batch.targets_T), batch)
            assert self.mtp is not None
            logits_1TV, of_layers = output
            outcome = collect(*logprobs_of(logits_1TV.squeeze(0), batch.targets_T), batch)
            pairs = zip(of_layers, batch.mtp.targets_DT, strict=True)
            return self.mtp.add(
                outcome, [logprobs_of(ahead_1TV.squeeze(0), ahead_T)[0] for ahead_1TV, ahead_T in pairs], batch
            )

        return output, finish

    def _of_tokens(self, output_TV: Tensor, targets_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, float32 [T] each, from the model's output."""
        return vocab_parallel_logprobs(
            output_TV,
            targets_T,
            temperature=temperature,
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            group=mpu.get_tensor_model_parallel_group() if self.layout.tensor > 1 else None,
        )

    def _whole(
        self, found: Sequence[tuple[LocalBatch, Tensor, Tensor]], routes: Sequence[tuple[Tensor, ...]] | None = None
    ) -> list[LogProbs]:
        """Log-probs, entropies and routing of whole micro-batches, from this context-parallel rank's tokens."""
        joined = [
            [gather_context(values_T, batch) for values_T in (*values, *route)]
            for (batch, *values), route in zip(found, routes or [()] * len(found), strict=True)
        ]
        return [_to_numpy(*(values if self.layout.is_output_rank else values[:2])) for values in joined]

    def _whole_by_token(
        self, micro_batches: Sequence[MicroBatch], local: Sequence[LocalBatch], recorded: Collection[int]
    ) -> dict[int, dict[str, np.ndarray]]:
        """See `recorded`."""
        by_token, self._by_token = self._by_token, None
        return {
            place: {
                name: gather_context(values_T.float(), local[place]).cpu().numpy() for name, values_T in own.items()
            }
            for place, own in enumerate(by_token or ())
            if not set(recorded).isdisjoint(micro_batches[place].sequences.tolist())
        }

    def _show_progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self.on_progress(done, total)

    def _compute_loss(
        self, loss_function: LossFunction, loss_scale: float, logprobs_T: Tensor, entropy_T: Tensor, batch: LocalBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch for Megatron's schedule, on the last pipeline stage, on every context-parallel rank
        for its own tokens."""
        sums = loss_function(logprobs_T, entropy_T, batch)
        num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=sums.loss.device)
        self._found.append((batch, logprobs_T.detach(), entropy_T.detach()))
        if self._by_token is not None:
            self._by_token.append(sums.by_token)
        return sums.loss * loss_scale, num_tokens, {name: value.detach() for name, value in sums.reported.items()}

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> int:
        device = self.router_stats.counts_LE.device
        count = torch.tensor(sum(batch.num_tokens for batch in micro_batches), device=device)
        dist.all_reduce(count, group=mpu.get_data_parallel_group())
        if not count.item():
            raise ValueError("the update batch has no tokens")
        return int(count.item())

    def _reduce(self, reported: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum over micro-batches and over data- and context-parallel ranks, then send to the other pipeline stages."""
        sums: list[dict[str, float]] = [{}]
        if self.layout.is_last_stage:
            names = sorted(reported[0])
            totals = torch.stack([torch.stack([part[name].double() for name in names]) for part in reported]).sum(0)
            dist.all_reduce(totals, group=mpu.get_data_parallel_group(with_context_parallel=True))
            sums = [dict(zip(names, totals.tolist(), strict=True))]
        if self.layout.pipeline > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(sums, src=last, group=mpu.get_pipeline_model_parallel_group())
        return sums[0]


class ValueRunner(MicroBatchRunner):
    """Runs a critic: in place of log-probs it has values, and in place of entropies zeros."""

    def _of_tokens(self, output_TV: Tensor, targets_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        values_T = output_TV[:, 0]
        return values_T, torch.zeros_like(values_T)


def output_options(chunk: DistributedDataParallel) -> dict[str, bool]:
    """Arguments with which a chunk leaves its logits in the model's dtype.

    Megatron's wrapper of a bfloat16 model would make a float32 copy of all of them, and of their gradients. Log-probs
    convert as many tokens at a time as they work on.
    """
    return {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}


def _layer_of_rows(chunk: DistributedDataParallel) -> ColumnParallelLinear | None:
    """The output layer if it may multiply some tokens alone. None for a value head, which is small; for an output layer
    in FP8, which takes whole tiles; and if Megatron computes its gradient after the pipeline, from inputs of one size.
    """
    model = unwrap(chunk)
    layer = model.output_layer if model.post_process else None
    deferred = model.config.defer_embedding_wgrad_compute
    return layer if isinstance(layer, ColumnParallelLinear) and not deferred else None


def _to_numpy(
    logprobs_T: Tensor, entropy_T: Tensor, experts_TLK: Tensor | None = None, margin_TL: Tensor | None = None
) -> LogProbs:
    return LogProbs(
        logprobs=logprobs_T.cpu().numpy(),
        entropy=entropy_T.cpu().numpy(),
        routed_experts=None if experts_TLK is None else experts_TLK.short().cpu().numpy(),
        routing_margin=None if margin_TL is None else margin_TL.cpu().numpy(),
    )
