"""Which sequences are said to be at fault for an update that is skipped, and what the run does then."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_learner import AnsweringTrainers, learn, pairs, recipe, trajectory

from slimrl.algorithms.not_finite import GIVEN, LOGPROBS, LOSS, OF_TOKENS, Fault, causes, faults_of, narrowed
from slimrl.algorithms.selection import select
from slimrl.base.errors import NotFinite, RunError
from slimrl.data.packing import ADVANTAGES, REFERENCE_LOGPROBS, micro_batches
from slimrl.data.roles import by_role
from slimrl.data.trajectory import read_trajectories
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.not_finite import Owner, Work, owners_of
from slimrl.runtime.packed_updates import make_updates
from slimrl.runtime.state import RunState


def packed(settings=None):
    """The micro-batches of four trajectories of a segment each."""
    settings = settings or recipe()
    selection = select(pairs("ab"), settings.algorithm, lambda group: True, step=1)
    (update,) = make_updates(selection, settings, AnsweringTrainers.layout)
    return micro_batches([update.batch])


def places_of(batch, sequence):
    number = batch.sequences.tolist().index(sequence)
    start, end = batch.cu_seqlens[number : number + 2]
    return start + np.flatnonzero(batch.mask[start:end])


def test_the_first_number_that_is_not_finite_is_the_cause_and_masked_ones_are_none():
    (batch,) = packed()
    zeros = np.zeros(len(batch.tokens), np.float32)
    masked = np.where(batch.mask, zeros, np.nan)
    assert faults_of(batch, {LOGPROBS: masked, LOSS: masked}) == []
    lost, logprobs, loss = zeros.copy(), zeros.copy(), zeros.copy()
    lost[places_of(batch, 1)[-1]] = math.nan
    batch.added[REFERENCE_LOGPROBS] = lost
    logprobs[places_of(batch, 3)[0]] = -math.inf
    for sequence in (0, 1, 3):
        loss[places_of(batch, sequence)] = math.inf
    assert faults_of(batch, {LOGPROBS: logprobs, LOSS: loss}) == [
        Fault(0, LOSS), Fault(1, "the reference's log-probs"), Fault(3, LOGPROBS),
    ]  # fmt: skip


def test_whitening_spreads_what_is_not_finite_and_the_others_are_not_named():
    given, found = [Fault(2, GIVEN)], [Fault(n, OF_TOKENS) for n in range(4)]
    assert causes(given, found, whitened=True) == {2: GIVEN}
    assert causes([], [Fault(0, LOSS), Fault(1, LOGPROBS), *found[2:]], whitened=True) == {1: LOGPROBS}
    assert causes([], [Fault(0, LOSS), Fault(1, LOGPROBS)], whitened=False) == {0: LOSS, 1: LOGPROBS}
    assert causes([], found, whitened=True) == dict(found)


@pytest.mark.parametrize("seed", range(20))
def test_every_part_at_fault_is_found_and_no_other(seed):
    chosen = np.random.default_rng(seed)
    parts = list(range(int(chosen.integers(1, 40))))
    bad = set(chosen.choice(parts, size=min(len(parts), int(chosen.integers(1, 4))), replace=False).tolist())
    asked = []

    def is_finite(some):
        asked.append(some)
        return not bad & set(some)

    assert sorted(part for found in narrowed(parts, is_finite) for part in found) == sorted(bad)
    assert all(len(found) == 1 for found in narrowed(parts, is_finite))
    assert len(asked) <= 2 * 2 * len(bad) * math.ceil(math.log2(len(parts)) if len(parts) > 1 else 1)


def test_parts_that_overflow_together_and_those_for_which_there_is_no_time_stay_together():
    assert narrowed([0, 1, 2, 3], lambda some: not {0, 1} <= set(some)) == [[0, 1]]
    calls = []
    found = narrowed(list(range(64)), lambda some: calls.append(some) or False, most=6)
    assert len(calls) == 6
    assert sorted(part for some in found for part in some) == list(range(64))


class Poisoned(AnsweringTrainers):
    """Its log-probs of a chosen token are not finite."""

    def __init__(self, *tokens: int, value: float = math.nan) -> None:
        super().__init__()
        self.poison, self.value = tokens, value

    def _answer(self, batch):
        found = super()._answer(batch)
        found.logprobs[np.isin(batch.targets, self.poison) & batch.mask] = self.value
        return found


def marked(groups: str, **options):
    """Trajectories whose tokens are their own: those of trajectory n are 100 n and more."""
    made = pairs(groups, **options)
    for number, one in enumerate(made):
        for place, segment in enumerate(one.segments):
            segment.tokens[:] = 100 * number + 10 * place
            segment.rollout_logprobs = np.nan_to_num(segment.rollout_logprobs)
    return made


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_probs_of_the_trainer_that_are_not_finite_skip_the_update_and_are_no_mismatch(value, tmp_path):
    trainers, said, state = Poisoned(110, 300, value=value), [], RunState()
    step, _ = learn(trainers, recipe(), marked("ab", lengths=(12, 12)), state, said=said, folder=RunFolder(tmp_path))
    assert said == [
        "warning: step 4: update 1 of 1 skipped: the log-probs of 2 of 4 trajectories are not finite: "
        "a (a/1) segment 2, b (b/1) segment 1"
    ]
    assert (state.skipped_steps, state.suspects) == (1, ["a", "b"])
    assert step.metrics["mismatch/logprob_abs_mean"] == 0.0
    assert math.isfinite(step.metrics["mismatch/kl_k3"])
    kept = read_trajectories(RunFolder(tmp_path).not_finite_file(4, 1))
    assert [one.trajectory_id for one in kept] == ["a/0", "a/1", "b/0", "b/1"]


def test_where_no_log_prob_is_finite_the_mismatch_is_unknown_and_the_update_is_skipped():
    said = []
    step, _ = learn(AnsweringTrainers(mismatch=math.nan), recipe(), marked("a"), said=said)
    assert math.isnan(step.metrics["mismatch/logprob_abs_mean"])
    assert "the log-probs of 2 of 2 trajectories are not finite: a (a/0), a (a/1)" in said[0]


def test_an_advantage_beyond_32_bits_is_named_with_its_group_alone():
    trajectories, said, settings = marked("ab"), [], recipe()
    settings.algorithm.advantage = "dr_grpo"
    trajectories[1].reward = 1e39
    trainers, state = AnsweringTrainers(skips=[True]), RunState()
    learn(trainers, settings, trajectories, state, said=said)
    assert "skipped: the advantages of 2 of 4 trajectories are not finite: a (a/0), a (a/1)" in said[0]
    assert state.suspects == ["a"]


def test_a_gradient_that_is_not_finite_is_sought_in_the_micro_batches_of_ever_fewer_trajectories():
    trainers, said, settings = AnsweringTrainers(skips=[True]), [], recipe()
    # Segments of 40 tokens: a micro-batch of 64 has one.
    trainers.overflowing = {5}
    _, (update,) = learn(trainers, settings, pairs("abcd", lengths=(40,)), said=said)
    assert said[0].endswith("skipped: the gradients of 1 of 8 trajectories are not finite: c (c/1)")
    assert [len(sequences) for sequences, _ in trainers.gradients] == [8, 4, 4, 2, 2, 1, 1]
    by_place = {int(batch.sequences[0]): place for place, batch in enumerate(micro_batches([update.batch]))}
    for sequences, places in trainers.gradients:
        assert places == sorted(by_place[one] for one in sequences)


def test_segments_of_a_trajectory_are_passed_together_and_a_sum_that_overflows_is_said_to_be_one():
    trainers, said = AnsweringTrainers(skips=[True]), []
    trainers.overflowing_together = {1, 2}
    learn(trainers, recipe(), pairs("a", lengths=(30, 30)), said=said)
    assert [sequences for sequences, _ in trainers.gradients] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert said[0].endswith(
        "skipped: the gradients of some of 2 of 2 trajectories are not finite, or their sum is not: a (a/0), a (a/1)"
    )


def test_a_gradient_that_is_finite_when_it_is_computed_again_is_laid_to_no_trajectory(tmp_path):
    trainers, state, said = AnsweringTrainers(skips=[True]), RunState(), []
    learn(trainers, recipe(), pairs("a", lengths=(30, 30)), state, said=said, folder=RunFolder(tmp_path))
    assert said[0].endswith("skipped: the gradients were not finite, and are finite when they are computed again")
    assert (state.suspects, state.skipped_in_a_row, list(tmp_path.iterdir())) == ([], 1, [])


def test_weights_that_are_not_finite_end_the_run_at_once_and_no_trajectory_is_to_blame(tmp_path):
    trainers, state, said = AnsweringTrainers(mismatch=math.nan), RunState(suspects=["x"]), []
    trainers.bad_weights = [f"decoder.layers.{n}.mlp" for n in range(10)]
    with pytest.raises(NotFinite, match=r"step 4: update 1 of 1: weights are not finite, which no .* and 2 more$"):
        learn(trainers, recipe(), marked("a"), state, said=said, folder=RunFolder(tmp_path))
    assert state.suspects == []
    # Nothing is looked for in the update, and nothing of it is kept.
    assert trainers.asked == ["gradients of 0 with log-probs"]
    assert (said, list(tmp_path.iterdir())) == ([], [])


def test_weights_that_an_update_has_spoiled_are_found_before_the_step_ends():
    trainers = AnsweringTrainers()
    trainers.bad_weights = ["decoder.layers.0.mlp"]
    with pytest.raises(NotFinite, match=r"^step 4: after the updates: weights are not finite, .*: decoder\.layers\.0"):
        learn(trainers, recipe(updates=2), pairs("ab"))
    assert trainers.num_steps == 2


class Walked(list):
    """A list that counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_sequences_are_named_without_a_walk_through_all_others_for_each():
    owners = Walked(Owner(name=f"{number // 2}", item="") for number in range(200))
    owners += [Owner(name="alone", item="")]
    work = Work(number=0, batch=[], owners=owners, loss=None, denominator=1.0, temperature=1.0)
    assert [work.names[number] for number in (0, 1, 198, 199)] == [
        "0 segment 1", "0 segment 2", "99 segment 1", "99 segment 2",
    ]  # fmt: skip
    assert work.names[200] == "alone"
    assert owners.walks <= 2


def test_suspects_are_those_of_the_updates_skipped_in_a_row():
    state, settings = RunState(), recipe(max_skipped_updates=3)
    for tokens, groups in (((0,), "ab"), ((), "c"), ((100,), "de"), ((100, 200), "fg")):
        learn(Poisoned(*tokens), settings, marked(groups), state)
    assert state.suspects == ["d", "f", "g"]
    with pytest.raises(RunError, match="3 optimizer updates in a row had a loss or a gradient that is not finite"):
        learn(Poisoned(0), settings, marked("hi"), state)
    assert state.suspects == ["d", "f", "g", "h"]


def test_a_role_s_part_is_of_its_episode_s_prompt():
    one = replace(
        trajectory("prompt 1", 0), metadata={"roles": {"left": {"train": True, "group": "asked"}}},
        role_rewards={"left": 1.0},
    )  # fmt: skip
    one.segments[0] = replace(one.segments[0], role="left")
    (part,) = by_role([one])
    owners = owners_of(type("Update", (), {"trajectories": [part]}))
    assert [owner.item for owner in owners] == ["prompt 1"]
    assert part.group_id != "prompt 1"


def test_advantages_of_tokens_that_came_with_the_batch_are_those_of_turns():
    (batch,) = packed()
    batch.added[ADVANTAGES] = np.zeros(len(batch.tokens), np.float32)
    batch.added[ADVANTAGES][places_of(batch, 2)] = math.inf
    assert faults_of(batch) == [Fault(2, OF_TOKENS)]
