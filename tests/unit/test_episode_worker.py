"""What an episode worker and the driver tell each other, without the processes."""

import asyncio
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.engines.routing import RoutedEngines
from slimrl.rollout import episode_worker
from slimrl.rollout.episode_worker import Cancel, Ended, EpisodeWorker, Forget, Job, Message, Use
from slimrl.runtime.cluster.episode_workers import _Process


class Runner:
    """Does in an episode what the prompt's label says; its engine notes the sessions that it closes."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.engine = SimpleNamespace(close=self.closed.append)

    async def start(self) -> None:
        return

    stop = start

    async def run(self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int) -> Trajectory:
        if prompt.label == "waits":
            await asyncio.sleep(600)
        if prompt.label == "breaks":
            raise AssertionError("of our own")
        if prompt.label == "exits":
            sys.exit("for good")
        return Trajectory(
            group_id="g", trajectory_id=trajectory_id, segments=[], status=Status.completed, scratch={"x": b"x" * seed}
        )


@pytest.fixture
def runner(monkeypatch) -> Runner:
    runner = Runner()
    monkeypatch.setattr(episode_worker, "capture_output", lambda path: None)
    code = SimpleNamespace(episode_runner=lambda *_: runner)
    monkeypatch.setattr(episode_worker, "load_episode_code", lambda loaded, sandbox: code)
    return runner


async def started(engine: RoutedEngines, variables: Mapping[str, str] | None = None) -> EpisodeWorker:
    worker = EpisodeWorker("episode worker 0", Path("run/logs/episodes_0.log"), Path.cwd(), list(sys.path))
    loaded = LoadedRecipe(recipe=Recipe(), provenance={}, path="", command="rollout")
    assert await worker.start(loaded, engine, variables or {}) == os.getpid()
    return worker


def engines(*urls: str) -> RoutedEngines:
    return RoutedEngines(lambda url: None, urls)  # type: ignore[arg-type, return-value]


def job(name: str, label: str = "", size: int = 0) -> Job:
    prompt = Prompt(prompt_id="p", messages=[], label=label)
    return Job(trajectory_id=name, prompt=prompt, sampling=SamplingConfig(), seed=size)


async def answers(worker: EpisodeWorker, count: int) -> list[list[Ended]]:
    """Answers of the worker until so many episodes have ended."""
    given: list[list[Ended]] = []
    async with asyncio.timeout(20):
        while sum(map(len, given)) < count:
            given.append(pickle.loads(await worker.ended()))
    return given


async def test_episodes_that_have_ended_come_together_as_far_as_they_are_small(runner, monkeypatch):
    monkeypatch.setattr(episode_worker, "MOST_BYTES", 10_000)
    worker = await started(engines())
    await worker.take(pickle.dumps([job("a", size=100), job("b", size=20_000), job("c", size=100), job("d", size=100)]))
    while runner.closed != ["a", "b", "c", "d"]:
        await asyncio.sleep(0)
    given = await answers(worker, 4)
    assert [[one.trajectory_id for one in part] for part in given] == [["a", "b"], ["c", "d"]]
    sizes = [len(pickle.loads(one.trajectory).scratch["x"]) for part in given for one in part]
    assert sizes == [100, 20_000, 100, 100]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.ended(), 0.05)
    await worker.close()


async def test_a_cancelled_episode_ends_without_an_answer(runner):
    worker = await started(engines())
    await worker.take(pickle.dumps([job("a", "waits"), job("b", "waits")]))
    await asyncio.sleep(0)
    await worker.take(pickle.dumps([Cancel(trajectory_id="a"), Cancel(trajectory_id="gone"), job("c")]))
    [[ended]] = await answers(worker, 1)
    assert ended.trajectory_id == "c"
    assert sorted(runner.closed) == ["a", "c"]
    await worker.close()
    assert sorted(runner.closed) == ["a", "b", "c"]


async def test_an_episode_that_is_cancelled_before_it_begins_leaves_nothing(runner):
    worker = await started(engines("http://one"))
    await worker.take(pickle.dumps([job("a", "waits"), Cancel(trajectory_id="a")]))
    await asyncio.sleep(0.01)
    assert worker._running == {}


@pytest.mark.parametrize(
    ("label", "said"), [("breaks", "AssertionError: of our own"), ("exits", "SystemExit: for good")]
)
async def test_a_fault_of_ours_comes_with_its_traceback(runner, label: str, said: str):
    worker = await started(engines())
    await worker.take(pickle.dumps([job("a", label)]))
    [[ended]] = await answers(worker, 1)
    assert "in run" in ended.fault
    assert said in ended.fault
    assert ended.trajectory == b""
    await worker.close()


async def test_the_worker_is_told_which_engines_serve(runner):
    client = engines("a")
    worker = await started(client)
    await worker.take(pickle.dumps([Use(urls=("b", "c"), evaluating=("d",))]))
    assert client.in_use == (("b", "c"), ("d",))
    await worker.close()


async def test_the_code_of_episodes_is_loaded_where_the_drivers_variables_are(runner, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_TOOL", "before")
    code, seen = SimpleNamespace(episode_runner=lambda *_: runner), []

    def load(loaded: LoadedRecipe, sandbox: SandboxPool) -> SimpleNamespace:
        seen.append(os.environ["KEY_OF_A_TOOL"])
        return code

    monkeypatch.setattr(episode_worker, "load_episode_code", load)
    worker = await started(engines(), {"KEY_OF_A_TOOL": "the driver's"})
    assert seen == ["the driver's"]
    await worker.close()


async def test_messages_that_come_up_during_a_call_go_together_and_in_order_in_the_next():
    calls: list[list[Message]] = []
    answer = asyncio.Event()

    async def take(messages: bytes) -> None:
        calls.append(pickle.loads(messages))
        await answer.wait()

    process = _Process(SimpleNamespace(take=SimpleNamespace(remote=take)), Path("log"))
    delivering = asyncio.create_task(process.deliver())
    first, *others = [job("a"), Cancel(trajectory_id="a"), Forget(trajectory_id="a"), job("b")]
    process.send(first)
    for _ in range(5):
        await asyncio.sleep(0)
    for message in others:
        process.send(message)
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == [[first]], "one call at a time: Ray may let another one overtake it"
    answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == [[first], others]
    delivering.cancel()
