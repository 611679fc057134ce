"""Selection, dealing to updates, and what lies elsewhere, without any process."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.cross_batch_sums import remote_sums, set_remote
from slimrl.algorithms.mismatch import entropy_mean, mismatch_metrics, report_logprobs
from slimrl.algorithms.selection import Selection
from slimrl.algorithms.selection import select as select_with
from slimrl.algorithms.shaping import apply_truncation_rule
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.training import LogProbs
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.rollout.stage import planned_trajectories
from slimrl.runtime.learner import make_updates

STEP = 0.1
"""By which log-probs differ; at smaller ones a divergence and that the other way round are hardly told apart."""
LAYOUT = SimpleNamespace(alignment=4, data=2, micro_batch_multiple=1)


def recipe(**algorithm) -> Recipe:
    made = Recipe()
    made.trainer.max_tokens_per_rank = 64
    made.trainer.updates_per_rollout = 2
    for name, value in algorithm.items():
        setattr(made.algorithm, name, value)
    return made


def segment(length: int, rng: np.random.Generator) -> Segment:
    mask = np.ones(length, np.bool_)
    mask[:3] = False
    return Segment(
        tokens=rng.integers(1, 50, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int16),
    )


def trajectory(group: str, sample: int, reward: float, status: Status = Status.completed, lengths=(12,)) -> Trajectory:
    rng = np.random.default_rng(hash((group, sample)) % 1000)
    return Trajectory(
        group_id=group,
        trajectory_id=f"{group}/{sample}",
        segments=[segment(length, rng) for length in lengths],
        status=status,
        reward=reward,
    )


def select(batch: list[Trajectory], settings: Recipe) -> Selection:
    """The selection of a task that refuses nothing."""
    return select_with(batch, settings.algorithm, lambda group: True, step=1)


def test_a_prompt_that_comes_twice_in_a_step_makes_one_group_of_other_samples():
    prompts = [Prompt(prompt_id=name, messages=[], label=None) for name in "ab"]
    taken = Sampler(prompts, seed=0, shuffle=False).take(3)
    planned = planned_trajectories(taken, samples_per_prompt=2, label="step_000001")
    assert len(planned) == 6
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    batch = [
        trajectory(prompt.prompt_id, sample, reward)
        for sample, (prompt, reward) in enumerate(zip(planned.values(), rewards, strict=True))
    ]
    settings = recipe(advantage="dr_grpo")
    chosen = select(batch, settings)
    # The second pair of prompt a is 1, 1: alone it would teach nothing.
    assert [t.group_id for t in chosen.trajectories] == ["a", "a", "b", "b", "a", "a"]
    assert chosen.advantages.tolist() == [0.25, -0.75, 0.5, -0.5, 0.25, 0.25]
    assert [update.num_trajectories for update in make_updates(chosen, settings, LAYOUT)] == [4, 2]


def test_failed_trajectories_and_what_filters_refuse_are_left_out_and_equal_groups_are_known():
    batch = [
        *(trajectory("mixed", i, float(i == 0)) for i in range(3)),
        trajectory("mixed", 3, math.nan, Status.failed),
        *(trajectory("equal", i, 1.0) for i in range(3)),
        *(trajectory("refused", i, float(i)) for i in range(3)),
        trajectory("alone", 0, 1.0),
        trajectory("alone", 1, math.nan, Status.failed),
    ]
    chosen = select_with(batch, recipe().algorithm, lambda group: group[0].group_id != "refused", step=1)
    assert [t.trajectory_id for t in chosen.trajectories] == [
        *(f"mixed/{i}" for i in range(3)), *(f"equal/{i}" for i in range(3)),
    ]  # fmt: skip
    assert chosen.zero_variance.tolist() == [False] * 3 + [True] * 3
    assert chosen.zero_variance_fraction == 0.5
    std = math.sqrt(1 / 3) + 1e-6
    assert chosen.advantages == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0, 0])


def test_a_trajectory_without_a_sampled_token_counts_in_the_baseline_alone():
    batch = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("a", 2, 0.0, Status.aborted, lengths=())]
    chosen = select(batch, recipe(advantage="dr_grpo"))
    assert [t.trajectory_id for t in chosen.trajectories] == ["a/0", "a/1"]
    assert chosen.advantages == pytest.approx([2 / 3, -1 / 3])


def test_masked_truncated_trajectories_count_in_the_baseline_alone():
    batch = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("a", 2, 0.0, Status.truncated)]
    masked = select(batch, recipe(truncated=TruncationMode.mask))
    scored = select(batch, recipe(truncated=TruncationMode.score))
    assert [t.trajectory_id for t in masked.trajectories] == ["a/0", "a/1"]
    assert masked.advantages.tolist() == scored.advantages[:2].tolist()


def test_the_zero_rule_takes_the_reward_of_truncated_trajectories():
    batch = [trajectory("a", 0, 1.0), trajectory("a", 1, 1.0, Status.truncated)]
    apply_truncation_rule(batch, TruncationMode.score)
    assert [t.reward for t in batch] == [1.0, 1.0]
    apply_truncation_rule(batch, TruncationMode.zero)
    assert [t.reward for t in batch] == [1.0, 0.0]


def test_groups_are_dealt_whole_to_the_updates():
    batch = [trajectory(g, i, float(i)) for g in "abcde" for i in range(2)]
    updates = make_updates(select(batch, recipe()), recipe(), LAYOUT)
    assert [u.num_trajectories for u in updates] == [6, 4]
    sampled = sum(int(m.mask.sum()) for update in updates for m in batches_of(update))
    assert sampled == sum(t.num_sampled_tokens for t in batch)
    assert all(len(u.batch) == 2 for u in updates)


def test_fewer_groups_than_updates_make_fewer_updates():
    batch = [trajectory("a", i, float(i)) for i in range(2)]
    assert len(make_updates(select(batch, recipe()), recipe(), LAYOUT)) == 1
    assert make_updates(select([], recipe()), recipe(), LAYOUT) == []


def test_a_context_parallel_group_holds_the_tokens_of_all_its_ranks():
    settings = recipe()
    settings.trainer.parallel.context = 2
    layout = SimpleNamespace(alignment=4, data=1, micro_batch_multiple=1)
    # 64 tokens a rank: 120 in one segment, and two of 59 together, fit the two of them.
    batch = [trajectory("a", 0, 0.0, lengths=(121,)), trajectory("a", 1, 1.0, lengths=(60, 60))]
    (update,) = make_updates(select(batch, settings), settings, layout)
    assert sorted(len(m.tokens) for m in update.batch[0]) == [120, 120]


def batches_of(update) -> list:
    return [batch for part in update.batch for batch in part]


def found(batch, offset: float) -> LogProbs:
    """A stand-in of the trainer's answer: NaN where nothing was sampled."""
    logprobs = np.where(batch.mask, batch.rollout_logprobs + offset * (1 + batch.position_ids), np.nan)
    return LogProbs(logprobs=logprobs.astype(np.float32), entropy=np.full(len(batch.tokens), 0.5, np.float32))


def moved(update, offset: float) -> None:
    """As the ranks do it, each on its own: old log-probs are the rollout's, and the policy has moved by `offset`."""
    for batch in batches_of(update):
        batch.added["old_logprobs"] = found(batch, 0.0).logprobs
    settings = recipe().algorithm
    sums = [[remote_sums(batch, found(batch, offset).logprobs, settings) for batch in part] for part in update.batch]
    everywhere = [
        (batch.trajectories, of)
        for part, own in zip(update.batch, sums, strict=True)
        for batch, of in zip(part, own, strict=True)
    ]
    for part, own in zip(update.batch, sums, strict=True):
        set_remote(part, own, everywhere)


def test_mismatch_is_measured_on_sampled_tokens_alone():
    batch = [trajectory("a", i, float(i)) for i in range(2)]
    (update,) = make_updates(select(batch, recipe()), recipe(), LAYOUT)
    reports = [report_logprobs(batch, found(batch, STEP)) for batch in batches_of(update)]
    metrics = mismatch_metrics(reports, batches_of(update))
    # 12 tokens, the first three of the prompt: targets at input positions 2..10.
    expected = np.array([STEP * (1 + p) for p in range(2, 11)])
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(expected.mean(), rel=1e-3)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(expected.max(), rel=1e-3)
    assert metrics["mismatch/kl_k3"] == pytest.approx((np.exp(expected) - 1 - expected).mean(), rel=1e-3)
    assert sum(report.entropy_sum for report in reports) == pytest.approx(0.5 * 18)
    assert entropy_mean([reports[:1], reports[1:]]) == pytest.approx(0.5)


def test_tokens_are_counted_that_are_far_from_the_engine_s_for_the_precision():
    """Some in 100 of 1,200 sampled tokens are off by 2 nat: a mean that bf16's limit lets pass."""
    batch = [trajectory("a", i, float(i), lengths=(63,) * 10) for i in range(2)]
    (update,) = make_updates(select(batch, recipe()), recipe(), LAYOUT)
    batches = batches_of(update)
    sampled = sum(int(m.mask.sum()) for m in batches)

    def metrics(every: int, limit: float) -> dict[str, float]:
        answers, count = [], 0
        for m in batches:
            answer = found(m, 0.0)
            for place in np.flatnonzero(m.mask):
                answer.logprobs[place] = m.rollout_logprobs[place] + (2.0 if count % every == 0 else 1e-3)
                count += 1
            answers.append(report_logprobs(m, answer))
        return mismatch_metrics(answers, batches, limit=limit)

    far = metrics(100, 0.05)
    assert far["mismatch/logprob_abs_mean"] < 0.05
    assert far["mismatch/far_fraction"] == (-(-sampled // 100) - 2) / sampled > 0.005
    # 20 times the limit is 2 nat, which none exceeds.
    assert metrics(100, 0.1 + 1e-6)["mismatch/far_fraction"] == 0
    # Two in a step are no sign of a fault.
    assert metrics(sampled - 1, 0.05)["mismatch/far_fraction"] == 0
    assert metrics(100, 1e-4)["mismatch/far_fraction"] == far["mismatch/far_fraction"]


def test_what_lies_elsewhere_is_the_rest_of_the_trajectory():
    batch = [trajectory("a", i, float(i), lengths=(60, 50, 40)) for i in range(2)]
    (update,) = make_updates(select(batch, recipe()), recipe(), LAYOUT)
    moved(update, 1e-3)
    totals = {}
    pieces = [(m, found(m, 1e-3)) for m in batches_of(update)]
    for m, r in pieces:
        for local, index in enumerate(m.trajectories):
            here = m.mask & (m.trajectory_ids == local)
            totals[index] = totals.get(index, 0) + float((r.logprobs - m.rollout_logprobs)[here].sum())
    assert len(pieces) > 2
    for m, r in pieces:
        for local, index in enumerate(m.trajectories):
            here = m.mask & (m.trajectory_ids == local)
            own = float((r.logprobs - m.rollout_logprobs)[here].sum())
            assert m.remote["policy"][local] == pytest.approx(totals[index] - own, rel=1e-4)


def test_micro_batches_of_padding_alone_change_no_figure():
    """Two trajectories over eight ranks, with the experts of every token, against the same on one rank."""
    rng = np.random.default_rng(0)
    batch = [trajectory("a", i, float(i), lengths=(40, 30)) for i in range(2)]
    for s in (s for t in batch for s in t.segments):
        s.routed_experts = rng.integers(0, 4, (len(s.tokens), 2, 1)).astype(np.int16)
    figures = []
    for ranks in (1, 8):
        layout = SimpleNamespace(alignment=4, data=ranks, micro_batch_multiple=1)
        (update,) = make_updates(select(batch, recipe()), recipe(), layout)
        reports = []
        for m in batches_of(update):
            experts, margin = (m.tokens[:, None, None] % 4).repeat(2, 1), (m.tokens[:, None] / 100).repeat(2, 1)
            answer = replace(found(m, 1e-3), routed_experts=experts, routing_margin=margin)
            reports.append(report_logprobs(m, answer))
        moved(update, 2e-3)
        log_ratios = sorted(float(x) for m in batches_of(update) for x in m.remote["policy"])
        figures.append((mismatch_metrics(reports, batches_of(update)), entropy_mean([reports]), log_ratios))
        assert sum(m.padding.all() for m in batches_of(update)) == (0 if ranks == 1 else 4)
    assert figures[1][0] == pytest.approx(figures[0][0])
    assert figures[0][0]["mismatch/routing_flips"] > 0
    assert figures[1][1:] == figures[0][1:]
