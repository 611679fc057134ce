"""Greedy programs: the host's memory, measured from outside, stays within the limit, each ends by its deadline, and
the runs beside it get their results as if it were not there."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest
from greedy_programs import ENDLESS, FAMILIES, MEMORY, MODERATE, PRELUDE
from host_memory import HostMemory
from sandboxes import needs_namespaces, processes_inside

from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.interface import Ended, Program, Result
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120), needs_namespaces]

MIB = 1 << 20
LIMITS = SandboxLimits(
    wall_s=3.0, cpu_s=3, memory_bytes=256 * MIB, processes=32, disk_bytes=32 * MIB, output_bytes=65536
)
MOST_BYTES, STAYS_BYTES = LIMITS.memory_bytes * 11 // 10, LIMITS.memory_bytes // 8
LEAST_FREE_BYTES = 6144 * MIB
"""Where the sandbox is ended, before a bound that fails takes the machine."""
SLACK_S = 8.0
"""How much later than its deadline a run may be reported on a busy machine, whose cores its processes need to end."""
ATTEMPTS = 3
"""Other work on the machine is measured too; what is beyond the limit each time is the program's own."""
BESIDE = """
import os, socket, subprocess, threading
read, write = os.pipe()
os.write(write, bytes(60_000))
one, two = socket.socketpair()
socket.send_fds(one, [b"x"], [read])
_, (file,), *_ = socket.recv_fds(two, 1, 1)
open("/tmp/x", "wb").write(bytes(1 << 20))
said = []
thread = threading.Thread(target=lambda: said.append(sum(range(10**5))))
thread.start(); thread.join()
echo = subprocess.run(["echo", "there"], capture_output=True)
print(len(os.read(file, 60_000)), said, echo.stdout, len(bytearray(1 << 25)))
"""
ANSWER = "60000 [4999950000] b'there\\n' 33554432\n"
QUICK = {
    "shared mappings of seven forks",
    "full socket pairs",
    "shared mappings of which one page stays",
    "private memory of a burst",
    "copies of what forks inherit",
    "connections that nobody accepts",
    "pages of files in sockets",
    "busy forks",
    "busy forks whose names are no text",
    "busy forks in sessions of their own",
}
"""One of each kind. What they take of the host is measured in the full set: it is the host's memory that is measured,
where tests that run beside take hundreds of megabytes."""


def whole(code: str) -> str:
    return (PRELUDE + code).replace("LIMIT", str(LIMITS.memory_bytes))


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(runner):
    box = BubblewrapSandbox(SandboxConfig(limits=LIMITS))
    yield box
    runner.run(box.close())


async def run_beside(sandbox: BubblewrapSandbox, code: str) -> tuple[Result, list[Result]]:
    """What becomes of a program, and of runs beside it, one after the other until it ends."""
    hostile = asyncio.create_task(sandbox.run(Program(code=code)))
    beside = []
    while not hostile.done():
        await asyncio.sleep(0.3)
        beside.append(await sandbox.run(Program(code=BESIDE)))
    return await hostile, beside


def measure(
    runner: asyncio.Runner, sandbox: BubblewrapSandbox, code: str
) -> tuple[Result, list[Result], list[int], list[int]]:
    """What became of the program and the runs beside it, and bytes of the host: the most taken, and what stays."""
    runner.run(sandbox.run(Program(code="")))
    pid = sandbox.pid
    assert pid is not None

    def stop() -> None:
        print("the sandbox was ended: little of the host's memory is left")
        os.kill(pid, signal.SIGKILL)

    with HostMemory(pid, LEAST_FREE_BYTES, stop) as memory:
        result, beside = runner.run(run_beside(sandbox, code))
        peaks, deadline = memory.peaks_bytes, time.monotonic() + 5.0
        while max(stay := memory.now_bytes()) > STAYS_BYTES and time.monotonic() < deadline:
            time.sleep(0.05)
    assert sandbox.pid == pid, "the warm interpreter was replaced"
    return result, beside, peaks, stay


def check_beside(beside: list[Result]) -> None:
    assert {(result.stdout, result.stderr, result.ended) for result in beside} == {(ANSWER, "", Ended.ok)}
    assert max(result.seconds for result in beside) < LIMITS.wall_s


def test_there_are_enough_programs():
    assert len({*MEMORY.values(), *ENDLESS.values()}) >= 43
    assert {*MEMORY, *ENDLESS} >= QUICK


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_greedy_program_ends_and_concerns_no_other_run(runner, sandbox, name):
    result, beside = runner.run(run_beside(sandbox, whole((MEMORY | ENDLESS)[name])))
    assert result.ended is not Ended.ok
    assert "ESCAPED" not in result.stdout, result
    assert result.seconds < LIMITS.wall_s + SLACK_S
    check_beside(beside)
    assert processes_inside(sandbox) == 2


@pytest.mark.full
@pytest.mark.parametrize(("name", "code"), (MEMORY | ENDLESS).items(), ids=(MEMORY | ENDLESS).keys())
def test_a_greedy_program_takes_no_more_than_its_limit_and_concerns_no_other_run(runner, sandbox, name, code):
    measured: list[list[int]] = []
    beyond = True
    while beyond and len(measured) < ATTEMPTS:
        result, beside, peaks, stay = measure(runner, sandbox, whole(code))
        measured.append([size // MIB for size in (*peaks, *stay)])
        beyond = max(peaks) > MOST_BYTES or max(stay) > STAYS_BYTES
        assert "ESCAPED" not in result.stdout, result
        assert result.seconds < LIMITS.wall_s + SLACK_S
        check_beside(beside)
        assert processes_inside(sandbox) == 2
    slowest = max(one.seconds for one in beside)
    print(f"{name}: {measured} MiB, {result.ended.value} after {result.seconds:.1f} s; beside it {slowest:.2f} s")
    assert not beyond, measured


def test_no_family_of_sockets_is_there_but_those_of_programs(runner, sandbox):
    result = runner.run(sandbox.run(Program(code=PRELUDE + FAMILIES)))
    assert (result.stdout, result.ended) == ("", Ended.ok), result


@pytest.mark.parametrize("name", MODERATE)
def test_a_program_within_its_limits_is_left_alone(runner, sandbox, name):
    limits = replace(LIMITS, wall_s=60.0, cpu_s=60)
    result = runner.run(sandbox.run(Program(code=whole(MODERATE[name])), limits))
    assert (result.stdout, result.stderr, result.ended) == ("", "", Ended.ok), result


def test_what_a_program_is_given_is_read_and_never_written(runner, sandbox):
    given = b"abc" * 1000
    code = (
        "import os\n"
        "for flags in (None, os.O_RDWR, os.O_WRONLY):\n"
        "    file = 0 if flags is None else os.open('/proc/self/fd/0', flags)\n"
        "    for call in (lambda: os.pwrite(file, b'x', 0), lambda: os.pwrite(file, b'x', 10**6),\n"
        "                 lambda: os.ftruncate(file, 10**6), lambda: os.ftruncate(file, 0)):\n"
        "        try: call(); print('ESCAPED')\n"
        "        except OSError as error: pass\n"
        "print(input())\n"
    )
    result = runner.run(sandbox.run(Program(code=code, stdin=given)))
    assert (result.stdout, result.stderr) == (given.decode() + "\n", "")


def test_what_a_program_is_given_counts(runner, sandbox):
    code = "import os, time\nif not os.fork(): time.sleep(60)\ntime.sleep(60)\n"
    limits = replace(LIMITS, wall_s=20.0)
    result = runner.run(sandbox.run(Program(code=code, stdin=bytes(LIMITS.memory_bytes)), limits))
    assert result.ended is Ended.memory, result
