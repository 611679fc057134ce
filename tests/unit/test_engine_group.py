"""What becomes of a run when an engine's server ends: which endings a rollout survives, and until when."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import EngineError
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.lockstep import LockstepEngine
from slimrl.rollout.routing import RoutedEngines
from slimrl.rollout.servers.control import EngineMemory
from slimrl.rollout.servers.process import ServerError
from slimrl.rollout.servers.server import ENGINE, TEACHER
from slimrl.runtime.cluster import engine_actor, engine_group
from slimrl.runtime.cluster.engine_actor import EngineActor, EngineAddress
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.errors import StageError
from slimrl.runtime.cluster.placement import Node


class Actors:
    """Engines that answer at once; an answer is of the moment of its question, whenever it is read."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.ended: dict[str, str] = {}
        self.calls: list[str] = []
        self.timeouts: dict[str, float] = {}

    def kill(self, *names: str) -> None:
        self.calls.append("kill")
        self.ended |= {name: f"{name} was ended by SIGKILL (log: {name}.log)" for name in names}

    def begin(self, method, arguments=None):
        return self.call(method, arguments, timeout_s=0)

    def answers(self, refs, method):
        return refs

    def wait(self, refs, method, *, timeout_s):
        self.timeouts[f"wait for {method}"] = timeout_s
        return refs

    def call(self, method, arguments=None, *, timeout_s):
        self.timeouts[method] = timeout_s
        return {name: getattr(self, method)(name) for name in (self.names if arguments is None else arguments)}

    def start(self, name):
        return EngineAddress(name=name, url=f"http://{name}", tensor=1, nodes=("host",), pids=(1, 2))

    def ending(self, name):
        return self.ended.get(name, "")

    def stop(self, name):
        self.calls.append(f"stop {name}")

    def restart(self, name):
        self.ended.pop(name)
        return replace(self.start(name), pids=(1, 3))


Start = Callable[..., tuple[EngineGroup, Actors]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    def begin(engines: int = 3, role: str = ENGINE, **settings) -> tuple[EngineGroup, Actors]:
        recipe = Recipe()
        recipe.rollout.num_engines = engines
        for name, value in settings.items():
            setattr(recipe if name == "deterministic" else recipe.rollout, name, value)
        made, given = [], []

        def actors(handles, logs, nodes):
            made.append(Actors(list(handles)))
            made[0].environments = given
            return made[0]

        handle = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: None))
        monkeypatch.setattr(engine_group, "ActorGroup", actors)
        monkeypatch.setattr(engine_group, "EngineActor", handle)
        slots = [[SimpleNamespace(node=SimpleNamespace(name="host"))] for _ in range(engines)]
        places = SimpleNamespace(
            placement=SimpleNamespace(engines=slots, teachers=slots),
            options=lambda slot, variables: given.append(variables) or {},
            devices=lambda slots: (),
        )
        group = EngineGroup(recipe, RunFolder(tmp_path), places, role)
        group.wait_ready()
        return group, made[0]

    return begin


def test_engines_get_the_settings_of_nccl_that_the_trainer_gets(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_group, "engine_variables", lambda recipe, inherited: {"of": inherited})
    _, actors = start(engines=2)
    assert [environment["of"] for environment in actors.environments] == [os.environ] * 2


def watch(group: EngineGroup) -> None:
    """Long enough that a question and its answer are behind it."""
    for _ in range(3):
        group.watch()


def test_a_rollout_goes_on_without_an_engine_and_so_do_those_after_its_replacement(start: Start):
    group, actors = start(max_replacements=1)
    actors.kill("engine 1")
    # The last look of the rollout asks, and the first one of the next would read.
    group.watch()
    group.replace(["engine 1"])
    watch(group)
    assert group.num_replaced == 1
    group.check()


def test_an_engine_that_ends_and_is_not_replaced_yet_is_no_cause_of_what_fails_later(start: Start):
    group, actors = start()
    actors.kill("engine 1")
    watch(group)
    group.check()
    actors.kill("engine 2")
    with pytest.raises(StageError, match=r"^engine 2 was ended by SIGKILL"):
        group.check()


def test_a_replaced_engine_that_ends_again_counts_again(start: Start):
    group, actors = start(max_replacements=2)
    for _ in range(2):
        actors.kill("engine 0")
        watch(group)
        group.replace(["engine 0"])
    actors.kill("engine 0")
    with pytest.raises(StageError, match=r"max_replacements = 2 allows no more replacements of engines \(2 so far\)"):
        watch(group)


@pytest.mark.parametrize(
    ("killed", "settings"),
    [
        (["engine 0", "engine 1"], {"max_replacements": 1}),
        (["engine 0"], {"max_replacements": 0}),
        (["engine 0"], {"deterministic": True}),
        (["engine 0", "engine 1", "engine 2"], {"max_replacements": 9}),
        (["engine 0"], {"engines": 1}),
    ],
    ids=["too many", "none may be", "lock-step", "none left", "the only one"],
)
def test_a_rollout_stops_where_nobody_can_take_an_engines_place(start: Start, killed, settings):
    group, actors = start(**settings)
    watch(group)
    actors.kill(*killed)
    with pytest.raises(StageError) as raised:
        watch(group)
    for name in killed:
        assert f"{name} was ended by SIGKILL (log: {name}.log)" in str(raised.value)


def test_two_of_three_engines_may_end_where_two_may_be_replaced(start: Start):
    group, actors = start(max_replacements=2)
    actors.kill("engine 0", "engine 2")
    watch(group)
    group.replace(["engine 0", "engine 2"])
    assert group.num_replaced == 2


def test_a_teacher_that_ends_is_restarted_while_the_rollout_goes_on(start: Start):
    group, actors = start(engines=1, role=TEACHER, max_replacements=1)
    watch(group)
    assert not group.is_restarting
    actors.kill("teacher 0")
    watch(group)
    assert group.is_restarting
    assert group.addresses[0].pids == (1, 2)
    group.watch()
    assert not group.is_restarting
    assert (group.addresses[0].pids, group.num_replaced) == ((1, 3), 1)
    watch(group)
    actors.kill("teacher 0")
    with pytest.raises(StageError, match=r"SIGKILL.*; teacher.max_replacements = 1 allows no more"):
        watch(group)


def test_requests_go_to_the_engines_that_have_not_ended(start: Start):
    group, actors = start()
    client = group.client(vocab_size=50, routed_experts_shape=None)
    urls = ("http://engine 0", "http://engine 1", "http://engine 2")
    assert client.live == urls
    actors.kill("engine 1")
    watch(group)
    assert client.live == (urls[0], urls[2])
    group.replace(["engine 1"])
    assert client.live == urls


def test_an_engine_that_has_ended_has_no_memory_to_give_or_take():
    actor = object.__new__(EngineActor.__ray_metadata__.modified_class)
    calls, answers, ends_after = [], True, []

    def call(name: str) -> None:
        calls.append(name)
        if not answers:
            raise EngineError("engine 0: connection refused")

    def check() -> None:
        """Alive for as many looks as `ends_after` has entries."""
        if ends_after:
            ends_after.pop()
        else:
            raise ServerError("engine 0 was ended by SIGKILL")

    actor.control = SimpleNamespace(
        release_memory=lambda parts: call("release"),
        resume_memory=lambda parts: call("take"),
        resume=lambda: call("serve"),
    )
    actor.server = SimpleNamespace(check=check)
    actor.release_memory(list(EngineMemory))
    actor.resume_memory(list(EngineMemory))
    assert calls == ["release", "take", "serve"]
    answers, ends_after = False, [None]
    actor.release_memory(list(EngineMemory))
    actor.resume_memory(list(EngineMemory))


def test_an_engine_that_lives_and_refuses_to_give_memory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    actor = object.__new__(EngineActor.__ray_metadata__.modified_class)

    def refuse(parts) -> None:
        raise EngineError("engine 0, release_memory_occupation: 400")

    monkeypatch.setattr(engine_actor, "ENDS_WITHIN_S", 0.0)
    actor.control, actor.server = SimpleNamespace(release_memory=refuse), SimpleNamespace(check=lambda: None)
    with pytest.raises(EngineError, match="400"):
        actor.release_memory(list(EngineMemory))


PARTS = (("actor", 1), ("server", 2))


def test_episodes_talk_to_the_engines_and_in_lock_step_where_the_run_is_deterministic(start: Start):
    every = [f"http://engine {i}" for i in range(3)]
    for deterministic in (False, True):
        group, _ = start(deterministic=deterministic)
        client = group.client(vocab_size=50, routed_experts_shape=(2, 3))
        assert type(client) is (LockstepEngine if deterministic else RoutedEngines)
        ends = client._engines if deterministic else [client._connect(url) for url in client.live]
        assert [end._url for end in ends] == every
        # Another engine is asked before the same one again.
        assert [end._retries for end in ends] == [deterministic] * 3
        assert all((end._vocab_size, end._routed_experts_shape) == (50, (2, 3)) for end in ends)
        assert group.roles == tuple((f"engine {i}, {part} on host", pid) for i in range(3) for part, pid in PARTS)


def test_replaced_engines_keep_their_places(start: Start):
    group, actors = start(startup_timeout_s=100.0)
    actors.kill("engine 1")
    group.replace(["engine 1"])
    assert [address.name for address in group.addresses] == ["engine 0", "engine 1", "engine 2"]
    assert [address.pids for address in group.addresses] == [(1, 2), (1, 3), (1, 2)]
    # Engines have their own deadlines, within that of the call.
    assert actors.timeouts["wait for start"] > 100.0
    assert actors.timeouts["restart"] > 100.0 + engine_group.STOP_TIMEOUT_S
    assert actors.timeouts["ending"] == engine_group.CHECK_TIMEOUT_S


def test_the_engines_are_stopped_before_their_actors_end(start: Start, monkeypatch):
    group, actors = start()
    group.stop()
    assert actors.calls == ["stop engine 0", "stop engine 1", "stop engine 2", "kill"]
    assert actors.timeouts["stop"] == engine_group.STOP_TIMEOUT_S
    actors.calls.clear()

    def late(name):
        raise StageError(f"{name}: stop did not finish")

    monkeypatch.setattr(actors, "stop", late)
    group.stop()
    assert actors.calls == ["kill"]
    # Before they have answered there is no server that could be told to end.
    actors.calls.clear()
    group.addresses = []
    group.stop()
    assert actors.calls == ["kill"]


def test_memory_moves_on_all_engines_within_the_deadlines_of_all_their_calls(start: Start, monkeypatch):
    group, actors = start()
    group._recipe.resync.timeout_s = 20.0
    moved = []

    def call(method, arguments=None, *, timeout_s):
        moved.append((method, arguments))
        assert 60.0 < timeout_s <= 120.0

    monkeypatch.setattr(actors, "call", call)
    group.release_memory({EngineMemory.kv_cache})
    group.resume_memory({EngineMemory.weights})
    names = [f"engine {i}" for i in range(3)]
    assert moved == [
        ("release_memory", dict.fromkeys(names, ([EngineMemory.kv_cache],))),
        ("resume_memory", dict.fromkeys(names, ([EngineMemory.weights],))),
    ]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An engine's actor whose servers and controls only note what is asked of them."""
    journal: list[tuple] = []

    class Server:
        def __init__(self, index, rollout, model, log, **given) -> None:
            journal.append(("server", index, model, log.name, given))
            self.port, self.url = given["port"] or 7000, "http://engine"
            self.process = SimpleNamespace(pid=77)

        def wait_ready(self) -> None:
            journal.append(("ready",))

        def stop(self) -> None:
            journal.append(("stop",))

    class Control:
        def __init__(self, name, url, *, timeout_s) -> None:
            journal.append(("control", name, url, timeout_s))

        def __getattr__(self, method):
            return lambda *given: journal.append((method, *given))

    monkeypatch.setattr(engine_actor, "EngineServer", Server)
    monkeypatch.setattr(engine_actor, "SglangControl", Control)
    monkeypatch.setattr(engine_actor, "capture_output", lambda path: journal.append(("log", path.name)))
    monkeypatch.setattr(engine_actor, "clean_stale_segments", lambda: journal.append(("clean",)))
    monkeypatch.setattr(engine_actor.os, "chdir", lambda path: journal.append(("cd", path)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    recipe = Recipe(seed=3)
    recipe.resync.timeout_s, recipe.rollout.engine_tp = 30.0, 2
    recipe.model.path = "/model"

    def make(devices=()):
        actor = object.__new__(EngineActor.__ray_metadata__.modified_class)
        node = Node(node_id="n", name="host-a", address="10.0.0.3", slots=1)
        actor.__init__(recipe, tmp_path, Path("/work"), 4, node, devices)
        return actor, journal

    return make


def test_an_engine_listens_on_its_nodes_address_and_starts_again_at_its_port_paused(engine):
    actor, journal = engine()
    address = actor.start()
    assert journal[:2] == [("log", "engine_4_actor.log"), ("cd", Path("/work"))]
    kind, index, model, log, given = journal[2]
    assert (kind, index, model, log) == ("server", 4, Path("/model"), "engine_4.log")
    assert (given["host"], given["port"], given["precision"]) == ("10.0.0.3", None, actor.recipe.trainer.precision)
    assert journal[3:] == [("ready",), ("control", "engine 4", "http://engine", 30.0)]
    assert (address.name, address.url, address.tensor, address.nodes) == ("engine 4", "http://engine", 2, ("host-a",))
    assert address.pids == (os.getpid(), 77)
    seed = given["seed"]
    for again, colocated in ((1, False), (2, True)):
        journal.clear()
        actor.recipe.rollout.colocated = colocated
        assert actor.restart() == address
        assert [entry[0] for entry in journal[:3]] == ["stop", "close", "server"]
        assert journal[2][3] == f"engine_4_start_{again}.log"
        assert (journal[2][4]["port"], journal[2][4]["seed"]) == (7000, seed)
        released = [("release_memory", [EngineMemory.kv_cache, EngineMemory.cuda_graph])] if colocated else []
        assert journal[4:] == [("control", "engine 4", "http://engine", 30.0), ("pause",), *released]
    journal.clear()
    actor.resume_memory([EngineMemory.weights])
    actor.resume_memory([EngineMemory.kv_cache])
    actor.flush_cache()
    assert journal == [
        ("resume_memory", [EngineMemory.weights]), ("resume_memory", [EngineMemory.kv_cache]), ("resume",),
        ("flush_when_idle",),
    ]  # fmt: skip
    journal.clear()
    actor.stop()
    assert journal == [("stop",), ("clean",)]


def test_an_engine_of_several_gpus_sees_all_of_them_and_another_what_its_process_sees(engine):
    engine()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    engine(("2", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"
