"""The warm interpreter: imports packages once, and forks itself for each run.

1. A request is one message on the control socket: JSON with the id and limits, and the run's descriptors. It holds
   nothing of the program, whose code only the fork reads, so the warm interpreter's memory tells the next run nothing.
2. The fork is process 1 of a new pid namespace. It confines itself (confine.py) and runs the program (interpreter.py).
   If it ends, the kernel ends all processes of its namespace before this process is told.
3. The memory of runs is looked at (memory.py), and a run above its limit is killed.
4. `rest` stops a session that waits for its next code, if it is a single process: then there is nothing to look at.
5. `kill` ends a run, which is answered at once, and again and again until it has ended; each end is reported. The end
   of the control socket ends this process, and with it the sandbox.
"""

import array
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from slimrl.agent.sandbox.inside import interpreter
from slimrl.agent.sandbox.inside.confine import RUN_USERS, confine, overlay_works
from slimrl.agent.sandbox.inside.memory import PAGE_BYTES, RunMemory
from slimrl.agent.sandbox.inside.processes import RunProcesses

KILL_S = 1.0
"""Seconds between two kills of a run that has not ended yet."""
MAX_MESSAGE_BYTES = 4096
MAX_PROBLEM = 1000
"""Most characters of a reason, so that a message holds it"""
MAX_DESCRIPTORS = 8
MAX_DESCRIPTOR = 1 << 20
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(eq=False)
class _Run:
    number: int
    user: int
    processes: RunProcesses
    memory: RunMemory
    next_look: float
    killed: bool = False
    over_memory: bool = False
    resting: bool = False

    def rest(self, on: bool) -> None:
        """Stop the session's process until it has code again. With processes in the background it goes on."""
        if on and (not self.processes.open() or len(self.processes.found()) > 1):
            return
        if on != self.resting:
            self.resting = on
            self.processes.signal_first(signal.SIGSTOP if on else signal.SIGCONT)
            self.next_look = time.monotonic()

    def look(self) -> None:
        if self.resting and not self.killed and self.processes.single_and_stopped():
            self.next_look = math.inf
            return
        if not self.killed and self.processes.open():
            self.over_memory = self.memory.exceeds()
        if self.killed or self.over_memory:
            self.kill()
        else:
            self.next_look = time.monotonic() + self.memory.next_look_s

    def kill(self) -> None:
        self.killed = True
        self.next_look = time.monotonic() + KILL_S
        self.processes.kill()


class Zygote:
    """The loop of the warm interpreter."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._runs: dict[int, _Run] = {}
        """Running runs, by the pid of their first process."""
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = _address_space_bytes()
        self._overlay = overlay_works()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Handle messages and the ends of runs until the control socket ends."""
        self._send({"ready": os.getpid(), "overlay": self._overlay})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll(self._until_next_look_ms())}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._receive():
                return
            self._look()

    def _until_next_look_ms(self) -> float | None:
        if not self._runs:
            return None
        next_look = min(run.next_look for run in self._runs.values())
        return None if next_look == math.inf else max(0.0, 1000 * (next_look - time.monotonic()))

    def _receive(self) -> bool:
        """Handle a message. False at the end of the socket."""
        files = array.array("i")
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * files.itemsize)
        message, ancillary, _, _ = self._control.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        for _, _, data in ancillary:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
        request = json.loads(message)
        if "rest" in request:
            for run in self._runs.values():
                if run.number == request["rest"] and not run.killed:
                    run.rest(request["on"])
            return True
        if "kill" in request:
            for run in self._runs.values():
                if run.number == request["kill"]:
                    run.kill()
            self._send({"killed": request["kill"]})
            return True
        given = dict(zip(request["descriptors"], files, strict=True))
        try:
            self._fork(request, given)
        except OSError as error:
            self._send({"id": request["id"], "problem": str(error)})
        finally:
            for file in files:
                os.close(file)
        return True

    def _fork(self, request: dict[str, Any], given: dict[str, int]) -> None:
        limits, users = request["limits"], {run.user for run in self._runs.values()}
        # The kernel counts some things for each user, so runs share none as long as there are others.
        user = next((user for user in RUN_USERS if user not in users), RUN_USERS[0])
        given_bytes = sum(os.fstat(given[name]).st_size for name in ("task", "stdin"))
        session = self._session(request["beside"])
        if session is not None:
            user = session.user
            given = given | {"mounts": session.processes.mounts()}
        try:
            pid = self._forked()
        finally:
            if os.getpid() != 1 and session is not None:
                os.close(given["mounts"])
        if pid == 0:
            self._become(request, given, user)
        processes = RunProcesses(pid, None if session is None else session.processes)
        memory = RunMemory(processes, limits["memory_bytes"], given_bytes, limits["processes"])
        self._runs[pid] = _Run(request["id"], user, processes, memory, time.monotonic() + memory.next_look_s)

    def _forked(self) -> int:
        """The pid of a child in a new pid namespace, 0 in the child."""
        os.unshare(os.CLONE_NEWPID)  # of the children, not of this process
        try:
            return os.fork()
        finally:
            # The child is in its own namespace already; there this fails, which it need not know.
            if os.getpid() != 1:
                os.setns(self._own_pids, os.CLONE_NEWPID)

    def _session(self, number: int | None) -> _Run | None:
        """The session beside which a run works. Raises OSError if it has ended."""
        if number is None:
            return None
        for run in self._runs.values():
            if run.number == number and run.processes.open():
                return run
        raise ProcessLookupError("the session has ended")

    def _become(self, request: dict[str, Any], given: dict[str, int], user: int) -> NoReturn:
        """The rest of the child's life."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, name in enumerate(_STREAMS):
                os.dup2(given[name], number)
            limits = request["limits"]
            # Those of the other runs would count in the limit of open files.
            _close_all_but([self._control.fileno(), *(given[name] for name in given if name not in _STREAMS)])
            limits = limits | {"address_space_bytes": limits["memory_bytes"] + self._base_bytes}
            confine(
                limits,
                user,
                base=request["base"],
                beside=given.get("mounts"),
                sees_base=request["sees_base"],
            )
        except OSError as error:
            self._send({"id": request["id"], "problem": f"cannot confine a program: {error}"})
            os._exit(status)
        self._control.close()
        try:
            interpreter.run(given["task"], given.get("channel"), given.get("folder"))
        except BaseException:  # noqa: BLE001 - a fork never returns to the loop
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self._runs.pop(pid)
            run.processes.close()
            code = os.waitstatus_to_exitcode(status)
            cpu_s = usage.ru_utime + usage.ru_stime
            self._send({"id": run.number, "status": code, "cpu_s": cpu_s, "over_memory": run.over_memory})

    def _look(self) -> None:
        for run in self._runs.values():
            if time.monotonic() < run.next_look:
                continue
            try:
                run.look()
            except Exception as error:  # noqa: BLE001 - a program chooses what is read of it; of others all may be well
                problem = f"cannot see what a program holds of the memory: {error!r}"
                self._send({"id": run.number, "problem": problem[:MAX_PROBLEM]})
                run.kill()

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


def main() -> None:
    """Arguments: the control socket's descriptor, and the packages to import."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    interpreter.warm(sys.argv[2:])
    assert len(os.listdir("/proc/self/task")) == 1, "a package has started a thread, which no fork would have"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each run takes some
    gc.collect()
    gc.freeze()
    gc.disable()
    Zygote(control).serve()


def _close_all_but(kept: list[int]) -> None:
    """Close the descriptors from 3 on that are not among those kept."""
    first = 3
    for file in sorted(kept):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, MAX_DESCRIPTOR)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * PAGE_BYTES
