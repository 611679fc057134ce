"""Log-probs and entropy from logits against float64 formulas and numerical gradients."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from thread_meeting import Meeting

from slimrl.trainer.vocab_parallel import vocab_parallel_logprobs

TOKENS, ROWS, REAL = 23, 40, 37
"""37 real tokens in an embedding of 40 rows."""


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(TOKENS, ROWS, generator=generator) * 5
    targets_T = torch.randint(0, REAL, (TOKENS,), generator=generator)
    return logits_TV, targets_T


def reference(logits_TV, targets_T, temperature):
    log_p_TV = (logits_TV[:, :REAL].double() / temperature).log_softmax(-1)
    return log_p_TV.gather(1, targets_T[:, None]).squeeze(1), -(log_p_TV.exp() * log_p_TV).sum(-1)


def compute(logits_TV, targets_T, temperature, chunk_tokens=8):
    return vocab_parallel_logprobs(
        logits_TV, targets_T, temperature=temperature, vocab_size=REAL, chunk_tokens=chunk_tokens
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_and_entropy_equal_float64_log_softmax_of_the_real_vocabulary(temperature):
    logits_TV, targets_T = make()
    logprobs_T, entropy_T = compute(logits_TV, targets_T, temperature)
    expected_logprobs_T, expected_entropy_T = reference(logits_TV, targets_T, temperature)
    torch.testing.assert_close(logprobs_T.double(), expected_logprobs_T, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy_T.double(), expected_entropy_T, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_gradients_equal_those_of_the_float64_formula(entropy_weight):
    logits_TV, targets_T = make(1)
    weights_T = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    ours_TV = logits_TV.clone().requires_grad_()
    theirs_TV = logits_TV.double().requires_grad_()
    for function, leaf_TV in ((compute, ours_TV), (reference, theirs_TV)):
        logprobs_T, entropy_T = function(leaf_TV, targets_T, 0.8)
        (logprobs_T * weights_T + entropy_weight * entropy_T).sum().backward()
    torch.testing.assert_close(ours_TV.grad.double(), theirs_TV.grad, atol=1e-6, rtol=1e-5)


def test_padding_rows_get_no_probability_and_no_gradient():
    logits_TV, targets_T = make(3)
    logits_TV[:, REAL:] = 1e4
    logits_TV.requires_grad_()
    logprobs_T, _ = compute(logits_TV, targets_T, 1.0)
    logprobs_T.sum().backward()
    assert logprobs_T.isfinite().all()
    assert (logits_TV.grad[:, REAL:] == 0).all()


def test_the_chunk_size_does_not_change_a_bit():
    logits_TV, targets_T = make(4)
    results = []
    for chunk_tokens in (1, 7, TOKENS, 1000):
        leaf_TV = logits_TV.clone().requires_grad_()
        logprobs_T, entropy_T = compute(leaf_TV, targets_T, 0.9, chunk_tokens)
        (logprobs_T + entropy_T).sum().backward()
        results.append((logprobs_T, entropy_T, leaf_TV.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bfloat16_logits_are_worked_on_in_float32():
    logits_TV, targets_T = make(5)
    logits_TV = logits_TV.bfloat16()
    logprobs_T, _ = compute(logits_TV, targets_T, 1.0)
    torch.testing.assert_close(logprobs_T.double(), reference(logits_TV, targets_T, 1.0)[0], atol=2e-6, rtol=1e-6)


def test_large_logits_do_not_overflow():
    logits_TV, targets_T = make(6)
    logprobs_T, entropy_T = compute(logits_TV * 1e4, targets_T, 1.0)
    assert logprobs_T.isfinite().all()
    assert (entropy_T >= 0).all()


@pytest.mark.parametrize(("count", "rows"), [(2, 20), (4, 10), (4, 20)])
def test_shards_of_the_vocabulary_give_what_the_whole_gives_on_every_rank(monkeypatch, count, rows):
    """One of the last case's four shards of 20 rows has nothing but padding."""
    logits_TV, targets_T = make(7)
    logits_TV = torch.cat([logits_TV, torch.full((TOKENS, count * rows - ROWS), 50.0)], 1)
    meeting = Meeting(count)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        whole = torch.stack(meeting.exchange(group, tensor.clone()))
        tensor.copy_(whole.amax(0) if op == dist.ReduceOp.MAX else whole.sum(0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_rank", lambda group: group)

    def on_rank(rank):
        shard_TV = logits_TV[:, rank * rows : (rank + 1) * rows].clone().requires_grad_()
        logprobs_T, entropy_T = vocab_parallel_logprobs(
            shard_TV, targets_T, temperature=0.8, vocab_size=REAL, chunk_tokens=8, group=rank
        )
        (logprobs_T + 0.3 * entropy_T).sum().backward()
        return logprobs_T.detach(), entropy_T.detach(), shard_TV.grad

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(on_rank, range(count)))
    theirs_TV = logits_TV.double().requires_grad_()
    expected = reference(theirs_TV, targets_T, 0.8)
    (expected[0] + 0.3 * expected[1]).sum().backward()
    for logprobs_T, entropy_T, _ in found:
        torch.testing.assert_close(logprobs_T.double(), expected[0].detach(), atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(entropy_T.double(), expected[1].detach(), atol=2e-6, rtol=1e-6)
    gradient_TV = torch.cat([gradient for _, _, gradient in found], 1)
    torch.testing.assert_close(gradient_TV.double(), theirs_TV.grad, atol=1e-6, rtol=1e-5)
