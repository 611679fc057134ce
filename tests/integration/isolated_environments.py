"""Environments of the tests of isolation; imported by other interpreters too, so the standard library is enough."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt


class Counter:
    """Counts in a thread of its own; `step` does what the turn's text says."""

    def __init__(self, step_by: int = 1) -> None:
        self._step_by = step_by

    @classmethod
    def check(cls, step_by: int = 1) -> None:
        if step_by < 1:
            raise ValueError(f"step_by is {step_by}, not a positive number")

    def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        self._count, self._thread, self._scratch = seed, threading.get_ident(), scratch
        return Observation(messages=[*prompt.messages], tools=None, state_id=f"{seed}", metrics={"pid": os.getpid()})

    def step(self, turn: Turn) -> Observation:
        assert threading.get_ident() == self._thread
        match turn.text:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "raise":
                raise RuntimeError("as told")
            case "spawn":  # leaves a process that is in no group of this one
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        self._count += self._step_by
        self._scratch["count"] = self._count
        return Observation(
            messages=[{"role": "user", "content": f"{self._count} {turn.calls}"}],
            reward=0.5,
            state_id=str(self._count),
            done=turn.text == "end",
        )

    def close(self) -> None:
        if folder := os.environ.get("SLIMRL_TEST_CLOSED"):
            open(f"{folder}/{os.getpid()}", "w").close()


class CopyingCounter(Counter):
    """One that copies itself, and once it is told so cannot any more."""

    def copy(self, *, scratch: dict) -> "CopyingCounter | None":
        if self._count == 99:
            return None
        other = type(self)(self._step_by)
        other._count, other._thread, other._scratch = self._count, self._thread, scratch
        return other

    def step(self, turn: Turn) -> Observation:
        if turn.text == "99":
            self._count = 99 - self._step_by
        return super().step(turn)


class SlowCopies(CopyingCounter):
    """Counts how many of its copies were closed."""

    closed = 0

    def copy(self, *, scratch: dict) -> "SlowCopies | None":
        time.sleep(0.5)
        return super().copy(scratch=scratch)

    def close(self) -> None:
        type(self).closed += 1


class AsyncCopyingCounter(CopyingCounter):
    async def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        return super().start(prompt, seed=seed, scratch=scratch)

    async def step(self, turn: Turn) -> Observation:
        return super().step(turn)

    async def copy(self, *, scratch: dict) -> "CopyingCounter | None":
        return super().copy(scratch=scratch)

    async def close(self) -> None:
        super().close()


class Drawing(Counter):
    """Shows what it is told to."""

    def step(self, turn: Turn) -> Observation:
        image = b"JFIF" if turn.text == "a photograph" else b"\x89PNG\r\n\x1a\n..."
        return replace(super().step(turn), image=image)


class Clock(Counter):
    """One whose state is never the same again."""

    def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        return super().start(prompt, seed=time.monotonic_ns(), scratch=scratch)


class AsyncCounter(Counter):
    """The same with asynchronous methods."""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        return super().start(prompt, seed=seed, scratch=scratch)

    async def step(self, turn: Turn) -> Observation:
        return super().step(turn)

    async def close(self) -> None:
        super().close()


class Sharing(Counter):
    """Its instances share a process that ends with its standard input."""

    shared: subprocess.Popen

    @classmethod
    def share(cls, step_by: int = 1) -> None:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        cls.shared = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        return Observation(messages=[*prompt.messages], metrics={"pid": self.shared.pid})


class SlowCounter(Counter):
    """One whose class takes long to check, as others take to import."""

    @classmethod
    def check(cls) -> None:
        time.sleep(1.0)


def find_neighbours() -> None:
    """Raises ValueError: a module of the program that runs this can be imported as if it were a package."""
    if found := [folder for folder in sys.path if folder.endswith("isolation")]:
        raise ValueError(f"{found} can be imported from")
