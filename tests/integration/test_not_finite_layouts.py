"""Numbers that are not finite are found where they were planted, under every layout.

Twelve short trajectories, of which some have two segments. Every rank plays the driver: it asks all ranks, and each
answers for itself.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trainer_cases import LAYERS, VOCAB, Run, in_layouts, model_config, packed_batches, start, trainer_config

from slimrl.algorithms.objective import loss_function
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.not_finite import Owner, Work, find
from slimrl.trainer.build import unwrap
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.weights import _global_tensors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(560)]

TP2_SP = {"tensor": 2, "sequence": True}
TWO_RANKS = [{}, {**TP2_SP, "expert": 2}, {"pipeline": 2}, {"context": 2}]
"""The first is two data-parallel ranks."""
TWO_RANKS_MORE = [{"pipeline": 2, "virtual_pipeline": 2}, {"expert": 2}, TP2_SP, {**TP2_SP, "expert_tensor": 2}]
FOUR_RANKS = [{**TP2_SP, "pipeline": 2, "expert": 2}, {"context": 2, "pipeline": 2}, {**TP2_SP, "context": 2}, {}]

NUM_TRAJECTORIES, PLANTED = 12, (3, 8)
"""Trajectory 3 has two segments, and trajectory 8 one."""
LOSS = loss_function("policy", AlgorithmConfig())


def trajectories() -> tuple[list[list[Segment]], np.ndarray]:
    """Segments of 4 to 9 tokens, so that many of them miss an expert; and an advantage of each trajectory."""
    rng = np.random.default_rng(5)

    def segment() -> Segment:
        length = int(rng.integers(4, 10))
        made = Segment.not_sampled(rng.integers(0, VOCAB, length), np.arange(length) >= length - 3)
        made.rollout_logprobs[:] = -4.0
        return made

    made = [[segment() for _ in range(1 + (number % 3 == 0))] for number in range(NUM_TRAJECTORIES)]
    return made, rng.normal(size=NUM_TRAJECTORIES).astype(np.float32)


def sequences_of(chosen) -> list[int]:
    """The places of these trajectories' segments among all."""
    owners = [number for number, own in enumerate(trajectories()[0]) for _ in own]
    return [place for place, owner in enumerate(owners) if owner in chosen]


class EveryRank:
    """The ranks as this one sees them: all of them ask the same at once."""

    def __init__(self, held: RankBatches) -> None:
        self.held, self.layout = held, held.runner.layout

    def call(self, method, *given, **options):
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, getattr(self.held, method.__name__)(*given, **options))
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def gather(self, method, *given, **options):
        answers = [None] * dist.get_world_size()
        own = self.layout.data_rank, getattr(self.held, method.__name__)(*given, **options)
        dist.all_gather_object(answers, own)
        return [one for _, found in sorted(answers, key=lambda answer: answer[0]) for one in found or ()]


class Case:
    """One rank's part of an update."""

    def __init__(self, run) -> None:
        self.run, self.held = run, RankBatches(run.runner)
        self.ranks = EveryRank(self.held)

    def skipped(self, scale: float = 1.0):
        """An update in which the advantages of the planted trajectories are multiplied; whether it was skipped, and
        how it was made."""
        made, advantages_N = trajectories()
        advantages_N[list(PLANTED)] *= np.float32(scale)
        parts = pack(
            made, advantages_N, budget_tokens=24 * self.run.layout.context, alignment=self.run.layout.alignment,
            data_parallel=self.run.layout.data, micro_batch_multiple=self.run.layout.micro_batch_multiple,
        )  # fmt: skip
        assert sum(map(len, parts)) > 1
        owners = [Owner(name=f"{number}", item="") for number, own in enumerate(made) for _ in own]
        work = Work(number=0, batch=parts, owners=owners, loss=LOSS, denominator=12.0, temperature=0.7)
        self.held.put_batches([parts[self.run.layout.data_rank]])
        self.held.accumulate(0, work.loss, work.denominator, work.temperature)
        return self.held.step(), work


def search(rank, num_ranks, port, weights, layouts):
    """For each layout: what is found of advantages that are infinite, of gradients too large, of an expert's weights;
    and the update of before made once more."""
    results = []
    for run in in_layouts(rank, num_ranks, port, layouts, weights):
        case, found = Case(run), {}
        result, work = case.skipped(np.inf)
        found["advantages"] = result.skipped, [vars(one) for one in find(case.ranks, work)]
        # Their squares are beyond float32, and they are not.
        result, work = case.skipped(1e30)
        found["gradients"] = result.skipped, [vars(one) for one in find(case.ranks, work)]
        found["weights"] = case.ranks.gather(RankBatches.weights_not_finite)
        found["good"] = case.skipped()[0]
        reached = reached_sequences(case, work)
        expert = min((one for one in reached if 0 < len(reached[one]) < 12), key=lambda one: len(reached[one]))
        planted = plant(run, expert)
        result, work = case.skipped()
        found["expert"] = result.skipped, [vars(one) for one in find(case.ranks, work)]
        found["reached"], found["planted"] = sorted(reached[expert]), planted
        found["named"] = sorted(set(case.ranks.gather(RankBatches.weights_not_finite)))
        found["number"] = expert
        results.append(found)
    return results


def reached_sequences(case: Case, work: Work) -> dict[int, set[int]]:
    """The sequences of which a sampled token takes an expert of the last layer, by expert."""
    outputs = case.run.runner.compute_logprobs(case.held.updates[0], work.temperature, routing=True)
    own = []
    if outputs is not None and case.run.layout.is_output_rank:
        for batch, output in zip(case.held.updates[0], outputs, strict=True):
            for number, sequence in enumerate(batch.sequences.tolist()):
                inside = np.arange(len(batch.tokens))
                inside = (inside >= batch.cu_seqlens[number]) & (inside < batch.cu_seqlens[number + 1]) & batch.mask
                own += [(int(expert), sequence) for expert in np.unique(output.routed_experts[inside, LAYERS - 1])]
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    reached: dict[int, set[int]] = {}
    for expert, sequence in (pair for of_rank in answers for pair in of_rank):
        reached.setdefault(expert, set()).add(sequence)
    return reached


def plant(run, expert: int) -> bool:
    """Make a weight of an expert of the last layer NaN; whether this rank has it."""
    mark = f"decoder.layers.{LAYERS - 1}.mlp.experts."
    held = [
        tensor
        for name, tensor in _global_tensors([unwrap(chunk) for chunk in run.chunks])
        if name.startswith(mark) and "linear_fc2" in name
        if f"local_experts.{expert}." in name or name.endswith(f"weight{expert}")
    ]
    with torch.no_grad():
        for tensor in held:
            tensor.view(-1)[0] = torch.nan
    run.optimizer.megatron.reload_model_params()
    return bool(held)


def assert_found(weights, num_ranks, layouts):
    of_ranks = run_ranks(search, num_ranks, weights, layouts, timeout_s=520)
    planted = sequences_of(PLANTED)
    assert Counter(map(len, trajectories()[0])) == {1: 8, 2: 4}
    for number, layout in enumerate(layouts):
        for found in (of_rank[number] for of_rank in of_ranks):
            exact = {"sequences": planted, "exact": True}
            assert found["advantages"] == (True, [{"what": "the advantages", **exact}]), layout
            assert found["gradients"] == (True, [{"what": "the gradients", **exact}]), layout
            assert found["weights"] == []
            assert not found["good"].skipped
            assert found["good"].grad_norm == pytest.approx(of_ranks[0][0]["good"].grad_norm, rel=1e-4), layout
            lost = {"what": "the log-probs", "sequences": found["reached"], "exact": True}
            assert found["expert"] == (True, [lost]), layout
            assert len(found["named"]) == 1
            assert f"{found['number']}" in found["named"][0]
        assert any(of_rank[number]["planted"] for of_rank in of_ranks)


def update_of_one_infinite_loss(rank, num_ranks, port, weights):
    """Rank 1's loss is infinite, and its gradient is not."""
    trainer = trainer_config(num_ranks)
    run = Run(trainer, start(trainer, rank, num_ranks, port), weights)

    def infinite(logprobs_T, entropy_T, batch):
        sums = LOSS(logprobs_T, entropy_T, batch)
        loss = sums.loss + torch.inf if rank == 1 else sums.loss
        return replace(sums, loss=loss, reported={**sums.reported, "loss": loss.detach()})

    batches = packed_batches(0, run.layout, 128)
    result = run.runner.train_update(batches, infinite, denominator=12.0, temperature=0.7)
    finite = run.runner.has_finite_gradient(batches, infinite, denominator=12.0, temperature=0.7)
    destroy_parallel()
    return result.skipped, finite


def test_a_loss_that_is_infinite_skips_the_update_though_its_gradient_is_finite(weights):
    assert run_ranks(update_of_one_infinite_loss, 2, weights) == [(True, True)] * 2


def biases_around_a_search(rank, num_ranks, port):
    """Buffers of a model whose routers are balanced by biases, before and after a pass for gradients."""
    balanced = {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    }  # fmt: skip
    trainer = trainer_config()
    run = Run(trainer, start(trainer, rank, num_ranks, port), None, model_config(**balanced))
    batches = packed_batches(0, run.layout, 128)

    def buffers():
        return [buffer.clone() for chunk in run.chunks for buffer in unwrap(chunk).buffers()]

    before = buffers()
    run.runner.has_finite_gradient(batches, LOSS, denominator=12.0, temperature=0.7)
    after = buffers()
    run.runner.train_update(batches, LOSS, denominator=12.0, temperature=0.7)
    moved = any(not torch.equal(a, b) for a, b in zip(before, buffers(), strict=True))
    destroy_parallel()
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), moved


def test_a_search_leaves_the_biases_of_routers_as_they_are():
    assert run_ranks(biases_around_a_search, 1) == [(True, True)]


def test_what_was_planted_is_found_under_two_ranks(weights):
    assert_found(weights, 2, TWO_RANKS)


@pytest.mark.full
def test_what_was_planted_is_found_under_more_layouts_of_two_ranks(weights):
    assert_found(weights, 2, TWO_RANKS_MORE)


@pytest.mark.full
@pytest.mark.parametrize("layouts", [FOUR_RANKS[:2], FOUR_RANKS[2:]])
def test_what_was_planted_is_found_under_mixed_layouts_of_four_ranks(weights, layouts):
    assert_found(weights, 4, layouts)
