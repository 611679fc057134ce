"""The ZeroMQ sockets with which an engine's processes talk over TCP: with attention data parallelism, and across nodes.

They carry pickles, and would take them from whoever connects. So they use ZeroMQ's CURVE security (RFC 26 of ZeroMQ)
with a pair of keys that follows from the engine's key: who does not have it cannot complete the handshake. Sockets of
the filesystem, which only this user may write to, stay as they are.
"""

import hashlib
from functools import cache
from typing import Any


@cache
def key_pair(engine_key: str) -> tuple[bytes, bytes]:
    """(public key, secret key) in ZeroMQ's encoding. The public one is as secret as the other: no message shows it."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(hashlib.sha256(b"sockets of an engine: " + engine_key.encode()).digest())
    return zmq.curve_public(secret), secret


def before_bind(socket: Any, address: str, *rest: Any) -> None:
    """Hook of zmq's Socket.bind."""
    if address.startswith("tcp:"):
        _, socket.curve_secretkey = key_pair(_engine_key())
        socket.curve_server = True


def before_connect(socket: Any, address: str, *rest: Any) -> None:
    """Hook of zmq's Socket.connect."""
    if address.startswith("tcp:"):
        public, socket.curve_secretkey = key_pair(_engine_key())
        socket.curve_publickey = socket.curve_serverkey = public


def _engine_key() -> str:
    from sglang.srt.runtime_context import get_serving

    key: str | None = get_serving().api_key
    assert key is not None, "an engine starts with a key"
    return key
