"""Log-probs and entropy of next tokens from logits whose vocabulary is sharded over tensor-parallel ranks.

T tokens, V rows of this rank's vocabulary shard. Tokens are processed in chunks, so only one chunk's float32 softmax is
in memory at a time. The backward pass recomputes it from the logits.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and entropy of each distribution, both differentiable.

    With z = logits / temperature and p = softmax(z): log p(target), and H = logsumexp(z) - sum p z.

    Args:
        logits_TV: this rank's rows of the vocabulary, rank r of the group holding rows r V to (r + 1) V - 1.
        targets_T: int64, indices into the whole vocabulary, below `vocab_size`.
        vocab_size: real tokens; the softmax leaves out the padding rows beyond.
        chunk_tokens: tokens per chunk.
        group: the tensor-parallel group; None for one rank.

    Returns:
        float32 [T], float32 [T], equal on all ranks of the group.
    """
    return _VocabParallelLogProbs.apply(logits_TV, targets_T, temperature, vocab_size, chunk_tokens, group)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        vocab_size: int,
        chunk_tokens: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        rank = dist.get_rank(group) if group is not None else 0
        rows = logits_TV.shape[1]
        ctx.first_row, ctx.real_rows = rank * rows, min(max(vocab_size - rank * rows, 0), rows)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        tokens = logits_TV.shape[0]
        logprobs_T, entropy_T, log_z_T = torch.empty((3, tokens), dtype=torch.float32, device=logits_TV.device)
        for start in range(0, tokens, chunk_tokens):
            span = slice(start, start + chunk_tokens)
            z_CV = logits_TV[span, : ctx.real_rows].float() / temperature
            logprobs_T[span], entropy_T[span], log_z_T[span] = _forward_chunk(
                z_CV, targets_T[span] - ctx.first_row, group
            )
        ctx.save_for_backward(logits_TV, targets_T, log_z_T, entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropy_T = grads
        logits_TV, targets_T, log_z_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, ctx.real_rows :] = 0
        entropy_matters = bool(grad_entropy_T.any())
        for start in range(0, logits_TV.shape[0], ctx.chunk_tokens):
            span = slice(start, start + ctx.chunk_tokens)
            z_CV = logits_TV[span, : ctx.real_rows].float() / ctx.temperature
            log_p_CV = z_CV - log_z_T[span, None]
            p_CV = log_p_CV.exp()
            # d log p(target) / dz = [row is target] - p;  dH / dz = -p (log p + H)
            weight_C = grad_logprobs_T[span, None]
            if entropy_matters:
                grad_CV = p_CV * (-weight_C - grad_entropy_T[span, None] * (log_p_CV + entropy_T[span, None]))
            else:
                grad_CV = p_CV * -weight_C
            local_C, here_C = _local_targets(targets_T[span] - ctx.first_row, ctx.real_rows)
            if ctx.real_rows:
                grad_CV.scatter_add_(1, local_C[:, None], torch.where(here_C[:, None], weight_C, 0.0))
            grad_TV[span, : ctx.real_rows] = grad_CV / ctx.temperature
        return grad_TV, None, None, None, None, None


def _forward_chunk(z_CV: Tensor, targets_C: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(log p(target), entropy, log Z), each float32 [C]; targets are relative to this rank's first row."""
    tokens, rows = z_CV.shape
    top_C = z_CV.amax(1) if rows else z_CV.new_full((tokens,), -torch.inf)
    if group is not None:
        dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    shifted_CV = z_CV - top_C[:, None]
    exp_CV = shifted_CV.exp()
    local_C, here_C = _local_targets(targets_C, rows)
    target_C = shifted_CV.gather(1, local_C[:, None]).squeeze(1) if rows else torch.zeros_like(top_C)
    sums_3C = torch.stack([exp_CV.sum(1), (exp_CV * shifted_CV).sum(1), torch.where(here_C, target_C, 0.0)])
    if group is not None:
        dist.all_reduce(sums_3C, group=group)
    total_C, weighted_C, target_C = sums_3C
    log_total_C = total_C.log()
    return target_C - log_total_C, log_total_C - weighted_C / total_C, top_C + log_total_C


def _local_targets(targets_C: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target clamped into this shard, and whether the target is in the shard."""
    here_C = (targets_C >= 0) & (targets_C < rows)
    return targets_C.clamp(0, max(rows - 1, 0)), here_C
