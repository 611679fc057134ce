"""Hostile programs: each ends within its limits, escapes nothing, and leaves nothing to the next run."""

import asyncio
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_programs import ANY, PYTHON, SHELL
from sandboxes import SMALL, needs_namespaces, processes_inside

from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.interface import Ended, Language, Program, Result
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    needs_namespaces,
]

REPOSITORY = Path(__file__).parents[2]
SLACK_S = 8.0
"""How much later than its deadline a run may be reported on a busy machine."""
CASES = [
    *((name, Language.python, code, ended) for name, (code, ended) in PYTHON.items()),
    *((name, Language.shell, code, ended) for name, (code, ended) in SHELL.items()),
]
AFTER = """
import builtins, json, math, os, re
print(math.sqrt(4), json.dumps([1]), re.sub("a", "b", "a"), os.listdir("/tmp"), os.listdir("/dev/shm"))
print("LEFT" in os.environ, [p for p in os.listdir("/proc") if p.isdigit()], open("/usr/bin/env", "rb").read(4))
"""
CLEAN = "2.0 [1] b [] []\nFalse ['1'] b'\\x7fELF'\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What programs try to reach on the host, which all of them leave as it was."""
    secret = tmp_path_factory.mktemp("host") / "secret"
    secret.write_text("ESCAPED")
    os.environ["SLIMRL_TEST_SECRET"] = "ESCAPED"
    abstract = f"slimrl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + abstract)
        unix.listen()
        yield {
            "HOST_FILE": str(secret), "REPOSITORY": str(REPOSITORY), "HOST_PID": str(os.getpid()), "ABSTRACT": abstract,
            "PORT": str(server.getsockname()[1]), "HOME": str(Path.home()),
        }  # fmt: skip
    del os.environ["SLIMRL_TEST_SECRET"]
    assert secret.read_text() == "ESCAPED"


class Box(BubblewrapSandbox):
    """One sandbox, and its event loop, for all tests of this file."""

    def __init__(self, runner: asyncio.Runner) -> None:
        super().__init__(SandboxConfig(limits=SMALL))
        self.runner = runner

    def result(self, code: str, language: Language = Language.python, limits: SandboxLimits | None = None) -> Result:
        return self.runner.run(self.run(Program(code=code, language=language), limits))

    def results(self, codes: list[str]) -> list[Result]:
        async def all_at_once() -> list[Result]:
            return await asyncio.gather(*(self.run(Program(code=code)) for code in codes))

        return self.runner.run(all_at_once())


@pytest.fixture(scope="module")
def sandbox(host):  # which is there first
    with asyncio.Runner() as runner:
        box = Box(runner)
        box.result("")
        yield box
        runner.run(box.close())


def test_there_are_enough_programs():
    assert len(CASES) == len({name for name, *_ in CASES}) >= 60


@pytest.mark.parametrize(("name", "language", "code", "ended"), CASES, ids=[case[0] for case in CASES])
def test_a_hostile_program_ends_and_leaves_nothing(sandbox, host, name, language, code, ended):
    pid = sandbox.pid
    for word, value in host.items():
        code = code.replace(word, value)
    # A program that ends otherwise than at the deadline does so also on a machine that is busy.
    limits = SMALL if ended in ("timeout", ANY) else replace(SMALL, wall_s=20.0)
    start = time.monotonic()
    result = sandbox.result(code, language, limits)
    assert time.monotonic() - start < limits.wall_s + SLACK_S
    assert "ESCAPED" not in result.stdout, result
    assert len(result.stdout) + len(result.stderr) <= SMALL.output_bytes
    if ended is not None:
        assert result.ended is Ended(ended), result
    assert processes_inside(sandbox) == 2
    after = sandbox.result(AFTER, limits=replace(SMALL, wall_s=20.0))
    assert (after.stdout, after.stderr, after.ended) == (CLEAN, "", Ended.ok)
    assert sandbox.pid == pid, "the warm interpreter was replaced"


def test_runs_at_the_same_time_see_nothing_of_each_other(sandbox):
    look = (
        "import os, socket, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0meeting')\n"
        "open('/tmp/mine', 'x').close(); open('/dev/shm/mine', 'x').close(); time.sleep(0.3)\n"
        "print([p for p in os.listdir('/proc') if p.isdigit()], os.listdir('/tmp'), os.listdir('/dev/shm'))\n"
    )
    results = sandbox.results([look] * 6)
    assert {(result.stdout, result.stderr) for result in results} == {("['1'] ['mine'] ['mine']\n", "")}


def test_random_numbers_of_two_runs_differ(sandbox):
    code = "import random, numpy, numpy.random\nprint(random.random(), numpy.random.rand())"
    first, second = [sandbox.result(code).stdout.split() for _ in range(2)]
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_bomb_does_not_hold_up_the_runs_beside_it(sandbox):
    bomb, *others = sandbox.results([PYTHON["fork bomb"][0], *(f"print({number})" for number in range(4))])
    assert [result.stdout for result in others] == ["0\n", "1\n", "2\n", "3\n"]
    assert max(result.seconds for result in others) < bomb.seconds
    assert bomb.ended is Ended.timeout
