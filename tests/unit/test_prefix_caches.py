"""A deterministic run's rollouts and evaluations each begin from empty prefix caches, and from nothing else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.errors import StageError
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import EngineError
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import SglangControl
from slimrl.observability.progress import Progress
from slimrl.rewards.loading import Rewards
from slimrl.rollout.stage import RolloutStage
from slimrl.runtime.cluster.engine_actor import EngineActor
from slimrl.runtime.cluster.engine_group import EngineGroup

PROMPTS = [Prompt(prompt_id=name, messages=[{"role": "user", "content": name}], label="") for name in ("a", "b", "c")]


class Engine:
    """Has the prompts that it has seen since it was flushed in its cache."""

    def __init__(self) -> None:
        self.cache: set[str] = set()

    def open(self, session_ids, *, at_once: int) -> None:
        pass

    def close(self, session_id: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


@dataclass
class Task:
    """Episodes of which each says whether its prompt was cached."""

    eval_sets: dict[str, list[Prompt]]

    def episode_runner(self, recipe: Recipe, engine: Engine, logs: object, past: object) -> SimpleNamespace:
        async def run(prompt: Prompt, *, trajectory_id: str, **_) -> Trajectory:
            cached = prompt.prompt_id in engine.cache
            engine.cache.add(prompt.prompt_id)
            counts = {
                "num_turns": 1,
                "num_tool_calls": 0,
                "num_tool_errors": 0,
                "num_malformed_calls": 0,
                "num_retries": 0,
                "cached": cached,
            }
            return Trajectory(
                group_id=prompt.prompt_id,
                trajectory_id=trajectory_id,
                segments=[],
                status=Status.completed,
                messages=[{"role": "user", "cached": cached}],
                metadata=counts,
            )

        async def nothing() -> None:
            pass

        return SimpleNamespace(run=run, start=nothing, stop=nothing)

    sandbox = SandboxPool(SandboxConfig())
    rewards = Rewards(function=lambda trajectory, prompt: 1.0)
    roles = ()


@contextmanager
def stage_of(engine: Engine, *, deterministic: bool) -> Iterator[RolloutStage]:
    recipe = Recipe(deterministic=deterministic, steps=1)
    recipe.rollout.samples_per_prompt = 1
    task = Task(eval_sets={})
    with (
        Progress(1) as progress,
        RolloutStage(
            recipe,
            task,
            engine,
            progress,
            watch=lambda: None,
            flush_caches=engine.cache.clear,
        ) as stage,
    ):
        yield stage


def cached(batch) -> list[bool]:
    return [trajectory.metadata["cached"] for trajectory in batch]


def test_in_a_deterministic_run_no_rollout_and_no_evaluation_set_meets_what_an_earlier_one_cached():
    with stage_of(Engine(), deterministic=True) as stage:
        for label in ("step_1", "step_2"):
            assert cached(stage.rollout(PROMPTS, label=label)) == [False] * 3
            for name in ("one", "other"):
                items = stage.evaluate(name, PROMPTS, label=label)
                assert [item.messages[0]["cached"] for item in items] == [False] * 3


def test_other_runs_keep_their_caches():
    with stage_of(Engine(), deterministic=False) as stage:
        stage.evaluate("heldout", PROMPTS[:2], label="step_1")
        assert cached(stage.rollout(PROMPTS, label="step_2")) == [True, True, False]


def test_a_rollout_does_not_begin_where_an_engine_refuses_to_flush():
    def refuse() -> None:
        raise StageError("engine 1: flush_cache: 400")

    with stage_of(Engine(), deterministic=True) as stage:
        stage._flush_caches = refuse
        with pytest.raises(StageError, match="engine 1: flush_cache: 400"):
            stage.rollout(PROMPTS, label="step_1")


def test_all_engines_are_flushed_within_a_deadline():
    calls = []

    class Actors:
        def on(self, names) -> "Actors":
            calls.append(list(names))
            return self

        def begin(self, method) -> "Actors":
            calls.append(method)
            return self

        def wait(self, *, timeout_s: float) -> None:
            assert 20.0 < timeout_s <= 60.0
            calls.append("waited")

    group = object.__new__(EngineGroup)
    group._down, group._fresh, group._aside = {}, set(), None
    group.addresses = [SimpleNamespace(name="engine 0")]
    group._recipe = Recipe()
    group._recipe.resync.timeout_s = 20.0
    group._actors = Actors()
    group._parts = {"engine 0": ["engine 0", "engine 0, part 1"]}
    group.flush_caches()
    assert calls == [["engine 0"], EngineActor.flush_cache, "waited"]


@contextmanager
def answering(status: int) -> Iterator[tuple[str, list[str]]]:
    """An engine's address, and the requests that it has answered with this status."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b"Timed out waiting for idle state."
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_engine_waits_for_its_last_requests_before_it_flushes_for_less_than_the_deadline_of_the_call():
    with answering(200) as (url, asked):
        control = SglangControl("engine 0", url, timeout_s=10, key=EngineKey("k"))
        control.flush_when_idle()
        control.close()
    assert asked == ["/flush_cache?timeout=9"]


def test_an_engine_that_does_not_flush_is_an_error_with_its_reason():
    with answering(400) as (url, _):
        control = SglangControl("engine 0", url, timeout_s=10, key=EngineKey("k"))
        with pytest.raises(EngineError, match=r"engine 0, flush_cache.*: 400 Timed out waiting for idle state\."):
            control.flush_when_idle()
        control.close()
