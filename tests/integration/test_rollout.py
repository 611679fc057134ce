"""Real SGLang engines: what they compute, which of them serves, how they are controlled, how they end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import PauseMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import EngineError, GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.control import EngineMemory, SglangControl
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import EngineServer
from slimrl.observability.memory import session_members

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SIZE = ToySize(init_std=0.1)
ROLLOUT = RolloutConfig(
    num_engines=2, max_trajectory_tokens=512, max_concurrency_per_engine=64, routed_experts=True, startup_timeout_s=200
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rollout") / "toy"
    write_toy("qwen3_moe", path, SIZE, seed=0)
    return path


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    with Fleet(ROLLOUT, model, tmp_path_factory.mktemp("logs"), precision=Precision.fp32) as fleet:
        yield fleet


def vocab_size(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["vocab_size"]


@pytest.fixture
async def engines(fleet, model):
    connect = partial(SglangEngine, key=KEY, vocab_size=vocab_size(model), routed_experts_shape=(SIZE.layers, 2))
    client = RoutedEngines(connect, fleet.engine_urls)
    yield client
    await client.aclose()


def control(fleet, index) -> SglangControl:
    return SglangControl(f"engine {index}", fleet.engine_urls[index], timeout_s=60, key=KEY)


def ask(session: str, tokens: list[int], new: int = 16, timeout_s: float = 60.0, seed: int = 1) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=tokens, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new,
        stop_token_ids=(), timeout_s=timeout_s, seed=seed,
    )  # fmt: skip


def prompt(index: int, length: int) -> list[int]:
    return [3 + (17 * index + 7 * position) % 250 for position in range(length)]


async def converse(engine, session: str, tokens: list[int], turns: int) -> list[tuple[list[int], GenerateResult]]:
    """(context, answer) of each turn; three tokens come between two turns, which ask for new experts only."""
    history, known = [], 0
    for turn in range(turns):
        request = ask(session, tokens, 10 + turn, seed=derive_seed(session, turn))
        result = await engine.generate(replace(request, experts_from=known))
        history.append((tokens, result))
        known = len(tokens) + len(result.tokens) - 1
        tokens = [*tokens, *result.tokens, 5, 6, 7]
    return history


async def test_logprobs_and_routing_of_crowded_conversations_equal_transformers(engines, model):
    conversations = await asyncio.gather(
        *(converse(engines, f"parity-{index}", prompt(index, 1 + 9 * index), 3) for index in range(24))
    )
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worst, cached, rows, same_rows = 0.0, 0, 0, 0
    for context, result in (turn for conversation in conversations for turn in conversation):
        tokens = torch.tensor(context + result.tokens)
        with torch.no_grad():
            output = reference(tokens[None], output_router_logits=True)
        logprobs_TV = output.logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = logprobs_TV.gather(-1, torch.tensor(result.tokens)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(result.logprobs)).abs().max().item())
        cached += result.cached_tokens
        routed = torch.stack([logits.topk(2).indices for logits in output.router_logits], 1)[:-1].sort(-1).values
        engine = torch.from_numpy(result.routed_experts).long().sort(-1).values
        # Of a later turn: the last token of the turn before, the three between, and this turn's but for its last.
        turn = len(result.tokens) - 10
        assert len(engine) == (len(routed) if turn == 0 else 1 + 3 + len(result.tokens) - 1)
        routed = routed[len(routed) - len(engine) :]
        rows, same_rows = rows + len(engine), same_rows + int((engine == routed).all(-1).all(-1).sum())
    assert worst <= 5e-6
    assert same_rows == rows
    # Second and third turns find what the first ones left.
    assert cached > sum(len(conversation[0][0]) for conversation in conversations)


async def test_a_session_stays_on_its_engine_and_both_engines_work(engines, fleet):
    for index in range(2):
        control(fleet, index).set_version(10 + index)
    conversations = await asyncio.gather(
        *(converse(engines, f"sticky-{index}", prompt(index, 20), 3) for index in range(16))
    )
    versions = [{*np.concatenate([result.weight_versions for _, result in turns]).tolist()} for turns in conversations]
    assert all(len(seen) == 1 for seen in versions)
    assert set.union(*versions) == {10, 11}


@pytest.mark.full
async def test_sessions_of_an_engine_that_leaves_go_on_with_the_same_tokens_at_the_other(engines, fleet):
    requests = [ask(f"leave-{index}", prompt(index, 20), 200, seed=index) for index in range(8)]
    whole = [(await engines.generate(request)).tokens for request in requests]
    asked = [asyncio.create_task(engines.generate(replace(r, session_id=f"again-{r.session_id}"))) for r in requests]
    first, second = (control(fleet, index) for index in range(2))
    async with asyncio.timeout(30):
        while not (first.running_requests() and second.running_requests()):
            await asyncio.sleep(0.01)
    engines.use(fleet.engine_urls[1:])
    results = await asyncio.gather(*asked)
    assert [result.tokens for result in results] == whole
    assert {result.num_retries for result in results} == {0, 1}
    async with asyncio.timeout(10):
        while first.running_requests():
            await asyncio.sleep(0.01)


async def test_a_paused_request_goes_on_under_the_new_version(engines, fleet):
    first = control(fleet, 0)
    before = first.version()
    direct = SglangEngine(fleet.engine_urls[0], routed_experts_shape=(SIZE.layers, 2), key=KEY)
    task = asyncio.create_task(direct.generate(ask("paused", prompt(1, 10), 400)))
    await asyncio.sleep(0.5)
    first.pause()
    await asyncio.sleep(0.2)
    assert not task.done()
    first.flush_cache()
    first.set_version(21)
    assert first.version() == 21
    first.resume()
    result = await task
    await direct.aclose()
    assert len(result.tokens) == 400
    assert (result.weight_versions == 21).sum() == 400 - (result.weight_versions == before).sum() < 400


async def test_requests_are_aborted_or_stay_in_place_as_the_pause_says(fleet):
    first = control(fleet, 0)
    direct = SglangEngine(fleet.engine_urls[0], routed_experts_shape=(SIZE.layers, 2), key=KEY)

    async def start(session: str) -> asyncio.Task[GenerateResult]:
        task = asyncio.create_task(direct.generate(ask(session, prompt(1, 10), 400)))
        await asyncio.sleep(0.5)
        assert first.running_requests() == 1
        return task

    task = await start("in-place")
    first.pause(PauseMode.in_place)
    first.probe(5.0)
    assert first.running_requests() == 1
    with pytest.raises(EngineError, match="flush_cache: 400"):
        first.flush_cache()
    first.resume()
    assert len((await task).tokens) == 400

    task = await start("abort")
    await asyncio.to_thread(first.pause, PauseMode.abort)
    result = await task
    assert result.finish_reason == "abort"
    assert 0 < len(result.tokens) < 400
    assert first.running_requests() == 0
    waiting = asyncio.create_task(direct.generate(ask("waiting", prompt(1, 10), 4)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    first.resume()
    assert len((await waiting).tokens) == 4

    task = await start("retract")
    first.pause(PauseMode.retract)
    assert first.running_requests() == 0
    first.resume()
    assert len((await task).tokens) == 400

    task = await start("released")
    await asyncio.to_thread(first.release_memory, list(EngineMemory))
    assert (await task).finish_reason == "abort"
    first.resume_memory([EngineMemory.weights])
    first.resume_memory([EngineMemory.kv_cache, EngineMemory.cuda_graph])
    first.resume()
    assert len((await direct.generate(ask("after", prompt(1, 10), 4))).tokens) == 4
    await direct.aclose()


def test_a_paused_engine_takes_no_core_and_answers_at_once(fleet):
    first = control(fleet, 0)
    processes = [psutil.Process(pid) for pid in session_members(fleet.engines[0].process.pid)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    first.pause()
    try:
        before = cpu_seconds()
        time.sleep(1.0)
        assert cpu_seconds() - before < 0.3
        start = time.monotonic()
        first.probe(5.0)
        assert time.monotonic() - start < 0.5
    finally:
        first.resume()


async def test_a_stopped_engine_gives_no_sign_of_life(fleet):
    second = control(fleet, 1)
    pids = session_members(fleet.engines[1].process.pid)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"engine 1, server_info: no answer within 0\.5 s"):
            second.probe(0.5)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    second.probe(20.0)


async def test_requests_past_their_deadline_are_aborted_at_the_engine(engines, fleet):
    controls = [control(fleet, index) for index in range(2)]

    def running() -> int:
        return sum(each.running_requests() for each in controls)

    asked = (engines.generate(ask(f"late-{i}", prompt(i, 10), 490, timeout_s=15.0)) for i in range(8))
    late = asyncio.gather(*asked, return_exceptions=True)
    while running() < 8:
        await asyncio.sleep(0.02)
        assert not late.done()
    for each in controls:
        each.pause(PauseMode.in_place)
    for error in await late:
        assert re.search(r"session late-\d: no answer within 15 s", str(error))
    # The aborts were sent; whoever was not aborted has hundreds of tokens to go, one with each of these.
    await engines.aclose()
    for each in controls:
        each.resume()
    direct = [SglangEngine(url, routed_experts_shape=(SIZE.layers, 2), key=KEY) for url in fleet.engine_urls]
    for client in direct:
        assert len((await client.generate(ask("after", prompt(9, 10), 8))).tokens) == 8
        await client.aclose()
    assert running() == 0


async def test_errors_name_the_engine_and_the_reason(engines, fleet, model):
    with pytest.raises(EngineError, match=r"token \d+ is outside of the vocabulary"):
        await engines.generate(ask("bad", [vocab_size(model)]))
    with pytest.raises(EngineError, match=r"engine 0, update_weights_from_distributed: 400 .*begin_weight_update"):
        control(fleet, 0)._call("update_weights_from_distributed", names=[], dtypes=[], shapes=[], group_name="g")
    with pytest.raises(EngineError, match=r"no such tensors .*model\.nothing"):
        control(fleet, 0).fingerprints(["model.nothing"])
    nobody = SglangEngine("http://127.0.0.1:9", key=KEY)
    with pytest.raises(EngineError, match="Connect"):
        await nobody.generate(ask("nobody", [1]))
    await nobody.aclose()


async def test_lockstep_rollouts_are_bit_identical_on_two_processes(fleet):
    async def rollout(url: str) -> dict[str, list[tuple[list[int], list[float]]]]:
        engine = LockstepEngine([SglangEngine(url, routed_experts_shape=(SIZE.layers, 2), key=KEY)])
        sessions = [f"lock-{index:02d}" for index in range(24)]
        engine.open(sessions, at_once=len(sessions))

        async def one(index: int) -> list[tuple[list[int], list[float]]]:
            await asyncio.sleep((index * 7 % 5) * 0.01 if url == fleet.engine_urls[0] else 0)
            try:
                history = await converse(engine, sessions[index], prompt(index, 5 + 4 * index), 1 + index % 3)
            finally:
                engine.close(sessions[index])
            return [(result.tokens, result.logprobs) for _, result in history]

        results = await asyncio.gather(*map(one, range(24)))
        await engine.aclose()
        return dict(zip(sessions, results, strict=True))

    for index in range(2):
        control(fleet, index).flush_cache()
    first, second = [await rollout(url) for url in fleet.engine_urls]
    assert first == second


OWNER = """
import sys, time
from pathlib import Path
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.engine_key import new_key
from slimrl.engines.servers.server import EngineServer
rollout = RolloutConfig(max_trajectory_tokens=64, max_concurrency_per_engine=4, startup_timeout_s=200)
log = Path(sys.argv[2]) / "engine.log"
server = EngineServer(0, rollout, sys.argv[1], log, key=new_key(), precision=Precision.fp32)
server.wait_ready()
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.full
def test_nothing_survives_an_owner_that_was_killed(model, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        leader = int(owner.stdout.readline())
        assert len(session_members(leader)) >= 3
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    deadline = time.monotonic() + 10
    while session_members(leader):
        assert time.monotonic() < deadline, session_members(leader)
        time.sleep(0.1)


@pytest.mark.full
def test_an_engine_that_cannot_start_names_the_cause_and_leaves_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    engine = EngineServer(3, ROLLOUT, tmp_path, tmp_path / "engine.log", precision=Precision.fp32, key=KEY)
    with pytest.raises(ServerError, match=r"engine 3 ended with exit code \d+: .*(Error|error).*engine\.log"):
        engine.wait_ready()
    engine.stop()
    assert not session_members(engine.process.pid)


def first_error(fleet: Fleet, timeout_s: float = 10.0) -> str:
    """What `check` says first; a killed process is a zombie for a moment while its threads end."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            fleet.check()
        except ServerError as error:
            return str(error)
        time.sleep(0.05)
    return "nothing"


async def test_sessions_of_a_killed_engine_go_on_at_the_other_and_a_fleet_leaves_no_processes(engines, fleet):
    """Last: it ends the module's fleet."""
    leaders = [engine.process.pid for engine in fleet.engines]
    fleet.check()
    first = control(fleet, 0)
    asked = [asyncio.create_task(engines.generate(ask(f"dead-{i}", prompt(i, 10), 300, seed=i))) for i in range(8)]
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(first.running_requests):
            assert not any(task.done() for task in asked)
            await asyncio.sleep(0.02)
    os.kill(leaders[0], signal.SIGKILL)
    results = await asyncio.gather(*asked)
    assert [len(result.tokens) for result in results] == [300] * 8
    assert any(result.num_retries for result in results)
    assert "engine 0 was ended by SIGKILL" in first_error(fleet)
    fleet.stop()
    assert not any(session_members(leader) for leader in leaders)
