"""How server processes are started, waited for and ended; the processes are stand-ins."""

import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers import ports, process, server
from slimrl.engines.servers.ports import free_port, free_ports
from slimrl.engines.servers.process import ServerError, ServerProcess, find_cause
from slimrl.engines.servers.server import EngineServer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(process, "time", made)
    return made


class Child:
    """What subprocess.Popen makes."""

    pid = 50

    def __init__(self, command, **options) -> None:
        self.command, self.options = command, options
        self.code: int | None = None
        self.waited: list[float] = []
        options["stdout"].write(b"begun\n")

    def poll(self):
        return self.code

    def wait(self, timeout):
        self.waited.append(timeout)
        if self.code is None:
            raise process.subprocess.TimeoutExpired("x", timeout)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServerProcess:
    monkeypatch.setattr(process.subprocess, "Popen", Child)
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("OTHER", "1")
    log = tmp_path / "deep" / "log"
    log.parent.mkdir()
    log.write_text("of the start before\n")
    return ServerProcess("engine 0", ("run", "it"), {"OTHER": "2"}, log)


def test_a_server_has_a_session_and_a_fresh_log_of_its_own_and_our_environment_with_its_variables(child: ServerProcess):
    made = child._process
    assert made.command == ["run", "it"]
    assert (made.options["env"]["KEPT"], made.options["env"]["OTHER"]) == ("1", "2")
    assert made.options["start_new_session"] is True
    assert (made.options["stdin"], made.options["stderr"]) == (process.subprocess.DEVNULL, process.subprocess.STDOUT)
    assert child.log.read_text() == "begun\n"
    assert child.pid == 50


@pytest.mark.parametrize(
    ("code", "said"),
    [(1, "ended with exit code 1: begun"), (0, "ended with exit code 0: begun"), (-9, "was ended by SIGKILL, without")],
)
def test_a_server_that_has_ended_says_how(child: ServerProcess, code: int, said: str):
    child.check()
    child._process.code = code
    with pytest.raises(ServerError, match=rf"^engine 0 {said}.*\(log: {child.log}\)$"):
        child.check()
    child.log.unlink()
    with pytest.raises(ServerError, match="its log is empty" if code >= 0 else "SIGKILL"):
        child.check()


def test_a_log_without_an_error_is_shown_by_its_last_lines():
    lines = [f"line {i}" if i % 2 else " " for i in range(80)]
    assert find_cause(lines).splitlines() == [f"line {i}" for i in range(51, 80, 2)]


def test_a_server_is_waited_for_until_it_answers_200(child: ServerProcess, clock: Clock, monkeypatch):
    asked = []
    answers = [httpx.ConnectError("refused"), 503, 200]

    clients = []

    class Client:
        def __init__(self, *, headers, trust_env):
            assert headers == {"a": "b"}
            clients.append(trust_env)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            clients.append("closed")

        def get(self, url, *, timeout):
            asked.append((url, timeout))
            answer = answers.pop(0) if answers else 503
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(status_code=answer)

    monkeypatch.setattr(process.httpx, "Client", Client)
    child.wait_ready("http://a/health", 30.0, {"a": "b"})
    # A client reads the system's certificates, which takes 30 ms: one for all attempts, and without a proxy.
    assert clients == [False, "closed"]
    # One answer may take twenty seconds, but not longer than what is left, and a second at the least.
    assert asked == [("http://a/health", 20.0)] * 3
    asked.clear()
    clock.now = 0.0
    with pytest.raises(ServerError, match=r"engine 0 was not ready within 5 s: begun \(log: "):
        child.wait_ready("http://a/health", 5.0, {"a": "b"})
    assert clock.now == pytest.approx(5.0, abs=0.2)
    assert asked[0][1] == 5.0
    assert asked[-1][1] == 1.0
    child._process.code = 1
    with pytest.raises(ServerError, match="exit code 1"):
        child.wait_ready("http://a/health", 5.0, {"a": "b"})


class Member:
    """A process of the server's session; it ends by itself at a signal of `ends_by`."""

    def __init__(self, pid: int, ends_by=(signal.SIGTERM, signal.SIGKILL), session: int = 50) -> None:
        self.pid, self.ends_by, self.session = pid, ends_by, session
        self.got: list[signal.Signals] = []
        self.alive = True
        self.starts: list[Member] = []
        self.zombie = False

    def send_signal(self, number) -> None:
        self.got.append(number)
        if not self.alive:
            raise psutil.NoSuchProcess(self.pid)
        self.alive = number not in self.ends_by

    def children(self, *, recursive):
        assert recursive
        return [child for child in self.starts if child.alive]

    def lives(self) -> bool:
        return self.alive and not self.zombie


class Table:
    """All processes of a machine."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.waited: list[tuple[set[int], float]] = []

    def process(self, pid):
        found = [m for m in self.members if m.pid == pid and m.alive]
        if not found:
            raise psutil.NoSuchProcess(pid)
        return found[0]

    def sid(self, pid):
        found = [m for m in self.members if m.pid == pid]
        if not found[0].alive:
            raise ProcessLookupError
        return found[0].session

    def await_end(self, members, timeout_s):
        self.waited.append(({m.pid for m in members}, timeout_s))
        return [m for m in members if m.alive]


@pytest.fixture
def end(child: ServerProcess, monkeypatch):
    def stop(members: list[Member], **options) -> Table:
        table = Table(members)
        monkeypatch.setattr(process.psutil, "Process", table.process)
        monkeypatch.setattr(process.psutil, "process_iter", lambda: list(members))
        monkeypatch.setattr(process, "await_end", table.await_end)
        monkeypatch.setattr(process, "lives", Member.lives)
        monkeypatch.setattr(process.os, "getsid", table.sid)
        monkeypatch.setattr(child._process, "poll", lambda: None if members[0].alive else 1)
        monkeypatch.setattr(child._process, "wait", lambda timeout: child._process.waited.append(timeout))
        child.stop(**options)
        return table

    return stop


def test_a_server_and_all_below_it_are_told_to_end_and_what_does_not_is_killed(end, child: ServerProcess):
    root, mild, stubborn = Member(50), Member(51), Member(52, ends_by=(signal.SIGKILL,))
    # In a session of its own, but a child; and one whose parent has ended, in the session.
    apart, orphan, stranger = Member(53, session=53), Member(54), Member(55, session=9)
    root.starts = [mild, stubborn, apart]
    zombie = Member(58)
    zombie.zombie = True
    table = end([root, mild, stubborn, apart, orphan, stranger, zombie], timeout_s=3.0)
    assert all(m.got == [signal.SIGTERM] for m in (root, mild, apart, orphan))
    assert stubborn.got == [signal.SIGTERM, signal.SIGKILL]
    assert stranger.got == zombie.got == []
    assert table.waited == [({50, 51, 52, 53, 54}, 3.0), ({52}, 3.0)]
    assert child._process.waited == [3.0]


def test_engines_are_killed_at_once_and_what_is_left_of_a_server_that_has_ended_too(end, child: ServerProcess):
    root, left, stranger = Member(50), Member(51), Member(52, session=9)
    root.alive = False
    end([root, left, stranger], first=signal.SIGKILL)
    assert (root.got, left.got, stranger.got) == ([], [signal.SIGKILL], [])
    assert child._process.waited == [10.0]
    engine = object.__new__(EngineServer)
    engine.process, engine._folders = child, ExitStack()
    said = []
    child.stop = lambda **options: said.append(options)
    engine.stop()
    assert said == [{"first": signal.SIGKILL}]


def test_what_the_end_of_a_server_has_started_is_killed_too(end):
    root, late = Member(50), Member(51)
    late.alive = False
    original = root.send_signal

    def begin_another(number):
        original(number)
        late.alive = True

    root.send_signal = begin_another
    end([root, late])
    assert late.got == [signal.SIGKILL]


def test_a_server_that_even_the_kernel_does_not_end_is_an_error(end, child: ServerProcess, monkeypatch):
    end([Member(50)])
    child._process.code = None
    monkeypatch.setattr(child._process, "wait", lambda timeout: Child.wait(child._process, timeout))
    with pytest.raises(ServerError, match=r"engine 0 \(process 50\) is alive 4 s after SIGKILL"):
        child.stop(timeout_s=4.0)


class Started:
    """Notes how a ServerProcess is made, and with what it is asked to be ready."""

    def __init__(self, name, command, env, log, *, pass_fds) -> None:
        (self.descriptor,) = pass_fds
        self.key = os.read(self.descriptor, 100).decode()
        self.name, self.command, self.env, self.log = name, command, env, log
        self.ready: list[tuple[str, float, dict[str, str]]] = []
        self.checked = 0

    def wait_ready(self, url, timeout_s, headers):
        self.ready.append((url, timeout_s, headers))

    def check(self):
        self.checked += 1


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("is_fp8", "computes_fp8", "dequantizes"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_an_engine_that_cannot_compute_with_block_fp8_serves_the_plain_model(
    monkeypatch, tmp_path: Path, is_fp8: bool, computes_fp8: bool, dequantizes: bool
):
    monkeypatch.setattr(server, "ServerProcess", Started)
    monkeypatch.setattr(server, "is_block_fp8", lambda path: is_fp8)
    monkeypatch.setattr(server, "is_packed_int4", lambda path: False)
    monkeypatch.setattr(server.device, "computes_block_fp8", lambda: computes_fp8)
    rollout = RolloutConfig(max_trajectory_tokens=100, startup_timeout_s=77.0, threads_per_engine=3)
    given = {"precision": Precision.fp32, "host": "127.0.0.2", "port": 7001, "seed": 9}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    made = EngineServer(3, rollout, tmp_path, tmp_path / "log", key=EngineKey("k3y"), **given)
    assert made.process.name == "engine 3"
    command = made.process.command
    assert command[:3] == [sys.executable, "-m", "slimrl.engines.plugin.launch"]
    assert command[3:5] == [str(os.getpid()), str(made.process.descriptor)]
    assert made.process.key == "k3y"
    assert "k3y" not in f"{command} {made.process.env}"
    assert ("--json-model-override-args" in command) == dequantizes
    expected = {"--host": "127.0.0.2", "--port": "7001", "--random-seed": "9", "--dtype": "float32", "--device": "cpu"}
    assert {flag: after(command, flag) for flag in expected} == expected
    assert made.process.env["OMP_NUM_THREADS"] == "3"
    meeting = Path(made.process.env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].removeprefix("file://"))
    assert meeting.parent.stat().st_mode & 0o777 == 0o700
    posts = []

    def post(url, *, headers, timeout, trust_env):
        posts.append((url, headers, timeout, trust_env))
        return httpx.Response(200 if len(posts) == 1 else 500, request=httpx.Request("POST", url))

    monkeypatch.setattr(server.httpx, "post", post)
    made.wait_ready()
    headers = {"authorization": "Bearer k3y"}
    assert made.process.ready == [("http://127.0.0.2:7001/health_generate", 77.0, headers)]
    assert posts == [("http://127.0.0.2:7001/freeze_gc", headers, 77.0, False)]
    with pytest.raises(ServerError, match=r"engine 3: freeze_gc: .*500"):
        made.wait_ready()


def test_free_ports_lie_below_the_ephemeral_ones_and_none_is_given_twice_or_taken(monkeypatch):
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(ports.FIRST_PORT <= port <= ports.LAST_PORT for port in [*found, free_port()])
    with socket.create_server(("127.0.0.1", found[0])):
        monkeypatch.setattr(ports.random, "SystemRandom", lambda: SimpleNamespace(sample=lambda span, n: found[:2]))
        assert free_port() == found[1]
        with pytest.raises(OSError, match=r"no free port on 127\.0\.0\.1 among 200 tried"):
            free_ports(2)
