"""Which failure of several actors is raised, after how long, and what it says; Ray is a clock and a table here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from slimrl.base.errors import ActorLost, NoAnswer, NodeLost, StageError
from slimrl.engines.servers.process import ServerError
from slimrl.runtime.cluster import calls
from slimrl.runtime.cluster.actors import ActorGroup, run
from slimrl.runtime.cluster.placement import Node

NEVER = float("inf")
NODES = {name: Node(node_id=name, name=f"host-{name[-1]}", address="", slots=1) for name in ("rank 0", "rank 1")}


class Rank:
    """What the group's actors are objects of, elsewhere."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int]] = []

    def train(self) -> str: ...

    def save(self, where: str, times: int = 1) -> None:
        self.saved.append((where, times))

    def start(self) -> None: ...

    def ending(self) -> str: ...


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("call", "all tracebacks", cause, proctitle="p", pid=1, ip="10.0.0.1")


BROKEN = raised(RuntimeError("[gloo/transport] Connection closed by peer"))
OWN = raised(ValueError("no such tensor"))
DIED = RayActorError()


class Ray:
    """Each call has come to its end at a second: (second, what it returned or raised), by actor."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: dict[str, tuple[float, object]] = {}
        self.asked: list[tuple] = []
        self.killed: list[object] = []
        self.probe: Exception | None = None
        self.probed_for_s = 0.0

    def actor(self, name: str):
        def call(function, method, *given, **options):
            assert function is run
            self.asked.append((name, method, given, options))
            return f"ref of {name}"

        def ready():
            self.asked.append((name, "ready"))
            return "probe"

        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=call), __ray_ready__=SimpleNamespace(remote=ready))

    def wait(self, refs, *, num_returns, timeout):
        # As Ray does, which returns at once when all are there.
        assert len(set(refs)) == len(refs) == num_returns
        ends = {ref: self.ends[ref.removeprefix("ref of ")][0] for ref in refs}
        self.now = min(self.now + timeout, max(self.now, *ends.values()))
        return [ref for ref in refs if ends[ref] <= self.now], [ref for ref in refs if ends[ref] > self.now]

    def get(self, ref, timeout=None):
        if ref == "probe":
            self.probed_for_s = timeout
            if self.probe is not None:
                raise self.probe
            return None
        _, value = self.ends[ref.removeprefix("ref of ")]
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    monkeypatch.setattr(calls.ray, "wait", fake.wait)
    monkeypatch.setattr(calls.ray, "get", fake.get)
    monkeypatch.setattr(calls.ray, "kill", fake.killed.append)
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: fake.now))
    monkeypatch.setattr(calls, "is_alive", lambda node: True)
    return fake


@pytest.fixture
def group(ray: Ray, tmp_path: Path) -> ActorGroup[Rank]:
    made = ActorGroup[Rank]()
    for name, node in NODES.items():
        made.add(name, ray.actor(name), tmp_path / f"{name}.log", node)
    return made


def test_results_come_by_name_whoever_answered_first_and_the_display_moves_meanwhile(ray: Ray, group: ActorGroup[Rank]):
    ray.ends = {"rank 0": (1.0, "a"), "rank 1": (0.3, "b")}
    looks = []
    results = group.begin(Rank.train).wait(timeout_s=5.0, while_waiting=lambda: looks.append(ray.now))
    assert list(results.items()) == [("rank 0", "a"), ("rank 1", "b")]
    assert looks == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert ray.asked == [("rank 0", Rank.train, (), {}), ("rank 1", Rank.train, (), {})]
    assert group.on(["rank 1"]).begin(Rank.save, "here", times=2).wait(timeout_s=5.0) == {"rank 1": "b"}
    assert ray.asked[2:] == [("rank 1", Rank.save, ("here",), {"times": 2})]
    assert group.names == list(NODES)


def test_an_actor_runs_the_method_that_a_call_names():
    rank = Rank()
    run(rank, Rank.save, "here", times=2)
    run(rank, Rank.save, "there")
    assert rank.saved == [("here", 2), ("there", 1)]


def test_calls_that_differ_in_their_arguments_are_waited_for_together(ray: Ray, group: ActorGroup[Rank]):
    ray.ends = {"rank 0": (1.0, "a"), "rank 1": (0.3, "b")}
    both = group.on(["rank 1"]).begin(Rank.save, "here") | group.on(["rank 0"]).begin(Rank.save, "there")
    assert [(name, given) for name, _, given, _ in ray.asked] == [("rank 1", ("here",)), ("rank 0", ("there",))]
    assert both.wait(timeout_s=5.0) == {"rank 0": "a", "rank 1": "b"}
    assert both.of(["rank 0", "rank 2"]).wait(timeout_s=5.0) == {"rank 0": "a"}
    assert len(both.of([])) == 0
    with pytest.raises(AssertionError):
        both | group.begin(Rank.ending)


@pytest.mark.parametrize(
    ("first", "second", "message", "after_s"),
    [
        # A cause of its own: the other one may report for two seconds.
        ((1.0, OWN), (NEVER, None), "rank 0: train: ValueError: no such tensor", 3.0),
        ((1.0, OWN), (2.5, DIED), "rank 1: its process died during train", 2.5),
        ((1.0, OWN), (3.5, DIED), "rank 0: train: ValueError: no such tensor", 3.0),
        ((1.0, OWN), (2.0, raised(ValueError("later"))), "rank 0: train: ValueError: no such tensor", 2.0),
        # What follows from another's end waits for that one, but not longer than for an answer.
        ((1.0, BROKEN), (NEVER, None), "rank 0: train: RuntimeError: .gloo", 61.0),
        ((1.0, BROKEN), (50.0, DIED), "rank 1: its process died during train", 50.0),
        ((1.0, BROKEN), (50.0, OWN), "rank 1: train: ValueError: no such tensor", 50.0),
        ((95.0, BROKEN), (NEVER, None), "rank 0: train: RuntimeError: .gloo", 100.0),
        # The moment that a cause leaves is not prolonged by what follows from it.
        ((1.0, OWN), (2.0, BROKEN), "rank 0: train: ValueError: no such tensor", 2.0),
        ((1.0, DIED), (NEVER, None), "rank 0: its process died during train", 3.0),
    ],
)
def test_the_likeliest_cause_of_several_failures_is_raised_as_soon_as_it_is_known(
    ray: Ray, group: ActorGroup[Rank], first, second, message: str, after_s: float
):
    ray.ends = {"rank 0": first, "rank 1": second}
    with pytest.raises(StageError, match=message):
        group.begin(Rank.train).wait(timeout_s=100.0)
    assert ray.now == pytest.approx(after_s, abs=0.45)


def test_who_does_not_answer_in_time_is_named_with_the_log(ray: Ray, group: ActorGroup[Rank], tmp_path: Path):
    ray.ends = {"rank 0": (1.0, None), "rank 1": (NEVER, None)}
    with pytest.raises(StageError) as caught:
        group.begin(Rank.train).wait(timeout_s=7.0)
    assert str(caught.value) == f"rank 1: train did not finish within 7 s (log: {tmp_path / 'rank 1.log'})"
    assert ray.now == pytest.approx(7.0, abs=0.45)
    ray.ends["rank 0"] = (NEVER, None)
    with pytest.raises(StageError, match=r"^rank 0, rank 1: train did not finish .*rank 0\.log\)$"):
        group.begin(Rank.train).wait(timeout_s=7.0)


def test_what_became_of_each_is_known_when_all_have_ended_or_at_the_deadline(
    ray: Ray, group: ActorGroup[Rank], tmp_path: Path
):
    ray.ends = {"rank 0": (3.0, "a"), "rank 1": (1.0, OWN)}
    ended = group.begin(Rank.ending).outcomes(timeout_s=7.0)
    assert ray.now == 3.0
    assert (ended["rank 0"], str(ended["rank 1"])) == ("a", "rank 1: ending: ValueError: no such tensor")
    ray.now, ray.ends["rank 0"] = 0.0, (NEVER, None)
    late = group.begin(Rank.ending).outcomes(timeout_s=7.0)["rank 0"]
    assert ray.now == pytest.approx(7.0, abs=0.45)
    assert type(late) is NoAnswer
    assert str(late) == f"rank 0: ending did not finish within 7 s (log: {tmp_path / 'rank 0.log'})"
    assert group.on([]).begin(Rank.ending).outcomes(timeout_s=7.0) == {}


def test_answers_are_read_without_waiting_and_a_failure_is_one(ray: Ray, group: ActorGroup[Rank]):
    ray.ends = {"rank 0": (5.0, "a"), "rank 1": (1.0, "b")}
    asked = group.begin(Rank.ending)
    for now, expected in ((0.0, {}), (2.0, {"rank 1": "b"}), (5.0, {"rank 0": "a", "rank 1": "b"})):
        ray.now = now
        assert asked.answers_so_far() == expected
        assert ray.now == now
    ray.now, ray.ends["rank 1"] = 2.0, (1.0, OWN)
    [(name, failure)] = asked.answers_so_far().items()
    assert (name, type(failure)) == ("rank 1", StageError)
    assert str(failure).startswith("rank 1: ending: ValueError")
    assert asked.of([]).answers_so_far() == {}


@pytest.mark.parametrize(
    ("error", "log", "alive", "message"),
    [
        (raised(ServerError("engine 0 ended with exit code 1")), "", True, "engine 0 ended with exit code 1"),
        (DIED, "", True, "rank 0: its process died during start, without an error of its own; it may have been killed"),
        (
            DIED,
            "Fatal Python error: Aborted\nmore\nFatal Python error: Segmentation fault\n\nCurrent thread",
            True,
            "rank 0: its process died during start: Fatal Python error: Segmentation fault",
        ),
        (DIED, "Fatal Python error: Aborted", False, "rank 0: its node host-0 was lost during start"),
        (WorkerCrashedError(), "", True, "rank 0: start: WorkerCrashedError"),
        (
            OutOfMemoryError("95% of the memory is in use"),
            "",
            True,
            "rank 0: Ray ended its process during start, since host-0 was short of memory",
        ),
    ],
)
def test_a_failure_says_what_became_of_the_process_or_its_node(
    ray: Ray, group: ActorGroup[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error, log, alive, message
):
    monkeypatch.setattr(calls, "is_alive", lambda node: node is not NODES["rank 0"] or alive)
    path = tmp_path / "rank 0.log"
    if log:
        path.write_text(log)
    ray.ends = {"rank 0": (0.1, error), "rank 1": (0.1, None)}
    with pytest.raises(StageError) as caught:
        group.begin(Rank.start).wait(timeout_s=5.0)
    where = "" if isinstance(error, RayTaskError) else f" (log: {path})"
    assert str(caught.value) == message + where
    assert caught.value.details == str(error)
    kind = StageError
    if error is DIED or isinstance(error, OutOfMemoryError):
        kind = ActorLost if alive else NodeLost
    assert type(caught.value) is kind


@pytest.mark.parametrize("probe", [DIED, GetTimeoutError(), None])
def test_of_an_actor_that_cannot_be_reached_the_cluster_is_asked(ray: Ray, group: ActorGroup[Rank], probe):
    error = ActorUnavailableError("cannot be reached", None)
    ray.ends = {"rank 0": (0.1, None), "rank 1": (0.1, error)}
    ray.probe = probe
    said = "its process died" if probe is DIED else "start: ActorUnavailableError"
    with pytest.raises(StageError, match=f"rank 1: {said}") as caught:
        group.begin(Rank.start).wait(timeout_s=5.0)
    assert ("rank 1", "ready") in ray.asked
    assert ray.probed_for_s == calls.CONSEQUENCE_GRACE_S
    assert caught.value.details == str(DIED if probe is DIED else error)


@pytest.mark.parametrize("probe", [ActorUnavailableError("nor now", None), GetTimeoutError()])
def test_a_lost_node_is_named_where_its_actors_cannot_be_reached(ray: Ray, group: ActorGroup[Rank], monkeypatch, probe):
    monkeypatch.setattr(calls, "is_alive", lambda node: node is not NODES["rank 1"])
    ray.ends = {"rank 0": (0.1, None), "rank 1": (0.1, ActorUnavailableError("cannot be reached", None))}
    ray.probe = probe
    with pytest.raises(StageError, match="rank 1: its node host-1 was lost during start"):
        group.begin(Rank.start).wait(timeout_s=5.0)


def test_all_processes_are_ended_at_once(ray: Ray, group: ActorGroup[Rank]):
    group.kill()
    assert ray.killed == [member.actor for member in group._members.values()]
    assert list(group.handles.values()) == ray.killed
