"""The learning half of a step with a trainer that only answers: what it is asked, what is recorded, when it stops."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.cross_batch_sums import remote_sums, set_remote
from slimrl.algorithms.mismatch import report_logprobs
from slimrl.algorithms.not_finite import LOGPROBS, faults_of
from slimrl.algorithms.objective import policy_objective
from slimrl.algorithms.selection import select
from slimrl.base.errors import RunError
from slimrl.config.schema.algorithm import Aggregation, CorrectionLevel, KlEstimator, KlPlace, OldPolicy
from slimrl.config.schema.recipe import Recipe
from slimrl.data.pieces import pieces_of
from slimrl.data.token_values import TokenValues
from slimrl.data.training import LogProbs, UpdateResult
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.rollout.group_filters import GroupFilters
from slimrl.runtime.learner import Learner
from slimrl.runtime.loop import train_on_file
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

    def __init__(self, *, mismatch: float = 0.0, far: float = 0.0, skips=(), drift_of_update: float = 0.0) -> None:
        """
        Args:
            far: added to the log-prob of one token in 50.
        """
        self.mismatch, self.far, self.drift = mismatch, far, drift_of_update
        self.skips = list(skips)
        self.asked: list[str] = []
        """Passes in their order"""
        self.updates, self.temperatures, self.routing, self.puts = [], [], [], []
        self.num_steps = 0
        self.overflowing: set[int] = set()
        """Sequences whose gradients are not finite"""
        self.overflowing_together: set[int] = set()
        """Sequences whose gradients have a sum that is not finite"""
        self.bad_weights: list[str] = []
        self.gradients: list[tuple[list[int], list[int]]] = []
        """Sequences and places of the passes that looked for such gradients"""

    def call(self, method, *given, **options):
        return getattr(self, method.__name__)(*given, **options)

    gather = call

    def put_batches(self, updates):
        self.held = [[batch for part in parts for batch in part] for parts in updates]
        self.puts.append(len(updates))

    def _answer(self, batch) -> LogProbs:
        drift = self.num_steps * self.drift * batch.position_ids
        far = np.where(batch.position_ids % 50 == 7, self.far, 0.0)
        logprobs = np.where(batch.mask, batch.rollout_logprobs + self.mismatch + far + drift, np.nan)
        entropy = np.where(batch.mask, ENTROPY, np.nan)
        return LogProbs(logprobs=logprobs.astype(np.float32), entropy=entropy.astype(np.float32))

    def _ask(self, what: str, temperature: float) -> None:
        self.asked.append(what)
        self.temperatures.append(temperature)

    def add_logprobs(self, update, name, temperature, *, routing=False):
        self._ask(f"{name} of {update}", temperature)
        self.routing.append(routing)
        for batch in self.held[update]:
            batch.added[name] = self._answer(batch).logprobs
        return [report_logprobs(batch, self._answer(batch)) for batch in self.held[update]]

    def add_advantages(self, settings):
        self.asked.append("advantages")

    def set_remote(self, update, settings, temperature):
        self._ask(f"sums of {update}", temperature)
        own = [remote_sums(batch, self._answer(batch).logprobs, settings) for batch in self.held[update]]
        everywhere = [(batch.trajectories, sums) for batch, sums in zip(self.held[update], own, strict=True)]
        set_remote(self.held[update], own, everywhere)

    def accumulate(self, update, loss, *, denominator, temperature, logprobs, recorded):
        self._ask(f"gradients of {update}" + (" with log-probs" if logprobs else ""), temperature)
        remote = [batch.remote.get("policy", np.zeros(1)) for batch in self.held[update]]
        self.updates.append(
            SimpleNamespace(
                batches=self.held[update],
                objective=loss.func,
                settings=loss.keywords["settings"],
                denominator=denominator,
                temperature=temperature,
                entropy_coef=loss.keywords["entropy_coef"],
                remote=remote,
            )
        )
        return [report_logprobs(batch, self._answer(batch)) for batch in self.held[update]] if logprobs else []

    def recorded(self, update, sequences):
        found = [
            pieces_of(batch, {"trainer_logprobs": batch.rollout_logprobs, "ratios": batch.targets + 100 * update})
            for batch in self.held[update]
        ]
        return [piece for pieces in found for piece in pieces if piece.sequence in sequences]

    def faults(self, update, loss, temperature, *, output):
        self.asked.append(f"faults of {update}")
        found = [{LOGPROBS: self._answer(batch).logprobs} for batch in self.held[update]]
        return [fault for batch, own in zip(self.held[update], found, strict=True) for fault in faults_of(batch, own)]

    def has_finite_gradient(self, update, loss, denominator, temperature, *, sequences, places):
        passed = {int(one) for place in places for one in self.held[update][place].sequences}
        assert sequences <= passed, (sequences, places)
        assert (denominator, temperature) == (self.updates[-1].denominator, self.temperatures[-1])
        self.gradients.append((sorted(sequences), list(places)))
        together = self.overflowing_together
        return not self.overflowing & set(sequences) and not (together and together <= set(sequences))

    def weights_not_finite(self):
        return list(self.bad_weights)

    def step(self, *, skip=False):
        self.num_steps += 1
        skipped = self.skips.pop(0) if self.skips else skip
        denominator = self.updates[-1].denominator
        sums = {
            "loss": 0.5 * denominator, "weight": 8.0, "clipped": 2.0, "tokens": 50.0, "kl_old": 5.0, "clamped": 1.0,
            "importance": 60.0, "importance_squared": 90.0, "kl": 10.0,
        }  # fmt: skip
        return UpdateResult(
            sums=sums, denominator=denominator,
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


def learn(
    trainers, settings, trajectories, state=None, recorded=(), said=None, folder=None, **options
) -> tuple[Step, list]:
    """One step of the learner; the step with its metrics, and the updates that were made."""
    said = [] if said is None else said
    learner, step = Learner(settings, trainers, state or RunState(), say=said.append, folder=folder), Step(4)
    step.tokens = TokenValues(recorded)
    updates = learner.prepare(step, select(trajectories, settings.algorithm, lambda group: True, step=4))
    learner.compute_inputs(step, updates)
    learner.train(step, updates, **options)
    return step, updates


def pairs(groups: str, **options) -> list[Trajectory]:
    return [trajectory(group, sample, **options) for group in groups for sample in range(2)]


@pytest.mark.parametrize("old_policy", OldPolicy)
def test_what_the_updates_find_at_recorded_tokens_is_kept_and_the_old_policy_s_log_probs_where_they_are(old_policy):
    settings, trajectories = recipe(updates=2), pairs("abc", lengths=(60, 30))
    settings.algorithm.old_policy = old_policy
    for number, segment in enumerate(segment for one in trajectories for segment in one.segments):
        segment.tokens[:] = 1 + number
    # Groups a and c are of the first update, b of the second.
    first, other, second, *_ = trajectories
    step, _ = learn(AnsweringTrainers(), settings, trajectories, recorded=[first, second])
    nothing = [np.nan] * PROMPT
    found = step.tokens.of(first.segments[1])
    np.testing.assert_array_equal(found["ratios"], np.float32(nothing + [2] * 27))
    np.testing.assert_array_equal(found["trainer_logprobs"], np.float32(nothing + [-1] * 27))
    later = step.tokens.of(second.segments[0])
    np.testing.assert_array_equal(later["ratios"], np.float32(nothing + [105] * 57))
    assert ("trainer_logprobs" in later) == (old_policy is OldPolicy.trainer)
    assert step.tokens.of(other.segments[0]) == {}


class OneStep:
    """A run of one step."""

    def __init__(self, settings: Recipe) -> None:
        self.recipe, self.should_continue = settings, True

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        yield Step(1)
        self.should_continue = False

    def finish(self) -> None:
        """Nothing is left to do."""


def test_a_group_of_a_file_is_trained_on_where_every_filter_keeps_it():
    settings, asked, trainers = recipe(), [], AnsweringTrainers()

    def refuses(name):
        return lambda group: asked.append((name, group[0].group_id)) or group[0].group_id != name

    keeps = GroupFilters(["task:not_a", "task:not_b"], [refuses("a"), refuses("b")])
    train_on_file(OneStep(settings), Learner(settings, trainers, RunState(), say=print), pairs("abc"), keeps)
    assert [update.denominator for update in trainers.updates] == [2]
    assert asked == [("a", "a"), ("a", "b"), ("b", "b"), ("a", "c"), ("b", "c")]


def test_a_group_filter_that_fails_is_named():
    settings = recipe()
    learner = Learner(settings, AnsweringTrainers(), RunState(), say=print)
    mixed = [trajectory("mixed", n) for n in range(2)]
    with pytest.raises(RunError, match="task:keep failed on mixed: ZeroDivisionError"):
        train_on_file(OneStep(settings), learner, mixed, GroupFilters(["task:keep"], [lambda group: 1 / 0]))


def test_an_update_is_divided_by_its_trajectories_and_works_at_the_temperature_of_the_rollout():
    trainers = AnsweringTrainers()
    settings = recipe(updates=2)
    learn(trainers, settings, pairs("abc", lengths=(60, 50)))
    assert [(u.objective, u.denominator, u.temperature) for u in trainers.updates] == [
        (policy_objective, 4, 0.7),
        (policy_objective, 2, 0.7),
    ]
    assert all(u.settings is settings.algorithm for u in trainers.updates)
    # All batches go to the ranks at once, and none is left there.
    assert trainers.puts == [2, 0]
    assert set(trainers.temperatures) == {0.7}


def test_the_metrics_are_means_over_tokens_and_over_trajectories():
    trainers = AnsweringTrainers(mismatch=0.002)
    step, updates = learn(trainers, recipe(), pairs("ab"))
    assert updates[0].num_trajectories == 4
    assert step.metrics["policy/entropy"] == pytest.approx(ENTROPY)
    assert step.metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.002, rel=1e-3)
    assert step.metrics["policy/loss"] == 0.5
    assert step.metrics["policy/clip_fraction"] == 0.25
    assert step.metrics["policy/clamped_fraction"] == 0.02
    assert step.metrics["policy/kl"] == 0.1
    assert step.metrics["policy/reference_kl"] == 0.2
    # 60^2 / (50 * 90)
    assert step.metrics["policy/effective_sample_size"] == pytest.approx(0.8)
    assert step.metrics["policy/grad_norm"] == 2.0
    assert step.metrics["train/lr"] == 0.125
    assert step.metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize("mismatch", [0.011, -0.011])
def test_a_mismatch_above_the_limit_stops_the_run_before_the_weights_change(mismatch):
    trainers = AnsweringTrainers(mismatch=mismatch)
    with pytest.raises(RunError, match=r"step 4: trainer and engines disagree by 1\.10e-02 .* is 1\.00e-02"):
        learn(trainers, recipe(), pairs("a"))
    assert trainers.num_steps == 0
    learn(trainers, recipe(), pairs("a"), enforce_limit=False)
    assert trainers.num_steps == 1


def test_a_mismatch_below_the_limit_does_not_stop_the_run():
    trainers = AnsweringTrainers(mismatch=-0.009)
    learn(trainers, recipe(), pairs("a"))
    assert len(trainers.updates) == 1


def test_single_tokens_that_differ_by_far_more_stop_a_run_whose_mean_is_within_the_limit():
    groups = pairs("abcd", lengths=(55, 55))
    fine = AnsweringTrainers(far=0.19)
    step, _ = learn(fine, recipe(), groups)
    assert (len(fine.updates), step.metrics["mismatch/far_fraction"]) == (1, 0.0)
    trainers, settings = AnsweringTrainers(far=0.3), recipe()
    with pytest.raises(RunError, match=r"by more than 0\.2 nat, 20 times .* on 1\.\d\d% of the tokens; .* is 0\.50%"):
        learn(trainers, settings, groups)
    assert trainers.num_steps == 0
    settings.algorithm.max_far_tokens = 1.0
    step, _ = learn(trainers, settings, groups)
    assert step.metrics["mismatch/logprob_abs_mean"] < settings.algorithm.max_logprob_mismatch
    assert step.metrics["mismatch/far_fraction"] > 0.01


def test_the_engines_experts_are_compared_in_a_pass_where_the_recipe_asks_for_them():
    settings, trainers = recipe(), AnsweringTrainers()
    settings.rollout.routed_experts = True
    learn(trainers, settings, pairs("a"))
    assert trainers.routing == [True]


def passes(settings: Recipe, **options) -> list[str]:
    """What a step of these settings asks of the ranks."""
    trainers = AnsweringTrainers()
    learn(trainers, settings, pairs("ab", **options))
    return trainers.asked


def test_one_update_of_a_rollout_needs_no_pass_before_it():
    assert passes(recipe()) == ["gradients of 0 with log-probs"]


def test_later_updates_need_the_old_policys_log_probs_before_the_first_one():
    assert passes(recipe(updates=2)) == [
        "old_logprobs of 1", "gradients of 0 with log-probs", "gradients of 1",
    ]  # fmt: skip


def test_a_ratio_against_the_engines_log_probs_needs_no_pass():
    settings = recipe(updates=2)
    settings.algorithm.old_policy = OldPolicy.rollout
    assert passes(settings) == ["gradients of 0 with log-probs", "gradients of 1"]


def test_a_reference_costs_a_pass_and_in_the_reward_one_more():
    settings = recipe()
    settings.algorithm.kl_coef = 0.1
    assert passes(settings) == ["reference_logprobs of 0", "gradients of 0 with log-probs"]
    settings.algorithm.kl_place, settings.algorithm.kl_estimator = KlPlace.reward, KlEstimator.k1
    assert passes(settings) == ["old_logprobs of 0", "reference_logprobs of 0", "advantages", "gradients of 0"]


def test_whitened_advantages_need_no_pass():
    settings = recipe()
    settings.algorithm.whiten = True
    assert passes(settings) == ["advantages", "gradients of 0 with log-probs"]


def test_trajectories_in_several_micro_batches_cost_a_pass_where_a_sum_over_them_matters():
    """Segments of 60 and 50 tokens do not fit one micro-batch of 64."""
    split = {"lengths": (60, 50)}
    settings = recipe(updates=2)
    first, second = "gradients of 0 with log-probs", "gradients of 1"
    assert passes(settings, **split) == ["old_logprobs of 1", first, "sums of 1", second]
    settings.algorithm.loss = "ppo"
    assert passes(settings, **split) == ["old_logprobs of 1", first, second]
    settings.algorithm.correction.level = CorrectionLevel.token
    assert passes(settings, **split) == ["old_logprobs of 1", first, second]
    settings.algorithm.correction.level = CorrectionLevel.sequence
    assert passes(settings, **split) == ["old_logprobs of 1", "sums of 0", first, "sums of 1", second]
    assert passes(settings) == ["old_logprobs of 1", first, second]


@pytest.mark.parametrize(("aggregation", "expected"), [("trajectory", 6), ("token", 54), ("constant", 6 * 320)])
def test_the_denominator_is_that_of_the_aggregation_over_all_groups(aggregation, expected):
    settings, trainers = recipe(), AnsweringTrainers()
    settings.algorithm.aggregation = Aggregation(aggregation)
    settings.rollout.max_trajectory_tokens = 320
    learn(trainers, settings, [*pairs("ab"), trajectory("solved", 1), trajectory("solved", 1)])
    assert trainers.updates[0].denominator == expected
    assert sum(int(batch.mask.sum()) for batch in trainers.updates[0].batches) == 36


def test_the_weight_of_the_entropy_bonus_follows_the_target():
    settings, trainers, state = recipe(), AnsweringTrainers(), RunState()
    settings.algorithm.entropy_coef, settings.algorithm.entropy_step = 0.01, 0.002
    learn(trainers, settings, pairs("a"), state)
    assert state.entropy_weight is None
    settings.algorithm.entropy_target = ENTROPY + 0.1
    for _ in range(2):
        learn(trainers, settings, pairs("a"), state)
    settings.algorithm.entropy_target = ENTROPY - 0.1
    for _ in range(8):
        learn(trainers, settings, pairs("a"), state)
    given = [update.entropy_coef for update in trainers.updates]
    assert given == pytest.approx([0.01, 0.01, 0.012, *(0.014 - 0.002 * n for n in range(8))], abs=1e-12)
    assert state.entropy_weight == 0.0


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


def test_each_update_asks_for_what_lies_elsewhere_where_its_own_trajectories_are_split():
    """One group has trajectories of one segment, the other has trajectories of two micro-batches; each is an update."""
    whole, split = pairs("a"), pairs("b", lengths=(60, 50))
    settings, found = recipe(updates=2), []
    settings.algorithm.correction.level = CorrectionLevel.sequence
    for batch in ([*whole, *split], [*split, *whole]):
        trainers = AnsweringTrainers(drift_of_update=1e-3)
        learn(trainers, settings, batch)
        found.append([what for what in trainers.asked if what.startswith("sums")])
    assert found == [["sums of 1"], ["sums of 0"]]


def test_whole_trajectories_of_the_second_update_need_no_log_probs_anew():
    trainers = AnsweringTrainers(drift_of_update=1e-3)
    learn(trainers, recipe(updates=2), pairs("ab"))
    assert trainers.asked == ["old_logprobs of 1", "gradients of 0 with log-probs", "gradients of 1"]


def test_the_run_stops_at_the_limit_of_updates_skipped_in_a_row():
    state = RunState()
    trainers = AnsweringTrainers(skips=[True] * 3)
    settings = recipe(max_skipped_updates=3)
    for step in (1, 2):
        made, _ = learn(trainers, settings, pairs("a"), state)
        assert made.metrics["train/skipped_steps"] == step
    with pytest.raises(RunError, match="3 optimizer updates in a row had a loss or a gradient that is not finite"):
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
    assert updates == trainers.puts == trainers.updates == trainers.asked == []
    assert step.metrics == {"rollout/zero_variance_fraction": 1.0, "train/skipped_steps": 0}
