"""The trainer on one and two ranks: log-probs, skipped updates, and checkpoints across layouts."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import RowParallelLinear
from ranks import run_ranks
from trainer_cases import (
    Run,
    in_layouts,
    packed_batches,
    sequences,
    start,
    token_cross_entropy,
    trainer_config,
)

from slimrl.algorithms.objective import loss_function
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.data.packing import OLD_LOGPROBS, is_split, pack
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.trainer.checkpointing import checkpoint
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.vocab_parallel import vocab_parallel_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TP2_SP_EP2 = {"tensor": 2, "sequence": True, "expert": 2}
ARCHITECTURE = {"hidden_size": 64}


def sharded_logprobs(rank, num_ranks, port):
    """Both gradients of a sharded vocabulary of 5 rows a rank, of which the last rank's last 3 are padding."""
    start(trainer_config(num_ranks, tensor=2, sequence=True), rank, num_ranks, port)
    logits_TV = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    targets_T = torch.tensor([0, 4, 5, 6, 1, 6, 5, 2, 3])
    local_TV = logits_TV.chunk(2, 1)[rank].clone().requires_grad_()
    group = mpu.get_tensor_model_parallel_group()
    logprobs_T, entropy_T = vocab_parallel_logprobs(
        local_TV, targets_T, temperature=0.7, vocab_size=7, chunk_tokens=4, group=group
    )
    (logprobs_T * torch.arange(9) + 0.5 * entropy_T).sum().backward()
    destroy_parallel()
    return logprobs_T.detach().numpy(), entropy_T.detach().numpy(), local_TV.grad.numpy()


def test_a_sharded_vocabulary_gives_the_log_softmax_and_gradient_of_the_whole():
    results = run_ranks(sharded_logprobs, 2)
    logits_TV = torch.randn(9, 10, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    targets_T = torch.tensor([0, 4, 5, 6, 1, 6, 5, 2, 3])
    log_p_TV = (logits_TV[:, :7] / 0.7).log_softmax(-1)
    logprobs_T, entropy_T = log_p_TV.gather(1, targets_T[:, None]).squeeze(1), -(log_p_TV.exp() * log_p_TV).sum(-1)
    (logprobs_T * torch.arange(9) + 0.5 * entropy_T).sum().backward()
    for actual_logprobs_T, actual_entropy_T, _ in results:
        np.testing.assert_allclose(actual_logprobs_T, logprobs_T.detach().numpy(), atol=1e-6)
        np.testing.assert_allclose(actual_entropy_T, entropy_T.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(np.hstack([grad for *_, grad in results]), logits_TV.grad.numpy(), atol=2e-6)


def logprob_layouts(rank, num_ranks, port, weights, layouts):
    """Log-probs, entropies, margins and experts by sequence, so that the order of micro-batches does not matter."""
    results = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank)
        held = RankBatches(run.runner)
        held.put_batches([batches])
        reports = held.add_logprobs(0, "found", 0.7, routing=True)
        assert (reports is not None) == run.layout.is_output_rank
        outputs = run.runner.compute_logprobs(batches, 0.7, routing=True)
        # Every rank that may compute a loss has them, one reports the experts.
        assert (outputs is None) == (not run.layout.is_last_stage)
        for batch, output in zip(batches, outputs or [], strict=outputs is not None):
            assert np.array_equal(batch.added["found"], output.logprobs)
            assert (output.routed_experts is not None) == run.layout.is_output_rank
        outputs = outputs if run.layout.is_output_rank else None
        by_trajectory = {}
        for batch, output in zip(batches, outputs or [], strict=outputs is not None):
            for local, trajectory in enumerate(batch.trajectories):
                chosen = (batch.trajectory_ids == local) & ~batch.padding
                values = (output.logprobs, output.entropy, output.routing_margin, np.sort(output.routed_experts))
                by_trajectory[int(trajectory)] = [value[chosen] for value in values]
        results.append(by_trajectory if outputs is not None else None)
    return results


def test_logprobs_and_routing_come_back_once_and_in_order_under_every_layout(weights):
    expected = run_ranks(logprob_layouts, 1, weights, [{}])[0][0]
    layouts = [{}, TP2_SP_EP2, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"context": 2}]
    ranks = run_ranks(logprob_layouts, 2, weights, layouts, timeout_s=200)
    for number, layout in enumerate(layouts):
        reported = [rank[number] for rank in ranks if rank[number] is not None]
        assert len(reported) == (2 if layout == {} else 1), layout
        merged = {trajectory: value for part in reported for trajectory, value in part.items()}
        assert merged.keys() == expected.keys()
        for trajectory, values in expected.items():
            for actual, wanted in zip(merged[trajectory][:3], values[:3], strict=True):
                np.testing.assert_allclose(actual, wanted, atol=5e-6, err_msg=f"{layout} {trajectory}")
            margin_TL, experts_TLK = values[2:]
            clear_TL = margin_TL > 1e-5
            assert clear_TL.mean() > 0.99
            assert (experts_TLK >= 0).all()
            assert (merged[trajectory][3][clear_TL] == experts_TLK[clear_TL]).all(), f"{layout} {trajectory}"


def split_updates(rank, num_ranks, port, weights, layouts):
    """For each layout: two updates on four trajectories of three sequences each, held by the ranks throughout."""
    settings = AlgorithmConfig(clip_low=0.9, clip_high=5.0)
    loss = loss_function("policy", settings)
    results = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        packed, advantages_N = sequences(0)
        parts = pack(
            [packed[index::4] for index in range(4)], advantages_N[:4],
            budget_tokens=run.trainer.max_tokens_per_rank * run.layout.context,
            alignment=run.layout.alignment, data_parallel=run.layout.data,
        )  # fmt: skip
        held = RankBatches(run.runner)
        held.put_batches([parts[run.layout.data_rank]])
        held.add_logprobs(0, OLD_LOGPROBS, 0.7)
        held.accumulate(0, loss, 4.0, 0.7)
        updates = [held.step()]
        held.set_remote(0, settings, 0.7)
        remote = [batch.remote["policy"] for batch in held.updates[0] if batch.remote]
        elsewhere = max((float(abs(values).max(initial=0)) for values in remote), default=0.0)
        held.accumulate(0, loss, 4.0, 0.7)
        updates.append(held.step())
        results.append((is_split(parts), elsewhere, updates))
    return results


def test_trajectories_that_lie_on_several_ranks_make_the_updates_of_one_micro_batch(weights):
    [[(split, elsewhere, expected)]] = run_ranks(split_updates, 1, weights, [{"max_tokens_per_rank": 1024}])
    assert (split, elsewhere) == (False, 0.0)
    layouts = [{}, {"context": 2}, {"pipeline": 2}, TP2_SP_EP2]
    for rank in run_ranks(split_updates, 2, weights, layouts, timeout_s=200):
        for layout, (split, elsewhere, found) in zip(layouts, rank, strict=True):
            assert split
            assert elsewhere > 1e-4 or "pipeline" in layout
            for update, wanted in zip(found, expected, strict=True):
                assert update.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4), layout
                assert update.sums == pytest.approx(wanted.sums, rel=1e-4, abs=1e-5), layout


def update_with_nan(rank, num_ranks, port, weights):
    trainer = trainer_config(num_ranks, expert=2)
    run = Run(trainer, start(trainer, rank, num_ranks, port), weights)
    before = [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]

    def poisoned(logprobs_T, entropy_T, batch):
        sums = token_cross_entropy(logprobs_T, entropy_T, batch)
        return replace(sums, loss=sums.loss * float("nan")) if rank == 1 else sums

    batches = packed_batches(0, run.layout, trainer.max_tokens_per_rank)
    bad = run.runner.train_update(batches, poisoned, denominator=100.0, temperature=0.7)
    after = [p.detach() for chunk in run.chunks for p in chunk.parameters()]
    untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    good = run.update(0)
    destroy_parallel()
    return bad.skipped, bad.lr, untouched, good


def test_an_update_with_a_nan_gradient_is_skipped_and_leaves_no_trace(weights):
    results = run_ranks(update_with_nan, 2, weights)
    expected = run_ranks(updates, 2, weights, {"expert": 2}, range(1), None, None)[0][0]
    for skipped, lr, untouched, good in results:
        assert skipped
        assert untouched
        assert lr == 0.001
        assert good == expected


def updates(rank, num_ranks, port, weights, settings, steps, save_to, load_from):
    """Updates from given weights or from a checkpoint, then a checkpoint."""
    trainer = trainer_config(num_ranks, **settings)
    layout = start(trainer, rank, num_ranks, port)
    run = Run(trainer, layout, weights)
    if load_from is not None:
        checkpoint.load(Path(load_from), run.chunks, run.optimizer, layout, ARCHITECTURE, seed=3)
    results = [run.update(step) for step in steps]
    if save_to is not None:
        checkpoint.save(Path(save_to), run.chunks, run.optimizer, layout, ARCHITECTURE)
    state = [p.detach().float().numpy() for chunk in run.chunks for p in chunk.parameters()]
    destroy_parallel()
    return [*results, state]


def losses(results):
    return [update.sums["loss"] / update.sums["tokens"] for update in results[0][:-1]]


def test_a_checkpoint_continues_under_other_layouts_and_to_the_bit_under_its_own(weights, tmp_path):
    folder = str(tmp_path / "step_2")
    run_ranks(updates, 2, weights, TP2_SP_EP2, range(2), folder, None)
    whole = run_ranks(updates, 2, weights, TP2_SP_EP2, range(5), None, None)
    same = run_ranks(updates, 2, None, TP2_SP_EP2, range(2, 5), None, folder)
    for uninterrupted, resumed in zip(whole, same, strict=True):
        assert resumed[:-1] == uninterrupted[2:-1]
        assert all(np.array_equal(a, b) for a, b in zip(resumed[-1], uninterrupted[-1], strict=True))
    for num_ranks, layout in ((2, {"pipeline": 2}), (1, {})):
        resumed = run_ranks(updates, num_ranks, None, layout, range(2, 5), None, folder)
        assert losses(resumed) == pytest.approx(losses(whole)[2:], abs=1e-5), layout


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (4, {"pipeline": 2, "expert": 2}),
        (4, {"tensor": 2, "sequence": True, "expert_tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
        (2, {"context": 2}),
    ],
)
def test_a_checkpoint_of_two_ranks_continues_on_more(weights, tmp_path, num_ranks, layout):
    folder = str(tmp_path / "step_2")
    run_ranks(updates, 2, weights, TP2_SP_EP2, range(2), folder, None)
    whole = run_ranks(updates, 1, weights, {}, range(5), None, None)
    resumed = run_ranks(updates, num_ranks, None, layout, range(2, 5), None, folder)
    assert losses(resumed) == pytest.approx(losses(whole)[2:], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_of_either_optimizer_and_precision_continues_to_the_bit(weights, tmp_path, precision, distributed):
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.01, distributed=distributed)
    settings = {**TP2_SP_EP2, "precision": precision, "optimizer": optimizer}
    folder = str(tmp_path / "step_2")
    whole = run_ranks(updates, 2, weights, settings, range(4), None, None)
    run_ranks(updates, 2, weights, settings, range(2), folder, None)
    resumed = run_ranks(updates, 2, None, settings, range(2, 4), None, folder)
    for full, part in zip(whole, resumed, strict=True):
        assert part[:-1] == full[2:-1]
        assert all(np.array_equal(a, b) for a, b in zip(part[-1], full[-1], strict=True))


def load_mismatch(rank, num_ranks, port, folder):
    trainer = trainer_config()
    layout = start(trainer, rank, num_ranks, port)
    run = Run(trainer, layout, None)
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE, seed=3)
    checkpoint.save(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE)
    # Saved before the first update, it leads on to the same first update.
    first = run.update(0)
    checkpoint.load(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE, seed=3)
    assert run.update(0) == first
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE)
    with pytest.raises(ValueError, match="hidden_size is 64 there and 128 here"):
        checkpoint.load(Path(folder), run.chunks, run.optimizer, layout, {"hidden_size": 128}, seed=3)
    destroy_parallel()
    return sorted(p.name for p in Path(folder).parent.iterdir())


def test_a_checkpoint_is_whole_or_absent_and_refuses_another_model(tmp_path):
    assert run_ranks(load_mismatch, 1, str(tmp_path / "saved")) == [["saved"]]


def load_with_scales(rank, num_ranks, port, folder):
    """Linear layers whose state is a pickle that they refuse to load, as Transformer Engine's are with delayed FP8."""
    trainer = trainer_config()
    layout = start(trainer, rank, num_ranks, port)
    run, received = Run(trainer, layout, None), []

    def set_extra_state(self, state):
        assert state.numel() == 0
        received.append(self)

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": torch.ones(3)})), dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowParallelLinear, "get_extra_state", get_extra_state)
        patch.setattr(RowParallelLinear, "set_extra_state", set_extra_state)
        checkpoint.save(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE)
        first = run.update(0)
        checkpoint.load(Path(folder), run.chunks, run.optimizer, layout, ARCHITECTURE, seed=3)
        assert run.update(0) == first
        resumed = len(received)
        checkpoint.load_weights(Path(folder), run.chunks)
    stored = [name for name in read_metadata(Path(folder)).state_dict_metadata if "._extra_state" in name]
    destroy_parallel()
    return resumed, len(received), len(stored)


def test_a_run_with_scales_that_cannot_be_loaded_is_resumed_without_them(tmp_path):
    ((resumed, received, stored),) = run_ranks(load_with_scales, 1, str(tmp_path / "saved"))
    assert resumed > 0
    assert received == 2 * resumed
    assert stored >= resumed
