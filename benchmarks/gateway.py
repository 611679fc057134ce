"""What the gateway adds to a chat completion of SGLang, and as many sessions at once as are asked for.

Latency: one engine on the toy model is asked the same questions, greedily, through its own chat completions, through
its /generate (which takes token ids), and through the gateway, in turn and with the order changing, so that other load
on the machine meets all ways. The texts must be the same.
Sessions: agents in one process with the gateway, each with a session of its own, before an engine that only waits. The
figures include the agents' own HTTP client, whose share is measured against a server that does nothing.
"""

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from figures import make_table, write_figures
from rich.console import Console
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.stop_tokens import stop_token_ids
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.chat.tokenizer import load_tokenizer
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.gateway.agents import FunctionAgent
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.runner import GatewayRunner
from slimrl.agent.parsers import NoCalls
from slimrl.config.schema.agent import AgentConfig, GatewayConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import new_key
from slimrl.engines.servers.server import EngineServer

KEY = new_key()
"""The engine's key"""
NEW_TOKENS = 8
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_end_of_turn=True)
ENGINE_S = 1.0
"""How long the engine that only waits takes for a turn"""
LAG_S = 0.05
"""Time between two looks at the event loop"""


class WaitingEngine(Engine):
    """Answers every request with the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.under_way = self.most_under_way = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(ENGINE_S)
        self.under_way -= 1
        logprobs = [-0.5] * len(self._tokens)
        return GenerateResult(
            tokens=self._tokens, logprobs=logprobs, weight_versions=np.zeros(len(logprobs), np.int32),
            finish_reason="stop", routed_experts=None, cached_tokens=0,
        )  # fmt: skip

    async def aclose(self) -> None:
        return


def chat_of(model: Path) -> ChatFormat:
    tokenizer = load_tokenizer(model)
    template = ChatTemplate(tokenizer)
    return ChatFormat(template, stop_token_ids(model, tokenizer, template.reserved))


def runner_of(engine: Engine, chat: ChatFormat, agent: Callable[..., Any]) -> GatewayRunner:
    unlimited = GatewayConfig(max_requests_per_s=1e9)
    return GatewayRunner(
        engine=engine,
        dialogues=Dialogues(chat, lambda schemas: NoCalls(), stop_at_call=True),
        agent=FunctionAgent(function=agent, path="benchmark:agent"),
        rollout=RolloutConfig(max_trajectory_tokens=1024, max_turns=1_000_000, trajectory_timeout_s=3600),
        config=AgentConfig(function="benchmark:agent", gateway=unlimited),
    )


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Compute {number}*{number + 3}+{7 * number}."}]


async def latencies(model: Path, num_requests: int, folder: Path) -> dict[str, dict[str, float]]:
    """Way -> median and 99th percentile of its latency, and of what it takes longer than SGLang's chat completions."""
    rollout = RolloutConfig(num_engines=1, max_trajectory_tokens=1024, max_concurrency_per_engine=8)
    server = EngineServer(0, rollout, model, folder / "engine.log", key=KEY, precision=Precision.fp32)
    seconds: dict[str, list[float]] = {"sglang chat": [], "sglang tokens": [], "gateway": []}
    chat = chat_of(model)
    try:
        server.wait_ready()
        engine = SglangEngine(server.url, key=KEY)
        agent = _comparer(server.url, chat, num_requests, seconds)
        runner = runner_of(engine, chat, agent)
        await runner.start()
        try:
            ended = await runner.run(_prompt(), trajectory_id="latency", sampling=GREEDY, seed=None)
        finally:
            await runner.stop()
            await engine.aclose()
        if ended.status is not Status.truncated:  # every turn ends at its limit
            raise RuntimeError(ended.metadata.get("error"))
    finally:
        server.stop()
    figures = {}
    for way, each in seconds.items():
        added = [mine - chats for mine, chats in zip(each, seconds["sglang chat"], strict=True)]
        figures[way] = {
            "p50_ms": percentile(each, 50),
            "p99_ms": percentile(each, 99),
            "added_p50_ms": percentile(added, 50),
            "added_p99_ms": percentile(added, 99),
        }
    return figures


def _prompt() -> Prompt:
    return Prompt(prompt_id="p", messages=question(1), label=None)


def _comparer(url: str, chat: ChatFormat, num_requests: int, seconds: dict[str, list[float]]) -> Callable[..., Any]:
    """An agent that asks each question in every way; fills `seconds`."""

    async def agent(line: Mapping[str, Any], connection: Connection) -> None:
        async with aiohttp.ClientSession() as http:

            async def post(address: str, body: Mapping[str, Any], key: str = "") -> Any:
                async with http.post(address, json=body, headers={"authorization": f"Bearer {key}"}) as response:
                    response.raise_for_status()
                    return await response.json()

            async def sglang_chat(number: int) -> str:
                body = {"model": "m", "messages": question(number), "max_tokens": NEW_TOKENS, "temperature": 0,
                        "ignore_eos": True, "skip_special_tokens": False}  # fmt: skip
                return (await post(f"{url}/v1/chat/completions", body, KEY.value))["choices"][0]["message"]["content"]

            async def sglang_tokens(number: int) -> str:
                sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
                tokens = chat.prompt(question(number), None).tokens
                body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
                answer = await post(f"{url}/generate", body, KEY.value)
                return chat.turn_text([pair[1] for pair in answer["meta_info"]["output_token_logprobs"]])

            async def gateway(number: int) -> str:
                body = {"model": "m", "messages": question(number), "temperature": 0}
                address = f"{connection.openai_base_url}/chat/completions"
                return (await post(address, body, connection.api_key))["choices"][0]["message"]["content"]

            ways = [("sglang chat", sglang_chat), ("sglang tokens", sglang_tokens), ("gateway", gateway)]
            for number in range(num_requests):
                for _, ask in ways:  # the engine's cache has the question, whichever way comes first
                    await ask(number)
                texts = set()
                for way, ask in (*ways[number % 3 :], *ways[: number % 3]):
                    start = time.perf_counter()
                    text = await ask(number)
                    seconds[way].append(time.perf_counter() - start)
                    texts.add(chat.turn_text(chat.template.encode(text)).strip())
                if len(texts) > 1:
                    raise RuntimeError(f"the ways do not agree: {texts}")

    return agent


def percentile(values: list[float], percent: int) -> float:
    """Milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def sessions(model: Path, num_sessions: int, num_turns: int) -> dict[str, float]:
    """Figures of sessions that are all open at once, each with a conversation of some turns."""
    chat = chat_of(model)
    engine = WaitingEngine([*chat.template.encode("34*17+2 = 580."), chat.stop_token_ids[0]])
    waits: list[float] = []
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def agent(line: Mapping[str, Any], connection: Connection) -> None:
        messages = list(line["messages"])
        url, headers = (
            f"{connection.openai_base_url}/chat/completions",
            {"authorization": f"Bearer {connection.api_key}"},
        )
        for _ in range(num_turns):
            start = time.perf_counter()
            async with http.post(url, json={"model": "m", "messages": messages}, headers=headers) as response:
                message = (await response.json())["choices"][0]["message"]
            waits.append(time.perf_counter() - start - ENGINE_S)
            messages += [message, {"role": "user", "content": "And 7?"}]

    runner = runner_of(engine, chat, agent)
    await runner.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, start, lags = time.process_time(), time.perf_counter(), list[float]()
    watch = asyncio.create_task(_watch(lags))
    try:
        run = runner.run
        done = await asyncio.gather(
            *(run(_prompt(), trajectory_id=f"t{i}", sampling=SamplingConfig(), seed=i) for i in range(num_sessions))
        )
    finally:
        watch.cancel()
        await http.close()
        await runner.stop()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    failed = [one.metadata.get("error") for one in done if one.status is not Status.completed]
    if failed or any(len(one.segments) != 1 for one in done):
        raise RuntimeError(f"{len(failed)} sessions failed: {failed[:1]}")
    num_requests = num_sessions * num_turns
    return {
        "sessions": num_sessions,
        "turns": num_turns,
        "most_requests_under_way": engine.most_under_way,
        "seconds": seconds,
        "requests_per_s": num_requests / seconds,
        "cpu_ms_per_request": 1000 * cpu / num_requests,
        "client_cpu_ms_per_request": 1000 * await _client_cpu(min(num_requests, 2000)),
        "added_p50_ms": percentile(waits, 50),
        "added_p99_ms": percentile(waits, 99),
        "loop_lag_p99_ms": percentile(lags, 99),
        "kb_per_session": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / num_sessions,
    }


async def _watch(lags: list[float]) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(LAG_S)
        lags.append(time.perf_counter() - start - LAG_S)


async def _client_cpu(num_requests: int) -> float:
    """CPU seconds of a request to a server of the same library that does nothing with it."""

    async def nothing(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "34*17+2 = 580."}}]})

    app = web.Application()
    app.router.add_post("/", nothing)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cpu = time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100)) as http:

        async def ask() -> None:
            async with http.post(url, json={"model": "m", "messages": question(1)}) as response:
                await response.json()

        await asyncio.gather(*(ask() for _ in range(num_requests)))
    cpu = time.process_time() - cpu
    await runner.cleanup()
    return cpu / num_requests


def print_tables(figures: Mapping[str, Any], load: float) -> None:
    console = Console()
    columns = ("way", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms")
    table = make_table(f"a chat completion of {NEW_TOKENS} tokens, load {load:.1f} before", columns)
    for way, row in figures["latency"].items():
        table.add_row(way, *(f"{value:.2f}" for value in row.values()))
    console.print(table)
    table = make_table("sessions at once", ("figure", "value"))
    for name, value in figures["sessions"].items():
        table.add_row(name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=300, help="questions, each asked in every way")
    parser.add_argument("--sessions", type=int, default=2000, help="sessions at once")
    parser.add_argument("--turns", type=int, default=5, help="turns of each session")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if min(options.requests, options.sessions, options.turns) < 1:
        print("--requests, --sessions and --turns: at least 1.", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_toy("qwen3_moe", folder / "toy", ToySize(), seed=0)
        figures: dict[str, Any] = {
            "sessions": asyncio.run(sessions(folder / "toy", options.sessions, options.turns)),
            "latency": asyncio.run(latencies(folder / "toy", options.requests, folder)),
        }
    print_tables(figures, load)
    write_figures(options.json, {**figures, "requests": options.requests, "load_before": load})
    return 0


if __name__ == "__main__":
    sys.exit(main())
