"""The server's end of one WebSocket connection, for a process with one thread that does nothing else meanwhile."""

import json
import socket
from collections.abc import Iterator
from typing import Any

from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

_READ_BYTES = 65536


class Connection:
    """Messages of JSON over a socket that a client has connected."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._protocol = ServerProtocol(max_size=None)

    def messages(self) -> Iterator[Any]:
        """What the client sends, until it closes the connection or is gone."""
        parts: list[bytes] = []
        while data := self._socket.recv(_READ_BYTES):
            self._protocol.receive_data(data)
            for event in self._protocol.events_received():
                if isinstance(event, Request):
                    self._protocol.send_response(self._protocol.accept(event))
                elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.CONT):
                    parts.append(bytes(event.data))
                    if event.fin:
                        text = b"".join(parts)
                        parts.clear()
                        self._flush()
                        yield json.loads(text)
            if not self._flush():
                return

    def send(self, message: Any) -> None:
        """Raises TypeError or ValueError: the message is not JSON."""
        self._protocol.send_text(json.dumps(message, allow_nan=False).encode())
        self._flush()

    def _flush(self) -> bool:
        """Send what the protocol has to say; False if the connection is closed with it."""
        for data in self._protocol.data_to_send():
            if not data:
                return False
            self._socket.sendall(data)
        return True


def close_frame(reason: str) -> bytes:
    """What tells a client that the server's process was lost, and why; at most 123 bytes of the reason are sent."""
    close = Close(CloseCode.INTERNAL_ERROR, reason.encode()[:123].decode(errors="ignore"))
    return Frame(Opcode.CLOSE, close.serialize()).serialize(mask=False)
