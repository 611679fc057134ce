"""What becomes of a node's memory whose actor is late or gone, without a cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from slimrl.base.errors import NotWritten
from slimrl.runtime.cluster import memory_nodes
from slimrl.runtime.cluster.memory_nodes import MemoryNodes
from slimrl.runtime.cluster.placement import Node

OWN, OTHER = (Node(node_id=name, name=name, address=name, slots=1) for name in ("own", "other"))


class Actor:
    """Answers with what is in `answers`, by method; an exception is raised by whoever waits for it."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {"folder": Path("/dev/shm/of_node")}
        self.calls: list[tuple] = []

    def __getattr__(self, method: str):
        def remote(*given):
            self.calls.append((method, *given))
            return SimpleNamespace(answer=lambda: self.answers.get(method))

        return SimpleNamespace(remote=remote)


def get(ref, timeout=None):
    if isinstance(ref, list):
        return [get(one) for one in ref]
    answer = ref.answer()
    if isinstance(answer, Exception):
        raise answer
    return answer


class Cluster:
    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.done, self.now = True, 100.0
        self.first_answers: dict[str, object] = {}

    def start(self, node: Node, path: Path | None) -> Actor:
        self.actors.append(Actor())
        self.actors[-1].answers |= self.first_answers
        return self.actors[-1]

    def wait(self, refs, num_returns, timeout):
        assert timeout == 0
        return (refs, []) if self.done else ([], refs)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    made = Cluster()
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray = SimpleNamespace(get=get, wait=made.wait, kill=made.killed.append, get_runtime_context=lambda: context)
    monkeypatch.setattr(memory_nodes, "ray", ray)
    monkeypatch.setattr(memory_nodes, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(memory_nodes, "start_memory", made.start)
    return made


@pytest.fixture
def nodes() -> MemoryNodes:
    return MemoryNodes(Path("/dev/shm/of_driver"), 30.0)


def test_an_actor_that_does_not_start_is_ended(cluster: Cluster, nodes: MemoryNodes):
    cluster.first_answers["folder"] = GetTimeoutError("late")
    with pytest.raises(NotWritten, match=r"^other does not answer: GetTimeoutError: late$"):
        nodes.on(OTHER)
    assert cluster.killed == cluster.actors
    cluster.first_answers.clear()
    assert nodes.on(OTHER) == Path("/dev/shm/of_node")
    assert len(cluster.actors) == 2


def test_only_an_actor_that_has_ended_is_replaced(cluster: Cluster, nodes: MemoryNodes):
    nodes.use([OWN, OTHER])
    nodes.make(".partial_step_000004")
    _, other = cluster.actors
    for error, said in (
        (GetTimeoutError("late"), "GetTimeoutError: late"),
        (RayTaskError("make", "a traceback", OSError("it takes 3.0 GiB")), "OSError: it takes 3.0 GiB"),
    ):
        other.answers["make"] = error
        with pytest.raises(NotWritten, match=rf"^other: make: {said}$"):
            nodes.make(".partial_step_000005")
        assert cluster.killed == []
    other.answers["make"] = ActorDiedError()
    with pytest.raises(NotWritten, match=r"^other: make: ActorDiedError: "):
        nodes.make(".partial_step_000005")
    assert cluster.killed == [other]
    nodes.make(".partial_step_000005")
    assert len(cluster.actors) == 3


def test_copies_are_under_way_until_their_deadline(cluster: Cluster, nodes: MemoryNodes):
    nodes.use([OWN, OTHER])
    nodes.make(".partial_step_000004")
    nodes.copy("step_000004", nodes.rename(".partial_step_000004", "step_000004", ["state.json"]))
    own, other = cluster.actors
    assert [call[0] for call in own.calls] == ["folder", "fetch"]
    assert other.calls[-1][:2] == ("fetch", ["step_000004/state.json"])
    cluster.done = False
    assert (nodes.is_copying("step_000004"), nodes.is_copied("step_000004")) == (True, False)
    cluster.now += 31.0
    assert (nodes.is_copying("step_000004"), nodes.is_copied("step_000004")) == (False, False)
    cluster.done = True
    assert (nodes.is_copying("step_000004"), nodes.is_copied("step_000004")) == (False, True)
    own.answers["fetch"] = RayTaskError("fetch", "a traceback", OSError("No space left on device"))
    assert (nodes.is_copying("step_000004"), nodes.is_copied("step_000004")) == (False, False)
