"""Every backend: plain runs, sessions, and how each ends; the remote server is a stand-in, and so is the container
command where there is no podman."""

import asyncio
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from podman_image import podman_config
from sandboxes import SMALL, needs_namespaces, processes_inside

from slimrl.agent.environment import Turn
from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.container import ContainerSandbox
from slimrl.agent.sandbox.interface import Ended, Language, Program, SandboxError, SessionEnded
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.sandbox.remote import RemoteSandbox
from slimrl.agent.sandbox.rlimited import SubprocessSandbox
from slimrl.agent.tool_call import ToolCall
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox
from slimrl.config.load import read_recipe
from slimrl.config.schema.agent import AgentConfig, SandboxBackend, SandboxConfig
from slimrl.data.prompt import Prompt
from slimrl.rollout.task.sandbox import check_sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]
ROOMY = replace(SMALL, wall_s=20.0)  # a deadline that a busy machine keeps too
CONFIG = SandboxConfig(limits=ROOMY, packages=())  # those take a second to import

FAKE_DOCKER = """#!{python}
import json, os, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
command, *rest = sys.argv[1:]
if command == "rm" or "--detach" in rest:
    sys.exit(0)
place = rest.index("sh")
words = [word.replace("/tmp/work", {work!r}) for word in rest[place:]]
os.execvp("sh", words)
"""


@pytest.fixture
async def bubblewrap():
    sandbox = BubblewrapSandbox(CONFIG)
    yield sandbox
    await sandbox.close()


@pytest.fixture
def container(tmp_path):
    """A sandbox whose docker is a script that writes down its arguments, and runs the command itself."""
    log, command = tmp_path / "log", tmp_path / "docker"
    command.write_text(FAKE_DOCKER.format(python=sys.executable, log=str(log), work=str(tmp_path / "work")))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return ContainerSandbox(SandboxConfig(limits=ROOMY, command=str(command), image="theirs")), log


class Fusion(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does: it runs the program, or fails as its stdin asks."""

    requests: ClassVar[list[dict]] = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request | {"path": self.path})
        run = {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stdout": "", "stderr": ""}
        status, message = "Success", ""
        if request["stdin"] == "broken":
            status, message, run = "SandboxError", "no space", None
        else:
            command = {"python": sys.executable, "bash": "bash"}[request["language"]]
            try:
                done = subprocess.run(
                    [command, "-c", request["code"]],
                    input=request["stdin"], capture_output=True, text=True, timeout=request["run_timeout"], check=False,
                )  # fmt: skip
                run |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
                status = "Failed" if done.returncode else "Success"
            except subprocess.TimeoutExpired:
                run |= {"status": "TimeLimitExceeded", "return_code": None}
                status = "Failed"
        body = {"status": status, "message": message, "compile_result": None, "run_result": run, "files": {}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
async def remote():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sandbox = RemoteSandbox(SandboxConfig(limits=ROOMY, url=f"http://127.0.0.1:{server.server_port}"))
    yield sandbox
    await sandbox.close()
    server.shutdown()
    server.server_close()


@pytest.fixture
async def podman(tmp_path_factory):
    sandbox = ContainerSandbox(podman_config(tmp_path_factory, ROOMY))
    yield sandbox
    await sandbox.close()


BACKENDS = [
    pytest.param("bubblewrap", marks=needs_namespaces),
    "subprocess",
    "remote",
    "container",
    pytest.param("podman", marks=pytest.mark.full),
]


@pytest.fixture(params=BACKENDS)
def sandbox(request):
    if request.param == "subprocess":
        return SubprocessSandbox(CONFIG)
    made = request.getfixturevalue(request.param)
    return made[0] if request.param == "container" else made


@pytest.mark.parametrize(
    ("language", "code", "stdin", "stdout", "status", "ended"),
    [
        (Language.python, "print(6 * 7)", b"", "42\n", 0, Ended.ok),
        (Language.python, "print(input()[::-1])", b"abc\n", "cba\n", 0, Ended.ok),
        (Language.python, "print(1, flush=True); raise SystemExit(3)", b"", "1\n", 3, Ended.error),
        (Language.python, "1 / 0", b"", "", 1, Ended.error),
        (Language.python, "raise MemoryError", b"", "", 1, Ended.memory),
        (Language.python, "import time; time.sleep(60)", b"", "", None, Ended.timeout),
        (Language.python, "print('x' * 10**6)", b"", "x" * SMALL.output_bytes, None, Ended.output),
        (Language.shell, "cat; exit 4", b"abc", "abc", 4, Ended.error),
    ],
)
async def test_every_backend_gives_the_same_result(sandbox, language, code, stdin, stdout, status, ended):
    limits = SMALL if ended is Ended.timeout else ROOMY
    result = await sandbox.run(Program(code=code, language=language, stdin=stdin), limits)
    if ended is Ended.output:
        # A container's first line of stderr counts too.
        assert len(result.stdout) > SMALL.output_bytes - 50
        stdout = stdout[: len(result.stdout)]
    assert (result.stdout, result.exit_status, result.ended) == (stdout, status, ended), result
    assert (code == "1 / 0") == ("ZeroDivisionError" in result.stderr)
    await sandbox.close()


@needs_namespaces
async def test_an_interpreter_keeps_its_variables_and_ends_at_a_limit(bubblewrap):
    session = await bubblewrap.session()
    other = await bubblewrap.session()
    assert (await session.run("x = 20")).ended is Ended.ok
    failed = await session.run("print(x + 1)\n1 / 0")
    assert (failed.stdout, failed.ended) == ("21\n", Ended.error)
    assert (await session.run("print(x + 2)")).stdout == "22\n"
    assert "NameError" in (await other.run("x")).stderr
    assert (await session.run("while True: pass", wall_s=0.3)).ended is Ended.timeout
    with pytest.raises(SessionEnded):
        await session.run("x")
    assert (await other.run("print(1)")).stdout == "1\n"
    await other.close()
    assert processes_inside(bubblewrap) == 2


@needs_namespaces
async def test_a_shell_works_in_a_private_copy_of_a_folder(bubblewrap, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.txt").write_text("original\n")
    session = await bubblewrap.session(Language.shell, folder=tmp_path)
    await session.run("cd inner; export NAME=there; echo changed > a.txt")
    assert (await session.run("cat a.txt; echo $NAME; false")).stdout == "changed\nthere\n"
    assert (await session.run("echo 'unclosed")).ended is Ended.error
    assert (await session.run("pwd")).stdout == "/tmp/work/inner\n"
    ended = await session.run("exit 7")
    assert (ended.exit_status, ended.ended) == (7, Ended.error)
    with pytest.raises(SessionEnded):
        await session.run("pwd")
    assert (tmp_path / "inner/a.txt").read_text() == "original\n"
    again = await bubblewrap.session(Language.shell, folder=tmp_path)
    assert (await again.run("cat inner/a.txt")).stdout == "original\n"


@needs_namespaces
@pytest.mark.parametrize(
    "code", ["import os; os.write({n}, b'9' * 99)", "import os; os.write({n}, b'no')\nwhile 1: pass"]
)
async def test_a_session_that_breaks_its_protocol_harms_itself_alone(bubblewrap, code):
    session = await bubblewrap.session()
    find = (
        "import os, stat\n"
        "there = [i for i in range(3, 30) if os.path.exists(f'/proc/self/fd/{i}')]\n"
        "(n,) = [i for i in there if stat.S_ISSOCK(os.fstat(i).st_mode)]\n"
    )
    await session.run(find + code.format(n="n"), wall_s=1.0)
    with pytest.raises(SessionEnded):
        await session.run("1")
    assert (await bubblewrap.run(Program(code="print(1)"))).stdout == "1\n"


@needs_namespaces
async def test_a_cancelled_run_is_ended(bubblewrap):
    await bubblewrap.run(Program(code=""))
    task = asyncio.create_task(bubblewrap.run(Program(code="while True: pass")))
    await asyncio.sleep(0.3)
    assert processes_inside(bubblewrap) == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert processes_inside(bubblewrap) == 2


@needs_namespaces
async def test_a_cancelled_execution_takes_no_channel_from_the_next_session(bubblewrap):
    """The next session may get its descriptor's number."""
    session = await bubblewrap.session()
    task = asyncio.create_task(session.run("while True: pass"))
    await asyncio.sleep(0.3)
    channel = session._channel.fileno()
    task.cancel()
    while session._channel.fileno() >= 0:
        await asyncio.sleep(0)
    following = await bubblewrap.session()
    assert following._channel.fileno() == channel
    assert (await following.run("print(1)")).stdout == "1\n"
    await asyncio.gather(task, return_exceptions=True)
    assert (await following.run("print(2)")).stdout == "2\n"


@needs_namespaces
async def test_a_cancelled_start_leaves_no_process(bubblewrap):
    before = set(psutil.Process().children())
    task = asyncio.create_task(bubblewrap.start())
    while not (started := set(psutil.Process().children()) - before):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not any(process.is_running() for process in started)


@needs_namespaces
async def test_a_sandbox_that_was_killed_fails_its_runs_and_starts_again(bubblewrap):
    await bubblewrap.run(Program(code=""))
    first = bubblewrap.pid
    running = asyncio.create_task(bubblewrap.run(Program(code="while True: pass")))
    await asyncio.sleep(0.3)
    os.kill(first, 9)
    with pytest.raises(SandboxError):
        await running
    assert (await bubblewrap.run(Program(code="print(1)"))).stdout == "1\n"
    assert bubblewrap.pid != first


@needs_namespaces
async def test_closing_leaves_no_process(bubblewrap):
    await bubblewrap.session()
    await bubblewrap.run(Program(code=""))
    pid = bubblewrap.pid
    await bubblewrap.close()
    assert not Path(f"/proc/{pid}").exists()


@needs_namespaces
async def test_the_sandbox_ends_with_a_driver_that_is_killed():
    code = (
        "import asyncio, time\n"
        "from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox\n"
        "from slimrl.config.schema.agent import SandboxConfig\n"
        "async def main():\n"
        "    box = BubblewrapSandbox(SandboxConfig(packages=()))\n"
        "    await box.start()\n"
        "    print(box.pid, flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        pid = int(driver.stdout.readline())
        driver.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@needs_namespaces
async def test_tools_run_programs_and_keep_a_session_for_each_episode(tmp_path):
    (tmp_path / "a.txt").write_text("original\n")
    pool = SandboxPool(replace(CONFIG, max_sessions=3))
    agent = AgentConfig(tools=[f"slimrl.agent.sandbox.tools:{name}" for name in ("python", "python_session", "shell")])
    box = ToolBox.from_import_paths(agent.tools, {}, pool)
    prompt = Prompt(
        prompt_id="p", messages=[{"role": "user", "content": "q"}], label=None, metadata={"folder": str(tmp_path)}
    )

    async def episode() -> tuple[ToolEnvironment, Callable[..., Awaitable[list[str]]]]:
        environment = ToolEnvironment(box, agent, 30.0)
        first = await environment.start(prompt, seed=0, scratch={})
        shown = {schema["function"]["name"]: schema["function"]["parameters"]["properties"] for schema in first.tools}
        assert {name: list(properties) for name, properties in shown.items()} == {
            "python": ["code"], "python_session": ["code"], "shell": ["command"],
        }  # fmt: skip

        async def call(*calls: tuple[str, str]) -> list[str]:
            arguments = [{"command" if name == "shell" else "code": text} for name, text in calls]
            made = [ToolCall(name=name, arguments=given) for (name, _), given in zip(calls, arguments, strict=True)]
            observation = await environment.step(Turn(index=0, text="", calls=tuple(made)))
            return [message["content"] for message in observation.messages]

        return environment, call

    first, call = await episode()
    second, other = await episode()
    printed, failed = await call(("python", "x = 1\nprint(2 ** 10)"), ("python", "print(1)\n[][1]"))
    assert printed == "1024"
    assert failed.startswith("1\nTraceback")
    assert failed.endswith("IndexError: list index out of range")
    assert await call(("python_session", "x = 20"), ("shell", "cat a.txt; echo changed > a.txt")) == [
        "no output",
        "original",
    ]
    assert await call(("python_session", "print(x + 1)"), ("shell", "cat a.txt")) == ["21", "changed"]
    # Another episode has sessions of its own.
    assert (await other(("python_session", "x")))[0].endswith("NameError: name 'x' is not defined")
    assert "exit status 3" in (await call(("python_session", "import os; os._exit(3)")))[0]
    assert (await call(("python_session", "x")))[0].startswith("error: the session has ended")
    assert (await call(("python_session", "x = 1; print(x)"))) == ["1"]
    # An end gives the places of its sessions back, or the last one would wait for ever.
    await first.close()
    await second.close()
    third, call = await episode()
    assert (await call(("shell", "cat a.txt"))) == ["original"]
    await third.close()
    assert processes_inside(pool._sandbox) == 2
    await pool.close()


@pytest.fixture(params=["remote", "container"])
def other(request) -> tuple[str, SandboxConfig]:
    """A backend and its settings."""
    made = request.getfixturevalue(request.param)
    return request.param, (made[0] if request.param == "container" else made)._config


async def test_a_recipe_names_another_backend_and_what_it_needs(other):
    backend, theirs = other
    settings = f"{{backend: {backend}, url: '{theirs.url}', command: '{theirs.command}', image: theirs}}"
    recipe = Path(__file__).parents[2] / "recipes/tiny_moe/gspo_python.yaml"
    loaded, problems = read_recipe(recipe, [f"agent.sandbox={settings}", "agent.sandbox.limits.wall_s=7"], "train")
    assert loaded is not None, problems
    await asyncio.to_thread(check_sandbox, loaded.recipe)
    pool = SandboxPool(loaded.recipe.agent.sandbox)
    box = ToolBox.from_import_paths(loaded.recipe.agent.tools, {}, pool)
    Fusion.requests.clear()
    assert (await box.call("python", {"code": "print(6 * 7)"}, 20.0)).text == "42"
    assert [request["run_timeout"] for request in Fusion.requests] == ([7.0] if backend == "remote" else [])
    await pool.close()


def test_the_plain_process_says_that_it_is_no_isolation(caplog):
    with caplog.at_level(logging.WARNING):
        SubprocessSandbox(SandboxConfig(backend=SandboxBackend.subprocess))
    assert ["isolates nothing" in message for message in caplog.messages] == [True]


async def test_a_server_gets_the_fields_of_its_interface_and_may_fail(remote):
    Fusion.requests.clear()
    with pytest.raises(SandboxError, match="no space"):
        await remote.run(Program(code="", stdin=b"broken"))
    (request,) = Fusion.requests
    assert request == {
        "path": "/run_code", "code": "", "language": "python", "stdin": "broken", "run_timeout": 20.0,
        "memory_limit_MB": 128,
    }  # fmt: skip


async def test_a_server_that_is_not_there_is_an_error():
    sandbox = RemoteSandbox(SandboxConfig(url="http://127.0.0.1:9"))
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
        await sandbox.run(Program(code=""))
    await sandbox.close()


async def test_a_container_is_isolated_by_its_arguments_and_removed_at_a_limit(container):
    sandbox, log = container
    await sandbox.run(Program(code="import time; time.sleep(60)"), SMALL)
    run, remove = map(json.loads, log.read_text().splitlines())
    assert run[:2] == ["run", "--rm"]
    assert "--interactive" in run
    assert run[-4:] == ["python3", "-I", "-c", "import time; time.sleep(60)"]
    assert run[-9:-7] == ["theirs", "sh"]
    assert {
        "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=16",
        f"--memory={SMALL.memory_bytes}", f"--memory-swap={SMALL.memory_bytes}", "--user=65534:65534", "--ulimit=cpu=1",
    } <= set(run)  # fmt: skip
    (name,) = [word.removeprefix("--name=") for word in run if word.startswith("--name=")]
    assert remove == ["rm", "--force", name]


async def test_a_container_of_a_trajectory_has_its_image_and_a_copy_of_the_folder(container, tmp_path):
    sandbox, log = container
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("original\n")
    session = await sandbox.session(Language.shell, folder=source, image="of-the-trajectory")
    await session.run(f"cd {tmp_path}/work; echo changed >> a.txt")
    assert (await session.run(f"cat {tmp_path}/work/a.txt")).stdout == "original\nchanged\n"
    assert (source / "a.txt").read_text() == "original\n"
    await sandbox.close()
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert calls[0][-3:] == ["of-the-trajectory", "sleep", "infinity"]
    assert calls[-1][:2] == ["rm", "--force"]
    with pytest.raises(SessionEnded):
        await session.run("pwd")


async def test_a_session_in_an_images_files_is_the_images_user_with_the_same_limits_and_is_never_pulled(container):
    sandbox, log = container
    session = await sandbox.image_session("theirs", SMALL)
    assert (await session.run_program(Program(code="echo here", language=Language.shell))).stdout == "here\n"
    await sandbox.close()
    run, execute, remove = map(json.loads, log.read_text().splitlines())
    assert run[-3:] == ["theirs", "sleep", "infinity"]
    assert {"--pull=never", "--network=none", "--cap-drop=ALL", "--pids-limit=16"} <= set(run)
    assert not [word for word in run if word.startswith(("--user", "--read-only", "--tmpfs", "--env", "--volume"))]
    assert execute[:4] == ["exec", "--interactive", "--workdir", "/"]
    assert remove[:2] == ["rm", "--force"]


async def test_a_session_whose_container_has_ended_has_ended_and_one_whose_command_fails_has_not(tmp_path):
    command, running = tmp_path / "docker", tmp_path / "running"
    command.write_text(
        f"#!/bin/sh\ncase $1 in\nexec) echo 'it cannot' >&2; exit 126;;\ninspect) cat {running};;\nesac\n"
    )
    command.chmod(0o755)
    sandbox = ContainerSandbox(SandboxConfig(limits=ROOMY, command=str(command)))
    session = await sandbox.image_session("theirs", SMALL)
    for state, error in (("true", SandboxError), ("false", SessionEnded), ("true", SessionEnded)):
        running.write_text(f"{state}\n")
        with pytest.raises(error):
            await session.run("pwd")
    await sandbox.close()


LEFT = """
import asyncio, os, signal, sys
from slimrl.agent.sandbox.container import ContainerSandbox
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

async def main():
    await ContainerSandbox(SandboxConfig(command=sys.argv[1])).image_session("theirs", SandboxLimits())
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_containers_of_a_process_that_was_killed_are_removed(tmp_path):
    command, log = tmp_path / "docker", tmp_path / "log"
    command.write_text(f'#!/bin/sh\n[ "$1" = ps ] && echo one two\necho "$@" >> {log}\n')
    command.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", LEFT, str(command)], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    for _ in range(200):
        lines = log.read_text().splitlines()
        if len(lines) == 3:
            break
        await asyncio.sleep(0.05)
    run, listed, removed = lines
    (label,) = [word.removeprefix("--label=") for word in run.split() if word.startswith("--label=")]
    assert listed == f"ps --all --quiet --filter label={label}"
    assert removed == "rm --force one two"


async def test_a_sandbox_without_images_says_so():
    pool = SandboxPool(SandboxConfig())
    with pytest.raises(ValueError, match="bubblewrap has no images"):
        await pool.image_session("theirs", SMALL)
    with pytest.raises(ValueError, match="bubblewrap has no images"):
        pool.missing_images(["theirs"])


async def test_a_session_that_is_cancelled_while_its_container_starts_leaves_none(tmp_path):
    command, there = tmp_path / "docker", tmp_path / "there"
    command.write_text(f"#!/bin/sh\ncase $1 in\nrun) sleep 1; touch {there};;\nrm) rm -f {there};;\nesac\n")
    command.chmod(0o755)
    sandbox = ContainerSandbox(SandboxConfig(limits=ROOMY, command=str(command), image="theirs"))
    task = asyncio.create_task(sandbox.session())
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(1.0)
    assert task.cancelled()
    assert not there.exists()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_podman_isolates_and_limits_and_leaves_no_container(podman, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "a.txt").write_text("original\n")
    said = {
        "network": await podman.run(Program(code="import socket; socket.create_connection(('1.1.1.1', 80), 5)")),
        "root": await podman.run(Program(code="open('/etc/x', 'w')")),
        "forks": await podman.run(Program(code="import os\nwhile 1: os.fork()")),
    }
    assert "Network is unreachable" in said["network"].stderr
    assert "Read-only file system" in said["root"].stderr
    assert "Resource temporarily unavailable" in said["forks"].stderr
    assert (await podman.run(Program(code="x = b'a' * 10**10"))).ended in (Ended.killed, Ended.memory)
    assert (await podman.run(Program(code="import os; os.abort()"))).ended is Ended.killed
    assert not [*Path().iterdir()], "podman's monitor says there that memory ran out"
    session = await podman.session(Language.shell, folder=tmp_path)
    await session.run("echo changed > a.txt")
    assert (await session.run("cat a.txt; id -u")).stdout == "changed\n65534\n"
    assert (await session.run("sleep 60", wall_s=2.0)).ended is Ended.timeout
    with pytest.raises(SessionEnded):
        await session.run("pwd")
    with pytest.raises(SandboxError, match="no-such-image"):
        await podman.run(Program(code=""), image="localhost/no-such-image")
    assert (tmp_path / "a.txt").read_text() == "original\n"
    assert "slimrl-" not in subprocess.run(["podman", "ps", "--all"], capture_output=True, text=True).stdout


async def test_a_command_that_starts_no_container_is_an_error_of_the_sandbox(tmp_path):
    command = tmp_path / "docker"
    command.write_text("#!/bin/sh\necho 'daemon is gone' >&2\nexit 125\n")
    command.chmod(0o755)
    sandbox = ContainerSandbox(SandboxConfig(command=str(command)))
    with pytest.raises(SandboxError, match="daemon is gone"):
        await sandbox.run(Program(code=""))


async def test_a_missing_container_command_is_an_error():
    sandbox = ContainerSandbox(SandboxConfig(command="/nowhere/docker"))
    with pytest.raises(SandboxError, match="/nowhere/docker"):
        await sandbox.run(Program(code=""))
