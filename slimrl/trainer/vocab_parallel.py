"""Log-probs and entropy of next tokens from logits whose vocabulary is sharded over tensor-parallel ranks.

T tokens, V rows of this rank's vocabulary shard. Tokens are processed in chunks of C, so only one chunk's softmax is in
memory in float32, once in either pass and once more for the entropy. The backward pass recomputes it from the logits.
"""

from collections.abc import Iterator
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
        scratch_2CV = _scratch(logits_TV, chunk_tokens, ctx.real_rows, buffers=2)
        for span in _spans(tokens, chunk_tokens):
            z_CV, exp_CV = scratch_2CV[:, : span.stop - span.start]
            _fill(z_CV, logits_TV[span, : ctx.real_rows], temperature)
            logprobs_T[span], entropy_T[span], log_z_T[span] = _forward_chunk(
                z_CV, exp_CV, targets_T[span] - ctx.first_row, group
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
        scratch_BCV = _scratch(logits_TV, ctx.chunk_tokens, ctx.real_rows, buffers=1 + entropy_matters)
        for span in _spans(logits_TV.shape[0], ctx.chunk_tokens):
            z_CV = _fill(scratch_BCV[0, : span.stop - span.start], logits_TV[span, : ctx.real_rows], ctx.temperature)
            log_p_CV = z_CV.sub_(log_z_T[span, None])
            # d log p(target) / dz = [row is target] - p;  dH / dz = -p (log p + H)
            weight_C1 = grad_logprobs_T[span, None] / ctx.temperature
            if entropy_matters:
                p_CV = torch.exp(log_p_CV, out=scratch_BCV[1, : span.stop - span.start])
                log_p_CV.add_(entropy_T[span, None]).mul_(grad_entropy_T[span, None] / ctx.temperature)
                grad_CV = p_CV.mul_(log_p_CV.add_(weight_C1).neg_())
            else:
                grad_CV = log_p_CV.exp_().mul_(-weight_C1)
            local_C, here_C = _local_targets(targets_T[span] - ctx.first_row, ctx.real_rows)
            if ctx.real_rows:
                grad_CV.scatter_add_(1, local_C[:, None], torch.where(here_C[:, None], weight_C1, 0.0))
            grad_TV[span, : ctx.real_rows] = grad_CV
        return grad_TV, None, None, None, None, None


def _spans(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Slices of the tokens, one for each chunk."""
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, tokens))


def _scratch(logits_TV: Tensor, chunk_tokens: int, rows: int, *, buffers: int) -> Tensor:
    """Memory for the largest chunk, reused for each: fresh pages cost a CPU as much as the arithmetic."""
    shape = (buffers, min(chunk_tokens, logits_TV.shape[0]), rows)
    return torch.empty(shape, dtype=torch.float32, device=logits_TV.device)


def _fill(z_CV: Tensor, logits_CV: Tensor, temperature: float) -> Tensor:
    """z = logits / temperature, in float32."""
    z_CV.copy_(logits_CV)
    return z_CV if temperature == 1.0 else z_CV.div_(temperature)


def _forward_chunk(z_CV: Tensor, exp_CV: Tensor, targets_C: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(log p(target), entropy, log Z), each float32 [C]; targets are relative to this rank's first row.

    Args:
        z_CV: overwritten.
        exp_CV: memory to use.
    """
    tokens, rows = z_CV.shape
    top_C = z_CV.amax(1) if rows else z_CV.new_full((tokens,), -torch.inf)
    if group is not None:
        dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    shifted_CV = z_CV.sub_(top_C[:, None])
    local_C, here_C = _local_targets(targets_C, rows)
    target_C = shifted_CV.gather(1, local_C[:, None]).squeeze(1) if rows else torch.zeros_like(top_C)
    total_C = torch.exp(shifted_CV, out=exp_CV).sum(1)
    weighted_C = exp_CV.mul_(shifted_CV).sum(1)
    sums_3C = torch.stack([total_C, weighted_C, torch.where(here_C, target_C, 0.0)])
    if group is not None:
        dist.all_reduce(sums_3C, group=group)
    total_C, weighted_C, target_C = sums_3C
    log_total_C = total_C.log()
    return target_C - log_total_C, log_total_C - weighted_C / total_C, top_C + log_total_C


def _local_targets(targets_C: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target clamped into this shard, and whether the target is in the shard."""
    here_C = (targets_C >= 0) & (targets_C < rows)
    return targets_C.clamp(0, max(rows - 1, 0)), here_C
