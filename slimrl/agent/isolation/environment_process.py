"""A process with an environment and its copies, as slimrl's own process sees it: OpenEnv's protocol over a Unix socket.

The protocol has requests of one environment alone; here each names its instance, and `copy` makes another one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, UnixConnector, WSMsgType

from slimrl.agent.environment import EnvironmentFailure

_URL = "http://environment/ws"
"""The host's name stands for the socket"""


class EnvironmentProcess:
    """
    Args:
        socket: gives the path of the server's socket, and starts the server if it does not run.
        name: of the environment, for messages.
    """

    def __init__(self, socket: Callable[[], Awaitable[str]], name: str) -> None:
        self._socket_path, self._name = socket, name
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._one_at_a_time = asyncio.Lock()
        self._answered = True
        """Whether the process answered the last request: one that did not is asked nothing more"""
        self.instances: set[int] = set()
        """Numbers of the environments that are open"""

    async def connect(self) -> None:
        """Raises EnvironmentFailure."""
        path = await self._socket_path()
        self._session = ClientSession(connector=UnixConnector(path=path))
        self.instances.add(0)
        try:
            self._socket = await self._session.ws_connect(_URL, max_msg_size=0)
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._name}: its process cannot be reached: {error}") from error

    async def ask(self, kind: str, number: int, data: dict[str, Any]) -> dict[str, Any]:
        """What the process answers to a request of an instance; raises EnvironmentFailure."""
        assert self._socket is not None
        method = "start" if kind == "reset" else kind
        async with self._one_at_a_time:
            if not self._answered:
                raise EnvironmentFailure(f"{self._name}: {method}: its process did not answer the request before")
            self._answered = False
            try:
                # One that has ended since its last answer takes nothing more, but has left word why.
                with suppress(ConnectionResetError):
                    await self._socket.send_json({"type": kind, "instance": number, "data": data})
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
        return answer["data"]

    async def close(self, number: int) -> None:
        """Close an instance, and with the last one the process; raises EnvironmentFailure."""
        self.instances.discard(number)
        if self._session is None:
            return
        if self.instances:
            await self.ask("close", number, {})
            return
        try:
            if self._socket is not None and self._answered and not self._socket.closed:
                await self._socket.send_json({"type": "close", "instance": number})
                message = await self._socket.receive()  # its end, when the environment is closed
                if message.type is WSMsgType.TEXT:
                    raise EnvironmentFailure(f"{self._name}: close raised {message.json()['data']['message']}")
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._name}: close: its process is gone: {error}") from error
        finally:
            await self._session.close()
