"""What becomes of a run when an engine's server ends: which endings a rollout survives, and until when."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.schema import Recipe
from slimrl.data.protocols import EngineError
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.control import EngineMemory
from slimrl.rollout.process import ServerError
from slimrl.runtime import engine_actor, engine_group
from slimrl.runtime.engine_actor import EngineActor, EngineAddress
from slimrl.runtime.engine_group import EngineGroup
from slimrl.runtime.errors import StageError


class Actors:
    """Engines that answer at once; an answer is of the moment of its question, whenever it is read."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.ended: dict[str, str] = {}

    def kill(self, *names: str) -> None:
        self.ended |= {name: f"{name} was ended by SIGKILL (log: {name}.log)" for name in names}

    def begin(self, method, arguments=None):
        return self.call(method, arguments, timeout_s=0)

    def answers(self, refs, method):
        return refs

    def wait(self, refs, method, *, timeout_s):
        return refs

    def call(self, method, arguments=None, *, timeout_s):
        return {name: getattr(self, method)(name) for name in (self.names if arguments is None else arguments)}

    def start(self, name):
        return EngineAddress(name=name, url=f"http://{name}", tensor=1, node="host", pids=(1, 2))

    def ending(self, name):
        return self.ended.get(name, "")

    def restart(self, name):
        self.ended.pop(name)
        return self.start(name)


class Router:
    def __init__(self, urls, log, *, timeout_s, request_timeout_s, port) -> None:
        self.port = port or 1234
        self.ended = False

    def wait_ready(self) -> None:
        pass

    def check(self) -> None:
        if self.ended:
            raise ServerError("router ended with exit code 1: no memory")

    def stop(self) -> None:
        pass


Start = Callable[..., tuple[EngineGroup, Actors]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    def begin(engines: int = 3, **settings) -> tuple[EngineGroup, Actors]:
        recipe = Recipe()
        recipe.rollout.num_engines = engines
        for name, value in settings.items():
            setattr(recipe if name == "deterministic" else recipe.rollout, name, value)
        made = []

        def actors(handles, logs, nodes):
            made.append(Actors(list(handles)))
            return made[0]

        handle = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: None))
        monkeypatch.setattr(engine_group, "ActorGroup", actors)
        monkeypatch.setattr(engine_group, "EngineActor", handle)
        monkeypatch.setattr(engine_group, "Router", Router)
        slots = [[SimpleNamespace(node=SimpleNamespace(name="host"))] for _ in range(engines)]
        places = SimpleNamespace(
            placement=SimpleNamespace(engines=slots), options=lambda *a: {}, devices=lambda slots: ()
        )
        group = EngineGroup(recipe, RunFolder(tmp_path), tmp_path, places)
        group.wait_ready()
        return group, made[0]

    return begin


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
    with pytest.raises(StageError, match=r"max_replacements = 2 allows no more engines to be replaced \(2 were\)"):
        watch(group)


@pytest.mark.parametrize(
    ("killed", "settings"),
    [
        (["engine 0", "engine 1"], {"max_replacements": 1}),
        (["engine 0"], {"max_replacements": 0}),
        (["engine 0"], {"router": False}),
        (["engine 0"], {"deterministic": True}),
        (["engine 0", "engine 1", "engine 2"], {"max_replacements": 9}),
        (["engine 0"], {"engines": 1}),
    ],
    ids=["too many", "none may be", "pinned sessions", "lock-step", "none left", "the only one"],
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


def test_the_routers_end_stops_a_rollout(start: Start):
    group, _ = start()
    group._router.ended = True
    with pytest.raises(StageError, match="router ended with exit code 1: no memory"):
        group.watch()


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
