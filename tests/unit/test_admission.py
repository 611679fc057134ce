"""Admission of groups: closed cases, and random orders of events against a history that the test keeps by itself.

The random orders are adversarial: groups that began late end first, so that old ones stay behind.
"""

import json
import random
from dataclasses import dataclass, field

import pytest

from slimrl.config.schema.rollout import TooOld
from slimrl.rollout.admission import Admission

SEEDS = range(80)
LAST_VERSION = 12
MIN_EVENTS = 10_000
"""Over all seeds, under each `too_old`"""


def admission(**settings) -> Admission:
    given = {"batch": 2, "max_running": 100, "max_staleness": 1, "too_old": TooOld.drop, "last_version": 100}
    return Admission(**{**given, **settings})


def drawn(seed: int, too_old: TooOld) -> Admission:
    rng = random.Random(seed)
    return admission(
        batch=rng.randint(1, 5),
        max_running=rng.choice([1, 2, 7, 100]),
        max_staleness=rng.choice([0, 1, 1, 2, 4, 8]),
        too_old=too_old,
        last_version=LAST_VERSION,
    )


@dataclass
class History:
    """What happened, told apart from the object that is tested."""

    version: int = 0
    lowest: dict[int, int] = field(default_factory=dict)
    """By a group's number; of a running one the version when it began"""
    place: dict[int, str] = field(default_factory=dict)
    """running, waiting, taken, filtered, failed or dropped"""
    ages: list[int] = field(default_factory=list)
    """Ages of the groups that were trained on, at their update"""
    is_training: bool = False

    def in_place(self, place: str) -> list[int]:
        return [number for number, now in self.place.items() if now == place]


def possible(state: Admission, history: History) -> list[str]:
    events = ["begin"] * 4 if state.capacity else []
    events += ["finish"] * 4 + ["filtered", "failed"] if history.in_place("running") else []
    if history.is_training:
        events += ["advance"] * 2
    elif state.is_ready:
        events += ["take"] * 2
    return events


def apply(event: str, state: Admission, history: History, rng: random.Random) -> None:
    if event == "begin":
        number = state.begin()
        assert number == len(history.place)
        history.place[number], history.lowest[number] = "running", history.version
    elif event in ("finish", "filtered", "failed"):
        running = history.in_place("running")
        number = running[-1] if rng.random() < 0.7 else rng.choice(running)
        if event == "finish":
            history.lowest[number] = rng.randint(history.lowest[number], history.version)
            state.finish(number, history.lowest[number])
            history.place[number] = "waiting"
        else:
            state.leave(number, event)
            history.place[number] = event
    elif event == "take":
        waiting = sorted(history.in_place("waiting"), key=lambda number: (history.lowest[number], number))
        taken = state.take()
        assert taken == waiting[: state.batch]
        for number in taken:
            history.place[number] = "taken"
            history.ages.append(history.version - history.lowest[number])
        history.is_training = True
    else:
        history.version += 1
        history.is_training = False
        too_old = [
            number
            for number, place in history.place.items()
            if place in ("running", "waiting") and history.version - history.lowest[number] > state.max_staleness
        ]
        dropped = state.advance()
        assert dropped == (too_old if state.too_old is TooOld.drop else [])
        for number in dropped:
            history.place[number] = "dropped"


def check(state: Admission, history: History) -> None:
    """What holds at every moment."""
    assert state.counts == {
        place: len(history.in_place(place))
        for place in ("running", "waiting", "taken", "filtered", "failed", "dropped")
    }
    assert sum(state.counts.values()) == state.begun
    running, waiting = state.counts["running"], state.counts["waiting"]
    ahead = (state.max_staleness + history.version + 1) * state.batch
    assert 0 <= state.capacity <= state.max_running - running
    assert state.counts["taken"] + waiting + running + state.capacity <= min(ahead, state.last_version * state.batch)
    assert state.version == history.version


@pytest.mark.parametrize("too_old", TooOld)
def test_random_orders_of_events_keep_counts_and_ages(too_old):
    events = 0
    for seed in SEEDS:
        rng, state, history = random.Random(seed), drawn(seed, too_old), History()
        while choices := possible(state, history):
            apply(rng.choice(choices), state, history, rng)
            check(state, history)
            events += 1
        assert history.version == LAST_VERSION, "nothing can happen, and the run has not ended"
        assert state.counts["taken"] == LAST_VERSION * state.batch
        if too_old is not TooOld.train:
            assert max(history.ages) <= state.max_staleness
        if too_old is not TooOld.drop:
            assert state.counts["dropped"] == 0
    assert events >= MIN_EVENTS


@pytest.mark.parametrize("too_old", TooOld)
def test_a_restored_state_goes_on_as_the_one_that_was_not_interrupted(too_old):
    events = 0
    for seed in SEEDS:
        state, history = drawn(seed, too_old), History()
        other, other_history = drawn(seed, too_old), History()
        rng, other_rng, interruptions = random.Random(seed), random.Random(seed), random.Random(-seed)
        while choices := possible(state, history):
            if interruptions.random() < 0.2:
                saved = json.loads(json.dumps(other.state()))
                other = drawn(seed, too_old)
                other.restore(saved)
            assert possible(other, other_history) == choices
            event = rng.choice(choices)
            assert other_rng.choice(choices) == event
            apply(event, state, history, rng)
            apply(event, other, other_history, other_rng)
            assert other == state
            events += 1
        assert other_history == history
    assert events >= MIN_EVENTS


def test_without_staleness_it_is_the_synchronous_schedule():
    state = admission(max_staleness=0, batch=3, last_version=2)
    for version in range(2):
        begun = []
        while state.capacity:
            begun.append(state.begin())
        assert begun == [3 * version, 3 * version + 1, 3 * version + 2]
        for number in reversed(begun):
            assert not state.is_ready
            state.finish(number, version)
        assert state.take() == begun
        assert state.capacity == 0, "no group begins while the trainer works"
        assert state.advance() == []
    assert state.capacity == 0, "the run has ended"


def test_no_more_groups_run_than_may():
    state = admission(max_running=3)
    numbers = [state.begin() for _ in range(3)]
    assert state.capacity == 0
    state.finish(numbers[1], 0)
    assert state.capacity == 1


@pytest.mark.parametrize("end", ["filtered", "failed"])
def test_another_group_begins_in_the_place_of_one_that_is_not_trained_on(end):
    state = admission(max_staleness=0)
    state.begin()
    number = state.begin()
    assert state.capacity == 0
    state.leave(number, end)
    assert state.capacity == 1
    assert state.counts == {"running": 1, "waiting": 0, "taken": 0, "dropped": 0, "filtered": 0, "failed": 0} | {end: 1}


def test_a_group_is_as_old_as_the_lowest_version_of_its_tokens_and_not_as_its_begin():
    state = admission(batch=1)
    slow, late = state.begin(), state.begin()
    state.finish(late, 0)
    state.take()
    state.advance()
    third = state.begin()
    state.finish(slow, 1)
    state.finish(third, 1)
    assert state.take() == [slow]
    assert state.advance() == [], "its first token was sampled one update later than it began"


def test_groups_that_are_too_old_are_dropped_whether_they_run_or_wait():
    state = admission(batch=1, max_staleness=2)
    first, waits, runs = state.begin(), state.begin(), state.begin()
    state.finish(first, 0)
    assert state.take() == [first]
    assert state.advance() == []
    state.finish(waits, 0)
    newer = state.begin()
    state.finish(newer, 1)
    assert state.take() == [waits], "the older one, though both wait"
    assert state.advance() == []
    assert state.take() == [newer]
    assert state.advance() == [runs]
    waits, other = state.begin(), state.begin()
    for number in (waits, other, third := state.begin()):
        state.finish(number, 3)
    for taken, dropped in ((waits, []), (other, []), (third, [])):
        assert state.take() == [taken]
        assert state.advance() == dropped
    assert state.counts == {"running": 0, "waiting": 0, "taken": 6, "filtered": 0, "failed": 0, "dropped": 1}


def test_a_waiting_group_of_an_old_version_is_dropped_too():
    state = admission(batch=1, max_staleness=0)
    state.begin()
    state.restore(state.state() | {"waiting": [[0, 0]], "running": []})
    assert state.advance() == [0]


def test_under_wait_a_batch_leaves_room_for_the_old_groups_that_still_run():
    # Two groups of version 0 may each be taken at version 2 at the latest, where one batch has room for one of them.
    state = admission(batch=1, max_staleness=2, too_old=TooOld.wait)
    slow, slower, first = state.begin(), state.begin(), state.begin()
    state.finish(first, 0)
    assert state.take() == [first]
    state.advance()
    state.finish(state.begin(), 1)
    assert not state.is_ready, "the newer group would take the place of an old one"
    state.finish(slow, 0)
    assert state.take() == [slow]
    state.advance()
    assert not state.is_ready
    state.finish(slower, 0)
    assert state.take() == [slower]
    assert state.age(0) == 2


def test_under_train_no_group_is_too_old():
    state = admission(batch=1, too_old=TooOld.train)
    slow = state.begin()
    for version in range(5):
        state.finish(state.begin(), version)
        assert state.take() != [slow]
        assert state.advance() == []
    state.finish(slow, 0)
    assert state.take() == [slow]
    assert state.age(0) == 5


def test_no_group_begins_that_the_run_would_not_take():
    state = admission(max_staleness=8, last_version=3)
    while state.capacity:
        state.begin()
    assert state.begun == 6


def test_a_run_that_begins_at_a_later_version_counts_the_earlier_groups_as_taken():
    state = admission()
    state.skip(7)
    assert (state.version, state.begun, state.counts["taken"]) == (7, 14, 14)
    assert state.capacity == 4
    assert state.begin() == 14


def test_tokens_of_the_next_version_are_of_age_0():
    state = admission()
    state.skip(3)
    assert [state.age(lowest) for lowest in (1, 3, 4)] == [2, 0, 0]


def restored(state: Admission, **settings) -> tuple[Admission, list[int]]:
    """The admission of a run that continues with other settings, and the groups that it drops."""
    other = admission(**settings)
    other.restore(json.loads(json.dumps(state.state())))
    return other, other.refit()


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_run_that_continues_with_other_batches_is_as_far_ahead_as_before(batch):
    state = admission()
    state.skip(10)
    other, dropped = restored(state, batch=batch)
    assert (other.capacity, dropped) == (2 * batch, [])


@pytest.mark.parametrize(
    ("too_old", "dropped"), [(TooOld.drop, [0, 1]), (TooOld.wait, [0, 1, 4, 5]), (TooOld.train, [])]
)
def test_a_run_that_continues_with_a_smaller_bound_drops_what_no_batch_may_take(too_old, dropped):
    state = admission(max_staleness=3)
    ages = {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    state.version, state.begun, state.ended["taken"] = 5, 16, 10
    state.waiting = {number: 5 - age for number, age in ages.items() if number % 2}
    state.running = {number: 5 - age for number, age in ages.items() if not number % 2}
    other, found = restored(state, max_staleness=1, too_old=too_old)
    assert (found, other.counts["dropped"]) == (dropped, len(dropped))
    assert sum(other.counts.values()) == other.begun
    if too_old is TooOld.wait:
        other.finish(2, 4)
        assert other.is_ready
