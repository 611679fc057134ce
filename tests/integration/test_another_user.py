"""A run among other users of its machine: what listens, who can speak to it, and what their requests change."""

import asyncio
import base64
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from cli_runs import ENGINE, RECIPES, CliRun, make_workspace, num_logged_steps
from gateway_agents import ANSWER, ScriptedEngine, play
from key_finder import KEY_FILE
from other_user import as_nobody, command_lines, needs_root, opened, send_rubbish, statuses

from slimrl.agent.gateway.connection import Connection
from slimrl.data.trajectory import POSTED_REWARD
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

START_S, STEP_S = 900.0, 200.0
SETTLES_S = 8.0
"""In which ranks and engines end what a driver has asked for"""
PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Running:
    """A run under way, and what the test knows of it as its owner."""

    def __init__(self, run: CliRun, folder: RunFolder, keys: list[str]) -> None:
        self.run, self.folder, self.keys = run, folder, keys
        (self.private,) = Path("/tmp").glob(f"slimrl-run-{run.process.pid}-*")
        self.token = (self.private / "token").read_text()
        (server,) = run.members(ENGINE)
        words = server.cmdline()
        self.engine_port = int(words[words.index("--port") + 1])

    def goes_on(self) -> None:
        """Wait until it has taken two more steps."""
        steps = num_logged_steps(self.folder)
        self.run.wait_until(lambda: num_logged_steps(self.folder) >= steps + 2, STEP_S)

    def listening(self) -> list[tuple[str, str, int]]:
        """(command line, address, port) of each socket that a process of the run listens on; port 0 of a unix one."""
        found = []
        listens = _unix_listeners()
        for process in self.run.members(""):
            try:
                command = " ".join(process.cmdline())
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        found.append((command, each.laddr.ip, each.laddr.port))
                for each in Path(f"/proc/{process.pid}/fd").iterdir():
                    target = os.readlink(each)
                    if target.startswith("socket:[") and target[8:-1] in listens:
                        found.append((command, listens[target[8:-1]], 0))
            except (psutil.Error, OSError):
                continue
        return sorted(set(found))


def _unix_listeners() -> dict[str, str]:
    """Path by inode of each unix socket that listens."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and len(fields) > 7:
            found[fields[6]] = fields[7]
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    workspace = make_workspace(tmp_path_factory.mktemp("another_user"))
    key_file = workspace.path / "key"
    os.environ[KEY_FILE] = str(key_file)
    settings = workspace.overrides(
        "run.name=watched",
        "steps=100000",
        "trainer.num_ranks=2",
        "trainer.parallel.expert=2",
        "rollout.num_engines=1",
        "reward.function=key_finder:low_tokens",
    )
    run = CliRun(["train", str(RECIPES / "gspo_calculator.yaml"), *settings])
    try:
        folder = workspace.run_folder("watched")
        run.wait_until(lambda: num_logged_steps(folder) >= 2 and key_file.exists(), START_S)
        yield Running(run, folder, key_file.read_text().split())
    finally:
        del os.environ[KEY_FILE]
        run.close()


def rows() -> list[tuple[str, str]]:
    """(text of the command line, where it listens) of each row of the page's table."""
    found = re.findall(r"^\| `([^`]+)` \| (loopback|a file of the run) \|", PAGE.read_text(), re.MULTILINE)
    assert len(found) > 5
    return found


def test_the_page_names_every_socket_that_a_run_listens_on(running: Running):
    listening = running.listening()
    assert len(listening) > 10
    unnamed = []
    for command, address, _ in listening:
        where = "loopback" if address.removeprefix("::ffff:") in ("127.0.0.1", "::1") else address
        if address.startswith(f"{running.private}/"):
            where = "a file of the run"
        if not any(name in command and where == place for name, place in rows()):
            unnamed.append((command[:120], address))
    assert unnamed == []


def test_every_row_of_the_page_is_of_a_socket_that_a_run_has(running: Running):
    # Some of Ray's processes begin to listen after the run has begun to train.
    deadline = time.monotonic() + START_S
    while True:
        commands = [command for command, _, _ in running.listening()]
        absent = [name for name, _ in rows() if not any(name in command for command in commands)]
        if not absent or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert absent == []


def test_the_keys_stand_nowhere_that_others_read(running: Running):
    secrets = [*running.keys, running.token]
    assert all(len(secret) >= 43 for secret in secrets)
    texts = {"command lines and environments": command_lines()}
    assert "slimrl.engines.plugin.launch" in texts["command lines and environments"]
    ray = running.private / "ray"
    for path in (*running.folder.path.rglob("*"), *ray.rglob("*")):
        if path.is_file() and path.stat().st_size < 64 * 1024**2:
            texts[str(path)] = path.read_bytes().decode(errors="replace")
    assert len(texts) > 20
    for where, text in texts.items():
        assert not any(secret in text for secret in secrets), where


@needs_root
def test_another_user_reads_no_secret_of_a_process(running: Running):
    said = as_nobody(command_lines)
    assert "slimrl.engines.plugin.launch" in said
    assert running.token not in said
    assert not any(key in said for key in running.keys)


@needs_root
def test_another_user_opens_no_file_and_no_unix_socket_of_a_run(running: Running):
    paths = [str(path) for path in running.private.rglob("*")]
    sockets = [address for _, address, port in running.listening() if port == 0]
    assert len(sockets) >= 3
    shared = [str(path) for path in SHARED_MEMORY_DIR.glob("slimrl-*")]
    assert as_nobody(opened, ["/etc/hostname"]) == ["/etc/hostname"]
    assert as_nobody(opened, [str(running.private), *paths, *sockets, *shared]) == []


def payload(made: Path) -> list[str]:
    """What had an engine unpickle a segment: a plain dictionary with a pickle inside."""
    inner = base64.b64encode(pickle.dumps((0, Touches(made)))).decode()
    value = {"slimrl_map_memory": {"target": [[(0, 0, [])]]}, "segments": {0: [f"cuda-ipc:{inner}"]}}
    return [base64.b64encode(pickle.dumps(value)).decode()]


def requests(made: Path) -> list[tuple[str, str, Any]]:
    update = {"serialized_named_tensors": payload(made), "load_format": "flattened_bucket", "flush_cache": False}
    generate = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    return [
        ("POST", "/generate", generate),
        ("GET", "/health_generate", None),
        ("OPTIONS", "/generate", None),
        ("GET", "/server_info", None),
        ("POST", "/flush_cache", {}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/set_internal_state", {"server_args": {}}),
        ("POST", "/start_profile", {"output_dir": str(made)}),
        ("POST", "/begin_weight_update", {}),
        ("POST", "/update_weights_from_tensor", update),
        ("POST", "/update_weights_from_disk", {"model_path": str(made)}),
        ("POST", "/end_weight_update", {}),
        ("POST", "/update_weight_version", {"new_version": "9", "abort_all_requests": True}),
        ("POST", "/release_memory_occupation", {}),
        ("POST", "/pause_generation", {"mode": "abort"}),
        ("POST", "/v1/chat/completions", {"model": "m", "messages": []}),
    ]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Host": "x/health?"}], ids=["no key", "wrong key", "host"]
)
def test_an_engine_does_nothing_for_who_has_no_key(running: Running, tmp_path: Path, headers: dict[str, str]):
    made = tmp_path / "made"
    asked = requests(made)
    run = as_nobody if os.geteuid() == 0 else lambda act, *arguments: act(*arguments)
    answered = run(statuses, running.engine_port, asked, headers)
    assert len(answered) == len(asked)
    # A web server may refuse such a host before anybody asks for a key.
    assert set(answered.values()) <= ({400, 401} if "Host" in headers else {401}), answered
    assert not made.exists()
    running.goes_on()


def test_even_with_the_key_a_segment_runs_no_code(running: Running, tmp_path: Path):
    made = tmp_path / "made"
    update = [each for each in requests(made) if each[1].endswith(("_weight_update", "_from_tensor"))]
    assert len(update) == 3
    # The run has no update under way meanwhile.
    driver = psutil.Process(running.run.process.pid)
    driver.suspend()
    try:
        time.sleep(SETTLES_S)
        for key in running.keys:
            headers = {"Authorization": f"Bearer {key}"}
            if statuses(running.engine_port, [("GET", "/server_info", None)], headers) == {"GET /server_info": 200}:
                answered = statuses(running.engine_port, update, headers)
    finally:
        driver.resume()
    assert answered["POST /begin_weight_update"] == 200
    assert answered["POST /update_weights_from_tensor"] == 400
    assert not made.exists()
    running.goes_on()


ASK_RAY = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
"""


def ask_ray(address: str, token: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-c", ASK_RAY, address], env=environment, capture_output=True, text=True, timeout=300
    )


def test_ray_answers_who_has_the_runs_token_and_nobody_else(running: Running):
    (port_file,) = running.private.glob("ray/session_2*/gcs_server_port_*")
    address = f"127.0.0.1:{port_file.read_text().strip()}"
    told = ask_ray(address, running.token)
    assert (told.returncode, told.stdout) == (0, "1\n"), told.stderr
    refused = ask_ray(address, "0" * 64)
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "auth" in refused.stderr.lower()


def test_rubbish_at_every_port_changes_nothing(running: Running):
    ports = [port for _, _, port in running.listening() if port]
    act = as_nobody if os.geteuid() == 0 else lambda act, *arguments: act(*arguments)
    assert act(send_rubbish, ports) > len(ports)
    running.goes_on()


@needs_root
async def test_the_gateway_does_nothing_for_who_has_no_key():
    body = {"model": "m", "messages": [{"role": "user", "content": "Compute 1+1."}], "max_tokens": 32}
    answered: list[dict[str, int | str]] = []

    async def agent(line: Any, connection: Connection) -> None:
        address = urlsplit(connection.url)
        turn = ("POST", f"{address.path}/v1/chat/completions", body)
        asked = [turn, ("POST", f"{address.path}/reward", {"reward": 99.0}), ("POST", "/v1/chat/completions", body)]
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answered.append(await asyncio.to_thread(as_nobody, statuses, address.port, asked, headers))
        own = {"Authorization": f"Bearer {connection.api_key}"}
        answered.append(await asyncio.to_thread(as_nobody, statuses, address.port, [turn], own))

    engine = ScriptedEngine([ANSWER])
    trajectory = await play(engine, agent)
    *refused, told = answered
    assert len(refused) == 2
    assert all(set(each.values()) <= {401, 404} for each in refused), refused
    assert list(told.values()) == [200]
    assert len(engine.sampled) == 1
    assert POSTED_REWARD not in trajectory.scratch
