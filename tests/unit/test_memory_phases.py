"""Memory that trainer and engines hand to each other: what each holds at every stage, and the most that is held."""

import pytest

from slimrl.data.training import MemoryPart
from slimrl.engines.servers.control import EngineMemory
from slimrl.runtime.cluster.memory_phases import MemoryPhase, MemorySchedule

BYTES = {
    ("engines", "weights"): 20,
    ("engines", "kv_cache"): 50,
    ("engines", "cuda_graph"): 5,
    ("trainer", "weights"): 20,
    ("trainer", "gradients"): 40,
    ("trainer", "optimizer"): 60,
}


ENGINES_ALL = {("engines", part.value) for part in EngineMemory}
TRAINER_ALL = {("trainer", part.value) for part in MemoryPart}


class Memory:
    """A device that both sides use, as a run finds it that starts."""

    def __init__(self, held: set[tuple[str, str]]) -> None:
        self.held = set(held)
        self.most = 0
        self.count()

    def count(self) -> None:
        self.most = max(self.most, sum(BYTES[part] for part in self.held))


class Side:
    def __init__(self, name: str, memory: Memory) -> None:
        self.name, self.memory = name, memory

    def release_memory(self, parts):
        names = {(self.name, part.value) for part in parts}
        assert names <= self.memory.held, "given away twice"
        self.memory.held -= names

    def resume_memory(self, parts):
        names = {(self.name, part.value) for part in parts}
        assert not names & self.memory.held, "taken twice"
        self.memory.held |= names
        self.memory.count()


def hand_over(*, enabled: bool = True) -> tuple[MemorySchedule, Memory]:
    memory = Memory(ENGINES_ALL if enabled else set(BYTES))
    return MemorySchedule(Side("engines", memory), Side("trainer", memory), enabled=enabled), memory


def test_each_stage_has_what_it_works_with():
    over, memory = hand_over()
    over.enter(MemoryPhase.exchange)
    assert memory.held == {("engines", "weights"), ("trainer", "weights")}
    over.enter(MemoryPhase.rollout)
    assert memory.held == ENGINES_ALL
    over.enter(MemoryPhase.train)
    assert memory.held == TRAINER_ALL
    over.enter(MemoryPhase.save)
    assert memory.held == {("engines", "weights"), ("trainer", "weights"), ("trainer", "optimizer")}
    over.enter(MemoryPhase.replace)
    assert memory.held == {("engines", "weights")}


def test_no_more_is_held_than_the_largest_stage_needs():
    over, memory = hand_over()
    for _ in range(2):
        for stage in (
            MemoryPhase.exchange,
            MemoryPhase.replace,
            MemoryPhase.exchange,
            MemoryPhase.rollout,
            MemoryPhase.train,
            MemoryPhase.save,
        ):
            over.enter(stage)
    assert memory.most == sum(BYTES[part] for part in TRAINER_ALL) == 120


@pytest.mark.parametrize("stage", list(MemoryPhase))
def test_a_stage_entered_again_moves_nothing(stage):
    over, memory = hand_over()
    over.enter(stage)
    before = set(memory.held)
    over.enter(stage)
    assert memory.held == before


def test_memory_of_ones_own_stays_where_it_is():
    over, memory = hand_over(enabled=False)
    for stage in MemoryPhase:
        over.enter(stage)
    assert memory.held == set(BYTES)


@pytest.mark.parametrize("phase", MemoryPhase)
def test_another_trainer_starts_on_devices_that_hold_nothing_whenever_the_one_before_has_ended(phase: MemoryPhase):
    over, memory = hand_over()
    over.enter(phase)
    # The trainer ends, with all that it held.
    memory.held = {part for part in memory.held if part[0] == "engines"}
    with over.trainer_starts():
        assert memory.held == set()
        memory.held |= TRAINER_ALL
    assert memory.held == ENGINES_ALL
    over.enter(MemoryPhase.train)
    assert memory.held == TRAINER_ALL
