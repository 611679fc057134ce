"""The HTTP server in front of the policy, in the event loop of the episodes.

1. Each trajectory is a session with a path and a key of its own, which is checked before a body is read.
2. A body is read as it comes, never unpacked, and only as far as the context could hold it.
3. What takes long is computed in threads, one computation of a session at a time.
4. A connection that its client closes cancels the request.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import ClientError, web
from pydantic import ValidationError

from slimrl.agent.gateway import anthropic_messages, chat_completions, responses
from slimrl.agent.gateway.activity import ABANDONED, ACTIVITY, FAILED, REFUSED
from slimrl.agent.gateway.aside import Aside
from slimrl.agent.gateway.chat_request import ChatRequest, Reply
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.errors import ApiError, BudgetSpent, refused, refused_body
from slimrl.agent.gateway.json_body import json_body
from slimrl.agent.gateway.listener import IDLE_S, Listener, is_ours
from slimrl.agent.gateway.messages import escaped
from slimrl.agent.gateway.session import Session
from slimrl.agent.schema_draft import unread_patterns
from slimrl.base.visible import visible
from slimrl.config.schema.agent import GatewayConfig
from slimrl.data.roles import ROLE_NAME, ROLE_NAME_RULE

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
http_log.addFilter(is_ours)

APIS = (chat_completions, responses, anthropic_messages)
PREFIXES = ("/v1", "")
"""The version in the paths: some clients want it in the base address, and some leave it out."""
MODEL = "policy"
"""Name of the model for clients that list them; a request may name any."""
UNKNOWN = "no session under way has this address and this key"
NOT_ITS_KEY = "this is not the key for the reward of a session under way (docs/gateway.md#rewards)"
JSON = "application/json"
LINGER_S = 1.0
"""How long what is left of a refused body is read, so that its client gets the answer"""
LOGPROB_BYTES = 16
"""What a sampled token counts in the size of an answer, which may list each with its log-prob"""
WARNED_CHARS, MOST_WARNED = 80, 200
"""Bounds on what a run warns of, since agents may name fields and paths as they like; the latter for each kind"""
UNREAD = "Python's `re` cannot read it, so that calls are not judged by it"
OVERRIDDEN = "the run's settings apply instead"
ROLE = "x-slimrl-role"
"""Header that says which role of an agent of several asks; the name of the model may say it too, as `policy:ROLE`"""
RETRIES = "x-stainless-retry-count"
"""Header in which both companies' clients say how often they sent a request before"""


class NotListening(Exception):
    """The gateway's address is none of this machine."""


class _Once:
    """Warns once of each thing of a kind, and of no more than MOST_WARNED."""

    def __init__(self, kind: str) -> None:
        self._kind, self._seen = kind, set[str]()

    def warn(self, key: str, message: str) -> None:
        if key in self._seen or len(self._seen) > MOST_WARNED:
            return
        self._seen.add(key)
        if len(self._seen) <= MOST_WARNED:
            log.warning("%s", message)
        else:
            log.warning("%s: %d were warned of; the log names no more", self._kind, MOST_WARNED)


class GatewayServer:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._sessions: dict[str, tuple[Connection, Session]] = {}
        """Connection and session of each open trajectory, by the name in the path"""
        self._refusals, self._vain = _Once("refused requests"), _Once("fields that agents send in vain")
        self.aside = Aside()
        app = web.Application(client_max_size=config.max_body_bytes)
        for prefix in PREFIXES:
            base = f"/{{session}}{prefix}"
            for api in APIS:
                app.router.add_post(f"{base}{api.PATH}", partial(self._safely, partial(self._sample, api), api))
            count = partial(self._safely, self._count_tokens, anthropic_messages)
            app.router.add_post(f"{base}{anthropic_messages.COUNT_PATH}", count)
            app.router.add_get(f"{base}/models", partial(self._safely, self._models, chat_completions))
            app.router.add_get(f"{base}/models/{{name:.+}}", partial(self._safely, self._model, chat_completions))
        app.router.add_post("/{session}/reward", partial(self._safely, self._reward, chat_completions))
        app.router.add_route("*", "/{session}/{rest:.*}", partial(self._safely, self._nothing, chat_completions))
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            auto_decompress=False,
            lingering_time=LINGER_S,
            keepalive_timeout=IDLE_S,
        )
        self._listener = Listener(self._runner)
        self._url = ""

    async def start(self) -> None:
        """Listen on a free port. Raises NotListening."""
        await self._runner.setup()
        try:
            host, port = await self._listener.start(self._config.host)
        except OSError as error:
            raise NotListening(f"agent.gateway.host: {error}") from error
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        await self._listener.close()
        await self._runner.cleanup()

    def open(self, session: Session) -> Connection:
        """Make a session reachable. Raises what has ended the accepting of connections, if anything has."""
        self._listener.check()
        name, key, reward_key = secrets.token_hex(8), f"sk-{secrets.token_hex(16)}", f"sk-{secrets.token_hex(16)}"
        url = f"{self._url}/{name}"
        connection = Connection(
            url=url, api_key=key, reward_key=reward_key, post=session.post_reward, serve=self._listener.also
        )
        self._sessions[name] = connection, session
        ACTIVITY.open()
        return connection

    def end(self, connection: Connection) -> None:
        """End a session; its keys are unknown from now on."""
        del self._sessions[connection.url.rpartition("/")[2]]
        ACTIVITY.end()
        connection.take_back()

    async def _safely(
        self,
        handler: Callable[[web.Request, Session], Awaitable[web.StreamResponse]],
        api: ModuleType,
        request: web.Request,
    ) -> web.StreamResponse:
        """The handler's response, or an error in the form of the API."""
        try:
            session = self._session(request, of_reward=handler == self._reward)
            with self._listener.busy(request.transport):
                return await handler(request, session)
        except ApiError as error:
            return _error(api, error)
        except ValidationError as error:
            return _error(api, refused_body(error))

    def _session(self, request: web.Request, *, of_reward: bool) -> Session:
        """The session that a request may use; that for turns of the policy and that for its reward have keys of their
        own. Raises ApiError."""
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        found = self._sessions.get(request.match_info.get("session", ""))
        if found is None:
            raise ApiError(401, UNKNOWN, code="invalid_api_key")
        connection, session = found
        key = connection.reward_key if of_reward else connection.api_key
        if not secrets.compare_digest(key.encode(), given.encode(errors="replace")):
            raise ApiError(401, NOT_ITS_KEY if of_reward else UNKNOWN, code="invalid_api_key")
        if request.method == "POST" and not of_reward:
            connection.take_back()
        return session

    async def _sample(self, api: ModuleType, request: web.Request, session: Session) -> web.StreamResponse:
        session.counts.requests += 1
        began = time.monotonic()
        try:
            session.num_open += 1
            body, asked = await self._asked(api, request, session)
            is_retry = request.headers.get(RETRIES, "0") != "0"
            reply = await session.answer(asked, is_retry=is_retry, is_gone=partial(_is_gone, request))
        except (ApiError, ValidationError) as error:
            refusal = error if isinstance(error, ApiError) else refused_body(error)
            session.counts.refused += refusal.status < 500
            ACTIVITY.requests[REFUSED if refusal.status < 500 else FAILED] += 1
            self._refuse(request, session, refusal)
            if isinstance(error, BudgetSpent):
                session.spent = error
            raise
        except asyncio.CancelledError:
            ACTIVITY.requests[ABANDONED] += 1
            raise
        finally:
            session.num_open -= 1
        self._warn(asked, reply)
        try:
            size = asked.num_bytes + LOGPROB_BYTES * reply.num_sampled_tokens
            response = await _deliver(api, request, body, reply, session, size)
        except (ConnectionError, asyncio.CancelledError):
            ACTIVITY.requests[ABANDONED] += 1
            session.take_back(reply)
            raise
        ACTIVITY.answer(time.monotonic() - began)
        return response

    async def _count_tokens(self, request: web.Request, session: Session) -> web.StreamResponse:
        session.num_open += 1
        try:
            # A count has no limit of an answer's tokens.
            _, asked = await self._asked(anthropic_messages, request, session, max_tokens=1)
            return web.json_response({"input_tokens": await session.num_tokens(asked)})
        finally:
            session.num_open -= 1

    async def _asked(
        self, api: ModuleType, request: web.Request, session: Session, **defaults: Any
    ) -> tuple[Any, ChatRequest]:
        # A retry may come while its first attempt is under way.
        most = 2 * self._config.max_concurrent_requests
        if session.num_open > most:
            raise ApiError(429, f"{most} requests are open, twice agent.gateway.max_concurrent_requests", retry=True)
        raw = await self._raw(request)

        def read() -> tuple[Any, ChatRequest]:
            body, asked = api.read({**defaults, **json_body(raw, session.max_tokens)}, session.replies)
            unread = [one for tool in asked.tools for one in unread_patterns(tool["function"]["parameters"])]
            ignored = {**asked.ignored, **{f"the pattern {one!r}": UNREAD for one in unread}}
            messages = escaped(asked.messages, session.chat)
            role = _role(request, body.model)
            asked = replace(asked, messages=messages, num_bytes=len(raw), model=body.model, ignored=ignored, role=role)
            assert asked.key
            return body, asked

        return await session.compute(read, len(raw))

    async def _raw(self, request: web.Request) -> bytes:
        """Bytes of a request's body."""
        packed = request.headers.get("content-encoding", "identity")
        if packed.lower() != "identity":
            raise ApiError(415, f"content-encoding: {packed[:40]!r}: send the body as it is")
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            most = self._config.max_body_bytes
            raise ApiError(413, f"the body has more than {most} bytes, agent.gateway.max_body_bytes") from error
        except (web.RequestPayloadError, ClientError, ConnectionError) as error:
            raise refused(f"the body cannot be read: {error}") from error
        except TimeoutError as error:
            raise ApiError(408, f"the body took longer than {self._config.body_timeout_s:g} s") from error

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response({"object": "list", "data": [_model_named(MODEL)], **ends})

    async def _model(self, request: web.Request, session: Session) -> web.StreamResponse:
        return web.json_response(_model_named(request.match_info["name"]))

    async def _reward(self, request: web.Request, session: Session) -> web.StreamResponse:
        raw = await self._raw(request)
        body = await session.compute(lambda: json_body(raw, session.max_tokens), len(raw))
        session.post_reward(body.get("reward"), body.get("by_role"))
        return web.json_response({"reward": session.posted_reward})

    async def _nothing(self, request: web.Request, session: Session) -> web.StreamResponse:
        missing = ApiError(404, "the gateway has no such endpoint")
        if request.method == "POST":
            self._refuse(request, session, missing)
        raise missing

    def _refuse(self, request: web.Request, session: Session, error: ApiError) -> None:
        """Note a refusal in the session, and once in the log."""
        path = request.path.removeprefix(f"/{request.match_info['session']}")
        session.refuse(f"{request.method} {path}", error)
        if session.refusal:
            self._refusals.warn(session.refusal, f"an agent's request: {visible(session.refusal)}")

    def _warn(self, asked: ChatRequest, reply: Reply) -> None:
        """Say once of each field that clients give it in vain."""
        reasons = {**dict.fromkeys(reply.overridden, OVERRIDDEN), **asked.ignored}
        for name, reason in reasons.items():
            shown = visible(name)[:WARNED_CHARS]
            self._vain.warn(shown, f"agents send {shown} in vain: {reason}")


def _model_named(name: str) -> dict[str, Any]:
    """A model as both companies describe theirs."""
    of_openai = {"id": name, "object": "model", "created": 0, "owned_by": "slimrl"}
    return {**of_openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _deliver(
    api: ModuleType, request: web.Request, body: Any, reply: Reply, session: Session, size: int
) -> web.StreamResponse:
    """Send a reply to its end; raises ConnectionError if the client is gone."""

    def written() -> bytes:
        return b"".join(api.events(body, reply)) if body.stream else json.dumps(api.answer(body, reply)).encode()

    content = await session.compute(written, size)
    headers = {"x-slimrl-sampling": json.dumps(reply.note)}
    response: web.StreamResponse
    if body.stream:
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(content)
    else:
        response = web.Response(body=content, content_type=JSON, headers=headers)
        await response.prepare(request)
    await response.write_eof()
    if _is_gone(request):
        raise ConnectionResetError("the client is gone")
    return response


def _is_gone(request: web.Request) -> bool:
    """Whether the connection of its client has ended."""
    return request.transport is None or request.transport.is_closing()


def _error(api: ModuleType, error: ApiError) -> web.Response:
    # Both companies' clients read this header before they try again.
    headers = {"x-should-retry": str(error.retry).lower()} | ({"retry-after": "1"} if error.retry else {})
    response = web.json_response(api.error_body(error), status=error.status, headers=headers)
    if error.status == 401:
        response.force_close()
    return response


def _role(request: web.Request, model: str) -> str:
    """The role that asks; raises ApiError if it is no name."""
    name, _, after = model.partition(":")
    role = request.headers.get(ROLE) or (after if name == MODEL else "")
    if role and not ROLE_NAME.fullmatch(role):
        raise refused(f"{ROLE}: {role[:40]!r} is no name of a role; use {ROLE_NAME_RULE}")
    return role
