"""Parts of the sandbox: admission, why a run ended, the filter of system calls, settings, limits of a command."""

import asyncio
import errno
import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from slimrl.agent.sandbox import user_namespace
from slimrl.agent.sandbox.admission import Admission
from slimrl.agent.sandbox.inside import seccomp
from slimrl.agent.sandbox.inside.processes import share_memory
from slimrl.agent.sandbox.interface import Ended, Language, Program, Result, SandboxBusy, SandboxError
from slimrl.agent.sandbox.outcome import out_of_cpu_time, why
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.sandbox.process import Command, run_command
from slimrl.agent.sandbox.tools import answer
from slimrl.agent.tools import make_tool
from slimrl.config.import_path import resolve
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86_64 = 0xC000003E


def verdict(number: int, *arguments: int, arch: int = X86_64) -> int:
    """What the filter returns, by an interpreter of the few instructions that it uses."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("<HBBI", seccomp.program()))
    place = value = 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
            continue
        true = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        place += if_true if true else if_false


def test_the_filter_refuses_what_is_denied_and_allows_the_rest():
    verdicts = {number: verdict(number, socket.AF_UNIX) for number in range(500)}
    refused = {number for number, said in verdicts.items() if said != ALLOW}
    assert refused == {*seccomp.DENIED.values(), *seccomp.MISSING.values()}
    assert {verdicts[number] for number in seccomp.DENIED.values()} == {EPERM}
    assert {verdicts[number] for number in seccomp.MISSING.values()} == {ENOSYS}
    assert {name: seccomp.DENIED[name] for name in ("ptrace", "mount", "bpf", "sync")} == {
        "ptrace": 101,
        "mount": 165,
        "bpf": 321,
        "sync": 162,
    }


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_may_make_threads_and_processes_but_no_namespace(flag):
    assert verdict(56, 17) == verdict(56, 0x3D0F00) == verdict(56, 0x4111) == ALLOW
    assert verdict(56, 17 | flag) == EPERM


def test_a_thread_has_the_open_files_of_its_process():
    assert verdict(56, 0x3D0F00 & ~0x400) == EPERM


def test_anonymous_memory_is_private_and_of_small_pages():
    files, shared, private, huge = 1, mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x40000
    anonymous = mmap.MAP_ANONYMOUS
    assert [verdict(9, 0, 4096, 3, flags) for flags in (files, private, private | anonymous)] == [ALLOW] * 3
    refused = (shared | anonymous, 3 | anonymous, private | anonymous | huge, shared | huge)
    assert [verdict(9, 0, 4096, 3, flags) for flags in refused] == [EPERM] * 4


@pytest.mark.parametrize("call", [41, 53])
def test_only_families_of_a_run_s_own_namespace_have_sockets(call):
    allowed = {family for family in range(64) if verdict(call, family, socket.SOCK_STREAM) == ALLOW}
    assert allowed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
    assert verdict(call, 40) == 0x00050000 | errno.EAFNOSUPPORT  # AF_VSOCK


def test_buffers_stay_as_they_are_and_pages_small():
    grown = [socket.SO_SNDBUF, socket.SO_RCVBUF, 26, 32, 33, 50, 51, 52]
    refused = {option for option in range(100) if verdict(54, 3, socket.SOL_SOCKET, option) == EPERM}
    assert refused == set(grown)
    assert verdict(54, 3, socket.IPPROTO_TCP, socket.SO_SNDBUF) == ALLOW
    assert verdict(72, 3, fcntl.F_SETPIPE_SZ, 1 << 20) == verdict(157, 41, 0) == EPERM
    assert verdict(72, 3, fcntl.F_GETPIPE_SZ) == verdict(157, 15) == ALLOW


def test_other_architectures_are_ended_and_x32_is_refused():
    assert verdict(1, arch=0x40000003) == KILL
    assert verdict(0x40000000 + 1) == EPERM


@pytest.mark.parametrize(
    ("status", "stderr", "ended"),
    [
        (0, "MemoryError", Ended.ok),
        (1, "Traceback\nMemoryError\n", Ended.memory),
        (1, "numpy._core._exceptions._ArrayMemoryError: no\n", Ended.memory),
        (1, "MemoryError\nValueError\n", Ended.error),
        (1, "", Ended.error),
        (-11, "", Ended.killed),
    ],
)
def test_why_a_program_ended_follows_from_its_status_and_last_line(status, stderr, ended):
    assert why(status, stderr) is ended


def test_a_kill_is_the_limit_of_cpu_time_only_if_that_was_used_up():
    limits = SandboxLimits(cpu_s=2)
    assert out_of_cpu_time(-9, 2.0, limits)
    assert out_of_cpu_time(137, 1.95, limits)
    assert not out_of_cpu_time(-9, 0.1, limits)
    assert not out_of_cpu_time(1, 2.0, limits)


@pytest.mark.parametrize("code", ["x" * 100_001, "a\0b"])
def test_code_that_could_not_be_passed_on_is_refused(code):
    with pytest.raises(ValueError, match="the code"):
        Program(code=code)


class Recorder:
    """A backend that counts how many runs it has at a time."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def run(self, program, limits=None):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return Result(stdout=program.code, stderr="", exit_status=0, ended=Ended.ok, seconds=0.01)

    async def session(self, language=Language.python, *, folder=None, limits=None):
        return self

    async def close(self):
        pass


async def test_runs_wait_for_a_place_and_all_are_answered():
    backend = Recorder()
    pool = SandboxPool(SandboxConfig(max_running=3), backend)
    results = await asyncio.gather(*(pool.run(Program(code=str(number))) for number in range(20)))
    assert [result.stdout for result in results] == [str(number) for number in range(20)]
    assert backend.most == 3


async def test_one_run_more_than_the_queue_holds_is_refused_at_once():
    pool = SandboxPool(SandboxConfig(max_running=1, max_waiting=2), Recorder())
    results = await asyncio.gather(*(pool.run(Program(code="")) for _ in range(4)), return_exceptions=True)
    assert [type(result) for result in results] == [Result, Result, Result, SandboxBusy]


async def test_a_wait_has_a_deadline_and_a_cancelled_wait_takes_no_place():
    admission = Admission(max_running=1, max_waiting=5, wait_s=0.05)
    await admission.enter()
    with pytest.raises(SandboxBusy, match=r"no place within 0\.05 s"):
        await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    admission.leave()
    await admission.enter()
    assert admission.num_waiting == 0


async def test_a_session_holds_its_place_until_it_is_closed():
    pool = SandboxPool(SandboxConfig(max_sessions=1, wait_s=0.05), Recorder())
    first = await pool.session()
    with pytest.raises(SandboxBusy):
        await pool.session()
    await first.close()
    await first.close()
    await pool.session()


@pytest.mark.parametrize(
    ("command", "limits", "ended"),
    [
        (["yes"], {"output_bytes": 100}, Ended.output),
        (["sleep", "60"], {"wall_s": 0.1}, Ended.timeout),
        (["true"], {}, Ended.ok),
    ],
)
async def test_what_a_command_started_elsewhere_is_stopped_only_at_a_limit(command, limits, ended):
    stopped = []

    async def stop() -> None:
        stopped.append(ended)

    result = await run_command(Command(argv=command), SandboxLimits(**limits), stop)
    assert result.ended is ended
    assert stopped == ([] if ended is Ended.ok else [ended])
    assert result.exit_status == (0 if ended is Ended.ok else None)


@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "ended", "text"),
    [
        ("4\n", "", 0, Ended.ok, "4"),
        ("", "", 0, Ended.ok, "no output"),
        ("4\n", "a warning", 0, Ended.ok, "4"),
        ("4\n", "".join(f"{n}\n" for n in range(20)), 1, Ended.error, "4\n" + "\n".join(map(str, range(12, 20)))),
        ("", "", 3, Ended.error, "exit status 3"),
        ("so far\n", "", None, Ended.timeout, "so far\nstopped: out of time"),
    ],
)
def test_the_model_is_told_the_output_and_the_last_lines_of_an_error(stdout, stderr, status, ended, text):
    result = Result(stdout=stdout, stderr=stderr, exit_status=status, ended=ended, seconds=0)
    assert answer(result) == text


def test_the_tool_has_a_schema():
    function = make_tool(resolve("slimrl.agent.sandbox.tools:python")).schema["function"]
    assert function["name"] == "python"
    assert list(function["parameters"]["properties"]) == ["code"]


ITS_FIRST_THREAD_ENDS = """
import ctypes, threading, time
def hold():
    print("there", flush=True)
    time.sleep(60)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_processes_whose_first_threads_have_ended_share_no_memory():
    """The kernel says of threads that have ended that they have the same memory: none."""
    with ExitStack() as stack:
        pids = []
        for _ in range(2):
            command = [sys.executable, "-c", ITS_FIRST_THREAD_ENDS]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            deadline = time.monotonic() + 10.0
            while " Z " not in Path(f"/proc/{process.pid}/stat").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            pids.append(process.pid)
        assert not share_memory(*pids)
        assert share_memory(pids[0], pids[0])


def test_an_unshare_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch):
    (tmp_path / "unshare").write_text("#!/bin/sh\nexec /bin/sleep 3\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(user_namespace, "START_S", 0.1)
    with pytest.raises(SandboxError, match=r"unshare made no user namespace within 0\.1 s"):
        user_namespace.open_user_namespace()
    # Also where its pipe's number is beyond what `select` takes.
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1024:
            taken.append(os.dup(taken[0]))
        with pytest.raises(SandboxError, match=r"unshare made no user namespace within 0\.1 s"):
            user_namespace.open_user_namespace()
    finally:
        for descriptor in taken:
            os.close(descriptor)
