"""What the driver and an episode worker tell each other, and how: pickled messages over a socket."""

import asyncio
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine
from slimrl.data.trajectory import Prompt
from slimrl.engines.turn_logs import LoggedTurn

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message to a worker, after the driver's `sys.path`."""

    recipe: Recipe
    engine: Engine
    """Client of the engines that has not connected yet"""


@dataclass(frozen=True, kw_only=True)
class Ready:
    problem: str = ""
    """Reason why the worker cannot run episodes; it then ends. Empty if it can."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """An episode to run."""

    trajectory_id: str
    prompt: Prompt
    sampling: SamplingConfig
    seed: int | None
    saved: Sequence[LoggedTurn] | None = None
    """Turns of the trajectory in an earlier run; None if its turns are not to be logged"""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    trajectory_id: str


@dataclass(frozen=True, kw_only=True)
class Use:
    """The engines that may serve from now on; see RoutedEngines."""

    urls: tuple[str, ...]
    evaluating: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Forget:
    """The worker may drop the log of a trajectory."""

    trajectory_id: str


@dataclass(frozen=True, kw_only=True)
class AskTurns:
    """A request for the logs of turns, answered with Turns."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The logs of the worker's trajectories as they are now."""

    logs: dict[str, list[LoggedTurn]]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of an episode."""

    trajectory_id: str
    trajectory: bytes = b""
    """Pickled trajectory, since it may hold a task's own objects, which the driver may fail to read"""
    fault: str = ""
    """Traceback of an exception that is neither the engine's nor the task's; there is then no trajectory."""
    lags_s: tuple[float, ...] = ()
    """Lags of the worker's event loop since the last such message; see LoopLag"""


class Messages(asyncio.Protocol):
    """One end of the connection. Each message follows its length in bytes.

    Args:
        on_message: called with each message.
        on_end: called once when the connection has ended.
    """

    def __init__(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, message: Any) -> None:
        """Send a message; does nothing if the connection has ended."""
        assert self._transport is not None
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(content)))
            self._transport.write(content)

    def close(self) -> None:
        """End the connection once all messages have been sent."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            self._on_message(pickle.loads(content))

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
