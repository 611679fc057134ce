"""Refuses requests without the run's key, before SGLang sees them.

SGLang's own check leaves open what begins with /health (/health_generate has the model generate), /ready or /metrics,
and WebSockets. Here only two routes are open, which change nothing: /health, and /metrics for a monitor.
"""

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/metrics", "/metrics/")


class KeyCheck:
    """ASGI middleware around an engine's web server."""

    def __init__(self, app: App, *, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this engine needs the key of its run"}'})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)


def add_key_check(app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
    """Replaces SGLang's add_api_key_middleware."""
    assert api_key is not None, "an engine starts with a key"
    assert admin_api_key == api_key
    app.add_middleware(KeyCheck, key=api_key)
