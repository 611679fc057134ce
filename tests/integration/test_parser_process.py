"""Parses that would not end are ended, whichever parser it is, and hold up nothing else."""

import asyncio
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from slimrl.agent import bounded_parser
from slimrl.agent.bounded_parser import NOT_IN_TIME, BoundedParser, close_parsers
from slimrl.agent.parser_process import ParserFailed, parsed, start_parser
from slimrl.agent.parsers import ParsedTurn, make_parser
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.base.answering_process import AnsweringProcess, OutOfCpuTime, ProcessFailed
from slimrl.base.threads import task_threads
from slimrl.config.package_fields import tool_call_parsers

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "pattern": "^(a+)+$"}, "n": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "aaa"}}\n</tool_call>'
ENDLESS = "<｜tool▁call▁begin｜>" + "function<｜tool▁sep｜>" * 1000 + "\n```json\n" * 1000 + "\n``<｜tool▁call▁end｜>"
"""SGLang's expression for DeepSeek-V3 has three `.*` in turn: it takes the cube of the text's length."""
PARSERS = sorted(set(tool_call_parsers()) - {"response_template"})


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    yield
    close_parsers()


async def test_a_turn_is_read_as_without_a_process():
    texts = [
        f"Let me see.\n{CALL}", CALL + CALL, "words alone", "<tool_call>\n{\n</tool_call>", "", "\ud800<tool_call>",
        CALL.replace('"aaa"', '{"x": [1.5, null, true, 1e300]}'), CALL.replace("calculator", "abacus"),
    ]  # fmt: skip
    parser, plain = BoundedParser("hermes", [TOOL]), make_parser("hermes", [TOOL])
    assert [await parser.read(text) for text in texts] == [plain.parse(text) for text in texts]


async def test_a_process_spells_markers_as_the_models_tokenizer_does():
    text = "<tool_calls:x><tool_call:x>calculator<tool_sep:x><arg_key:x>n</arg_key:x><arg_value:x>2</arg_value:x>"
    tokens = ("<tool_calls:x>", "<tool_call:x>", "<tool_sep:x>", "<arg_key:x>", "<arg_value:x>")
    (call,) = (await BoundedParser("hunyuan", [TOOL], tokens).read(f"{text}</tool_call:x></tool_calls:x>")).calls
    assert call == ToolCall(name="calculator", arguments={"n": 2})
    assert not (await BoundedParser("hunyuan", [TOOL]).read(f"{text}</tool_call:x></tool_calls:x>")).calls


async def test_a_parse_without_end_is_a_malformed_call_and_the_loop_goes_on():
    parser = BoundedParser("deepseekv3", [TOOL])
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1

    ticking = asyncio.create_task(tick())
    async with asyncio.timeout(60):
        parsed = await parser.read(ENDLESS)
    ticking.cancel()
    assert parsed.calls == [MalformedCall(problem=NOT_IN_TIME)]
    assert ticks > 20
    assert (await parser.read("words")).content == "words"


async def test_a_pattern_of_an_agents_schema_ends_too():
    parser = BoundedParser("hermes", [TOOL])
    async with asyncio.timeout(60):
        parsed = await parser.read(CALL.replace("aaa", "a" * 40 + "!"))
        assert parsed.calls == [MalformedCall(problem=NOT_IN_TIME)]
        assert (await parser.read(CALL)).calls == [ToolCall(name="calculator", arguments={"expression": "aaa"})]


class RaisingParser:
    close_marker = ""

    def parse(self, text: str) -> ParsedTurn:
        raise ZeroDivisionError(text)


async def test_a_parser_that_raises_keeps_its_process():
    parser = BoundedParser(f"{__name__}:RaisingParser", [])
    for _ in range(2):
        with pytest.raises(ParserFailed, match="ZeroDivisionError"):
            await parser.read("x")
    (process,) = [one for one in bounded_parser._processes._slots.queue if one is not None]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessFailed, match="the process that parses turns ended by SIGKILL"):
        await parser.read("x")
    with pytest.raises(ParserFailed, match="ZeroDivisionError"):
        await parser.read("x")


@dataclass(frozen=True, kw_only=True)
class OwnCall(ToolCall):
    score: float = 0.5


class OwnCallParser:
    close_marker = ""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content="", calls=[OwnCall(name=text, arguments={})])


async def test_a_call_of_a_class_of_the_tasks_own_is_a_call():
    parsed = await BoundedParser(f"{__name__}:OwnCallParser", []).read("x")
    assert parsed.calls == [ToolCall(name="x", arguments={})]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_whose_answer_is_refused_is_ended(monkeypatch: pytest.MonkeyPatch):
    before, process = num_descriptors(), start_parser()
    process.wait_ready()
    monkeypatch.setattr(AnsweringProcess, "_line", lambda process, deadline: b"no JSON")
    with pytest.raises(json.JSONDecodeError):
        parsed(process, "hermes", json.dumps([TOOL]), CALL)
    assert num_descriptors() == before
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_fork_that_fails_leaves_no_descriptors_open(monkeypatch: pytest.MonkeyPatch):
    def fail() -> int:
        raise BlockingIOError(11, "no process more")

    monkeypatch.setattr(os, "fork", fail)
    before = num_descriptors()
    with pytest.raises(BlockingIOError):
        start_parser()
    assert num_descriptors() == before


def test_a_process_that_is_stuck_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimrl.agent.parser_process.DEADLINE_S", 0.5)
    process = start_parser()
    process.wait_ready()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ProcessFailed, match=r"the process that parses turns did not answer within 0\.5 s"):
        parsed(process, "hermes", "[]", "x" * 1_000_000)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_process_holds_none_of_the_drivers_files(tmp_path: Any):
    BoundedParser("hermes", [TOOL])
    with (tmp_path / "file").open("w") as file:
        process = start_parser()
        process.wait_ready()
        held = [os.readlink(f"/proc/{process.pid}/fd/{one}") for one in os.listdir(f"/proc/{process.pid}/fd")]
        process.end()
    assert file.name not in held
    assert len(held) == 6, held  # with its end of each pipe, and a descriptor of this process to end with


async def test_all_processes_are_ended_and_the_next_turn_has_a_new_one():
    parser = BoundedParser("hermes", [TOOL])
    await parser.read(CALL)
    (pid,) = bounded_parser._processes.pids
    close_parsers()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert bounded_parser._processes.pids == []
    assert (await parser.read(CALL)).calls
    assert len(bounded_parser._processes.pids) == 1


def test_a_users_own_limit_of_cpu_time_stays():
    BoundedParser("hermes", [TOOL])
    process = start_parser()
    process.wait_ready()
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (1000, 1000))
    assert parsed(process, "hermes", json.dumps([TOOL]), CALL).calls
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_CPU)
    process.end()
    assert 0 < soft <= 10
    assert hard == 1000


async def test_a_turn_waits_for_a_process_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_parser, "DEADLINE_S", 0.3)
    monkeypatch.setattr(bounded_parser, "_processes", bounded_parser._pool())
    bounded_parser._processes._slots.queue.clear()  # as while all of them parse
    async with asyncio.timeout(20):
        with pytest.raises(ProcessFailed, match=r"no process that parses turns was free within 0\.3 s"):
            await BoundedParser("hermes", [TOOL]).read(CALL)


async def test_a_turn_that_nobody_waits_for_is_not_parsed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_parser, "_processes", bounded_parser._pool())
    slots, asked = bounded_parser._processes._slots, []
    monkeypatch.setattr(AnsweringProcess, "ask", lambda *call: asked.append(call))
    taken = [slots.get() for _ in range(slots.qsize())]
    waiting = asyncio.create_task(BoundedParser("hermes", [TOOL]).read(CALL))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    for one in taken:
        slots.put(one)
    async with asyncio.timeout(20):
        while task_threads():
            await asyncio.sleep(0.01)
    assert asked == []
    assert bounded_parser._processes.pids == []
    assert list(slots.queue) == taken


class LateParser:
    """Does at its first parse what takes 3 s of CPU time, as imports may."""

    close_marker = ""
    ready = True
    until = 0.0

    def parse(self, text: str) -> ParsedTurn:
        while not LateParser.ready:
            LateParser.ready = time.process_time() > LateParser.until
        logging.getLogger("late").error("one record")
        return ParsedTurn(content=text, calls=[])


async def test_what_a_parser_of_the_tasks_own_does_first_takes_no_turns_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LateParser, "ready", False)
    monkeypatch.setattr(LateParser, "until", time.process_time() + 3)
    parser = BoundedParser(f"{__name__}:LateParser", [])
    monkeypatch.setattr(LateParser, "until", 1000.0)  # of a process that has not seen the first parse
    assert await parser.read("x") == ParsedTurn(content="x", calls=[])


async def test_a_parser_that_takes_too_long_is_named_once(caplog: pytest.LogCaptureFixture):
    parser = BoundedParser(f"{__name__}:LateParser", [])
    LateParser.ready, LateParser.until = False, 1000.0
    for _ in range(2):
        assert (await parser.read("x")).calls == [MalformedCall(problem=NOT_IN_TIME)]
    LateParser.ready = True
    (record,) = [one for one in caplog.records if one.name == bounded_parser.__name__]
    assert f"{__name__}:LateParser" in record.getMessage()


async def test_what_a_parser_logs_is_dropped(tmp_path: Any, capfd: pytest.CaptureFixture[str]):
    LateParser.ready = True
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("late").addHandler(handler)
    parser = BoundedParser(f"{__name__}:LateParser", [])
    before = (tmp_path / "log").read_text()
    assert (await parser.read("x")).content == "x"
    logging.getLogger("late").removeHandler(handler)
    handler.close()
    assert "Logging error" not in capfd.readouterr().err
    assert (tmp_path / "log").read_text() == before == "one record\n"


class StuckParser:
    close_marker = ""

    def parse(self, text: str) -> ParsedTurn:
        if text == "stuck":
            threading.Event().wait()
        return ParsedTurn(content=text, calls=[])


STUCK = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from slimrl.agent.parser_process import parsed, start_parser
process = start_parser()
process.wait_ready()
parsed(process, "test_parser_process:StuckParser", "[]", "first")
threading.Thread(target=parsed, args=(process, "test_parser_process:StuckParser", "[]", "stuck")).start()
time.sleep(0.5)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_stuck_ends_with_the_one_that_forked_it():
    with subprocess.Popen([sys.executable, "-c", STUCK, os.path.dirname(__file__)], stdout=subprocess.PIPE) as driver:
        pid = int(driver.stdout.readline())
        driver.wait(timeout=10)
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = is_alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_alive(pid: int) -> bool:
    """Nobody may reap an orphan here."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_many_turns_at_once_each_get_their_own():
    parser = BoundedParser("hermes", [TOOL])
    texts = [CALL.replace("aaa", "a" * number) for number in range(1, 60)]
    parsed = await asyncio.gather(*map(parser.read, texts))
    assert [one.calls[0].arguments["expression"] for one in parsed] == ["a" * number for number in range(1, 60)]


FRAGMENTS = [
    '{"a":', "[", '{"name": "calculator", "arguments": {', '"', "\\", "f(x=", "[calculator(n=1),", "```json\n", "\n",
    "<", "</", "=", "'", " ", "<arg_key>", "</arg_value>", "<parameter=", "<function=calculator>", "<invoke name=",
]  # fmt: skip


REPORTED = "<|tool_calls_section_begin|><|to" + '{"a":' * 30 + "ol_call_"


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_ends_on_hostile_texts(name: str):
    """Seeded texts of the format's own markers, repeated: each is read within its limit, or its process is ended."""
    parser = BoundedParser(name, [TOOL])
    rng = random.Random(name)
    pieces = [*FRAGMENTS, *getattr(parser._parser, "all_markers", ()), "<tool_call>", "<|tool_call_begin|>"]
    texts = [REPORTED]
    for _ in range(12):
        first, again, last = rng.choices(pieces, k=3)
        texts.append(first + again * rng.choice([30, 300, 3000]) + last)
    process, slow = None, []
    for text in texts:
        if process is None:
            process = start_parser()
            process.wait_ready()
        try:
            assert isinstance(parsed(process, name, json.dumps([TOOL]), text), ParsedTurn)
        except OutOfCpuTime:
            process = None
            slow.append(text[:40])
    if process is not None:
        process.end()
    assert len(slow) < 5, slow
