"""The learning half of a step with a trainer that only answers: what it is asked, what is recorded, when it stops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.losses import log_ratio_sums, set_remote_log_ratio
from slimrl.algorithms.mismatch import report_logprobs
from slimrl.config.schema import Recipe
from slimrl.data.packing import num_trajectories
from slimrl.data.training import LogProbs, UpdateResult
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.learner import Learner
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step

PROMPT = 3
"""Tokens of each segment that nobody sampled."""
ENTROPY = 0.25


class AnsweringTrainers:
    """One rank whose log-probs are the engines' plus a drift, and whose updates are skipped as told.

    Each update adds `drift_of_update` times a token's position to its log-prob.
    """

    layout = SimpleNamespace(alignment=4, data=1, micro_batch_multiple=1)

    def __init__(self, *, mismatch: float = 0.0, skips=(), drift_of_update: float = 0.0) -> None:
        self.mismatch, self.drift = mismatch, drift_of_update
        self.skips = list(skips)
        self.updates, self.logprob_temperatures, self.routing, self.puts = [], [], [], []

    def put_batches(self, updates):
        self.held = [[batch for part in parts for batch in part] for parts in updates]
        self.puts.append(len(updates))

    def _answer(self, batch) -> LogProbs:
        drift = len(self.updates) * self.drift * batch.position_ids
        logprobs = np.where(batch.mask, batch.rollout_logprobs + self.mismatch + drift, np.nan)
        entropy = np.where(batch.mask, ENTROPY, np.nan)
        return LogProbs(logprobs=logprobs.astype(np.float32), entropy=entropy.astype(np.float32))

    def add_logprobs(self, update, name, temperature, *, routing=False):
        self.logprob_temperatures.append(temperature)
        self.routing.append(routing)
        for batch in self.held[update]:
            batch.added[name] = self._answer(batch).logprobs
        return [report_logprobs(batch, self._answer(batch)) for batch in self.held[update]]

    def refresh_remote(self, update, temperature):
        self.logprob_temperatures.append(temperature)
        own = [log_ratio_sums(batch, self._answer(batch).logprobs) for batch in self.held[update]]
        everywhere = [(batch.trajectories, sums) for batch, sums in zip(self.held[update], own, strict=True)]
        set_remote_log_ratio(self.held[update], own, everywhere)

    def train_update(self, update, objective, *, denominator, temperature):
        assert all("old_logprobs" in batch.added for batch in self.held[update])
        remote = [batch.remote_log_ratio.copy() for batch in self.held[update]]
        self.updates.append(
            SimpleNamespace(
                batches=self.held[update],
                objective=objective,
                denominator=denominator,
                temperature=temperature,
                remote=remote,
            )
        )
        skipped = self.skips.pop(0) if self.skips else False
        return UpdateResult(
            sums={"loss": 0.5 * denominator, "clipped": 0.25 * denominator, "trajectories": float(denominator)},
            grad_norm=math.nan if skipped else 2.0, skipped=skipped, lr=0.125, num_tokens=100,
            expert_load_max_over_mean=math.nan, router_entropy=math.nan,
        )  # fmt: skip


def trajectory(group: str, sample: int, lengths=(12,)) -> Trajectory:
    segments = []
    for length in lengths:
        mask = np.arange(length) >= PROMPT
        segments.append(
            Segment(
                tokens=np.arange(1, length + 1, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int16),
            )
        )
    return Trajectory(
        group_id=group,
        trajectory_id=f"{group}/{sample}",
        segments=segments,
        status=Status.completed,
        reward=float(sample),
    )


def recipe(updates: int = 1, **trainer) -> Recipe:
    made = Recipe()
    made.rollout.sampling.temperature = 0.7
    made.algorithm.max_logprob_mismatch = 0.01
    made.trainer.max_tokens_per_rank = 64
    made.trainer.updates_per_rollout = updates
    for name, value in trainer.items():
        setattr(made.trainer, name, value)
    return made


def learn(trainers, settings, trajectories, state=None, **options) -> tuple[Step, list]:
    """One step of the learner; the step with its metrics, and the updates that were made."""
    learner, step = Learner(settings, trainers, state or RunState(), []), Step(4)
    updates = learner.prepare(step, trajectories)
    learner.compute_old_logprobs(step, updates, **options)
    learner.train(step, updates)
    return step, updates


def pairs(groups: str, **options) -> list[Trajectory]:
    return [trajectory(group, sample, **options) for group in groups for sample in range(2)]


def test_a_group_is_trained_on_where_every_filter_keeps_it():
    settings, asked = recipe(), []
    settings.reward.group_filters = ["task:not_a", "task:not_b"]

    def refuses(name):
        return lambda group: asked.append((name, group[0].group_id)) or group[0].group_id != name

    learner = Learner(settings, AnsweringTrainers(), RunState(), [refuses("a"), refuses("b")])
    (update,) = learner.prepare(Step(1), pairs("abc"))
    assert num_trajectories(update) == 2
    assert asked == [("a", "a"), ("a", "b"), ("b", "b"), ("a", "c"), ("b", "c")]


def test_a_group_filter_that_fails_is_named():
    settings = recipe()
    settings.reward.group_filters = ["task:keep"]
    learner = Learner(settings, AnsweringTrainers(), RunState(), [lambda group: 1 / 0])
    with pytest.raises(RunError, match="task:keep failed on mixed: ZeroDivisionError"):
        learner.prepare(Step(1), [trajectory("mixed", sample) for sample in range(2)])


def test_an_update_is_divided_by_its_trajectories_and_works_at_the_temperature_of_the_rollout():
    trainers = AnsweringTrainers()
    learn(trainers, recipe(updates=2), pairs("abc", lengths=(60, 50)))
    assert [(u.objective, u.denominator, u.temperature) for u in trainers.updates] == [
        ("policy", 4, 0.7),
        ("policy", 2, 0.7),
    ]
    # All batches go to the ranks at once, and none is left there.
    assert trainers.puts == [2, 0]
    # Of each update's old log-probs, and of the second one's segments that lie apart.
    assert trainers.logprob_temperatures == [0.7] * 3


def test_the_metrics_are_means_over_tokens_and_over_trajectories():
    trainers = AnsweringTrainers(mismatch=0.002)
    step, updates = learn(trainers, recipe(), pairs("ab"))
    assert num_trajectories(updates[0]) == 4
    assert step.metrics["policy/entropy"] == pytest.approx(ENTROPY)
    assert step.metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.002, rel=1e-3)
    assert step.metrics["policy/loss"] == 0.5
    assert step.metrics["policy/clip_fraction"] == 0.25
    assert step.metrics["policy/grad_norm"] == 2.0
    assert step.metrics["train/lr"] == 0.125
    assert step.metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize("mismatch", [0.011, -0.011, math.nan])
def test_a_mismatch_above_the_limit_or_unknown_stops_the_run_before_it_trains(mismatch):
    trainers = AnsweringTrainers(mismatch=mismatch)
    with pytest.raises(RunError, match=r"step 4: trainer and engines disagree by (1\.10e-02|nan) .* is 1\.00e-02"):
        learn(trainers, recipe(), pairs("a"))
    assert trainers.updates == []
    learn(trainers, recipe(), pairs("a"), enforce_limit=False)
    assert len(trainers.updates) == 1


def test_a_mismatch_below_the_limit_does_not_stop_the_run():
    trainers = AnsweringTrainers(mismatch=-0.009)
    learn(trainers, recipe(), pairs("a"))
    assert len(trainers.updates) == 1


def test_the_engines_experts_are_asked_for_where_the_recipe_compares_them():
    for routed_experts in (True, False):
        settings, trainers = recipe(), AnsweringTrainers()
        settings.rollout.routed_experts = routed_experts
        learn(trainers, settings, pairs("a"))
        assert trainers.routing == [routed_experts]


def test_the_second_update_knows_what_lies_elsewhere_and_the_first_has_nothing_there():
    """Segments of 60 and 50 tokens do not fit one micro-batch of 64; the first update moved every log-prob."""
    trainers = AnsweringTrainers(drift_of_update=1e-3)
    learn(trainers, recipe(updates=2), pairs("ab", lengths=(60, 50)))
    first, second = trainers.updates
    assert all((remote == 0).all() for remote in first.remote)
    # Target positions of a segment of n tokens: PROMPT - 1 to n - 2, each moved by its position.
    moved = {length: 1e-3 * sum(range(PROMPT - 1, length - 1)) for length in (60, 50)}
    seen = []
    for batch, remote in zip(second.batches, second.remote, strict=True):
        length = int((~batch.padding).sum()) + 1
        assert remote == pytest.approx([moved[110 - length]], rel=1e-4)
        seen.append(length)
    assert sorted(seen) == [50, 50, 60, 60]


def test_whole_trajectories_of_the_second_update_need_no_log_probs_anew():
    trainers = AnsweringTrainers(drift_of_update=1e-3)
    learn(trainers, recipe(updates=2), pairs("ab"))
    assert len(trainers.logprob_temperatures) == len(trainers.updates) == 2


def test_the_run_stops_at_the_limit_of_updates_skipped_in_a_row():
    state = RunState()
    trainers = AnsweringTrainers(skips=[True] * 3)
    settings = recipe(max_skipped_updates=3)
    for step in (1, 2):
        made, _ = learn(trainers, settings, pairs("a"), state)
        assert made.metrics["train/skipped_steps"] == step
    with pytest.raises(RunError, match="3 optimizer updates in a row had a gradient norm of nan"):
        learn(trainers, settings, pairs("a"), state)


def test_an_update_that_is_made_ends_the_streak_of_skipped_ones():
    state = RunState()
    trainers = AnsweringTrainers(skips=[True, True, False] * 3)
    for _ in range(9):
        learn(trainers, recipe(max_skipped_updates=3), pairs("a"), state)
    assert (state.skipped_steps, state.skipped_in_a_row) == (6, 0)


def test_a_rollout_without_anything_to_teach_makes_no_update():
    trainers = AnsweringTrainers()
    step, updates = learn(trainers, recipe(), [trajectory("a", 1), trajectory("a", 1)])
    assert updates == trainers.puts == trainers.updates == trainers.logprob_temperatures == []
    assert step.metrics == {"rollout/zero_variance_fraction": 1.0, "train/skipped_steps": 0}
