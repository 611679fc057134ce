"""A run as discrete events, with the admission of a real one (slimrl/rollout/admission.py).

1. A group begins when admission has capacity and a slot for a trajectory is free, as in the rollout service. Each of
   its trajectories takes a slot until it ends; in a turn it decodes in an engine, then waits for its tool.
2. The trainer waits for a batch, takes it, trains for `train_s` and sends the weights for `resync_s`, in which the
   engines pause and tools go on. With `one_step_off` it first waits until no group runs and none may begin.
3. `sync` is a staleness of 0: the groups of the next step begin when the weights have changed.

The next event is the earliest of the heap's, which have fixed times, and the engines', whose next end moves whenever
the number of sequences changes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from math import inf

from slimrl.config.schema.rollout import RolloutMode
from slimrl.estimates.simulator.cluster import Cluster
from slimrl.estimates.simulator.engines import Engines
from slimrl.estimates.simulator.outcome import Outcome
from slimrl.estimates.simulator.schedule import Schedule
from slimrl.estimates.simulator.workload import GroupWork, Turn, Workload
from slimrl.rollout.admission import Admission


class Trainer(Enum):
    waits = "waits"
    trains = "trains"
    drains = "drains"
    sends = "sends"


@dataclass(eq=False, slots=True)
class Group:
    number: int
    work: GroupWork
    running: int
    """Number of the group's trajectories that have not ended"""
    in_slots: set["Trajectory"] = field(default_factory=set)
    """Trajectories of the group that have begun and not ended"""
    lowest: int | None = None
    """Version of the weights that sampled the group's first token; None before it"""
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class Trajectory:
    group: Group
    turns: Sequence[Turn]
    turn: int = 0
    begun: float = 0.0
    has_ended: bool = False


class Simulation:
    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        schedule: Schedule,
        *,
        batch: int,
        steps: int,
        warm_up: int = 0,
        deadline_s: float = inf,
    ) -> None:
        """
        Args:
            batch: groups of a step.
            steps: to measure.
            warm_up: steps before them.
            deadline_s: of a trajectory.
        """
        self._cluster, self._workload, self._schedule, self._deadline_s = cluster, workload, schedule, deadline_s
        self._warm_up, self._last = warm_up, warm_up + steps
        self._admission = Admission(
            batch=batch,
            max_running=cluster.slots,
            max_staleness=schedule.max_staleness,
            too_old=schedule.too_old,
            # Engines work as if the run went on.
            last_version=self._last + schedule.max_staleness + 1,
        )
        self._engines: Engines[Trajectory] = Engines(cluster.decoding, cluster.step_s, self._note_version)
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._slots = cluster.slots
        """Number of free slots"""
        self._queue: deque[Trajectory] = deque()
        self._groups: dict[int, Group] = {}
        """Groups that run or wait, by number"""
        self._trainer = Trainer.waits
        self._outcome = Outcome()

    def run(self) -> Outcome:
        while self._admission.version < self._last:
            self._begin_groups()
            self._move_trainer()
            self._next_event()
        self._outcome.steps = self._last - self._warm_up
        return self._outcome

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        """Plan an event after so many seconds from now."""
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event))

    def _next_event(self) -> None:
        engines_s = self._engines.seconds_to_end()
        heap_s = self._events[0][0] - self._now if self._events else inf
        assert min(engines_s, heap_s) < inf, "nothing can happen any more"
        self._elapse(min(engines_s, heap_s))
        if engines_s <= heap_s:
            self._end_turn(self._engines.pop())
        else:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _elapse(self, seconds: float) -> None:
        cluster, outcome = self._cluster, self._outcome
        busy = cluster.num_engines if self._engines.is_paused else min(cluster.num_engines, self._engines.num_decoding)
        outcome.seconds += seconds
        outcome.engines_busy_s += seconds * busy / cluster.num_engines
        outcome.slots_used_s += seconds * (1 - self._slots / cluster.slots)
        if self._trainer in (Trainer.trains, Trainer.sends):
            outcome.trainer_busy_s += seconds
        self._engines.elapse(seconds)
        self._now += seconds

    def _begin_groups(self) -> None:
        while self._admission.capacity and self._slots:
            number = self._admission.begin()
            work = self._workload.group(number)
            group = Group(number, work, running=len(work.trajectories))
            self._groups[number] = group
            self._queue.extend(Trajectory(group, turns) for turns in work.trajectories)
            self._fill_slots()

    def _fill_slots(self) -> None:
        while self._slots and self._queue:
            trajectory = self._queue.popleft()
            if trajectory.group.is_dropped:
                continue
            self._slots -= 1
            trajectory.group.in_slots.add(trajectory)
            trajectory.begun = self._now
            if self._deadline_s < inf:
                self._at(self._deadline_s, partial(self._abort, trajectory))
            self._begin_turn(trajectory)

    def _note_version(self, trajectory: Trajectory) -> None:
        if trajectory.group.lowest is None:
            trajectory.group.lowest = self._admission.version

    def _begin_turn(self, trajectory: Trajectory) -> None:
        self._engines.submit(trajectory, trajectory.turns[trajectory.turn].tokens)

    def _end_turn(self, trajectory: Trajectory) -> None:
        tool_s = trajectory.turns[trajectory.turn].tool_s
        if tool_s:
            self._at(tool_s, partial(self._end_tool, trajectory))
        else:
            self._end_tool(trajectory)

    def _end_tool(self, trajectory: Trajectory) -> None:
        if trajectory.has_ended:
            return
        trajectory.turn += 1
        if trajectory.turn < len(trajectory.turns):
            self._begin_turn(trajectory)
        else:
            self._end(trajectory)

    def _abort(self, trajectory: Trajectory) -> None:
        if not trajectory.has_ended:
            self._outcome.aborted += 1
            self._engines.cancel(trajectory)
            self._end(trajectory)

    def _end(self, trajectory: Trajectory) -> None:
        self._leave_slot(trajectory)
        self._outcome.durations_s.append(self._now - trajectory.begun)
        group = trajectory.group
        group.running -= 1
        if not group.running:
            self._end_group(group)
        self._fill_slots()

    def _end_group(self, group: Group) -> None:
        if group.work.end == "finished":
            if group.lowest is None:
                # All deadlines came before a token was sampled.
                group.lowest = self._admission.version
            self._admission.finish(group.number, group.lowest)
        else:
            self._admission.leave(group.number, group.work.end)
            del self._groups[group.number]

    def _leave_slot(self, trajectory: Trajectory) -> None:
        trajectory.has_ended = True
        trajectory.group.in_slots.discard(trajectory)
        self._slots += 1

    def _move_trainer(self) -> None:
        if self._trainer is Trainer.waits and self._admission.is_ready:
            self._take()
        if self._trainer is Trainer.drains and self._may_send:
            self._trainer = Trainer.sends
            self._engines.pause()
            self._at(self._cluster.resync_s, self._end_resync)

    def _take(self) -> None:
        for number in self._admission.take():
            group = self._groups.pop(number)
            assert group.lowest is not None
            self._outcome.ages[self._admission.age(group.lowest)] += 1
            self._outcome.trajectories += len(group.work.trajectories)
        self._trainer = Trainer.trains
        self._at(self._cluster.train_s, self._end_training)

    def _end_training(self) -> None:
        self._trainer = Trainer.drains

    @property
    def _may_send(self) -> bool:
        if self._schedule.mode is not RolloutMode.one_step_off:
            return True
        return not self._admission.running and not self._admission.capacity

    def _end_resync(self) -> None:
        self._trainer = Trainer.waits
        dropped = self._admission.advance()
        for number in dropped:
            self._drop(self._groups.pop(number))
        self._engines.resume()
        self._outcome.dropped += len(dropped)
        if self._admission.version == self._warm_up:
            self._outcome = Outcome()
        self._fill_slots()

    def _drop(self, group: Group) -> None:
        group.is_dropped = True
        for trajectory in list(group.in_slots):
            self._engines.cancel(trajectory)
            self._leave_slot(trajectory)
