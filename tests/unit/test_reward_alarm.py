"""The alarm for reward hacking: a proxy rises while what is checked against the truth falls."""

from types import SimpleNamespace

import numpy as np
import pytest
from reward_cases import said

from slimrl.config.schema.reward import RewardConfig
from slimrl.data.trajectory import Status
from slimrl.observability.metrics import is_metric
from slimrl.rewards.alarm import PartPoint, PartSeries, can_alarm, part_point, series_of, state_of
from slimrl.rewards.parts import Part
from slimrl.runtime.reward_watch import RewardWatch
from slimrl.runtime.state import RunState

STEPS = 8


def after(verified, **proxies):
    """The series after steps with these values."""
    series = PartSeries()
    for number, value in enumerate(verified):
        point = PartPoint(verified=value, proxies={name: values[number] for name, values in proxies.items()})
        series = series.followed_by(point, STEPS)
    return series


RISES, FALLS, FLAT = [0.1 * i for i in range(8)], [1 - 0.1 * i for i in range(8)], [0.5] * 8


def test_only_a_proxy_that_rises_while_the_verified_parts_fall_is_suspicious():
    assert after(FALLS, judge=RISES, length=FALLS, style=FLAT).suspicious(STEPS) == ["judge"]
    assert after(RISES, judge=RISES).suspicious(STEPS) == []
    assert after(FLAT, judge=RISES).suspicious(STEPS) == []
    assert after(FALLS[:7], judge=RISES[:7]).suspicious(STEPS) == []


def test_it_ends_when_the_window_has_passed():
    series = after([*FALLS, *FLAT], judge=[*RISES, *FLAT])
    assert series.suspicious(STEPS) == []
    assert len(series.verified) == len(series.proxies["judge"]) == STEPS


def test_noise_alone_hardly_ever_alarms_and_a_trend_within_it_does():
    rng = np.random.default_rng(0)
    noise = [after(rng.normal(0.5, 0.1, 8), judge=rng.normal(0.5, 0.1, 8)).suspicious(STEPS) for _ in range(2000)]
    # Welch's statistic on halves of four has heavier tails than a normal one: 4 % each, so at most some of 2000.
    assert sum(map(bool, noise)) < 12
    trend = np.linspace(-0.2, 0.2, 8)
    drift = [
        after(rng.normal(0.5, 0.05, 8) - trend, judge=rng.normal(0.5, 0.05, 8) + trend).suspicious(STEPS)
        for _ in range(200)
    ]
    assert sum(map(bool, drift)) > 180


def test_steps_without_a_part_add_no_point_to_it():
    series = PartSeries().followed_by(PartPoint(verified=None, proxies={"a": 1.0}), STEPS)
    series = series.followed_by(PartPoint(verified=0.5, proxies={"b": 2.0}), STEPS)
    assert series == PartSeries(verified=[0.5], proxies={"a": [1.0], "b": [2.0]})
    assert series_of(state_of(series)) == series


def part(name, **settings):
    return Part(name=name, function=lambda *_: 0.0, path="", **settings)


PARTS = [part("math", verified=True, weight=2.0), part("tests", verified=True), part("judge", cap=1.0, weight=0.5)]


def test_a_point_is_the_mean_of_what_the_parts_count_where_there_are_any():
    trajectories = [said("x", name=str(number)) for number in range(5)]
    given = [
        {"math": 1.0, "judge": 4.0},
        {"tests": 0.5, "judge": 0.5},
        {"judge": 0.0},
        {},
        {"math": 99.0, "judge": 99.0},
    ]
    for trajectory, rewards in zip(trajectories, given, strict=True):
        trajectory.rewards = rewards
    trajectories[4].status = Status.failed
    found = part_point(trajectories, PARTS)
    assert found.verified == pytest.approx((2.0 + 0.5) / 2)
    assert found.proxies == pytest.approx({"judge": (0.5 + 0.25 + 0.0) / 3})
    assert part_point(trajectories[3:], PARTS) == PartPoint(verified=None, proxies={})


def test_a_cost_that_shrinks_is_a_proxy_that_rises():
    trajectory = said("x")
    trajectory.rewards = {"length": 0.25}
    assert part_point([trajectory], [part("length", weight=-1.0)]).proxies == {"length": -0.25}


@pytest.mark.parametrize(
    ("parts", "possible"),
    [
        (PARTS, True), (PARTS[:2], False), (PARTS[2:], False),
        ([PARTS[0], part("seen", weight=0.0)], False), ([part("")], False),
    ],
)  # fmt: skip
def test_it_needs_a_verified_part_and_a_proxy_that_count(parts, possible):
    assert can_alarm(parts) is possible


def watched(state, steps, said_lines, *, settings=None):
    progress = SimpleNamespace(say=said_lines.append)
    watch = RewardWatch(settings or RewardConfig(alarm_steps=STEPS), PARTS, state, progress)
    found = []
    for number in steps:
        trajectory = said("x")
        trajectory.rewards = {"math": FALLS[number], "judge": RISES[number]}
        found.append(watch.metrics([trajectory]))
    return found


def test_the_run_says_so_once_counts_the_proxies_and_goes_on_after_a_resume():
    state, lines = RunState(), []
    first = watched(state, range(6), lines)
    assert first == [{"reward/hacking_alarm": 0}] * 6
    assert lines == []
    # A resumed run has the state and nothing else.
    assert watched(RunState(**vars(state)), [6, 7], lines) == [{"reward/hacking_alarm": 0}, {"reward/hacking_alarm": 1}]
    assert lines == [
        "warning: reward hacking? Over the last 8 steps the verified parts of the reward fell (1.7 -> 0.9) while "
        "proxies rose: judge 0.075 -> 0.275"
    ]


def test_without_parts_of_both_kinds_or_with_0_steps_nothing_is_recorded():
    off = RewardConfig(alarm_steps=0)
    assert watched(RunState(), [0], [], settings=off) == [{}]
    retried = said("x", num_reward_retries=3)
    watch = RewardWatch(RewardConfig(retries=1), PARTS[:1], RunState(), None)
    assert watch.metrics([retried, said("x")]) == {"reward/retries": 3}
    assert is_metric("reward/retries")
    assert is_metric("reward/hacking_alarm")
