"""Pending calls of actors, which are waited for together, with a deadline and one clear error.

If several fail, one of them is the cause: a rank that dies makes the others fail in their next collective. So after the
first failure the other actors get a moment to report theirs, and the likeliest cause is raised. After a failure that
looks like a consequence this takes longer, since the cluster needs 15 s to notice a silent node.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from slimrl.base.errors import ActorLost, NoAnswer, NodeLost, NotWritten, PeerLost, StageError
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """An actor, and what errors say of it."""

    actor: Any
    """Its handle"""
    log: Path
    node: Node


@dataclass(frozen=True, eq=False)
class Calls[T]:
    """Pending calls of one method, which returns T, of several actors."""

    method: str
    refs: Mapping[str, Any]
    """Ray's references to the results, by the actors' names"""
    members: Mapping[str, Member]

    def __len__(self) -> int:
        return len(self.refs)

    def __or__(self, others: "Calls[T]") -> "Calls[T]":
        """These calls and others of the same method; of an actor that is called in both, the other one."""
        assert self.method == others.method, (self.method, others.method)
        return Calls(self.method, {**self.refs, **others.refs}, {**self.members, **others.members})

    def of(self, names: Collection[str]) -> "Calls[T]":
        """The calls of those of these actors that are called."""
        return Calls(self.method, {name: ref for name, ref in self.refs.items() if name in names}, self.members)

    def wait(self, *, timeout_s: float, while_waiting: Callable[[], None] | None = None) -> dict[str, T]:
        """The results, by actor name.

        Args:
            while_waiting: called every POLL_S seconds, for progress displays.

        Raises:
            StageError: an actor raised, died, or did not answer in time.
        """
        results: dict[str, T] = {}
        failures: list[tuple[int, StageError]] = []
        answered: set[str] = set()
        names = {ref: name for name, ref in self.refs.items()}
        deadline = time.monotonic() + timeout_s
        while len(answered) < len(self.refs):
            open_refs = [ref for ref, name in names.items() if name not in answered]
            done, _ = ray.wait(open_refs, num_returns=len(open_refs), timeout=POLL_S)
            for ref in done:
                answered.add(names[ref])
                try:
                    results[names[ref]] = ray.get(ref)
                except RayError as error:
                    failures.append(self._failure(error, names[ref]))
                    grace_s = CONSEQUENCE_GRACE_S if failures[-1][0] == _CONSEQUENCE else GRACE_S
                    deadline = min(deadline, time.monotonic() + grace_s)
            if while_waiting is not None:
                while_waiting()
            if time.monotonic() > deadline:
                break
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        if late := [name for name in self.refs if name not in answered]:
            raise self._late(late, timeout_s)
        return {name: results[name] for name in self.refs}

    def outcomes(self, *, timeout_s: float) -> dict[str, T | StageError]:
        """The results, by actor name, when all have ended or at the deadline.

        The result of an actor that raised, died or is late is a StageError.
        """
        deadline, left = time.monotonic() + timeout_s, list(self.refs.values())
        while left and time.monotonic() < deadline:
            _, left = ray.wait(left, num_returns=len(left), timeout=POLL_S)
        results = self.answers_so_far()
        return {name: results[name] if name in results else self._late([name], timeout_s) for name in self.refs}

    def answers_so_far(self) -> dict[str, T | StageError]:
        """The results of those calls that have ended, by actor name. Does not wait.

        The result of an actor that raised or died is a StageError.
        """
        if not self.refs:
            return {}
        done = set(ray.wait(list(self.refs.values()), num_returns=len(self.refs), timeout=0)[0])
        results: dict[str, T | StageError] = {}
        for name, ref in self.refs.items():
            if ref in done:
                try:
                    results[name] = ray.get(ref)
                except RayError as error:
                    results[name] = self._failure(error, name)[1]
        return results

    def _late(self, names: list[str], timeout_s: float) -> StageError:
        return NoAnswer(
            f"{', '.join(names)}: {self.method} did not finish within {timeout_s:.0f} s{self._log(names[0])}"
        )

    def _failure(self, error: RayError, name: str) -> tuple[int, StageError]:
        """Distance from the cause, and the error to raise."""
        method, node = self.method, self.members[name].node
        if isinstance(error, ActorUnavailableError):
            error = _verdict(error, self.members[name].actor)
        if isinstance(error, RayTaskError):
            cause = error.cause
            # ServerError's message already has the name.
            is_server = isinstance(cause, ServerError)
            message = str(cause) if is_server else f"{name}: {method}: {type(cause).__name__}: {cause}"
            if any(text in str(cause) for text in _CONSEQUENCES):
                return _CONSEQUENCE, PeerLost(message, str(error))
            return 1, (NotWritten if isinstance(cause, NotWritten) else StageError)(message, str(error))
        if isinstance(error, RayActorError) and not is_alive(node):
            message = f"{name}: its node {node.name} was lost during {method}{self._log(name)}"
            return 0, NodeLost(message, str(error))
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            crash = _crash(self.members[name].log)
            reason = f": {crash}" if crash else ", without an error of its own; it may have been killed"
            return 0, ActorLost(f"{name}: its process died during {method}{reason}{self._log(name)}", str(error))
        if isinstance(error, OutOfMemoryError):
            message = f"{name}: Ray ended its process during {method}, since {node.name} was short of memory"
            return 0, ActorLost(f"{message}{self._log(name)}", str(error))
        return 1, StageError(f"{name}: {method}: {type(error).__name__}{self._log(name)}", str(error))

    def _log(self, name: str) -> str:
        return f" (log: {self.members[name].log})"


def _verdict(error: RayError, actor: Any) -> RayError:
    """The cluster's later verdict on an actor that cannot be reached."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=CONSEQUENCE_GRACE_S)
    except RayActorError as verdict:
        return verdict
    except RayError:
        pass
    return error


def _crash(log: Path) -> str | None:
    """The interpreter's message about a crash, for example `Fatal Python error: Segmentation fault`."""
    if not log.is_file():
        return None
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("Fatal Python error")), None)
