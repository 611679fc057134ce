"""A step of a policy with a critic, by ranks that only answer: who is asked what, in which order, and what stops it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_learner import AnsweringTrainers, pairs, recipe

from slimrl.algorithms.selection import Selection, select
from slimrl.algorithms.values import value_objective
from slimrl.base.errors import NotFinite, RunError
from slimrl.config.schema.algorithm import KlEstimator, KlPlace
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import micro_batches
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import Status
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.learner import Learner
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step

STEP = 4


class Ranks(AnsweringTrainers):
    """Ranks of the policy or the critic; `calls`, which both share, has what was asked of them, in order.

    What it gives of an update is a text that says so, which the other ranks can only pass on.
    """

    def __init__(self, role: str, calls: list[str], **options) -> None:
        super().__init__(**options)
        self.role, self.calls = role, calls

    def _note(self, call: str) -> None:
        self.calls.append(f"{self.role}: {call}")

    def put_batches(self, updates):
        super().put_batches(updates)
        self._note(f"holds {len(updates)}")

    def _ask(self, what, temperature):
        super()._ask(what, temperature)
        self._note(what)

    def add_advantages(self, settings):
        self._note("own advantages")

    def send(self, update, names, receivers):
        receivers._note(f"gets {self.role}'s {', '.join(names)} of {update} for {update}")

    def step(self, *, skip=False):
        self._note("step")
        return super().step(skip=skip)


class CriticRanks(Ranks):
    """Two data-parallel ranks of a layout of their own. The second update of a step has twice as many tokens."""

    layout = SimpleNamespace(alignment=8, data=2, micro_batch_multiple=1)

    def __init__(self, calls: list[str], **options) -> None:
        super().__init__("critic", calls, **options)
        self.made, self.algorithms, self.critics = [], [], []

    def put_batches(self, updates):
        super().put_batches(updates)
        self.packed = updates or self.packed

    def add_values(self, update):
        self._note(f"values of {update}")

    def estimate(self, update, algorithm, critic):
        self._note(f"estimate of {update}")
        self.critics.append(critic)
        self.algorithms.append(algorithm)

    def accumulate(self, update, loss, *, denominator, temperature):
        self._note(f"update {update}")
        self.made.append((loss.func, loss.keywords, denominator, temperature))
        self.update, self.denominator = update, denominator

    def has_finite_gradient(self, update, loss, denominator, temperature, *, sequences, places):
        assert (loss.func, denominator, temperature) == (value_objective, self.denominator, 1.0)
        return not self.overflowing & set(sequences)

    def step(self, *, skip=False):
        assert not skip
        update, denominator = self.update, self.denominator
        skipped = self.skips.pop(0) if self.skips else False
        tokens = 10.0 * (1 + update)
        sums = {
            "tokens": tokens, "loss": 2.0 + update, "clipped": 3.0, "value": tokens / 2,
            "return": tokens * (1 + update), "return_squared": 100.0, "error_squared": 5.0,
        }  # fmt: skip
        return UpdateResult(
            sums=sums, denominator=denominator, grad_norm=math.nan if skipped else 1.0 + update, skipped=skipped,
            lr=0.5 / (1 + update), num_tokens=100, expert_load_max_over_mean=math.nan, router_entropy=math.nan,
        )  # fmt: skip


def with_critic(updates: int = 1, **critic) -> Recipe:
    made = recipe(updates)
    made.algorithm.advantage, made.algorithm.loss, made.algorithm.skip_zero_variance = "gae", "ppo", False
    made.critic.trainer = replace(made.trainer)
    for name, value in critic.items():
        setattr(made.critic, name, value)
    return made


def chosen(settings: Recipe, trajectories) -> Selection:
    return select(trajectories, settings.algorithm, lambda group: True, step=STEP)


class Run:
    """Both groups of ranks, and the learner that asks them."""

    def __init__(self, settings: Recipe, *, policy_skips=(), critic_skips=(), **policy) -> None:
        self.calls: list[str] = []
        self.policy = Ranks("policy", self.calls, skips=policy_skips, **policy)
        self.critic = CriticRanks(self.calls, skips=critic_skips)
        self.settings, self.state = settings, RunState()
        self.said: list[str] = []
        self.learner = Learner(settings, self.policy, self.state, self.critic, say=self.said.append)

    def step(self, trajectories=None, number: int = STEP, **options) -> Step:
        step = Step(number)
        updates = self.learner.prepare(step, chosen(self.settings, trajectories or pairs("ab")))
        self.learner.compute_inputs(step, updates)
        self.learner.train(step, updates, **options)
        return step


def test_each_update_gets_the_critic_s_advantages_and_the_critic_learns_from_it_before_the_policy():
    run = Run(with_critic(updates=2))
    run.step()
    assert run.calls == [
        "policy: holds 2",
        "critic: holds 2",
        "policy: old_logprobs of 1",
        "critic: values of 0",
        "critic: estimate of 0",
        "policy: gets critic's advantages of 0 for 0",
        "critic: values of 1",
        "critic: estimate of 1",
        "policy: gets critic's advantages of 1 for 1",
        "policy: own advantages",
        "critic: update 0",
        "policy: gradients of 0 with log-probs",
        "policy: step",
        "critic: update 1",
        "policy: gradients of 1",
        "policy: step",
        "policy: holds 0",
        "critic: holds 0",
    ]


def test_with_the_kl_in_the_reward_the_critic_gets_both_log_probs_before_it_estimates():
    settings = with_critic()
    settings.algorithm.kl_coef, settings.algorithm.kl_place = 0.1, KlPlace.reward
    settings.algorithm.kl_estimator = KlEstimator.k1
    run = Run(settings)
    run.step()
    assert run.calls[2:8] == [
        "policy: old_logprobs of 0",
        "policy: reference_logprobs of 0",
        "critic: gets policy's old_logprobs, reference_logprobs of 0 for 0",
        "critic: values of 0",
        "critic: estimate of 0",
        "policy: gets critic's advantages of 0 for 0",
    ]
    # The policy's, which says how much the KL costs.
    assert [algorithm is settings.algorithm for algorithm in run.critic.algorithms] == [True]
    assert [critic is settings.critic for critic in run.critic.critics] == [True]
    # In the loss it is none of the critic's concern.
    settings.algorithm.kl_place = KlPlace.loss
    run = Run(settings)
    run.step()
    assert "policy: reference_logprobs of 0" in run.calls
    assert not [call for call in run.calls if call.startswith("critic: gets")]


def test_the_critic_s_ranks_hold_the_policy_s_sequences_with_their_rewards_packed_for_their_own_layout():
    settings = with_critic(updates=2)
    settings.critic.trainer.max_tokens_per_rank = 16
    run = Run(settings)
    trajectories = pairs("abc")
    for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
        segment.routed_experts = np.zeros((len(segment.tokens), 2, 1), np.int16)
    policy = run.learner.prepare(Step(STEP), chosen(settings, trajectories))
    assert [len(update.batch) for update in policy] == [1, 1]
    assert [len(update) for update in run.critic.packed] == [2, 2]
    for ours, critics in zip(policy, run.critic.packed, strict=True):
        batches, own = micro_batches([critics]), micro_batches([ours.batch])
        assert {len(batch.tokens) for batch in batches} == {16}
        assert max(len(batch.tokens) for batch in own) > 16
        assert sum(batch.mask.sum() for batch in batches) == sum(batch.mask.sum() for batch in own) == ours.num_tokens
        rewards = {int(t): float(r) for b in batches for t, r in zip(b.trajectories, b.advantages, strict=True)}
        assert sorted(rewards.values()) == [0.0] * (len(rewards) // 2) + [1.0] * (len(rewards) // 2)
        # The engine's experts are the policy's alone.
        assert all(batch.routed_experts is None for batch in batches)
        assert all(batch.routed_experts is not None for batch in own)


def test_the_critic_s_loss_is_a_mean_over_the_sampled_tokens_with_its_own_bound():
    run = Run(with_critic(updates=2, value_clip=0.3))
    run.step(pairs("abc"))
    # Of 9 sampled tokens for each trajectory; four trajectories come first.
    assert run.critic.made == [
        (value_objective, {"value_clip": 0.3}, 36, 1.0),
        (value_objective, {"value_clip": 0.3}, 18, 1.0),
    ]


def test_the_critic_s_metrics_are_means_over_the_tokens_of_all_updates():
    step = Run(with_critic(updates=2)).step()
    found = {name: value for name, value in step.metrics.items() if name.startswith("critic/")}
    assert found == {
        "critic/loss": pytest.approx((2 + 3) / 30),
        "critic/clip_fraction": pytest.approx(6 / 30),
        "critic/value_mean": pytest.approx(0.5),
        "critic/return_mean": pytest.approx((10 + 40) / 30),
        "critic/explained_variance": pytest.approx(1 - (10 / 30) / (200 / 30 - (50 / 30) ** 2)),
        "critic/grad_norm": 1.5,
        "critic/lr": 0.25,
    }
    assert step.metrics["policy/grad_norm"] == 2.0
    assert step.metrics["train/lr"] == 0.125


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_in_the_first_steps_the_critic_learns_alone_and_the_mismatch_is_measured_all_the_same(kl_in_reward):
    settings = with_critic(updates=2, warmup_steps=STEP)
    if kl_in_reward:
        settings.algorithm.kl_coef, settings.algorithm.kl_place = 0.1, KlPlace.reward
        settings.algorithm.kl_estimator = KlEstimator.k1
    settings.algorithm.entropy_target, settings.algorithm.entropy_step = 9.0, 0.1
    run = Run(settings, mismatch=0.002)
    step = run.step()
    assert [call for call in run.calls if "update" in call or "step" in call or "gradients" in call] == [
        "critic: update 0",
        "critic: update 1",
    ]
    # One pass for the first update, which would else have been measured with its gradients.
    assert run.calls.count("policy: old_logprobs of 0") == 1
    assert run.calls[-2:] == ["policy: holds 0", "critic: holds 0"]
    assert step.metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.002, rel=1e-3)
    assert step.metrics["policy/entropy"] == pytest.approx(0.25)
    assert step.metrics["critic/grad_norm"] == 1.5
    assert step.metrics["train/skipped_steps"] == 0
    assert not {"policy/loss", "policy/grad_norm", "train/lr"} & set(step.metrics)
    assert run.state.entropy_weight is None
    run.step(number=STEP + 1)
    assert run.policy.num_steps == 2
    assert run.state.entropy_weight == pytest.approx(0.1)


def test_a_mismatch_above_the_limit_stops_a_run_in_its_first_steps_too():
    run = Run(with_critic(warmup_steps=STEP), mismatch=0.011)
    with pytest.raises(RunError, match=r"step 4: trainer and engines disagree by 1\.10e-02 .* is 1\.00e-02"):
        run.step()
    run = Run(with_critic(warmup_steps=STEP), mismatch=0.011)
    assert "critic/loss" in run.step(enforce_limit=False).metrics
    assert run.policy.num_steps == 0


def test_a_critic_whose_updates_are_skipped_too_often_stops_the_run_by_its_own_count_and_limit():
    settings = with_critic()
    settings.trainer.max_skipped_updates, settings.critic.trainer.max_skipped_updates = 2, 3
    run = Run(settings, critic_skips=[True] * 3, policy_skips=[True, False, True])
    assert [run.step().metrics["train/skipped_steps"] for _ in range(2)] == [2, 3]
    assert (run.state.critic_skipped_in_a_row, run.state.skipped_in_a_row) == (2, 0)
    with pytest.raises(RunError) as caught:
        run.step()
    assert str(caught.value) == (
        "3 optimizer updates of the critic in a row had a loss or a gradient that is not finite; "
        "critic.trainer.max_skipped_updates stops the run here"
    )
    # The policy's update of that step was not made.
    assert run.policy.num_steps == 2


def test_updates_of_the_critic_do_not_end_the_policy_s_streak_nor_the_policy_s_the_critic_s():
    settings = with_critic()
    settings.trainer.max_skipped_updates = settings.critic.trainer.max_skipped_updates = 3
    run = Run(settings, critic_skips=[True, False, False, False], policy_skips=[False, True, True, True])
    for _ in range(3):
        run.step()
    assert (run.state.critic_skipped_in_a_row, run.state.skipped_in_a_row) == (0, 2)
    with pytest.raises(RunError, match=r"^3 optimizer updates in a row .*; trainer\.max_skipped_updates stops"):
        run.step()
    assert run.state.skipped_steps == 4


def test_a_step_without_updates_asks_the_critic_nothing_and_has_no_metrics_of_it():
    settings = with_critic()
    settings.algorithm.truncated = TruncationMode.mask
    run, cut = Run(settings), pairs("a")
    for trajectory in cut:
        trajectory.status = Status.truncated
    assert not [name for name in run.step(cut).metrics if name.startswith("critic/")]
    run.step()
    asked = len(run.calls)
    # Nor those of the step before.
    assert not [name for name in run.step(cut).metrics if name.startswith("critic/")]
    assert run.calls[asked:] == []


def test_a_lone_sample_of_a_prompt_is_learned_from_since_it_needs_no_others():
    run = Run(with_critic())
    run.step(pairs("a")[:1])
    assert run.critic.made[0][2] == np.sum(pairs("a")[0].segments[0].loss_mask)
    assert run.policy.num_steps == 1


def test_weights_of_the_critic_that_are_not_finite_end_the_run_also_where_it_learns_alone():
    run = Run(with_critic(warmup_steps=STEP))
    run.critic.bad_weights = ["value_head"]
    with pytest.raises(NotFinite, match=r"^step 4: after the updates of the critic: weights are not finite, .*_head$"):
        run.step()


def test_trajectories_that_the_critic_s_update_could_not_bear_are_named_and_kept_apart_from_the_policy_s(tmp_path):
    run = Run(with_critic(), critic_skips=[True])
    run.learner = Learner(
        run.settings, run.policy, run.state, run.critic, say=run.said.append, folder=RunFolder(tmp_path)
    )
    run.critic.overflowing = {2}
    run.step()
    assert [line.partition(" skipped: ")[0] for line in run.said] == ["warning: step 4: update 1 of 1 of the critic"]
    assert run.said[0].endswith("skipped: the gradients of 1 of 4 trajectories are not finite: b (b/0)")
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["critic_not_finite_000004_1.jsonl"]
    assert run.state.suspects == ["b"]
