"""Programs that a job starts on its nodes: what they check, wait for, run and leave behind."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from ray.exceptions import RpcError
from sglang.srt.environ import third_party_cache_defaults

from slimrl import device
from slimrl.launch import allreduce, control, driver, preflight, ray_node, slurm, wait_for_nodes
from slimrl.launch.allreduce import lone_address, probe
from slimrl.launch.control import run_under_control
from slimrl.launch.ports import NAMED, PortBlock, port_block
from slimrl.launch.reports import LaunchError, NodeReport, read_reports


class Clock:
    """Stands in for the module `time`: only sleeping takes time, and what is to happen then happens."""

    def __init__(self, *happens) -> None:
        self.now_s, self.happens = 1000.0, list(happens)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.happens:
            self.happens.pop(0)()
        assert self.now_s < 3000, "it waits for ever"


class Process:
    """As subprocess.Popen and psutil.Process have it. It ends when it is sent what `ends_by` names."""

    def __init__(self, events: list[str], name: str, ends_by=("terminate", "kill")) -> None:
        self.events, self.name, self.ends_by = events, name, ends_by
        self.pid, self.returncode, self.below = 1, None, []

    def poll(self) -> int | None:
        return self.returncode

    def children(self, *, recursive: bool):
        assert recursive
        if self.returncode is not None:
            raise psutil.NoSuchProcess(self.pid)
        return self.below

    def is_running(self) -> bool:
        return self.returncode is None

    def status(self) -> str:
        return psutil.STATUS_RUNNING

    def wait(self, timeout_s: float | None = None) -> None:
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.name, timeout_s)

    def send_signal(self, number: int) -> None:
        if words := {signal.SIGTERM: "terminate", signal.SIGKILL: "kill"}.get(number):
            self._told(words)
        else:
            self.events.append(f"{self.name} gets {signal.Signals(number).name}")

    def _told(self, what: str) -> None:
        self.events.append(f"{what} {self.name}")
        if what in self.ends_by:
            self.returncode = -9

    def terminate(self) -> None:
        self._told("terminate")

    def kill(self) -> None:
        self._told("kill")


@pytest.fixture
def controlled(monkeypatch, tmp_path):
    """Runs a stand-in under control; what happens at each look into the control file is given."""
    events: list[str] = []
    child = Process(events, "command")
    handlers = {}
    (tmp_path / "control").write_text("run\n")

    def run(*happens, preemptible: bool = True, **settings) -> int:
        started = []
        monkeypatch.setattr(control, "time", Clock(*happens))
        monkeypatch.setattr(signal, "signal", handlers.__setitem__)
        monkeypatch.setattr(subprocess, "Popen", lambda command, env: started.append((command, env)) or child)
        monkeypatch.setattr(psutil, "Process", FakeClass(child))
        code = run_under_control(["c", "1"], tmp_path / "control", {"A": "b"}, preemptible=preemptible, **settings)
        assert started == [(["c", "1"], {"A": "b"})]
        return code

    return SimpleNamespace(run=run, events=events, child=child, handlers=handlers, word=(tmp_path / "control"))


class FakeClass:
    """In place of psutil.Process: the one process that is asked for."""

    def __init__(self, child: Process) -> None:
        self._child = child

    def __call__(self, pid: int) -> Process:
        assert pid == self._child.pid
        return self._child


def ends_with(process: Process, code: int):
    return lambda: setattr(process, "returncode", code)


def nothing() -> None:
    pass


@pytest.mark.parametrize("code", [0, 3, -11])
def test_a_command_that_ends_by_itself_gives_its_code(controlled, code):
    assert controlled.run(nothing, nothing, ends_with(controlled.child, code)) == code
    assert controlled.events == []


def test_at_the_jobs_word_a_command_is_ended_with_all_that_it_started(controlled):
    stubborn = Process(controlled.events, "stubborn", ("kill",))
    willing = Process(controlled.events, "willing")
    controlled.child.below = [stubborn]
    grown = lambda: stubborn.below.append(willing)  # noqa: E731
    assert controlled.run(grown, lambda: controlled.word.write_text("end\n")) == 0
    assert controlled.events[0] == "terminate command"
    assert sorted(controlled.events[1:-1]) == ["terminate stubborn", "terminate willing"]
    assert controlled.events[-1] == "kill stubborn"


def test_what_outlives_the_command_that_started_it_is_ended(controlled):
    orphan, later = Process(controlled.events, "orphan"), Process(controlled.events, "later")
    controlled.child.below = [orphan]

    def leave() -> None:
        controlled.child.returncode = 5
        orphan.below = [later]

    assert controlled.run(nothing, leave) == 5
    assert sorted(controlled.events) == ["terminate later", "terminate orphan"]


@pytest.mark.parametrize("settings", [{}, {"end_timeout_s": 3.0}])
def test_a_command_that_does_not_end_when_it_is_told_is_killed(controlled, settings):
    controlled.child.ends_by = ("kill",)
    waits = []
    wait = controlled.child.wait
    controlled.child.wait = lambda timeout_s=None: waits.append(timeout_s) or wait(timeout_s)
    controlled.word.write_text("end\n")
    assert controlled.run(**settings) == 0
    assert controlled.events == ["terminate command", "kill command"]
    assert waits == [settings.get("end_timeout_s", 20.0), 10.0]


def test_a_command_that_even_a_kill_does_not_end_is_named_and_left(controlled, capsys, monkeypatch):
    monkeypatch.setattr(control, "END_S", 0.1)
    stuck = Process(controlled.events, "stuck", ())
    stuck.pid = 2
    controlled.child.ends_by, controlled.child.below = (), [stuck]
    controlled.word.write_text("end\n")
    assert controlled.run(end_timeout_s=0.1) == 0
    assert "kill stuck" in controlled.events
    said = sorted(capsys.readouterr().err.splitlines())
    assert said == [f"pid {pid} was killed and does not end: it waits within the kernel" for pid in (1, 2)]


@pytest.mark.parametrize("preemptible", [True, False])
def test_who_can_save_is_told_to_once_and_goes_on(controlled, preemptible):
    preempt = lambda: controlled.word.write_text("preempt\n")  # noqa: E731
    assert controlled.run(preempt, nothing, nothing, ends_with(controlled.child, 75), preemptible=preemptible) == 75
    assert controlled.events == (["command gets SIGUSR1"] if preemptible else [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_whoever_watches_ends_the_command(controlled, number):
    assert controlled.run(lambda: controlled.handlers[number](number, None)) == -signal.SIGTERM
    assert controlled.events == ["terminate command"]


def test_a_signal_that_comes_when_the_command_has_ended_is_not_lost(controlled):
    def end_and_tell() -> None:
        controlled.child.returncode = 1
        controlled.handlers[signal.SIGTERM](signal.SIGTERM, None)

    assert controlled.run(end_and_tell) == -signal.SIGTERM


def test_a_file_system_that_fails_for_a_moment_changes_nothing_and_one_that_fails_for_long_ends_the_part(controlled):
    away = controlled.word.with_name("away")
    gone, back = lambda: controlled.word.rename(away), lambda: away.rename(controlled.word)
    almost = [nothing] * int(control.UNREADABLE_S - 2)
    end = ends_with(controlled.child, 7)
    assert controlled.run(gone, *almost, back, gone, *almost, end) == 7
    controlled.child.returncode = None
    back()
    with pytest.raises(FileNotFoundError):
        controlled.run(gone)
    assert controlled.events == ["terminate command"]


handlers: dict[int, object] = {}
"""Signal handlers, as a node's program has set them."""


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Path:
    """The plan of two nodes, of which this one is `a`, the head."""
    first = port_block(4321).first
    own = {"address": "10.0.0.1", "interface": "ib0", "cores": 96, "first_port": first + 500}
    settings = {
        "job_id": 4321, "ray_address": "10.0.0.9:1", "gpus": 8,
        "token_file": "/shared/token", "object_store_bytes": 2**30,
        "nodes": {"a": {**own, "rank": 0}, "b": {**own, "rank": 1}},
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(settings))
    handlers.clear()
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("joins", "ends", "exit_code"),
    [(0, 0, 0), (0, 3, 3), (0, 75, 75), (0, -signal.SIGUSR1, 75), (0, -9, 137), (1, None, 1), (-10, None, 75)],
)
def test_the_command_runs_once_all_nodes_are_there_and_its_code_is_the_drivers(
    plan, monkeypatch, joins, ends, exit_code
):
    calls, codes = [], [joins, ends]

    def run(command, control, environment, *, preemptible):
        calls.append((command, control, environment))
        assert preemptible
        return codes.pop(0)

    monkeypatch.setattr(driver, "run_under_control", run)
    monkeypatch.setattr(sys, "argv", ["driver", f"--plan={plan}", "--control=c", "--", "python", "--", "-x"])
    with pytest.raises(SystemExit) as ended:
        driver.main()
    assert ended.value.code == exit_code
    joined_command = [sys.executable, "-m", "slimrl.launch.wait_for_nodes", "10.0.0.9:1", "2"]
    commands = [joined_command, ["python", "--", "-x"]]
    assert [command for command, _, _ in calls] == (commands if ends is not None else commands[:1])
    for _, file, environment in calls:
        assert file == Path("c")
        assert environment["SLIMRL_RAY_ADDRESS"] == "10.0.0.9:1"
        assert environment["RAY_AUTH_TOKEN_PATH"] == "/shared/token"
        assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(environment)


@pytest.mark.parametrize(("node", "code"), [("a", 0), ("b", 0), ("a", 1), ("b", -9)])
def test_rays_part_of_a_node_waits_for_the_head_and_leaves_no_folder(plan, monkeypatch, tmp_path, capsys, node, code):
    happened = []
    monkeypatch.setattr(ray_node, "TEMP", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setattr(ray_node, "_await_head", happened.append)

    def run(command, control, environment, *, preemptible, end_timeout_s):
        with pytest.raises(SystemExit):
            handlers[signal.SIGTERM](signal.SIGTERM, None)
        (folder,) = tmp_path.glob("slimrl-ray-4321-*")
        happened.append(folder)
        assert f"--temp-dir={folder / 'ray'}" in command
        assert f"--node-name={node}" in command
        assert (environment["TMPDIR"], control, preemptible) == (str(folder / "tmp"), Path("c"), False)
        assert end_timeout_s < 20
        return code

    monkeypatch.setattr(ray_node, "run_under_control", run)
    monkeypatch.setattr(sys, "argv", ["ray_node", f"--plan={plan}", "--control=c"])
    with pytest.raises(SystemExit) as ended:
        ray_node.main()
    assert ended.value.code == (1 if code else 0)
    assert happened[:-1] == (["10.0.0.9:1"] if node == "b" else [])
    assert not happened[-1].exists()
    ending = f"{node}: Ray's processes have ended with {code}" if code else f"{node}: ended"
    assert capsys.readouterr().err == f"{ending}\n"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["gives up", "gives up", "is ended"], 0),
        (["gives up"] * 3, 1),
        (["refuses"], 1),
        (["dies"], 1),
        (["gives up", "dies"], 1),
        (["is killed"], 1),
    ],
)
def test_ray_that_gives_up_on_its_own_start_is_started_again_and_nothing_else_is(
    plan, monkeypatch, tmp_path, capsys, ends, code
):
    clock, waited, runs = Clock(), [], iter(ends)
    monkeypatch.setattr(ray_node, "TEMP", str(tmp_path))
    monkeypatch.setattr(ray_node, "time", clock)
    monkeypatch.setenv("SLURMD_NODENAME", "b")
    monkeypatch.setattr(ray_node, "_await_head", waited.append)

    def run(command, control, environment, *, preemptible, end_timeout_s):
        end = next(runs)
        clock.now_s += 1 if end == "refuses" else 40
        if end == "dies":
            (folder,) = tmp_path.glob("slimrl-ray-4321-*")
            (folder / "ray" / "ray_current_cluster").write_text("10.0.0.9:1")
        return {"is ended": 0, "is killed": -9}.get(end, 1)

    monkeypatch.setattr(ray_node, "run_under_control", run)
    monkeypatch.setattr(sys, "argv", ["ray_node", f"--plan={plan}", "--control=c"])
    with pytest.raises(SystemExit) as ended:
        ray_node.main()
    assert ended.value.code == code
    assert list(runs) == []
    assert waited == ["10.0.0.9:1"] * len(ends)
    said = capsys.readouterr().err
    assert said.count("b: Ray gave up on its own start, attempt") == len(ends) - 1
    assert list(tmp_path.glob("slimrl-ray-*")) == []


def test_each_of_rays_ports_is_the_one_of_its_name_and_cpus_and_gpus_are_the_plans(plan, monkeypatch):
    monkeypatch.setattr(ray_node, "find_spec", lambda name: name == "grpc")
    settings = json.loads(plan.read_text())
    ports = PortBlock(settings["nodes"]["b"]["first_port"])
    command = ray_node.ray_command(settings, "b", Path("/tmp/x"))
    given = dict(text.split("=", 1) for text in command if text.startswith("--") and "=" in text)
    options = {
        "node-manager-port": "node_manager", "object-manager-port": "object_manager",
        "ray-client-server-port": "client_server", "dashboard-agent-listen-port": "agent_listen",
        "dashboard-agent-grpc-port": "agent_grpc", "runtime-env-agent-port": "runtime_env_agent",
        "metrics-export-port": "metrics_export",
    }  # fmt: skip
    assert {name: int(given[f"--{name}"]) for name in options} == {
        name: ports.first + NAMED.index(port) for name, port in options.items()
    }
    assert (int(given["--min-worker-port"]), int(given["--max-worker-port"])) == (ports.first + 9, ports.first + 499)
    assert (given["--num-cpus"], given["--num-gpus"], given["--object-store-memory"]) == ("96", "8", str(2**30))
    assert (given["--node-ip-address"], given["--address"]) == ("10.0.0.1", "10.0.0.9:1")
    assert "--block" in command
    head = ray_node.ray_command(settings, "a", Path("/tmp/x"))
    assert {"--head", f"--port={ports.first}", "--include-dashboard=false"} <= set(head)


def test_the_port_of_rays_client_server_is_given_only_where_ray_can_start_one(monkeypatch):
    monkeypatch.setattr(ray_node, "find_spec", lambda name: None)
    assert ray_node.client_server_option(12003) == []
    monkeypatch.setattr(ray_node, "find_spec", lambda name: name == "grpc")
    assert ray_node.client_server_option(12003) == ["--ray-client-server-port=12003"]


def test_a_head_that_does_not_listen_yet_is_waited_for_and_not_for_ever(monkeypatch):
    clock, asked = Clock(), []
    monkeypatch.setattr(ray_node, "time", clock)

    def connect(address, timeout):
        asked.append(address)
        if len(asked) < 4:
            raise ConnectionRefusedError("refused")
        return Connection()

    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *about):
            asked.append("closed")

    monkeypatch.setattr(socket, "create_connection", connect)
    ray_node._await_head("h:7")
    assert asked == [("h", 7)] * 4 + ["closed"]
    asked.clear()
    began = clock.now_s
    monkeypatch.setattr(socket, "create_connection", lambda a, timeout: asked.clear() or connect(a, timeout))
    with pytest.raises(TimeoutError, match="no Ray head at h:7 within 180 s: refused"):
        ray_node._await_head("h:7")
    assert 180 < clock.now_s - began < 190


class Ray:
    """The Ray of a cluster that answers from the third try on, and has one more node each time that it is asked."""

    def __init__(self, refuses: int = 2) -> None:
        self.refuses, self.tries, self.alive, self.ended = refuses, 0, 0, False

    def is_initialized(self) -> bool:
        return self.tries > self.refuses

    def init(self, **settings) -> None:
        assert settings["address"] == "h:1"
        self.tries += 1
        if self.tries <= self.refuses:
            raise ConnectionError("not there")

    def nodes(self):
        self.alive += 1
        if self.alive == 2:
            raise RpcError("the head has started again")
        return [{"Alive": True}] * self.alive + [{"Alive": False}] * 5

    def shutdown(self) -> None:
        self.ended = True


def test_all_nodes_are_waited_for_and_dead_ones_do_not_count(monkeypatch, capsys):
    cluster = Ray()
    monkeypatch.setattr(wait_for_nodes, "ray", cluster)
    monkeypatch.setattr(wait_for_nodes, "time", Clock())
    monkeypatch.setattr(sys, "argv", ["wait_for_nodes", "h:1", "3"])
    wait_for_nodes.main()
    assert (cluster.tries, cluster.alive, cluster.ended) == (3, 3, True)
    assert capsys.readouterr().err == "not yet: not there\n" * 2 + "not yet: the head has started again\n"
    never = Ray(refuses=10**6)
    monkeypatch.setattr(wait_for_nodes, "ray", never)
    clock = Clock()
    monkeypatch.setattr(wait_for_nodes, "time", clock)
    with pytest.raises(TimeoutError, match="0 of 3 nodes are in the Ray cluster at h:1 after 300 s"):
        wait_for_nodes.main()
    assert 300 < clock.now_s - 1000 < 302


class Store(dict):
    """The store of one process group, with TCPStore's interface."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = []

    def __call__(self, host, port, size, *, is_master, timeout, wait_for_workers):
        self.connections.append((host, port, size, is_master, timeout, wait_for_workers))
        return self

    set = dict.__setitem__

    def get(self, name: str) -> bytes:
        return self[name].encode()

    def wait(self, names, timeout) -> None:
        self.waited = (names, timeout)


INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@pytest.fixture
def network(monkeypatch):
    store, sums = Store(), []
    monkeypatch.setattr(allreduce, "TCPStore", store)
    monkeypatch.setattr(allreduce, "local_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.1": "ib0", "10.0.0.2": "ib1"})
    monkeypatch.setattr(allreduce, "route_to", lambda host, port: ("10.0.0.2", "10.0.0.1"))
    monkeypatch.setattr(allreduce, "_sum", lambda *arguments: sums.append(arguments))
    monkeypatch.setattr(allreduce.mp, "spawn", lambda function, args, nprocs: sums.append((function, args, nprocs)))
    for name in INTERFACE:
        monkeypatch.setenv(name, "")
    return SimpleNamespace(store=store, sums=sums)


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_nodes_of_a_group_meet_at_the_heads_address_on_the_route_to_it(network, gpus):
    nodes, hosts = ["a", "b", "c"], {"a": "host-a", "b": "host-b", "c": "host-c"}
    timeout, ranks = timedelta(seconds=20), max(1, gpus)
    # The others come before the head here, so what it has put there is there already.
    network.store["address 0"] = "10.0.0.9"
    found = [probe(node, nodes, hosts, 77, timeout_s=20, gpus=gpus) for node in ("b", "c", "a")]
    assert found == [("10.0.0.2", "ib1"), ("10.0.0.2", "ib1"), ("10.0.0.1", "ib0")]
    assert [master for _, _, _, master, _, _ in network.store.connections] == [False, False, True]
    assert {connection[:3] for connection in network.store.connections} == {("host-a", 77, 3)}
    assert {connection[4:] for connection in network.store.connections} == {(timeout, False)}
    assert network.store.waited == (["done 0", "done 1", "done 2"], timeout)
    addresses = {"head": "10.0.0.1", "address 0": "10.0.0.1", "address 1": "10.0.0.2", "address 2": "10.0.0.2"}
    assert network.store == {**addresses, **{f"done {rank}": "" for rank in range(3)}}
    assert [os.environ[name] for name in INTERFACE] == ["=ib0", "ib0"]
    places = {1: "10.0.0.9", 2: "10.0.0.9", 0: "10.0.0.1"}
    given = [(rank * ranks, 3 * ranks, place, 77, timeout, bool(gpus)) for rank, place in places.items()]
    if gpus > 1:
        assert network.sums == [(allreduce._sum, arguments, gpus) for arguments in given]
    else:
        assert network.sums == [(0, *arguments) for arguments in given]


def test_a_node_alone_takes_an_address_that_is_no_loopback_where_it_has_one(network):
    assert probe("a", ["a"], {"a": "x"}, 7, timeout_s=1, gpus=0) == ("10.0.0.1", "ib0")
    assert lone_address({"127.0.1.1": "lo", "127.0.0.1": "lo"}) == "127.0.0.1"


def test_an_address_that_no_interface_has_is_refused(network, monkeypatch):
    monkeypatch.setattr(allreduce, "local_addresses", lambda: {"127.0.0.1": "lo"})
    with pytest.raises(RuntimeError, match=r"b: others reach it at 10\.0\.0\.2, which none of its interfaces has"):
        probe("b", ["a", "b"], {"a": "x", "b": "y"}, 7, timeout_s=1, gpus=0)
    assert network.sums == []


def test_a_node_reports_its_address_in_its_own_group_and_nothing_without_one(tmp_path, monkeypatch):
    groups = [
        {"nodes": ["a", "b"], "hosts": {"a": "x", "b": "y"}, "port": 70},
        {"nodes": ["c", "d"], "hosts": {"c": "z", "d": "w"}, "port": 71},
    ]
    (tmp_path / "groups.plan").write_text(json.dumps({"groups": groups}))
    met = []
    monkeypatch.setattr(allreduce, "probe", lambda *group, **how: met.append((group, how)) or ("10.0.0.4", "eth0"))
    arguments = ["allreduce", f"--plan={tmp_path / 'groups.plan'}", "--gpus=2", "--timeout-s=9"]
    monkeypatch.setattr(sys, "argv", arguments)
    for node in ("d", "e"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        allreduce.main()
    assert met == [(("d", ["c", "d"], {"c": "z", "d": "w"}, 71), {"timeout_s": 9.0, "gpus": 2})]
    assert read_reports(tmp_path) == {"d": NodeReport("d", addresses={"10.0.0.4": "eth0"}, gpus=2)}


@pytest.mark.parametrize("others", [1.0 + 2.0 + 3.0, 1.0 + 2.0])
def test_a_sum_that_is_not_that_of_all_ranks_is_an_error(monkeypatch, others):
    """4 ranks, each with its number from 1, sum to 10."""
    joined_as, left = {}, []
    monkeypatch.setattr(allreduce, "ELEMENTS", 5)
    monkeypatch.setattr(allreduce, "TCPStore", lambda *about, **how: (about, how))
    monkeypatch.setattr(
        allreduce.dist, "init_process_group", lambda backend, **how: joined_as.update(backend=backend, **how)
    )
    monkeypatch.setattr(allreduce.dist, "destroy_process_group", lambda: left.append(True))

    def all_reduce(tensor: torch.Tensor) -> None:
        assert tensor.tolist() == [4.0] * 5
        tensor[:3] += others
        tensor[3:] += 6.0

    monkeypatch.setattr(allreduce.dist, "all_reduce", all_reduce)
    timeout = timedelta(seconds=3)
    if others == 6.0:
        allreduce._sum(1, 2, 4, "h", 7, timeout, False)
        assert left == [True]
    else:
        with pytest.raises(RuntimeError, match=r"rank 3: the all-reduce of 4 ranks gave 7\.0, not 10\.0"):
            allreduce._sum(1, 2, 4, "h", 7, timeout, False)
    assert (joined_as["backend"], joined_as["rank"], joined_as["world_size"]) == ("gloo", 3, 4)
    assert joined_as["store"] == (("h", 7), {"is_master": False, "timeout": timeout})


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A node with 100 GiB free and two good GPUs; what it is found to have can be changed."""
    found = SimpleNamespace(
        free_gib=100.04, gpus="0, 4, 0, 580.65\n1, 4, 0, 580.65\n", failure=None, computes=[], kernels=[]
    )
    memory = lambda: SimpleNamespace(available=int(found.free_gib * 2**30))  # noqa: E731
    monkeypatch.setattr(psutil, "virtual_memory", memory)
    monkeypatch.setattr(preflight, "query_gpus", lambda: (found.gpus, found.failure))
    monkeypatch.setattr(preflight, "compute_problems", lambda gpus: [f"{gpus}: {text}" for text in found.computes])
    monkeypatch.setattr(preflight, "kernel_problems", lambda: found.kernels)
    monkeypatch.setattr(preflight, "package_versions", lambda: {"ray": "2"})
    monkeypatch.setattr(preflight, "local_addresses", lambda: {"10.0.0.1": "ib0"})
    monkeypatch.setattr(preflight, "port_problems", lambda ports: [f"port {ports.first} is taken"])
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda pid: set(range(48)))
    (tmp_path / "canary").write_text("x\n")

    def inspect(gpus: int = 2, *, min_free_gib: float = 8.0, ports: PortBlock | None = None) -> NodeReport:
        return preflight.inspect_node(
            "n1", canary=tmp_path / "canary", gpus=gpus, min_free_gib=min_free_gib, ports=ports
        )

    return SimpleNamespace(found=found, inspect=inspect)


def test_a_node_reports_what_it_has_and_everything_that_is_wrong_with_it(node, tmp_path):
    versions = {"ray": "2", "NVIDIA driver": "580.65"}
    assert node.inspect() == NodeReport("n1", [], versions, {"10.0.0.1": "ib0"}, 2, 48, 100.0)
    assert node.inspect(0) == NodeReport("n1", [], {"ray": "2"}, {"10.0.0.1": "ib0"}, 0, 48, 100.0)
    assert node.inspect(ports=PortBlock(700)).problems == ["port 700 is taken"]
    node.found.free_gib = 7.96
    assert node.inspect().problems == ["8.0 GiB of memory are free, 8 needed"]
    assert node.inspect(min_free_gib=7.9).problems == []
    (tmp_path / "canary").write_text("\n")
    node.found.computes = ["GPU 1 multiplies matrices wrongly"]
    assert [problem.split(":")[0] for problem in node.inspect(ports=PortBlock(7)).problems] == [
        "the shared file system differs from the batch host's", "8.0 GiB of memory are free, 8 needed",
        "port 7 is taken", "2",
    ]  # fmt: skip


def test_packages_that_cannot_use_the_gpus_are_a_problem_of_the_node(node, monkeypatch):
    node.found.kernels = ["A100 has compute capability 8.0"]
    assert node.inspect().problems == ["A100 has compute capability 8.0"]
    assert node.inspect(0).problems == []
    monkeypatch.undo()

    def broken() -> None:
        raise ValueError("cannot be imported")

    assert preflight.kernel_problems() == []
    monkeypatch.setattr(device, "attention_problem", lambda: "no attention")
    assert preflight.kernel_problems() == ["no attention"]
    monkeypatch.setattr(device, "load_transformer_engine", broken)
    assert preflight.kernel_problems() == ["cannot be imported"]


def test_gpus_that_are_wrong_already_are_not_asked_to_compute(node):
    node.found.computes = ["wrong"]
    assert node.inspect(3).problems == ["2 GPUs, 3 expected"]
    node.found.failure = "no nvidia-smi, so no GPU"
    report = node.inspect()
    assert (report.problems, report.gpus, report.versions["NVIDIA driver"]) == (
        ["no nvidia-smi, so no GPU"],
        0,
        "absent",
    )


@pytest.mark.parametrize(("first_port", "problems"), [(None, []), (700, ["it is full", "it is old"])])
def test_the_preflight_writes_its_report_and_ends_with_1_where_something_is_wrong(
    tmp_path, monkeypatch, capsys, first_port, problems
):
    asked = []
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(
        preflight, "inspect_node", lambda node, **how: asked.append((node, how)) or NodeReport(node, problems)
    )
    arguments = ["preflight", f"--folder={tmp_path}", "--gpus=4", "--min-free-gib=8.5"]
    monkeypatch.setattr(sys, "argv", [*arguments, *([] if first_port is None else [f"--first-port={first_port}"])])
    with pytest.raises(SystemExit) as ended:
        preflight.main()
    assert ended.value.code == (1 if problems else 0)
    ports = None if first_port is None else PortBlock(first_port)
    assert asked == [("n1", {"canary": tmp_path / "canary", "gpus": 4, "min_free_gib": 8.5, "ports": ports})]
    assert read_reports(tmp_path / "preflight") == {"n1": NodeReport("n1", problems)}
    assert capsys.readouterr().err == "".join(f"n1: {problem}\n" for problem in problems)


def test_a_node_has_the_name_that_slurm_calls_it_by(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert preflight.node_name() == "n7"
    for name in ("", None):
        monkeypatch.delenv("SLURMD_NODENAME", raising=False)
        if name is not None:
            monkeypatch.setenv("SLURMD_NODENAME", name)
        assert preflight.node_name() == socket.gethostname()


def test_of_the_addresses_of_an_interface_those_of_ipv4_are_taken(monkeypatch):
    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    interfaces = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "ib0": [entry(socket.AF_PACKET, "00:11"), entry(socket.AF_INET, "10.0.0.1"), entry(socket.AF_INET, "10.0.0.2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert preflight.local_addresses() == {"127.0.0.1": "lo", "10.0.0.1": "ib0", "10.0.0.2": "ib0"}


@pytest.fixture
def programs(monkeypatch):
    """In place of subprocess.run: notes what it was called with, and gives or raises what is set."""
    asked: list[list[str]] = []
    state = SimpleNamespace(asked=asked, answers=[])

    def run(command, **how):
        assert how == {"capture_output": True, "text": True, "timeout": how["timeout"], "check": False}
        asked.append(list(command))
        answer = state.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(**{"returncode": 0, "stdout": "", "stderr": "", **answer})

    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_what_nvidia_smi_answers_is_told_from_why_it_does_not(programs):
    programs.answers = [
        {"stdout": "0, 4, 0, 580\n"},
        {"returncode": 9, "stderr": " lost \n", "stdout": "x"},
        {"returncode": 9, "stdout": "only here\n"},
        FileNotFoundError(),
        subprocess.TimeoutExpired("nvidia-smi", 60),
    ]
    assert [preflight.query_gpus() for _ in range(5)] == [
        ("0, 4, 0, 580\n", None),
        ("", "nvidia-smi fails: lost"),
        ("", "nvidia-smi fails: only here"),
        ("", "no nvidia-smi, so no GPU"),
        ("", "nvidia-smi does not answer within 60 s"),
    ]
    fields = "index,memory.used,ecc.errors.uncorrected.volatile.total,driver_version"
    assert programs.asked[0] == ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def test_an_allocation_is_read_from_the_environment_and_from_scontrol(programs, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(LaunchError, match="SLURM_JOB_ID is not set"):
        slurm.this_allocation()
    monkeypatch.setenv("SLURM_JOB_ID", "55")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[2,1]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    lines = "NodeName=n1 Arch=x NodeHostName=host1 X=1\n\nNodeName=n2 NodeHostName=host2\n"
    names = {"stdout": "n2\nn1\n"}
    programs.answers = [names, {"stdout": lines}]
    assert slurm.this_allocation() == slurm.Allocation(55, 0, ["n2", "n1"], {"n1": "host1", "n2": "host2"})
    assert programs.asked == [
        ["scontrol", "show", "hostnames", "n[2,1]"], ["scontrol", "--oneliner", "show", "node", "n[2,1]"],
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    programs.answers = [names, {"stdout": lines}]
    assert slurm.this_allocation().attempt == 3
    programs.answers = [names, {"stdout": "NodeName=n1 NodeHostName=host1\n"}]
    with pytest.raises(LaunchError, match="scontrol show node does not list n2"):
        slurm.this_allocation()
    programs.answers = [names, {"stdout": "NodeName=n1 NodeHostNames=host1\n"}]
    with pytest.raises(LaunchError, match="no NodeHostName in the answer of scontrol: NodeName=n1"):
        slurm.this_allocation()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"returncode": 1, "stderr": "slurm_load_jobs error\n"}, "scontrol requeue 7: slurm_load_jobs error"),
        ({"returncode": 4}, "scontrol requeue 7: 4"),
        (FileNotFoundError(errno.ENOENT, "no scontrol"), "no scontrol"),
        (subprocess.TimeoutExpired("scontrol", 60), "timed out"),
    ],
)
def test_a_scontrol_that_does_not_answer_is_a_failure_of_the_job(programs, answer, said):
    programs.answers = [{"stdout": "JobId=7 JobState=RUNNING"}, answer]
    with pytest.raises(LaunchError, match=said):
        slurm.requeue(7)


def test_kernels_are_kept_below_rays_folder_where_the_home_folder_takes_none(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_node.os, "access", lambda path, mode: (path, mode) != (Path.home(), os.W_OK))
    found = ray_node.kernel_caches(tmp_path, {"TRITON_CACHE_DIR": "/mine"})
    assert "TRITON_CACHE_DIR" not in found
    assert all(Path(path).is_relative_to(tmp_path / "kernels") for path in found.values())
    assert len(set(found.values())) == len(found) == len(ray_node.KERNEL_CACHES) - 1
    # SGLang points the packages that it knows at its own folder, by variables that are not set.
    assert {"SGLANG_CACHE_DIR", *third_party_cache_defaults()} <= ray_node.KERNEL_CACHES.keys()
    monkeypatch.undo()
    assert os.access(Path.home(), os.W_OK)
    assert ray_node.kernel_caches(tmp_path, {}) == {}
