"""An environment in a process of its own, through OpenEnv's protocol over a Unix socket."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, UnixConnector, WSMsgType

from slimrl.agent.environment import EnvironmentFailure, Observation, Turn
from slimrl.agent.isolation.messages import read_observation
from slimrl.data.prompt import Prompt

_URL = "http://environment/ws"
"""The host's name stands for the socket"""


class RemoteEnvironment:
    """
    Args:
        socket: gives the path of the server's socket, and starts the server if it does not run.
        name: of the environment, for messages.
    """

    def __init__(self, socket: Callable[[], Awaitable[str]], name: str) -> None:
        self._socket_path, self._name = socket, name
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._scratch: dict[str, Any] = {}
        self._answered = True
        """Whether the process answered the last request: one that did not is not asked to close"""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._scratch = scratch
        path = await self._socket_path()
        self._session = ClientSession(connector=UnixConnector(path=path))
        try:
            self._socket = await self._session.ws_connect(_URL, max_msg_size=0)
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._name}: its process cannot be reached: {error}") from error
        return await self._ask("reset", {"seed": seed, "prompt": asdict(prompt), "scratch": scratch})

    async def step(self, turn: Turn) -> Observation:
        return await self._ask("step", asdict(turn))

    async def close(self) -> None:
        if self._session is None:
            return
        try:
            if self._socket is not None and self._answered and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.receive()  # its end, when the environment is closed
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._name}: close: its process is gone: {error}") from error
        finally:
            await self._session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> Observation:
        assert self._socket is not None
        self._answered = False
        method = "start" if kind == "reset" else kind
        try:
            # One that has ended since its last answer takes nothing more, but has left word why.
            with suppress(ConnectionResetError):
                await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._name}: {method}: its process is gone: {error}") from error
        if message.type is not WSMsgType.TEXT:
            why = message.extra or "its process has ended"
            raise EnvironmentFailure(f"{self._name}: {method}: {why}")
        self._answered = True
        answer = message.json()
        if answer["type"] == "error":
            raise EnvironmentFailure(f"{self._name}: {method} raised {answer['data']['message']}")
        self._scratch.clear()
        self._scratch.update(answer["data"]["observation"].pop("scratch"))
        return read_observation(answer["data"])
