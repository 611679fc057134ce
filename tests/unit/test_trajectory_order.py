"""The order in which trajectories begin: closed cases, and how long rollouts of correlated lengths take."""

import heapq
import math
import random
from statistics import mean

import pytest

from slimrl.rollout.start_order import StartOrder

SEEDS = range(40)


def group_of(groups: int, samples: int) -> dict[str, str]:
    return {f"{group}/{sample}": f"{group}" for group in range(groups) for sample in range(samples)}


def test_each_group_is_probed_first_and_then_the_longest_go_on():
    order = StartOrder(group_of(3, 3), long_first=True)
    assert [order.begin(now) for now in (0.0, 1.0, 2.0)] == ["0/0", "1/0", "2/0"]
    order.end("1/0", 9.0)
    # 10, 8 and 8 seconds so far, two of them of trajectories that still run.
    assert order.begin(10.0) == "0/1"
    order.end("0/0", 10.5)
    # 10.5, 8 and 10 seconds: the group's longest counts, not its latest.
    order.end("0/1", 11.0)
    assert order.begin(12.0) == "0/2"
    # The one of group 2 is now longer than what group 1 has shown.
    assert [order.begin(12.0) for _ in range(4)] == ["2/1", "2/2", "1/1", "1/2"]


def test_without_long_first_all_begin_in_order():
    groups = group_of(5, 4)
    order, rng = StartOrder(groups, long_first=False), random.Random(0)
    begun, running = [], []
    for now in range(len(groups)):
        begun.append(order.begin(float(now)))
        running.append(begun[-1])
        if rng.random() < 0.7:
            order.end(running.pop(rng.randrange(len(running))), float(now))
    assert begun == list(groups)


def test_groups_that_are_alike_go_on_in_order():
    order = StartOrder(group_of(3, 2), long_first=True)
    assert [order.begin(0.0) for _ in range(6)] == ["0/0", "1/0", "2/0", "0/1", "1/1", "2/1"]


def lengths(rng: random.Random, groups: dict[str, str], between: float, within: float) -> dict[str, float]:
    """Log-normal, with standard deviations of the logarithm between groups and within them; at most 16 medians."""
    of_group = {group: rng.gauss(0, between) for group in groups.values()}
    return {one: min(16.0, math.exp(of_group[group] + rng.gauss(0, within))) for one, group in groups.items()}


def seconds(order: StartOrder, took: dict[str, float], slots: int) -> tuple[float, list[str]]:
    """Seconds that a rollout with this many slots takes, and the order in which its trajectories began."""
    running: list[tuple[float, str]] = []
    begun, now = [], 0.0
    for _ in took:
        if len(running) == slots:
            now, ended = heapq.heappop(running)
            order.end(ended, now)
        begun.append(order.begin(now))
        heapq.heappush(running, (now + took[begun[-1]], begun[-1]))
    while running:
        now, ended = heapq.heappop(running)
        order.end(ended, now)
    return now, begun


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trajectory_begins_once_the_probes_first_and_no_slot_is_idle(seed: int):
    rng = random.Random(seed)
    groups = group_of(rng.randint(1, 20), rng.randint(1, 9))
    took = lengths(rng, groups, rng.choice([0.0, 1.5]), 0.7)
    slots = rng.randint(1, len(groups))
    total, begun = seconds(StartOrder(groups, long_first=True), took, slots)
    assert sorted(begun) == sorted(groups)
    num_groups = len(set(groups.values()))
    assert begun[:num_groups] == [f"{group}/0" for group in range(num_groups)]
    # What any order without idle slots takes at most (Graham's bound).
    assert total <= sum(took.values()) / slots + max(took.values()) + 1e-9


def test_a_rollout_of_groups_with_long_and_short_ones_ends_earlier():
    ratios: dict[float, list[float]] = {0.0: [], 1.0: []}
    for between, found in ratios.items():
        for seed in SEEDS:
            groups = group_of(64, 8)
            took = lengths(random.Random(seed), groups, between, 0.5)
            ours, in_order = (seconds(StartOrder(groups, long_first=first), took, 64)[0] for first in (True, False))
            found.append(ours / in_order)
    # The figures of docs/async.md.
    assert mean(ratios[1.0]) == pytest.approx(0.83, abs=0.01)
    # Where groups tell nothing, nothing is lost.
    assert mean(ratios[0.0]) == pytest.approx(1.0, abs=0.01)
