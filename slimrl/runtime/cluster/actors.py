"""Named Ray actors that are called together, with a deadline and one clear error.

If several fail, one of them is the cause: a rank that dies makes the others fail in their next collective. So after the
first failure the other actors get a moment to report theirs, and the likeliest cause is raised. After a failure that
looks like a consequence this takes longer, since the cluster needs 15 s to notice a silent node.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from slimrl.base.errors import ActorLost, NodeLost, StageError
from slimrl.engines.servers.process import ServerError
from slimrl.runtime.cluster.placement import Node
from slimrl.runtime.cluster.reservation import is_alive

POLL_S = 0.2
"""Seconds between two updates of a waiting driver's progress display."""
GRACE_S = 2.0
"""How long other actors may report after a failure that has its own cause."""
CONSEQUENCE_GRACE_S = 60.0
"""How long other actors may report after a failure that looks like a consequence."""

_CONSEQUENCES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Texts in the error of a collective that failed because another rank ended."""
_CONSEQUENCE = 2
"""Distance from the cause of a failure that looks like a consequence; see `_failure`."""


class ActorGroup:
    """Actors, their log files and nodes, by the name that errors use."""

    def __init__(self, actors: Mapping[str, Any], logs: Mapping[str, Path], nodes: Mapping[str, Node]) -> None:
        self._actors, self._logs, self._nodes = dict(actors), dict(logs), dict(nodes)

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    def add(self, name: str, actor: Any, log: Path, node: Node) -> None:
        """Add an actor, or put it in the place of one that has ended."""
        self._actors[name], self._logs[name], self._nodes[name] = actor, log, node

    def remove(self, name: str) -> None:
        """Kill an actor, whatever its state, and forget it."""
        ray.kill(self._actors.pop(name))

    @property
    def first(self) -> Any:
        return next(iter(self._actors.values()))

    def begin(self, method: str, arguments: Mapping[str, tuple[Any, ...]] | None = None) -> dict[str, Any]:
        """Call `method` on the actors in `arguments`; None: on all, without arguments. Returns refs for `wait`."""
        if arguments is None:
            arguments = dict.fromkeys(self._actors, ())
        return {name: getattr(self._actors[name], method).remote(*given) for name, given in arguments.items()}

    def call(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, ...]] | None = None,
        *,
        timeout_s: float,
        while_waiting: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Call a method of the actors and wait for the results: `begin` and `wait`."""
        return self.wait(self.begin(method, arguments), method, timeout_s=timeout_s, while_waiting=while_waiting)

    def wait(
        self,
        refs: Mapping[str, Any],
        method: str,
        *,
        timeout_s: float,
        while_waiting: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Results of pending calls of `method`, by actor name.

        Args:
            while_waiting: called every POLL_S seconds, for progress displays.

        Raises:
            StageError: an actor raised, died, or did not answer in time.
        """
        results: dict[str, Any] = {}
        failures: list[tuple[int, StageError]] = []
        answered: set[str] = set()
        names = {ref: name for name, ref in refs.items()}
        deadline = time.monotonic() + timeout_s
        while len(answered) < len(refs):
            open_refs = [ref for ref, name in names.items() if name not in answered]
            done, _ = ray.wait(open_refs, num_returns=len(open_refs), timeout=POLL_S)
            for ref in done:
                answered.add(names[ref])
                try:
                    results[names[ref]] = ray.get(ref)
                except RayError as error:
                    failures.append(self._failure(error, names[ref], method))
                    grace_s = CONSEQUENCE_GRACE_S if failures[-1][0] == _CONSEQUENCE else GRACE_S
                    deadline = min(deadline, time.monotonic() + grace_s)
            if while_waiting is not None:
                while_waiting()
            if time.monotonic() > deadline:
                break
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        if late := [name for name in refs if name not in answered]:
            raise StageError(f"{', '.join(late)}: {method} did not finish within {timeout_s:.0f} s{self._log(late[0])}")
        return {name: results[name] for name in refs}

    def outcomes(self, refs: Mapping[str, Any], method: str, *, timeout_s: float) -> dict[str, Any]:
        """Results of pending calls of `method`, by actor name, when all have ended or at the deadline.

        The result of an actor that raised, died or is late is a StageError.
        """
        deadline, left = time.monotonic() + timeout_s, list(refs.values())
        while left and time.monotonic() < deadline:
            _, left = ray.wait(left, num_returns=len(left), timeout=POLL_S)
        results = self.answers_so_far(refs, method)
        for name in refs.keys() - results.keys():
            results[name] = StageError(f"{name}: {method} did not finish within {timeout_s:.0f} s{self._log(name)}")
        return results

    def answers_so_far(self, refs: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Results of those calls of `begin` that have ended, by actor name. Does not wait.

        The result of an actor that raised or died is a StageError.
        """
        if not refs:
            return {}
        done = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)[0])
        results: dict[str, Any] = {}
        for name, ref in refs.items():
            if ref in done:
                try:
                    results[name] = ray.get(ref)
                except RayError as error:
                    results[name] = self._failure(error, name, method)[1]
        return results

    def kill(self) -> None:
        """Kill all actors at once; child processes that watch them end too."""
        for actor in self._actors.values():
            ray.kill(actor)

    def _failure(self, error: RayError, name: str, method: str) -> tuple[int, StageError]:
        """Distance from the cause, and the error to raise."""
        if isinstance(error, ActorUnavailableError):
            error = self._verdict(error, name)
        if isinstance(error, RayTaskError):
            cause = error.cause
            # ServerError's message already has the name.
            is_server = isinstance(cause, ServerError)
            message = str(cause) if is_server else f"{name}: {method}: {type(cause).__name__}: {cause}"
            distance = _CONSEQUENCE if any(text in str(cause) for text in _CONSEQUENCES) else 1
            return distance, StageError(message, str(error))
        node = self._nodes[name]
        if isinstance(error, RayActorError) and not is_alive(node):
            message = f"{name}: its node {node.name} was lost during {method}{self._log(name)}"
            return 0, NodeLost(message, str(error))
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            crash = _crash(self._logs[name])
            reason = f": {crash}" if crash else ", without an error of its own; it may have been killed"
            return 0, ActorLost(f"{name}: its process died during {method}{reason}{self._log(name)}", str(error))
        if isinstance(error, OutOfMemoryError):
            message = f"{name}: Ray ended its process during {method}, since {node.name} was short of memory"
            return 0, ActorLost(f"{message}{self._log(name)}", str(error))
        return 1, StageError(f"{name}: {method}: {type(error).__name__}{self._log(name)}", str(error))

    def _verdict(self, error: RayError, name: str) -> RayError:
        """The cluster's later verdict on an actor that cannot be reached."""
        try:
            ray.get(self._actors[name].__ray_ready__.remote(), timeout=CONSEQUENCE_GRACE_S)
        except RayActorError as verdict:
            return verdict
        except RayError:
            pass
        return error

    def _log(self, name: str) -> str:
        return f" (log: {self._logs[name]})"


def _crash(log: Path) -> str | None:
    """The interpreter's message about a crash, for example `Fatal Python error: Segmentation fault`."""
    if not log.is_file():
        return None
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("Fatal Python error")), None)
