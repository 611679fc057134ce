"""A Ray cluster of several nodes on this machine, each a `ray start` of its own, as a job's script makes one."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from slimrl.base.processes import await_end, send_all
from slimrl.engines.servers.ports import free_ports
from slimrl.launch.ray_node import client_server_option

START_S = 90.0
START_ATTEMPTS = 3
STARTED, TOO_SLOW = "Ray runtime started", "timed out during startup"
NICENESS = {"RAY_worker_niceness": "0"}
"""As in a run's own cluster; Ray's 15 leaves actors what other processes of the machine do not take."""


class RayNodes:
    """Nodes of so many slots, the head first; `address` is the head's.

    Slots are cores, or with `gpus` GPUs as Ray counts them, whatever this machine has. With `apart` each node has
    an address of the loopback interface to itself, and all have a folder of temporary files that ends with them.
    """

    def __init__(self, *slots: int, gpus: bool = False, apart: bool = False) -> None:
        self._apart = apart
        self._resource = "num-gpus" if gpus else "num-cpus"
        # The path of a socket in it is limited to 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slimrl-nodes-", dir="/tmp"))
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        port, client_port = free_ports(2)
        self.address = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._family: set[psutil.Process] = set()
        try:
            head = ["--head", "--include-dashboard=false", f"--port={port}"]
            self._start(slots[0], [*head, *client_server_option(client_port)])
            self.address = f"{self._address_of_head()}:{port}"
            for count in slots[1:]:
                self.join(count)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Nodes so far, those included that have died."""
        return len(self._processes)

    def join(self, count: int) -> None:
        """Start a node more, with so many slots."""
        self._start(count, [f"--address={self.address}"])

    def _start(self, count: int, options: list[str]) -> None:
        for attempt in range(1, START_ATTEMPTS + 1):
            before = set(self._family)
            try:
                self._try_start(count, options)
                return
            except AssertionError as error:
                # Ray itself waits for half a minute, which a busy machine exceeds.
                if TOO_SLOW not in str(error) or attempt == START_ATTEMPTS:
                    raise
                failed = self._processes.pop()
                failed.kill()
                failed.wait(15)
                send_all(self._family - before, signal.SIGKILL)

    def _try_start(self, count: int, options: list[str]) -> None:
        index, (agent_port,) = len(self._processes), free_ports(1)
        address = [f"--node-ip-address=127.0.0.{index + 1}"] if self._apart else []
        own = {**NICENESS, **({"TMPDIR": str(self.folder)} if self._apart else {})}
        search_path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        log = self.folder / f"node_{index}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, *address,
                    f"--{self._resource}={count}", f"--temp-dir={self.folder / str(index)}",
                    f"--dashboard-agent-listen-port={agent_port}",
                    "--object-store-memory=200000000", "--disable-usage-stats",
                    "--min-worker-port=0", "--max-worker-port=0",
                ],
                env={**os.environ, **self.environment, **own, "PYTHONPATH": os.pathsep.join(search_path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while STARTED not in log.read_text():
            self.members(index)
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        self.members(index)

    def _address_of_head(self) -> str:
        """As the head's raylet was told it."""
        (raylet,) = [p for p in self.members(0) if Path(p.cmdline()[0]).name == "raylet"]
        (flag,) = [text for text in raylet.cmdline() if text.startswith("--node_ip_address=")]
        return flag.partition("=")[2]

    def members(self, index: int) -> list[psutil.Process]:
        """Processes of a node; they are remembered for the end."""
        try:
            found = psutil.Process(self._processes[index].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._family |= set(found)
        return found

    def running(self, text: str) -> list[psutil.Process]:
        """Processes of all nodes whose command line has `text`."""
        found = []
        for index in range(len(self._processes)):
            for process in self.members(index):
                try:
                    if text in " ".join(process.cmdline()):
                        found.append(process)
                except psutil.NoSuchProcess:
                    continue
        return found

    def command_lines(self, index: int) -> list[str]:
        """Command lines of a node's processes."""
        lines = []
        for process in self.members(index):
            try:
                lines.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return lines

    def kill_raylet(self, index: int) -> None:
        """Its death without a word, as of a machine that loses power; its workers notice and end."""
        (raylet,) = [p for p in self.members(index) if p.cmdline() and Path(p.cmdline()[0]).name == "raylet"]
        raylet.kill()

    def left(self, *texts: str, timeout_s: float = 30.0) -> list[str]:
        """Command lines with one of these texts that the nodes still have when the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            lines = [line for index in range(len(self._processes)) for line in self.command_lines(index)]
            found = [line for line in lines if any(text in line for text in texts)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def close(self) -> None:
        """End all nodes by pid."""
        for index, process in enumerate(self._processes):
            self.members(index)
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)
        for member in await_end(self._family, 5):
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)
