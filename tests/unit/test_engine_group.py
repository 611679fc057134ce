"""What becomes of a run when an engine's server ends: which endings a rollout survives, and until when."""

import inspect
import os
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import ActorLost, NodeLost, StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode, TransportName
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.engine import EngineError
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.control import EngineMemory
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import ENGINE, PAST, TEACHER
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster import engine_actor, engine_group, engine_sites
from slimrl.runtime.cluster.engine_actor import EngineActor, EngineAddress
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.placement import Node


class Answers:
    """Calls of engines that have answered."""

    def __init__(self, method: str, refs: dict, actors: "Actors") -> None:
        self.method, self.refs, self.actors = method, refs, actors

    def __len__(self) -> int:
        return len(self.refs)

    def __or__(self, others: "Answers") -> "Answers":
        assert self.method == others.method
        return Answers(self.method, {**self.refs, **others.refs}, self.actors)

    def of(self, names) -> "Answers":
        return Answers(self.method, {name: answer for name, answer in self.refs.items() if name in names}, self.actors)

    def answers_so_far(self):
        return {name: answer for name, answer in self.refs.items() if name not in self.actors.silent}

    def wait(self, *, timeout_s):
        self.actors.timeouts[self.method] = timeout_s
        return self.refs

    outcomes = wait


class Actors:
    """Engines that answer at once; an answer is of the moment of its question, whenever it is read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.whole = self
        self.ended: dict[str, str | StageError] = {}
        self.silent: set[str] = set()
        """Those that have not answered yet"""
        self.failed: dict[str, StageError] = {}
        """What restarts end with"""
        self.refused: dict[str, StageError] = {}
        """What a call to pause, or to move memory, ends with"""
        self.given: list[tuple[str, str, tuple]] = []
        """Actor, method and arguments of such calls"""
        self.calls: list[str] = []
        self.timeouts: dict[str, float] = {}
        self.said: list[str] = []
        """Lines on the terminal"""

    def kill(self, *names: str) -> None:
        self.calls.append("kill")
        self.ended |= {name: f"{name} was ended by SIGKILL (log: {name}.log)" for name in names}

    def add(self, name, actor, log, node) -> None:
        self.calls.append(f"make {name}, start {actor[-1]}")
        self.names.append(name)
        self.ended.pop(name, None)

    def remove(self, name) -> None:
        self.calls.append(f"remove {name}")
        self.names.remove(name)

    def on(self, names):
        chosen = copy(self)
        chosen.names = list(names)
        return chosen

    def begin(self, method, *given):
        # As the actor itself would take them.
        inspect.signature(method).bind(None, *given)
        return Answers(method.__name__, self.answers(method.__name__, given), self.whole)

    def answers(self, method, given):
        if method in ("pause", "release_memory", "resume_memory", "load_checkpoint"):
            self.given += [(name, method, given) for name in self.names]
            return {name: self.refused.get(name) for name in self.names}
        return {name: getattr(self, method)(name) for name in self.names}

    def start(self, name):
        return EngineAddress(name=name, url=f"http://{name}", tensor=1, nodes=("host",), pids=(1, 2), key=KEY)

    def ending(self, name):
        return self.ended.get(name, "")

    def stop(self, name):
        self.calls.append(f"stop {name}")

    def restart(self, name):
        if isinstance(self.ended.get(name), ActorLost):
            return self.ended[name]
        self.ended.pop(name, None)
        return self.failed.pop(name, None) or replace(self.start(name), pids=(1, 3))


KEY = EngineKey("k")
Start = Callable[..., tuple[EngineGroup, Actors]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    def begin(engines: int = 3, role: str = ENGINE, **settings) -> tuple[EngineGroup, Actors]:
        recipe = Recipe()
        recipe.rollout.num_engines = engines
        for name, value in settings.items():
            setattr(recipe if name == "deterministic" else recipe.rollout, name, value)
        made, given = Actors(), []
        made.environments = given
        handle = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: arguments))
        monkeypatch.setattr(engine_group, "ActorGroup", lambda *nothing: made)
        monkeypatch.setattr(engine_sites, "RemoteEngine", handle)
        slots = [[SimpleNamespace(node=SimpleNamespace(name="host"))] for _ in range(engines)]
        places = SimpleNamespace(
            placement=SimpleNamespace(engines=slots, teachers=slots, past=slots),
            options=lambda slot, variables: given.append(variables) or {},
            devices=lambda slots: (),
            resource="CPU",
        )
        group = EngineGroup(recipe, RunFolder(tmp_path), SimpleNamespace(say=made.said.append), places, role)
        group.wait_ready()
        made.calls.clear()
        return group, made

    return begin


def test_engines_get_the_settings_of_nccl_that_the_trainer_gets(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_sites, "engine_variables", lambda recipe, inherited: {"of": inherited})
    _, actors = start(engines=2)
    assert [environment["of"] for environment in actors.environments] == [os.environ] * 2


def watch(group: EngineGroup) -> None:
    """Long enough that a question and its answer are behind it."""
    for _ in range(3):
        group.watch()


def receivers(group: EngineGroup) -> list[str]:
    return [address.name for address in group.receivers]


class Client:
    """What the client is told last."""

    def use(self, serving, evaluating=None) -> None:
        self.serving, self.evaluating = list(serving), evaluating


def told(group: EngineGroup) -> Client:
    group._client = Client()
    return group._client


def test_an_engine_that_ends_is_restarted_while_the_others_serve_and_joins_with_the_next_weights(start: Start):
    group, actors = start(max_replacements=1)
    client = told(group)
    watch(group)
    actors.kill("engine 1")
    # The first answer is of the question before.
    group.watch()
    group.watch()
    actors.silent = {"engine 1"}
    group.watch()
    assert client.serving == ["http://engine 0", "http://engine 2"]
    assert (group.is_restarting, group.num_replaced, receivers(group)) == (True, 1, ["engine 0", "engine 2"])
    group.check()
    group.have_weights(["engine 0", "engine 2"])
    ended = "warning: engine 1 was ended by SIGKILL (log: engine 1.log); it is restarted while the run goes on"
    assert actors.said == [ended]
    actors.silent = set()
    group.watch()
    assert not group.is_restarting
    assert actors.said == [ended, "engine 1 has started and serves once it has the weights"]
    assert client.serving == ["http://engine 0", "http://engine 2"]
    assert [address.pids for address in group.receivers] == [(1, 2), (1, 3), (1, 2)]
    group.have_weights(receivers(group))
    assert client.serving == [f"http://engine {number}" for number in range(3)]
    watch(group)
    actors.kill("engine 0")
    with pytest.raises(StageError, match=r"max_replacements = 1 allows no more replacements of engines \(1 so far\)"):
        watch(group)


def test_an_engine_whose_actor_has_ended_gets_another_one_and_joins_with_the_next_weights(start: Start):
    group, actors = start()
    client = told(group)
    watch(group)
    actors.ended["engine 1"] = ActorLost("engine 1: its process died")
    group.watch()
    group.watch()
    assert actors.calls == ["remove engine 1", "make engine 1, start 1"]
    assert client.serving == ["http://engine 0", "http://engine 2"]
    group.watch()
    assert (group.num_replaced, len(receivers(group)), len(client.serving)) == (1, 3, 2)
    group.have_weights(receivers(group))
    assert len(client.serving) == 3
    # One that is lost while it restarts is made once more.
    actors.kill("engine 0")
    actors.failed = {"engine 0": ActorLost("engine 0: its process died during restart")}
    actors.calls.clear()
    watch(group)
    assert actors.calls == ["remove engine 0", "make engine 0, start 2"]


def test_an_engine_leaves_with_its_node_and_the_run_goes_on_while_one_is_left(start: Start):
    group, actors = start(engines=2, max_replacements=0)
    client = told(group)
    watch(group)
    actors.ended["engine 0"] = NodeLost("engine 0: its node was lost")
    watch(group)
    assert (client.serving, receivers(group), group.num_replaced) == (["http://engine 1"], ["engine 1"], 0)
    assert actors.names == ["engine 1"]
    assert actors.said == ["warning: the run goes on without engine 0: engine 0: its node was lost"]
    group.check()
    actors.ended["engine 1"] = NodeLost("engine 1: its node was lost")
    with pytest.raises(StageError, match="its node was lost"):
        watch(group)


def test_a_restart_that_takes_too_long_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch):
    group, actors = start(startup_timeout_s=100.0)
    now = 0.0
    monkeypatch.setattr(engine_group.time, "monotonic", lambda: now)
    actors.silent = {"engine 1"}
    group.restart({"engine 1": "ended"})
    group.watch()
    now = 100.0 + engine_group.STOP_TIMEOUT_S
    group.watch()
    assert (group.num_replaced, actors.calls) == (1, [])
    now += 61.0
    group.watch()
    assert (group.num_replaced, actors.calls) == (2, ["remove engine 1", "make engine 1, start 2"])


def test_an_engine_that_is_slow_to_answer_while_it_gets_weights_is_not_taken_for_one_that_hangs(start: Start):
    group, actors = start()
    actors.ended["engine 1"] = "engine 1, server_info: no answer within 60 s"
    group.watch()
    actors.ended.clear()
    group.have_weights(receivers(group))
    watch(group)
    assert group.num_replaced == 0


def test_engines_join_where_the_cluster_has_room_up_to_the_most_and_take_the_place_of_those_of_a_lost_node(
    start: Start, monkeypatch
):
    group, actors = start(engines=2, max_engines=3)
    group._recipe.resync.transport = TransportName.disk
    client, places, asked = told(group), None, []

    class Room:
        def __init__(self, num_slots, resource) -> None:
            asked.append((num_slots, resource))

        def find(self):
            return places

    monkeypatch.setattr(engine_sites, "Room", Room)
    watch(group)
    assert (len(receivers(group)), asked, actors.calls) == (2, [(1, "CPU")], [])
    slots = (SimpleNamespace(node=SimpleNamespace(name="other")),)
    places = SimpleNamespace(
        placement=SimpleNamespace(engines=(slots,)),
        options=lambda slot, variables: {},
        devices=lambda slots: (),
        give_back=lambda: given_back.append("engine 2"),
    )
    given_back = []
    group.watch()
    assert actors.calls == ["make engine 2, start 0"]
    assert receivers(group) == ["engine 0", "engine 1"]
    watch(group)
    joins = ["engine 2 joins the run and starts", "engine 2 has started and serves once it has the weights"]
    assert actors.said == joins
    group.have_weights(receivers(group))
    assert client.serving == [f"http://engine {number}" for number in range(3)]
    assert (len(asked), group.num_replaced) == (1, 0)
    # The next one has a number of its own.
    actors.ended["engine 1"] = NodeLost("engine 1: its node was lost")
    watch(group)
    watch(group)
    group.have_weights(receivers(group))
    assert client.serving == [f"http://engine {number}" for number in (0, 2, 3)]
    assert given_back == []
    places = None
    actors.ended["engine 2"] = NodeLost("engine 2: its node was lost")
    watch(group)
    assert given_back == ["engine 2"]


def test_with_fewer_engines_than_it_needs_a_run_ends(start: Start):
    group, actors = start(engines=3, min_engines=2)
    watch(group)
    actors.ended["engine 0"] = NodeLost("engine 0: its node was lost")
    watch(group)
    actors.ended["engine 2"] = NodeLost("engine 2: its node was lost")
    with pytest.raises(StageError, match="its node was lost; 1 of at least 2 engines are left"):
        watch(group)
    # It does not go on without the second one, and does not say so.
    assert actors.said == ["warning: the run goes on without engine 0: engine 0: its node was lost"]


def test_where_a_resync_reaches_no_engine_all_are_restarted_if_all_have_ended(start: Start, monkeypatch):
    group, actors = start(engines=2, mode=RolloutMode.async_)
    monkeypatch.setattr(engine_group, "ENDS_WITHIN_S", 0.3)
    actors.kill("engine 0")
    assert not group.have_all_ended(), "one is left, and the fault was another"
    assert group.num_replaced == 0
    actors.ended["engine 1"] = "engine 1, server_info: no answer within 5 s"
    actors.silent = {"engine 1"}

    def sleep(seconds) -> None:
        actors.silent = set()

    monkeypatch.setattr(engine_group.time, "sleep", sleep)
    assert group.have_all_ended()
    assert (group.num_replaced, receivers(group)) == (2, [])
    group.wait_for_receivers()
    assert receivers(group) == ["engine 0", "engine 1"]
    assert group.need_weights


def test_an_engine_that_ends_unnoticed_is_the_cause_of_what_fails(start: Start):
    group, actors = start()
    actors.kill("engine 2")
    with pytest.raises(StageError, match=r"^engine 2 was ended by SIGKILL"):
        group.check()


def test_a_restart_that_fails_is_tried_again_as_often_as_engines_may_be_replaced(start: Start):
    group, actors = start(max_replacements=2)
    actors.failed = {"engine 1": StageError("engine 1 was not ready within 5 s")}
    actors.kill("engine 1")
    watch(group)
    group.watch()
    assert (group.num_replaced, group.is_restarting, len(receivers(group))) == (2, False, 3)
    group, actors = start(max_replacements=1)
    actors.failed = {"engine 1": StageError("engine 1 was not ready within 5 s")}
    actors.kill("engine 1")
    with pytest.raises(StageError, match=r"was not ready within 5 s; rollout.max_replacements = 1 allows no more"):
        watch(group)


def test_engines_that_failed_in_a_resync_are_restarted_too(start: Start):
    group, _ = start()
    client = told(group)
    group.restart({"engine 0": "engine 0, begin_weight_update: no answer within 6 s"})
    assert client.serving == ["http://engine 1", "http://engine 2"]
    group.watch()
    assert receivers(group) == ["engine 0", "engine 1", "engine 2"]


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


def test_beside_the_training_requests_wait_for_the_only_engine(start: Start):
    group, actors = start(engines=1, mode=RolloutMode.async_)
    client = told(group)
    watch(group)
    actors.kill("engine 0")
    watch(group)
    assert client.serving == []
    group.watch()
    assert group.need_weights
    group.have_weights(receivers(group))
    assert (client.serving, group.need_weights) == (["http://engine 0"], False)


def test_engines_on_the_trainers_devices_wait_for_the_resync_that_replaces_them(start: Start):
    group, actors = start(colocated=True, max_replacements=1)
    client = told(group)
    actors.kill("engine 1")
    watch(group)
    assert (client.serving, group.is_restarting) == (["http://engine 0", "http://engine 2"], False)
    ended = "engine 1 was ended by SIGKILL (log: engine 1.log); the others continue, and the next resync replaces it"
    assert actors.said == [f"warning: {ended}"]
    # What hangs would hold the memory that the trainer needs.
    assert actors.calls[-1] == "stop engine 1"
    # In the resync it fails, and then it is replaced.
    assert receivers(group) == ["engine 0", "engine 1", "engine 2"]
    group.replace({"engine 1": "it had ended"})
    assert (group.num_replaced, len(receivers(group))) == (1, 3)
    with pytest.raises(StageError, match="max_replacements = 1 allows no more"):
        group.replace({"engine 2": "it failed"})


def test_engines_that_evaluate_serve_no_rollouts_and_get_no_weights(start: Start):
    group, actors = start()
    client = told(group)
    assert group.set_aside(1) == 1
    assert (client.serving, client.evaluating) == (["http://engine 0", "http://engine 1"], ["http://engine 2"])
    assert receivers(group) == ["engine 0", "engine 1"]
    group.take_back()
    assert (client.serving, client.evaluating) == (["http://engine 0", "http://engine 1"], None)
    assert receivers(group) == ["engine 0", "engine 1", "engine 2"]
    group.have_weights(receivers(group))
    assert len(client.serving) == 3
    # One is always left for rollouts.
    assert group.set_aside(5) == 2
    watch(group)
    actors.kill("engine 1", "engine 2")
    watch(group)
    # Restarted ones are for rollouts.
    assert (group.evaluation_is_lost, client.evaluating, client.serving) == (True, [], ["http://engine 0"])
    group.take_back()
    assert not group.evaluation_is_lost


def test_none_is_set_aside_where_one_serves(start: Start):
    group, _ = start(engines=1)
    assert group.set_aside(1) == 0
    assert receivers(group) == ["engine 0"]


def test_a_teacher_that_ends_is_restarted_while_the_rollout_goes_on(start: Start):
    group, actors = start(engines=1, role=TEACHER, max_replacements=1)
    watch(group)
    assert not group.is_restarting
    actors.kill("teacher 0")
    group.watch()
    group.watch()
    assert group.is_restarting
    assert group.addresses[0].pids == (1, 2)
    group.watch()
    assert not group.is_restarting
    assert (group.addresses[0].pids, group.num_replaced) == ((1, 3), 1)
    assert actors.said[1:] == ["teacher 0 has started"]
    watch(group)
    actors.kill("teacher 0")
    with pytest.raises(StageError, match=r"SIGKILL.*; teacher.max_replacements = 1 allows no more"):
        watch(group)


def test_an_engine_that_has_ended_has_no_memory_to_give_or_take():
    actor = object.__new__(EngineActor)
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

    actor.recipe = Recipe()
    actor.control = SimpleNamespace(
        probe=lambda timeout_s: None,
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
    # It does not answer the first question any more.
    actor.control.probe = lambda timeout_s: call("probe")
    calls.clear()
    actor.release_memory(list(EngineMemory))
    actor.resume_memory(list(EngineMemory))
    assert calls == ["probe", "probe"]


def test_an_engine_that_lives_and_refuses_to_give_memory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    actor = object.__new__(EngineActor)

    def refuse(parts) -> None:
        raise EngineError("engine 0, release_memory_occupation: 400")

    def hang(timeout_s) -> None:
        raise EngineError(f"engine 0, server_info: no answer within {timeout_s:g} s")

    monkeypatch.setattr(engine_actor, "ENDS_WITHIN_S", 0.0)
    actor.recipe, actor.server = Recipe(), SimpleNamespace(check=lambda: None)
    actor.control = SimpleNamespace(probe=lambda timeout_s: None, release_memory=refuse)
    with pytest.raises(EngineError, match="400"):
        actor.release_memory(list(EngineMemory))
    # Before it is asked for what may take longer.
    actor.recipe.rollout.health_timeout_s = 5.0
    actor.control.probe = hang
    for act in (actor.pause, lambda: actor.release_memory([]), lambda: actor.resume_memory([])):
        with pytest.raises(EngineError, match="no answer within 5 s"):
            act()


PARTS = (("actor", 1), ("server", 2))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, RoutedEngines), ({"engines": 1}, RoutedEngines), ({"deterministic": True}, LockstepEngine)],
)
def test_episodes_talk_to_the_engines(start: Start, settings, kind):
    group, _ = start(**settings)
    client = group.client(vocab_size=50, routed_experts_shape=(2, 3))
    assert type(client) is kind
    urls = [address.url for address in group.addresses]
    ends = client._engines if kind is LockstepEngine else [client._connect(url) for url in client.live]
    assert [end._url for end in ends] == urls
    assert all((end._vocab_size, end._routed_experts_shape) == (50, (2, 3)) for end in ends)
    assert all(end._caches is None for end in ends)
    group._recipe.resync.pause = PauseMode.in_place
    kept = group.client(vocab_size=50, routed_experts_shape=None)
    ends = kept._engines if kind is LockstepEngine else [kept._connect(url) for url in kept.live]
    assert all(end._caches == {} for end in ends)
    assert group.roles == tuple(
        (f"engine {number}, {part} on host", pid) for number in range(len(urls)) for part, pid in PARTS
    )


def test_calls_of_actors_have_longer_deadlines_than_what_they_wait_for(start: Start):
    group, actors = start(startup_timeout_s=100.0, health_timeout_s=7.0)
    actors.kill("engine 1")
    group.replace({"engine 1": "ended"})
    assert [address.name for address in group.addresses] == ["engine 0", "engine 1", "engine 2"]
    assert [address.pids for address in group.addresses] == [(1, 2), (1, 3), (1, 2)]
    assert actors.timeouts["start"] > 100.0
    assert actors.timeouts["restart"] > 100.0 + engine_group.STOP_TIMEOUT_S
    assert actors.timeouts["ending"] == engine_group.CHECK_TIMEOUT_S + 7.0


def test_engines_are_stopped_before_their_actors_end(start: Start, monkeypatch):
    group, actors = start()
    group.stop()
    assert actors.calls == ["stop engine 0", "stop engine 1", "stop engine 2", "kill"]
    assert actors.timeouts["stop"] == engine_group.STOP_TIMEOUT_S
    # One that is being restarted does not answer.
    actors.calls.clear()
    group.restart({"engine 1": "ended"})
    group.stop()
    assert actors.calls == ["stop engine 0", "stop engine 2", "kill"]
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


def test_memory_moves_on_all_engines_within_the_deadlines_of_all_their_calls(start: Start):
    group, actors = start(health_timeout_s=7.0)
    group._recipe.resync.timeout_s = 20.0
    group.release_memory({EngineMemory.kv_cache})
    group.resume_memory({EngineMemory.weights})
    names = [f"engine {i}" for i in range(3)]
    assert actors.given == [
        *((name, "release_memory", ([EngineMemory.kv_cache],)) for name in names),
        *((name, "resume_memory", ([EngineMemory.weights],)) for name in names),
    ]
    # A pause, a flush and a release, after an answer.
    assert actors.timeouts["release_memory"] == 3 * 20.0 + engine_group.CHECK_TIMEOUT_S + 7.0


def test_an_engine_that_hangs_when_a_step_ends_is_done_without(start: Start):
    hangs = StageError("engine 1: pause: EngineError: engine 1, server_info: no answer within 60 s")
    group, actors = start(mode=RolloutMode.sync, oversample=2.0)
    client = told(group)
    actors.refused = {"engine 1": hangs}
    group.pause()
    assert [(name, method) for name, method, _ in actors.given] == [(f"engine {i}", "pause") for i in range(3)]
    assert client.serving == ["http://engine 0", "http://engine 2"]
    assert (group.is_restarting, group.num_replaced) == (True, 1)
    # On the trainer's devices it is ended, which frees its memory, and the next resync replaces it.
    for move in (EngineGroup.release_memory, EngineGroup.resume_memory):
        group, actors = start(colocated=True)
        client = told(group)
        actors.refused = {"engine 1": hangs}
        move(group, {EngineMemory.weights})
        assert (client.serving, actors.calls) == (["http://engine 0", "http://engine 2"], ["stop engine 1"])
        assert (group.is_restarting, group.num_replaced, len(receivers(group))) == (False, 1, 3)
    group, actors = start(engines=1, colocated=True)
    actors.refused = {"engine 0": hangs}
    with pytest.raises(StageError, match="no answer within 60 s"):
        group.release_memory({EngineMemory.weights})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An engine's actor whose servers and controls only note what is asked of them."""
    journal: list[tuple] = []

    class Server:
        def __init__(self, index, rollout, model, log, **given) -> None:
            assert given["key"] is KEY
            journal.append(("server", index, model, log.name, given))
            self.port, self.url = given["port"] or 7000, "http://engine"
            self.process = SimpleNamespace(pid=77)

        def wait_ready(self) -> None:
            journal.append(("ready",))

        def stop(self) -> None:
            journal.append(("stop",))

    class Control:
        def __init__(self, name, url, *, key, timeout_s) -> None:
            assert key is KEY
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
        actor = object.__new__(EngineActor)
        node = Node(node_id="n", name="host-a", address="10.0.0.3", slots=1)
        actor.__init__(recipe, KEY, tmp_path, Path("/work"), 4, node, devices)
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
    asked = ("probe", actor.recipe.rollout.health_timeout_s)
    assert journal == [
        asked, ("resume_memory", [EngineMemory.weights]), asked, ("resume_memory", [EngineMemory.kv_cache]),
        ("resume",), ("flush_when_idle",),
    ]  # fmt: skip
    journal.clear()
    actor.stop()
    assert journal == [("stop",), ("clean",)]


def test_an_engine_of_several_gpus_sees_all_of_them_and_another_what_its_process_sees(engine):
    engine()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    engine(("2", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_an_engine_of_older_versions_loads_a_folder_and_the_run_ends_with_it(start: Start, tmp_path: Path):
    group, actors = start(engines=2, role=PAST)
    group.load_checkpoint(tmp_path / "step_000010", 10)
    assert actors.given == [(name, "load_checkpoint", (tmp_path / "step_000010", 10)) for name in ("past 0", "past 1")]
    watch(group)
    actors.kill("past 1")
    with pytest.raises(StageError, match="past 1 was ended by SIGKILL"):
        watch(group)
