"""An engine on several nodes: its actors start, end and are replaced together, and the first one answers for all."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from recipe_problems import recipe_problems
from test_engine_group import Actors

from slimrl.base.errors import StageError
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers import server
from slimrl.engines.servers.control import EngineMemory
from slimrl.engines.servers.server import EnginePart, engine_arguments, engine_environment
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster import engine_actor, engine_group, engine_sites
from slimrl.runtime.cluster.engine_actor import EngineActor, EngineAddress
from slimrl.runtime.cluster.engine_group import EngineGroup

TWO = ["engine 0", "engine 0 part 1"]


class Parts(Actors):
    """Actors that note each call with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[tuple[str, dict[str, tuple]]] = []

    def answers(self, method, given):
        if self.names:
            self.journal.append((method, dict.fromkeys(self.names, given)))
        return {name: getattr(self, method)(name, *given) for name in self.names}

    def meeting(self, name):
        return f"10.0.0.1:{1000 + sum(method == 'meeting' for method, _ in self.journal)}"

    def start(self, name, meeting=None):
        number = [*TWO, "engine 1"].index(name)
        nodes = (f"host-{number}",)
        return EngineAddress(
            name=name,
            url=f"http://{name}",
            tensor=4,
            nodes=nodes,
            pids=(10 * number, 10 * number + 1),
            key=EngineKey("k"),
        )

    def restart(self, name, meeting=None, port=None):
        self.ended.pop(name, None)
        return self.start(name)

    def flush_cache(self, name): ...

    def release_memory(self, name, parts): ...

    def since(self, method: str) -> list[dict[str, tuple]]:
        return [given for called, given in self.journal if called == method]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[EngineGroup, Parts, list[tuple]]:
    """Engine 0 on two nodes, engine 1 on one."""
    recipe = Recipe()
    recipe.rollout.num_engines, recipe.rollout.engine_tp, recipe.rollout.engine_nodes = 2, 4, 2
    made, asked = Parts(), []
    monkeypatch.setattr(engine_group, "ActorGroup", lambda *nothing: made)
    handle = SimpleNamespace(
        options=lambda **options: SimpleNamespace(remote=lambda *given: asked.append(given) or given)
    )
    monkeypatch.setattr(engine_sites, "RemoteEngine", handle)
    a, b, c = (SimpleNamespace(node=name) for name in "abc")
    places = SimpleNamespace(
        placement=SimpleNamespace(engines=[(a, a, b, b), (c, c)], teachers=[], past=[]),
        options=lambda *given: {},
        devices=lambda slots: tuple(slot.node for slot in slots),
        resource="CPU",
    )
    group = EngineGroup(recipe, RunFolder(tmp_path), SimpleNamespace(say=lambda text: None), places)
    group.wait_ready()
    return group, made, asked


def test_each_node_of_an_engine_has_an_actor_and_they_meet_at_the_first(started):
    group, actors, asked = started
    assert actors.names == [*TWO, "engine 1"]
    assert [given[1] for given in asked] == [group.key] * 3
    assert [given[4:8] for given in asked] == [
        (0, "a", ("a", "a"), 0), (0, "b", ("b", "b"), 1), (1, "c", ("c", "c"), 0),
    ]  # fmt: skip
    assert actors.since("meeting") == [{"engine 0": ()}]
    assert actors.since("start") == [dict.fromkeys(TWO, ("10.0.0.1:1001",)), {"engine 1": (None,)}]
    whole, alone = group.addresses
    assert (whole.name, whole.url, whole.nodes) == ("engine 0", "http://engine 0", ("host-0", "host-1"))
    assert (alone.name, alone.nodes) == ("engine 1", ("host-2",))
    assert group.roles[:4] == (
        ("engine 0, actor on host-0", 0), ("engine 0, server on host-0", 1),
        ("engine 0, actor on host-1", 10), ("engine 0, server on host-1", 11),
    )  # fmt: skip


def test_calls_go_to_the_first_part_alone(started):
    group, actors, _ = started
    group.flush_caches()
    group.release_memory([EngineMemory.kv_cache])
    assert actors.since("flush_cache") == [{"engine 0": (), "engine 1": ()}]
    assert [set(given) for given in actors.since("release_memory")] == [{"engine 0", "engine 1"}]


@pytest.mark.parametrize("dead", TWO)
def test_with_either_part_the_engine_has_ended_and_all_parts_are_restarted(started, dead):
    group, actors, _ = started
    group.watch()
    actors.kill(dead)
    for _ in range(4):
        group.watch()
    assert actors.since("restart") == [dict.fromkeys(TWO, ("10.0.0.1:1002", None))]
    assert group.num_replaced == 1
    assert group.addresses[0].nodes == ("host-0", "host-1")
    group.check()


def test_a_dead_part_of_the_only_engine_left_ends_the_run(started):
    group, actors, _ = started
    group.watch()
    actors.kill(TWO[1], "engine 1")
    group.watch()
    with pytest.raises(StageError, match=r"engine 0 part 1 was ended by SIGKILL .*; engine 1 was ended"):
        group.watch()


def test_sglang_is_told_the_part_and_binds_the_threads_of_its_node():
    rollout = RolloutConfig(engine_tp=4, engine_nodes=2, max_trajectory_tokens=100)
    how = {"host": "h", "port": 7, "precision": Precision.fp32, "cuda": False, "seed": 5}
    words = engine_arguments(rollout, "m", **how, part=EnginePart(number=1, meeting="10.0.0.1:99"))
    found = {
        flag: words[words.index(flag) + 1] for flag in ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size")
    }
    assert found == {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:99", "--tp-size": "4"}
    assert "--nnodes" not in engine_arguments(rollout, "m", **how)
    assert engine_environment(rollout, precision=Precision.fp32, cuda=False)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_an_actor_starts_its_own_part_and_controls_only_from_the_first(monkeypatch: pytest.MonkeyPatch):
    made, journal, trajectories = [], [], []
    process = SimpleNamespace(pid=7)

    def start(*given, **how):
        made.append((given[3].name, how["part"]))
        trajectories.append(how["trajectories"])
        return SimpleNamespace(
            wait_ready=lambda: None, stop=lambda: None, url="http://h:1", port=1, process=process,
        )  # fmt: skip

    control = SimpleNamespace(close=lambda: None, pause=lambda: journal.append("pause"))
    monkeypatch.setattr(engine_actor, "EngineServer", start)
    monkeypatch.setattr(engine_actor, "SglangControl", lambda *given, **how: control)
    for number in (0, 1):
        actor = object.__new__(EngineActor)
        actor.recipe, actor.logs, actor.index, actor.part, actor.starts = Recipe(), Path("logs"), 3, number, 0
        actor.node, actor.role = SimpleNamespace(address="127.0.0.1", name="n"), "engine"
        actor._key = EngineKey("k")
        assert actor.start("m:1").name == ("engine 3", "engine 3 part 1")[number]
        assert actor.restart("m:2").nodes == ("n",)
        host, port = actor.meeting().split(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert journal == ["pause"]
    logs = ["engine_3.log", "engine_3_start_1.log", "engine_3_part_1.log", "engine_3_part_1_start_1.log"]
    assert [name for name, _ in made] == logs
    assert [(part.number, part.meeting) for _, part in made] == [(0, "m:1"), (0, "m:2"), (1, "m:1"), (1, "m:2")]
    # Those of a step; a teacher's are other requests.
    actor.role = "teacher"
    actor._start(None, None)
    assert trajectories == [32 * 8] * 4 + [None]


def test_only_the_first_part_is_asked_to_freeze_its_garbage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    posts = []
    answer = SimpleNamespace(raise_for_status=lambda: None)
    monkeypatch.setattr(server.httpx, "post", lambda url, **how: posts.append((url, how["headers"])) or answer)
    ready = SimpleNamespace(wait_ready=lambda *given: None)
    monkeypatch.setattr(server, "ServerProcess", lambda *given, **how: ready)
    (tmp_path / "config.json").write_text("{}")
    rollout = RolloutConfig(engine_tp=2, engine_nodes=2, max_trajectory_tokens=100)
    for number in (0, 1):
        part = EnginePart(number=number, meeting="h:1")
        how = {"precision": Precision.fp32, "port": 70 + number, "part": part}
        server.EngineServer(0, rollout, tmp_path, tmp_path / "log", **how, key=EngineKey("k")).wait_ready()
    assert posts == [("http://127.0.0.1:70/freeze_gc", {"authorization": "Bearer k"})]


def test_impossible_parts_are_refused(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("")
    given = ["steps=3", "run.name=demo", "model.path=m", "data.train=t.jsonl", "reward.function=a.b:c",
             "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
             "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
             "rollout.eval_sampling.max_new_tokens=64"]  # fmt: skip

    def messages(*more: str) -> list[str]:
        problems = recipe_problems(tmp_path / "recipe.yaml", [*given, *more])
        return [p.message for p in problems if p.key == "rollout.engine_nodes"]

    for transport in ("resync.transport=p2p", "resync.transport=ipc", "rollout.colocated=true"):
        assert messages("rollout.engine_tp=4", "rollout.engine_nodes=2", transport) == []
    (message,) = messages("rollout.engine_tp=4", "rollout.engine_nodes=3")
    assert message == "3 does not divide rollout.engine_tp 4. Use 2 or 4."
    assert messages("rollout.engine_nodes=0") == ["0: must be at least 1."]
