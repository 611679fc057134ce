"""One rank's part of a micro-batch as torch tensors, sharded over the context-parallel group."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_patches.zigzag import zigzag_indices
from slimrl import device
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.data.mtp_targets import mtp_targets
from slimrl.data.packing import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class MtpTargets:
    """What D layers for multi-token prediction read and predict; see data/mtp_targets.py."""

    tokens_DT: Tensor
    targets_DT: Tensor
    mask_DT: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch(LossBatch):
    """T tokens of this rank in zigzag order, n trajectories of the whole micro-batch. Fields as in MicroBatch."""

    tokens_T: Tensor
    targets_T: Tensor
    padding_T: Tensor
    position_ids_T: Tensor
    index_T: Tensor
    """int64, position of each token in the whole micro-batch"""
    counted_R: Tensor
    """int64, positions among the T of the tokens whose targets count; one of any token if none does"""
    replay_experts_TLK: Tensor | None = None
    """int16, experts of each token that the routers are to take; None without routing replay"""
    total_tokens: int
    """Length of the whole micro-batch, padding included"""
    packed_seq_params: PackedSeqParams
    """Boundaries of the sequences in the whole micro-batch"""
    context_group: Any
    """The context-parallel process group; None if this rank holds all tokens"""
    mtp: MtpTargets | None = None
    """Targets of the layers for multi-token prediction; None if the pass is without these layers"""

    @property
    def num_tokens(self) -> int:
        """Number of this rank's tokens without padding."""
        return int((~self.padding_T).sum())


def shard_context(batch: MicroBatch, context_group: Any, *, mtp_layers: int = 0) -> LocalBatch:
    """This rank's slice of a micro-batch on the compute device.

    Args:
        context_group: the context-parallel process group, possibly of one rank.
        mtp_layers: of the pass, for multi-token prediction.

    Raises:
        ValueError: a sequence's length is not a multiple of twice the number of context-parallel ranks.
    """
    ranks = context_group.size()
    bounds = batch.cu_seqlens.tolist()
    index_T = zigzag_indices(bounds, ranks, context_group.rank())
    target = device.compute_device()

    def per_token(values: np.ndarray) -> Tensor:
        # A copy: arrays that came by Ray may not be written, and a tensor that shared their memory could be.
        found = torch.from_numpy(np.take(values, index_T.numpy(), axis=0)).to(target)
        # Embeddings and losses index by tokens and trajectories.
        return found.long() if found.dtype is torch.int32 else found

    def per_trajectory(values: np.ndarray) -> Tensor:
        return torch.tensor(values, device=target)

    counted = np.flatnonzero(np.take(batch.mask, index_T.numpy()))
    mtp: MtpTargets | None = None
    if mtp_layers:
        tokens_DT, targets_DT, mask_DT = (per_token(values_DT.T).T for values_DT in mtp_targets(batch, mtp_layers))
        mtp = MtpTargets(tokens_DT=tokens_DT, targets_DT=targets_DT, mask_DT=mask_DT)
    return LocalBatch(
        tokens_T=per_token(batch.tokens),
        targets_T=per_token(batch.targets),
        mask_T=per_token(batch.mask),
        padding_T=per_token(batch.padding),
        counted_R=torch.from_numpy(counted if len(counted) else np.zeros(1, np.int64)).to(target),
        position_ids_T=per_token(batch.position_ids),
        trajectory_ids_T=per_token(batch.trajectory_ids),
        rollout_logprobs_T=per_token(batch.rollout_logprobs),
        added_T={name: per_token(values) for name, values in batch.added.items()},
        num_sampled_N=per_trajectory(batch.num_sampled),
        advantages_N=per_trajectory(batch.advantages),
        remote_N={name: per_trajectory(values) for name, values in batch.remote.items()},
        index_T=index_T.to(target),
        replay_experts_TLK=None if batch.replay_experts is None else per_token(batch.replay_experts),
        total_tokens=bounds[-1],
        packed_seq_params=_packed_seq_params(batch.cu_seqlens, target),
        context_group=context_group if ranks > 1 else None,
        sum_over_ranks=partial(_sum, context_group) if ranks > 1 else None,
        mtp=mtp,
    )


def gather_context(values_T: Tensor, batch: LocalBatch) -> Tensor:
    """Values [T, ...] of all context-parallel ranks in the order of the whole micro-batch, on every rank."""
    if batch.context_group is None:
        return values_T
    parts = [torch.empty_like(values_T) for _ in range(batch.context_group.size())]
    dist.all_gather(parts, values_T.contiguous(), group=batch.context_group)
    indices = [torch.empty_like(batch.index_T) for _ in parts]
    dist.all_gather(indices, batch.index_T, group=batch.context_group)
    whole = values_T.new_empty((batch.total_tokens, *values_T.shape[1:]))
    whole[torch.cat(indices)] = torch.cat(parts)
    return whole


def _sum(group: Any, tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def _packed_seq_params(cu_seqlens: np.ndarray, target: torch.device) -> PackedSeqParams:
    bounds = torch.tensor(cu_seqlens, device=target)
    longest = int(np.diff(cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
