"""When the memory of an isolated run is measured, and when a cheap bound is enough."""

from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox.inside import memory
from slimrl.agent.sandbox.inside.memory import RunMemory
from slimrl.agent.sandbox.inside.processes import Process

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB


class Processes:
    """Two processes with 1 MiB of private memory each, of which this notes what is done to them."""

    def __init__(self, clock, look_s=0.0):
        self.clock, self.look_s, self.done = clock, look_s, []

    def found(self):
        self.clock.now += self.look_s
        one = Process(path="", state="R", faults=0, cpu_ticks=0, priority=19)
        return {(name, "0"): one for name in "12"}

    def signal(self, name, number):
        self.done.append((name, number.name))
        self.found = lambda: {(name, "0"): SimpleNamespace(path="", state="T", faults=0, cpu_ticks=0) for name in "12"}

    def read(self, path):
        self.done.append(path)
        return "0-1\nPss_Anon: 1024 kB\n" if path.endswith("smaps_rollup") else "VmPTE: 0 kB\n"

    def yield_to_others(self, found):
        pass

    def without_sharers(self, places):
        return list(places)

    def num_private_pages(self, one):
        return 256

    def tmpfs(self):
        return 0, 0

    def num_sockets(self):
        return 0

    def entries(self, path):
        return []

    def count_lines(self, path, most):
        return 0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(memory, "time", clock)
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 2)
    return clock


def test_a_look_in_time_measures_nothing_and_the_next_comes_before_half_of_what_is_left_can_be_taken(clock):
    processes = Processes(clock)
    run = RunMemory(processes, LIMIT_BYTES, 0, 32)
    assert run.next_look_s == pytest.approx(LIMIT_BYTES / 2 / (2 * memory.BYTES_PER_S))
    clock.now += run.next_look_s
    assert not run.exceeds()
    assert processes.done == []
    assert run.next_look_s < LIMIT_BYTES / 2 / (2 * memory.BYTES_PER_S)


@pytest.mark.parametrize(
    ("late_s", "look_s"), [(LIMIT_BYTES / (2 * memory.BYTES_PER_S), 0.0), (0.0, 0.05)], ids=["late", "slow"]
)
def test_a_late_or_slow_look_stops_the_processes_before_it_measures(clock, late_s, look_s):
    processes = Processes(clock, look_s)
    run = RunMemory(processes, LIMIT_BYTES, 0, 32)
    clock.now += run.next_look_s + late_s
    assert not run.exceeds()
    assert processes.done[:2] == [("1", "SIGSTOP"), ("2", "SIGSTOP")]
    assert processes.done[2].endswith("smaps_rollup")
    assert processes.done[-2:] == [("1", "SIGCONT"), ("2", "SIGCONT")]
