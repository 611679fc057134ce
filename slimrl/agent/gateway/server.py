"""The HTTP server in front of the policy, in the event loop of the episodes.

Each trajectory is a session with a path and a key of its own. A connection that its client closes cancels the request.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from aiohttp import ClientError, web
from pydantic import ValidationError

from slimrl.agent.gateway import anthropic_messages, chat_completions, responses
from slimrl.agent.gateway.chat_request import Reply
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.errors import ApiError, refused, refused_body
from slimrl.agent.gateway.session import Session
from slimrl.config.schema.agent import GatewayConfig
from slimrl.data.jsonl import refuse_unwritable

log = logging.getLogger(__name__)

APIS = (chat_completions, responses, anthropic_messages)
MODEL = "policy"
"""Name of the model for clients that look; a request may name any."""
BACKLOG = 4096
"""Connections that may wait to be accepted"""
JSON = "application/json"
RETRIES = "x-stainless-retry-count"
"""Header in which both companies' clients say how often they sent a request before"""


class NotListening(Exception):
    """The gateway's address is none of this machine."""


class GatewayServer:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._sessions: dict[str, tuple[str, Session]] = {}
        """(key, session) by the name in the path"""
        self._warned: set[str] = set()
        app = web.Application(client_max_size=config.max_body_bytes)
        for api in APIS:
            app.router.add_post(f"/{{session}}{api.PATH}", partial(self._safely, partial(self._sample, api), api))
        for method, path, handler in (("GET", "/v1/models", self._models), ("POST", "/reward", self._reward)):
            app.router.add_route(method, f"/{{session}}{path}", partial(self._safely, handler, chat_completions))
        app.router.add_route("*", "/{session}/{rest:.*}", partial(self._safely, self._nothing, chat_completions))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._url = ""

    async def start(self) -> None:
        """Listen on a free port. Raises NotListening."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._config.host, 0, backlog=BACKLOG).start()
        except OSError as error:
            raise NotListening(f"agent.gateway.host: {error}") from error
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    def open(self, session: Session) -> Connection:
        """Make a session reachable."""
        name, key = secrets.token_hex(8), f"sk-{secrets.token_hex(16)}"
        self._sessions[name] = key, session
        return Connection(url=f"{self._url}/{name}", api_key=key)

    def end(self, connection: Connection) -> None:
        """End a session; its key is unknown from now on."""
        del self._sessions[connection.url.rpartition("/")[2]]

    async def _safely(
        self,
        handler: Callable[[web.Request, Session], Awaitable[web.StreamResponse]],
        api: ModuleType,
        request: web.Request,
    ) -> web.StreamResponse:
        """The handler's response, or an error in the form of the API."""
        try:
            return await handler(request, self._session(request))
        except ApiError as error:
            return _error(api, error)
        except ValidationError as error:
            return _error(api, refused_body(error))

    def _session(self, request: web.Request) -> Session:
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        key, session = self._sessions.get(request.match_info.get("session", ""), ("", None))
        if session is None or not secrets.compare_digest(key.encode(), given.encode(errors="replace")):
            raise ApiError(401, "no session under way has this address and this key", code="invalid_api_key")
        return session

    async def _sample(self, api: ModuleType, request: web.Request, session: Session) -> web.StreamResponse:
        session.counts.requests += 1
        try:
            body, asked = api.read(await self._json(request))
            reply = await session.answer(asked, is_retry=request.headers.get(RETRIES, "0") != "0")
        except (ApiError, ValidationError) as error:
            session.counts.refused += not (isinstance(error, ApiError) and error.status >= 500)
            raise
        self._warn(reply)
        try:
            return await _deliver(api, request, body, reply)
        except (ConnectionError, asyncio.CancelledError):
            session.take_back(reply)
            raise

    async def _json(self, request: web.Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                value = json.loads(await request.read(), parse_constant=_refuse_constant)
            refuse_unwritable(value)
        except web.HTTPRequestEntityTooLarge as error:
            most = self._config.max_body_bytes
            raise ApiError(413, f"the body has more than {most} bytes, agent.gateway.max_body_bytes") from error
        except (web.RequestPayloadError, ClientError, ConnectionError) as error:
            raise refused(f"the body cannot be read: {error}") from error
        except TimeoutError as error:
            raise ApiError(408, f"the body took longer than {self._config.body_timeout_s:g} s") from error
        except (ValueError, RecursionError) as error:
            raise refused(f"the body is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise refused("the body is no JSON object")
        return value

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "slimrl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, session: Session) -> web.StreamResponse:
        session.post_reward((await self._json(request)).get("reward"))
        return web.json_response({"reward": session.posted_reward})

    async def _nothing(self, request: web.Request, session: Session) -> web.StreamResponse:
        raise ApiError(404, f"{request.method} {request.path}: the gateway has no such endpoint")

    def _warn(self, reply: Reply) -> None:
        """Say once of each setting that clients give it in vain."""
        for name in set(reply.overridden) - self._warned:
            self._warned.add(name)
            log.warning("an agent asked for another %s; the run's sampling settings apply instead", name)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


async def _deliver(api: ModuleType, request: web.Request, body: Any, reply: Reply) -> web.StreamResponse:
    """Send a reply to its end; raises ConnectionError if the client is gone."""
    headers = {"x-slimrl-sampling": json.dumps(reply.note)}
    response: web.StreamResponse
    if body.stream:
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(api.events(body, reply)))
    else:
        response = web.Response(body=json.dumps(api.answer(body, reply)), content_type=JSON, headers=headers)
        await response.prepare(request)
    await response.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client is gone")
    return response


def _error(api: ModuleType, error: ApiError) -> web.Response:
    # Both companies' clients read this header before they try again.
    headers = {"x-should-retry": str(error.retry).lower()} | ({"retry-after": "1"} if error.retry else {})
    return web.json_response(api.error_body(error), status=error.status, headers=headers)
