"""Advantages by turn against closed forms in float64, and how packing gives them to tokens."""

import math

import numpy as np
import pytest

from slimrl.algorithms.selection import select
from slimrl.algorithms.turn_credit import mixed_reward, stage_weights, turn_returns, weighted
from slimrl.algorithms.turn_states import observed_states
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.credit import CreditConfig, CreditName
from slimrl.data.packing import ADVANTAGES, pack
from slimrl.data.trajectory import Segment, Status, Trajectory

EPS = 1e-6


def segment(turns: list[int], mask: list[bool] | None = None) -> Segment:
    """A segment: a prompt token, then one token per entry, sampled where `mask` says, else where the turn is not -1."""
    count = len(turns) + 1
    sampled = [False, *(mask if mask is not None else [turn >= 0 for turn in turns])]
    return Segment(
        tokens=np.arange(1, count + 1, dtype=np.int32),
        loss_mask=np.array(sampled),
        rollout_logprobs=np.zeros(count, np.float32),
        weight_versions=np.zeros(count, np.int32),
        turn_ids=np.array([-1, *turns], np.int16),
    )


def trajectory(group: str, name: str, reward: float, turn_rewards, states=(), **changes) -> Trajectory:
    given = {"segments": [segment(list(range(len(turn_rewards))))], "status": Status.completed} | changes
    return Trajectory(
        group_id=group, trajectory_id=f"{group}/{name}", reward=reward, turn_rewards=list(turn_rewards),
        turn_states=list(states), **given,
    )  # fmt: skip


def settings(name: str, advantage: str = "grpo", **credit) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage=advantage, credit=CreditConfig(name=CreditName(name), **credit)
    )  # fmt: skip


def by_turn(batch: list[Trajectory], algorithm: AlgorithmConfig, step: int = 1) -> dict[str, list[float]]:
    chosen = select(batch, algorithm, lambda group: True, step=step)
    return {
        t.trajectory_id: own.tolist() for t, own in zip(chosen.trajectories, chosen.turn_advantages or [], strict=True)
    }


def standardised(values: list[float], value: float) -> float:
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return (value - mean) / (std + EPS)


def test_returns_are_discounted_from_each_turn_on_and_the_last_has_the_outcome():
    # G_2 = 0.5 * 4 + 2 * 1 = 4, G_1 = 0.5 * 2 + 0.9 * 4, G_0 = 0.5 * 1 + 0.9 * G_1
    got = turn_returns(1.0, [1, 2, 4], 3, weights=(0.5, 2.0), discount=0.9)
    assert got == pytest.approx([0.5 + 0.9 * (1 + 0.9 * 4), 1 + 0.9 * 4, 4.0])
    assert turn_returns(1.0, [], 3, weights=(1.0, 1.0), discount=0.5) == pytest.approx([0.25, 0.5, 1.0])
    assert turn_returns(1.0, [], 0, weights=(1.0, 1.0), discount=0.5).shape == (0,)


GROUPS = [
    trajectory("a", "0", 1.0, [0.5, 0.0, 1.0]),
    trajectory("a", "1", 0.0, [0.25, 1.0]),
    trajectory("b", "0", 0.0, [1.0]),
    trajectory("a", "2", 0.0, [0.0, 0.5]),
    trajectory("b", "1", 1.0, [0.0]),
]
RETURNS = {"a/0": [0.5 + 0.9 * (0.9 * 2), 0.9 * 2, 2.0], "a/1": [0.25 + 0.9, 1.0], "a/2": [0.45, 0.5]}
"""Those of group a with a discount of 0.9, by hand."""


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_each_turn_is_compared_with_the_same_turn_of_the_group_and_one_alone_has_its_trajectorys_advantage(kind):
    got = by_turn(GROUPS, settings("turn", kind, discount=0.9))

    def expected(values: list[float], value: float) -> float:
        if kind == "grpo":
            return standardised(values, value)
        mean = sum(values) / len(values)
        return (value - mean) * (len(values) / (len(values) - 1) if kind == "rloo" else 1)

    for name, own in RETURNS.items():
        for turn in range(2):
            values = [other[turn] for other in RETURNS.values()]
            assert got[name][turn] == pytest.approx(expected(values, own[turn]), rel=1e-6)
    # Nobody else had a third turn: 1 + 1.5 against 1.25 and 0.5, undiscounted.
    assert got["a/0"][2] == pytest.approx(expected([2.5, 1.25, 0.5], 2.5), rel=1e-6)


@pytest.mark.parametrize("name", ["turn", "gigpo", "trajectory"])
def test_the_order_of_the_trajectories_changes_nothing(name):
    batch = [
        trajectory(t.group_id, t.trajectory_id[2:], t.reward, t.turn_rewards, [f"s{i % 2}" for i in range(t.num_turns)])
        for t in GROUPS
    ]
    algorithm = settings(name, discount=0.9, turn_weights=[1.0, 0.5])
    first, other = by_turn(batch, algorithm), by_turn(batch[::-1], algorithm)
    assert first.keys() == other.keys()
    for one, own in first.items():
        assert own == pytest.approx(other[one], rel=1e-6)


def test_gigpo_adds_the_advantage_among_turns_from_the_same_state_of_the_group():
    """By hand: s occurs in a/0 twice and in a/1, u once in each, v once; group b has the same names and is apart."""
    batch = [
        trajectory("a", "0", 1.0, [0.0, 0.5, 0.0], ["s", "u", "s"]),
        trajectory("a", "1", 0.0, [0.25, 0.0], ["s", "u"]),
        trajectory("a", "2", 0.0, [0.0], ["v"]),
        trajectory("b", "0", 1.0, [0.0], ["s"]),
        trajectory("b", "1", 0.0, [0.0], ["v"]),
    ]
    got = by_turn(batch, settings("gigpo", discount=0.5, step_weight=0.7))
    returns = {"a/0": [0.5 * (0.5 + 0.5 * 1), 0.5 + 0.5 * 1, 1.0], "a/1": [0.25, 0.0]}
    of_s = [returns["a/0"][0], returns["a/0"][2], returns["a/1"][0]]
    of_u = [returns["a/0"][1], returns["a/1"][1]]
    totals = {"a/0": 1.5, "a/1": 0.25, "a/2": 0.0}
    whole = {name: standardised(list(totals.values()), total) for name, total in totals.items()}
    assert got["a/0"] == pytest.approx(
        [whole["a/0"] + 0.7 * standardised(of_s, of_s[0]), whole["a/0"] + 0.7 * standardised(of_u, of_u[0]),
         whole["a/0"] + 0.7 * standardised(of_s, of_s[1])], rel=1e-6,
    )  # fmt: skip
    assert got["a/1"] == pytest.approx(
        [whole["a/1"] + 0.7 * standardised(of_s, of_s[2]), whole["a/1"] + 0.7 * standardised(of_u, of_u[1])], rel=1e-6
    )
    assert got["a/2"] == pytest.approx([whole["a/2"]], rel=1e-6)
    assert got["b/0"] == pytest.approx([standardised([1.0, 0.0], 1.0)], rel=1e-6)


def test_equal_outcomes_teach_if_turns_differ_and_have_zero_variance_if_they_do_not():
    differ = [trajectory("a", "0", 1.0, [1.0, 0.0]), trajectory("a", "1", 1.0, [0.0, 1.0])]
    same = [trajectory("b", str(i), 1.0, [0.1, 0.2]) for i in range(3)]
    chosen = select([*differ, *same], settings("turn", "dr_grpo"), lambda group: True, step=1)
    assert chosen.zero_variance.tolist() == [False, False, True, True, True]
    assert chosen.zero_variance_fraction == 0.5
    assert [own.tolist() for own in chosen.turn_advantages[:2]] == [[0.0, -0.5], [0.0, 0.5]]
    assert np.concatenate(chosen.turn_advantages[2:]) == pytest.approx(np.zeros(6), abs=1e-9)
    assert chosen.advantages == pytest.approx(np.zeros(5), abs=1e-9)


def test_stages_move_from_the_rewards_of_turns_to_the_outcome():
    credit = CreditConfig(process_weights=[0.7, 0.3, 0.0], outcome_weights=[0.3, 0.7, 1.0], stage_starts=[11, 21])
    assert [stage_weights(credit, step) for step in (1, 10, 11, 20, 21, 99)] == [
        (0.7, 0.3), (0.7, 0.3), (0.3, 0.7), (0.3, 0.7), (0.0, 1.0), (0.0, 1.0),
    ]  # fmt: skip
    assert stage_weights(CreditConfig(), 5) == (1.0, 1.0)
    assert mixed_reward(1.0, [0.5, 0.25], (0.7, 0.3)) == pytest.approx(0.3 + 0.7 * 0.75)
    batch = [trajectory("a", "0", 0.0, [1.0]), trajectory("a", "1", 1.0, [0.0])]
    algorithm = AlgorithmConfig(advantage="dr_grpo", credit=credit)
    for step, expected in ((1, 0.2), (11, -0.2), (21, -0.5)):
        found = select(batch, algorithm, lambda group: True, step=step)
        assert found.turn_advantages is None
        assert found.advantages == pytest.approx([expected, -expected], rel=1e-6)


def test_turns_beyond_the_weights_have_the_last_one():
    assert [own.tolist() for own in weighted([np.ones(4), np.ones(1)], [1.0, 0.5])] == [[1, 0.5, 0.5, 0.5], [1]]
    batch = [trajectory("a", "0", 1.0, [0, 0, 0]), trajectory("a", "1", 0.0, [0, 0])]
    got = by_turn(batch, settings("trajectory", "dr_grpo", turn_weights=[1.0, 0.5, 0.25]))
    assert got == {"a/0": [0.5, 0.25, 0.125], "a/1": [-0.5, -0.25]}


def test_advantages_that_the_task_gives_are_used_as_they_are_in_groups_of_any_size():
    alone = trajectory("a", "0", 1.0, [0, 0], advantage=0.25, turn_advantages=[2.0, -1.0])
    useless = trajectory("b", "0", 1.0, [0], advantage=0.0, turn_advantages=[0.0])
    chosen = select([alone, useless], settings("trajectory", "given"), lambda group: True, step=1)
    assert (chosen.advantages.tolist(), chosen.zero_variance.tolist()) == ([0.25, 0.0], [False, True])
    assert chosen.turn_advantages is None
    assert chosen.zero_variance_fraction == 0.5
    assert by_turn([alone, useless], settings("turn", "given")) == {"a/0": [2.0, -1.0], "b/0": [0.0]}
    with pytest.raises(ValueError, match="a/9 has no advantage"):
        select([trajectory("a", "9", 1.0, [0])], settings("trajectory", "given"), lambda group: True, step=1)
    with pytest.raises(ValueError, match="a/9 has no turn_advantages"):
        select([trajectory("a", "9", 1.0, [0])], settings("turn", "given"), lambda group: True, step=1)


def test_gigpo_without_states_is_refused_and_so_is_a_reward_that_is_not_finite():
    with pytest.raises(ValueError, match="b/0 has no turn_states"):
        select([*GROUPS[2:3], *GROUPS[4:]], settings("gigpo"), lambda group: True, step=1)
    broken = [trajectory("a", "0", math.nan, [0]), trajectory("a", "1", 1.0, [0])]
    with pytest.raises(ValueError, match="not finite: a/0"):
        select(broken, settings("turn"), lambda group: True, step=1)


def test_each_sampled_token_gets_the_advantage_of_its_turn_in_every_segment_and_micro_batch():
    """A trajectory of two segments, as agent.history template writes them: the second shows turn 0 as prompt."""
    first = segment([0, 0, 0], [True, True, False])
    second = segment([-1, -1, 1, 1, 1, 2])
    other = segment([0, 0])
    values = [np.float32([1, 2, 3]), np.float32([-4])]
    for budget in (6, 32):
        (batches,) = pack(
            [[first, second], [other]], np.float32([9, 8]), values, budget_tokens=budget, alignment=2, data_parallel=1
        )
        found = {}
        for batch in batches:
            assert batch.added[ADVANTAGES].dtype == np.float32
            assert (batch.added[ADVANTAGES][~batch.mask] == 0).all()
            for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
                here = slice(start, end)
                name = (int(batch.trajectories[batch.trajectory_ids[start]]), int(batch.mask[here].sum()))
                found[name] = batch.added[ADVANTAGES][here][batch.mask[here]].tolist()
        assert found == {(0, 2): [1, 1], (0, 4): [2, 2, 2, 3], (1, 2): [-4, -4]}
    (batches,) = pack([[other]], np.float32([8]), budget_tokens=8, alignment=2, data_parallel=1)
    assert batches[0].added == {}


def test_a_sampled_token_without_a_turn_is_refused():
    with pytest.raises(ValueError, match="a sampled token has turn -1"):
        pack(
            [[segment([-1, 0], [True, True])]], np.float32([1]), [np.float32([1])], budget_tokens=8, alignment=1,
            data_parallel=1,
        )  # fmt: skip


def test_turns_from_the_same_answers_of_tools_have_the_same_state():
    def message(role, content):
        return {"role": role, "content": content}

    shown = [message("user", "q"), message("assistant", "an example"), message("user", "r")]
    one = [*shown, message("assistant", "x"), message("tool", "5"), message("tool", "6"), message("assistant", "y")]
    two = [*shown, message("assistant", "z"), message("tool", "7"), message("assistant", "w"), *one[4:]]
    first, second = observed_states(one, 3, 2), observed_states(two, 3, 3)
    assert first[0] == second[0]
    assert first[1] == second[2]
    assert len({*first, *second}) == 3
    # A last turn that ended within its thinking has no message.
    assert observed_states(one[:-1], 3, 2) == first
    assert observed_states(shown, 3, 1) == first[:1]
