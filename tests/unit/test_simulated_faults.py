"""10,000 faults on the state machines of an asynchronous run: admission of groups, and the choice of engines.

Engines end, hang and come back, tools fail, and the run is killed and goes on from what it saved, in random orders.
Time does not exist: any event that is possible may be the next one.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

from slimrl.config.schema.rollout import TooOld
from slimrl.data.engine import GenerateRequest
from slimrl.engines.load_balancing import EngineChoice
from slimrl.rollout.admission import Admission

SEEDS = range(70)
FAULTS = ("dies", "hangs", "tool fails", "killed")
MIN_FAULTS = 10_000
LAST_VERSION, SAMPLES = 30, 3


@dataclass(eq=False)
class Trajectory:
    group: int
    name: str
    turns: int
    """That are left"""
    engine: str | None = None
    """Engine of its running request"""
    asks: bool = True
    """It has a request, which may wait for an engine; else its tool runs"""
    version: int = 0
    """When its request was begun"""
    lowest: int | None = None
    failed: bool = False


@dataclass
class Run:
    """The run around the state machines; `ended` counts how often each group left."""

    rng: random.Random
    too_old: TooOld
    staleness: int
    admission: Admission = field(init=False)
    choice: EngineChoice = field(default_factory=EngineChoice)
    running: dict[int, list[Trajectory]] = field(default_factory=dict)
    """Trajectories of each running group that have not ended"""
    ended: dict[int, list[Trajectory]] = field(default_factory=dict)
    """Those that have"""
    live: list[str] = field(default_factory=list)
    """Engines that serve"""
    down: set[str] = field(default_factory=set)
    left: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    is_training: bool = False

    def __post_init__(self) -> None:
        self.engines = [f"http://{number}" for number in range(self.rng.randint(1, 4))]
        self.admission = self.fresh_admission()
        self.use(self.engines)

    def fresh_admission(self) -> Admission:
        return Admission(
            batch=2, max_running=6, max_staleness=self.staleness, too_old=self.too_old, last_version=LAST_VERSION
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for group in self.running.values() for each in group]

    def request(self, trajectory: Trajectory) -> GenerateRequest:
        return GenerateRequest(
            session_id=trajectory.name, input_ids=[trajectory.group], temperature=1.0, top_p=1.0, top_k=-1,
            max_new_tokens=8, stop_token_ids=(), timeout_s=1.0,
        )  # fmt: skip

    def possible(self) -> list[str]:
        events = ["begin"] * 3 if self.admission.capacity else []
        if any(each.engine for each in self.trajectories):
            events += ["answers"] * 6
        if any(not each.asks for each in self.trajectories):
            events += ["tool ends"] * 4 + ["tool fails"]
        if self.is_training:
            events += ["advance"] * 2
        elif self.admission.is_ready:
            events += ["take"] * 3
        elif self.down and not self.live:
            events += ["serves again"]
        return events + (["dies", "hangs"] if self.live else []) + (["killed"] if self.rng.random() < 0.3 else [])

    def apply(self, event: str) -> None:
        if event in FAULTS:
            self.faults[event] += 1
        if event == "begin":
            number = self.admission.begin()
            self.start(number)
        elif event == "answers":
            self.answer(self.rng.choice([each for each in self.trajectories if each.engine]))
        elif event in ("tool ends", "tool fails"):
            trajectory = self.rng.choice([each for each in self.trajectories if not each.asks])
            if event == "tool fails":
                self.end(trajectory, failed=True)
            else:
                trajectory.asks = True
        elif event == "take":
            self.leave(self.admission.take())
            self.is_training = True
        elif event == "advance":
            dropped = self.admission.advance()
            for number in dropped:
                for trajectory in self.running.pop(number, []):
                    self.stop(trajectory)
            self.leave(dropped)
            self.is_training = False
            self.serve()
        elif event == "serves again":
            self.serve()
        elif event == "dies":
            self.lose(self.rng.choice(self.live))
        elif event == "hangs":
            url = self.rng.choice(self.live)
            self.choice.avoid(url)
            for trajectory in self.on(url):
                self.stop(trajectory)
        else:
            self.resume()
        self.send()

    def start(self, number: int) -> None:
        self.running[number] = [
            Trajectory(number, f"{number}/{sample}", turns=self.rng.randint(1, 3)) for sample in range(SAMPLES)
        ]
        self.ended[number] = []

    def on(self, url: str) -> list[Trajectory]:
        return [each for each in self.trajectories if each.engine == url]

    def send(self) -> None:
        """Requests without an engine get one, if there is any."""
        for trajectory in self.trajectories:
            if trajectory.asks and trajectory.engine is None:
                trajectory.engine, trajectory.version = (
                    self.choice.begin(self.request(trajectory)),
                    self.admission.version,
                )
                assert trajectory.engine in (*self.live, None)
                assert (trajectory.engine is None) == (not self.live)

    def stop(self, trajectory: Trajectory) -> None:
        if trajectory.engine is not None:
            self.choice.end(trajectory.engine, self.request(trajectory))
            trajectory.engine = None

    def answer(self, trajectory: Trajectory) -> None:
        self.stop(trajectory)
        trajectory.lowest = min(
            trajectory.version, self.admission.version if trajectory.lowest is None else trajectory.lowest
        )
        trajectory.turns -= 1
        trajectory.asks = False
        if not trajectory.turns:
            self.end(trajectory)

    def end(self, trajectory: Trajectory, *, failed: bool = False) -> None:
        trajectory.failed = failed
        self.choice.close(trajectory.name)
        group = self.running[trajectory.group]
        group.remove(trajectory)
        self.ended[trajectory.group].append(trajectory)
        if group:
            return
        del self.running[trajectory.group]
        ended = self.ended[trajectory.group]
        assert len(ended) == SAMPLES
        if all(each.failed for each in ended):
            self.admission.leave(trajectory.group, "failed")
            self.leave([trajectory.group])
        else:
            lowest = [each.lowest for each in ended if each.lowest is not None]
            self.admission.finish(trajectory.group, min(lowest, default=self.admission.version))

    def leave(self, numbers: list[int]) -> None:
        self.left.update(numbers)

    def lose(self, url: str) -> None:
        self.down.add(url)
        self.use([one for one in self.live if one != url])
        for trajectory in self.on(url):
            self.stop(trajectory)

    def serve(self) -> None:
        """Weights reach some of the engines that were restarted, one at least if no other serves."""
        back = [url for url in sorted(self.down) if self.rng.random() < 0.5] or sorted(self.down)[:1]
        self.down -= set(back)
        self.use([*self.live, *back])

    def use(self, urls: list[str]) -> None:
        self.live = list(urls)
        self.choice.use(urls)

    def resume(self) -> None:
        """All that was not saved is gone: engines, and the trajectories that ran."""
        state = json.loads(json.dumps(self.admission.state()))
        self.admission, self.choice, self.down = self.fresh_admission(), EngineChoice(), set()
        self.admission.restore(state)
        self.use(self.engines)
        for group in self.running.values():
            for trajectory in group:
                trajectory.engine, trajectory.asks, trajectory.lowest = None, True, None
                trajectory.turns = max(1, trajectory.turns)

    def check_ledger(self) -> None:
        gone = set(range(self.admission.begun)) - set(self.admission.running) - set(self.admission.waiting)
        assert self.left == Counter(gone), "every group leaves once"

    def check(self) -> None:
        counts = self.admission.counts
        assert sum(counts.values()) == self.admission.begun
        assert set(self.admission.running) == set(self.running)
        loads = Counter(each.engine for each in self.trajectories if each.engine)
        assert {url: load for url, load in self.choice.loads.items() if load} == {
            url: 9 * n for url, n in loads.items()
        }
        assert not set(loads) - set(self.live)


def test_ten_thousand_faults_lose_no_group_and_train_on_none_twice_or_too_late():
    faults: Counter[str] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        run = Run(rng, rng.choice([TooOld.drop, TooOld.wait]), rng.choice([0, 1, 2, 4]))
        trained = 0
        while run.admission.version < LAST_VERSION:
            event = rng.choice(run.possible())
            ages = [run.admission.version - run.admission.waiting[number] for number in run.admission._oldest()]
            run.apply(event)
            if event == "take":
                trained += 1
                assert max(ages) <= run.staleness
                run.check_ledger()
            run.check()
        assert trained == LAST_VERSION
        assert run.admission.counts["taken"] == LAST_VERSION * 2
        faults += run.faults
    assert sum(faults.values()) >= MIN_FAULTS, faults
    assert min(faults[name] for name in FAULTS) > 500, faults
