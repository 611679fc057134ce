"""Client of an engine: one assistant turn, token ids in, token ids and log-probs out.

It also has an engine score given tokens (`score`): a prefill without new tokens, of which SGLang returns the log-probs.
Those are of the model's own distribution: SGLang divides by the temperature where it samples, and nowhere before.

Turns that begin at the same moment share a request (turn_batches.py), which SGLang answers turn by turn as a stream of
events.

aiohttp and not httpx: httpx's connection pool scans all its connections at each request. With 256 open requests that
took 7 to 10 ms of CPU time a request, aiohttp 0.2 ms.

An engine of several groups of ranks with a cache each (rollout.engine_attention_dp) chooses the group of a session's
first turn; its answer names the group, and later turns ask for it.

A request is sent once and has no deadline here (retries.py). One that its caller cancels, or whose connection breaks,
is aborted at the engine.
"""

import asyncio
import base64
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import orjson

from slimrl.data.engine import (
    Engine,
    EngineAbsent,
    EngineError,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
)
from slimrl.data.trajectory import ACCEPTED_DRAFT_TOKENS, DRAFT_TOKENS, STALE_CACHE_TOKENS
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.kept_caches import SessionCache
from slimrl.engines.turn_batches import Ended, Kind, TurnBatches

SPECULATION = {"spec_num_proposed_drafts": DRAFT_TOKENS, "spec_num_correct_drafts": ACCEPTED_DRAFT_TOKENS}
"""Key of SGLang's answers with speculative decoding -> our name for its value."""
_AT_THE_END = 1 << 30
"""Interval of a turn's events in tokens, so large that there are only the first one and that of its end"""
_ABORT_TIMEOUT_S = 5.0
_NOT_NOW = (500, 502, 503)
"""HTTP statuses of an engine that accepts no request now."""
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
"""Exceptions for a request that did not arrive, or whose connection broke before the answer."""

log = logging.getLogger(__name__)


def request_body(
    request: GenerateRequest, rid: str, *, routed_experts: bool, group: int | None = None
) -> dict[str, Any]:
    """The JSON body of /generate. Without stop tokens the turn has `max_new_tokens` tokens.

    Args:
        group: of the engine's ranks, to serve the request; None for any.
    """
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_new_tokens": request.max_new_tokens,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = request.stop_token_ids
    else:
        sampling["ignore_eos"] = True
    if request.stop:
        sampling["stop"] = request.stop
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if group is not None:
        body["routed_dp_rank"] = group
    if routed_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
    return body


def batch_body(requests: Sequence[GenerateRequest], rids: Sequence[str], *, routed_experts: bool) -> dict[str, Any]:
    """The JSON body of one /generate for several requests, which reach the engine's scheduler together."""
    bodies = [
        request_body(request, rid, routed_experts=routed_experts) for request, rid in zip(requests, rids, strict=True)
    ]
    listed: dict[str, Any] = {name: [body[name] for body in bodies] for name in ("rid", "input_ids", "sampling_params")}
    if routed_experts:
        listed["routed_experts_start_len"] = first_experts(requests)
    return {**bodies[0], **listed}


def first_experts(requests: Sequence[GenerateRequest]) -> int:
    """First token whose experts a call asks for; SGLang takes one number for all its requests."""
    return min(request.experts_from for request in requests)


def parse_answer(
    answer: dict[str, Any],
    request: GenerateRequest,
    routed_experts_shape: tuple[int, int] | None,
    *,
    first_expert_row: int = 0,
) -> GenerateResult:
    """The result of a request, from the engine's answer.

    Args:
        first_expert_row: first token whose experts the answer has, at most `request.experts_from`.

    Raises:
        KeyError, TypeError, ValueError: the answer is not from /generate.
    """
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    logprobs = [pair[0] for pair in pairs]
    if None in logprobs:  # how JSON has it that they are not finite
        raise ValueError("log-probs that are not finite")
    finish = (meta["finish_reason"] or {})["type"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {finish!r}")
    if finish == "abort":
        # SGLang says neither of a request that was aborted in its queue.
        meta = {"cached_tokens": 0, "routed_experts": None, **meta}
    experts = None
    if routed_experts_shape is not None and (finish != "abort" or meta["routed_experts"] is not None):
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        count = max(0, len(request.input_ids) + len(pairs) - 1 - first_expert_row)
        known = request.experts_from - first_expert_row
        experts = rows.reshape(count, *routed_experts_shape)[known:].astype(np.int16)
    return GenerateResult(
        tokens=[pair[1] for pair in pairs],
        logprobs=logprobs,
        weight_versions=weight_versions(meta, len(pairs)),
        finish_reason=finish,
        routed_experts=experts,
        cached_tokens=meta["cached_tokens"],
        counts={key: meta[name] for name, key in SPECULATION.items() if name in meta},
    )


def weight_versions(meta: dict[str, Any], count: int) -> np.ndarray:
    """int32 [count] of an answer's spans `weight_versions`; `weight_version` is only the last one's.

    SGLang gives the spans with every finished answer. It keeps track of the versions while a request runs, pauses or
    waits to be computed again.
    """
    if not count:
        return np.zeros(0, np.int32)
    versions, end = [], 0
    for span in meta["weight_versions"]:
        if span["start"] != end:
            raise ValueError(f"weight_versions leave out tokens: {meta['weight_versions']}")
        end = span["end"]
        versions.append(np.full(end - span["start"], int(span["version"]), np.int32))
    if end != count:
        raise ValueError(f"weight_versions of {end} tokens, and there are {count}")
    return np.concatenate(versions)


def score_body(request: ScoreRequest, rid: str) -> dict[str, Any]:
    """The JSON body of the /generate that scores tokens. Of the first log-prob that it returns SGLang has none."""
    return {
        "rid": rid,
        "input_ids": request.tokens,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": request.start - 1,
    }


def parse_scores(answer: dict[str, Any], count: int) -> np.ndarray:
    """float32 [count]. Raises KeyError, TypeError or ValueError for an answer that does not score so many tokens."""
    meta = answer["meta_info"]
    if (finish := meta["finish_reason"] or {}).get("type") == "abort":
        raise ValueError(f"aborted: {finish.get('message')}")
    _, *pairs = meta["input_token_logprobs"]
    if len(pairs) != count:
        raise ValueError(f"{len(pairs)} log-probs of {count} tokens")
    logprobs = np.array([pair[0] for pair in pairs], np.float32)
    if not np.isfinite(logprobs).all():
        raise ValueError("log-probs that are not finite")
    return logprobs


class SglangEngine(Engine):
    """The client of one SGLang server. One per event loop; holds its connections until `aclose`."""

    def __init__(
        self,
        url: str,
        *,
        key: EngineKey | None = None,
        vocab_size: int | None = None,
        routed_experts_shape: tuple[int, int] | None = None,
        keeps_caches: bool = False,
    ) -> None:
        """Connects at the first request.

        Args:
            key: of the engine's run; None for a server of others that asks for none.
            vocab_size: refuse input tokens from this id on, which would crash the engine.
            routed_experts_shape: (MoE layers, experts per token) if the engine reports routing.
            keeps_caches: resyncs may keep what older weights have computed.
        """
        self._url = url
        self._headers = {} if key is None else key.headers
        self._vocab_size = vocab_size
        self._routed_experts_shape = routed_experts_shape
        self._http: aiohttp.ClientSession | None = None
        self._group_of: dict[str, int] = {}
        self._caches: dict[str, SessionCache] | None = {} if keeps_caches else None
        self._aborts: set[asyncio.Task[None]] = set()
        self._batches = TurnBatches(self._alone, self._together, self._abort_later)

    def close(self, session_id: str) -> None:
        self._group_of.pop(session_id, None)
        if self._caches is not None:
            self._caches.pop(session_id, None)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn.

        Raises:
            EngineUnreachable: the request did not reach the engine, or the connection broke before the answer.
            EngineError: the engine refused it, or answered something else.
        """
        self._check_tokens(self._name([request]), request.input_ids)
        # SGLang takes one number for a request, and a first turn would have it report all experts of the others.
        experts_from = 0 if self._routed_experts_shape is None else request.experts_from
        return await self._batches.generate(request, (self._group_of.get(request.session_id), experts_from))

    async def _alone(self, request: GenerateRequest) -> GenerateResult:
        return (await self.generate_batch([request]))[0]

    async def _together(
        self, requests: Sequence[GenerateRequest], rids: Sequence[str], kind: Kind
    ) -> AsyncIterator[Ended]:
        """Send several requests in one call. Yields, for each request when it has ended, its index and what reads its
        result, None where the engine refuses it.

        Of a request by itself SGLang would make the refusal the status of its answer.

        Raises:
            EngineError: also from what reads a result.
        """
        group, _ = kind
        body = batch_body(requests, rids, routed_experts=self._routed_experts_shape is not None)
        for sampling in body["sampling_params"]:
            sampling["stream_interval"] = _AT_THE_END
        body |= {"stream": True} | ({} if group is None else {"routed_dp_rank": group})
        name, first = self._name(requests), first_experts(requests)
        try:
            async with self._session().post(**self._call(body)) as response:
                if response.status != 200:
                    raise _refusal(name, response.status, await response.read())
                async for event in _events(response.content):
                    answer = orjson.loads(event)
                    if "error" in answer:
                        raise EngineError(f"{name}: {answer['error']}")
                    if (finish := answer["meta_info"]["finish_reason"]) is None:
                        continue
                    index, is_refused = answer["index"], (finish.get("status_code") or 0) >= 400
                    yield index, None if is_refused else partial(self._read, name, answer, requests[index], first)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{name}: not an answer to /generate: {error!r}") from error
        except aiohttp.ClientError as error:
            raise _failure(name, error) from error

    def _read(
        self, name: str, answer: dict[str, Any], request: GenerateRequest, first_expert_row: int
    ) -> GenerateResult:
        try:
            return self._result(answer, request, first_expert_row=first_expert_row)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{name}: not an answer to /generate: {error!r}") from error

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Several turns in one call, all or nothing.

        Raises:
            EngineError: as `generate`.
        """
        name = self._name(requests)
        for request in requests:
            self._check_tokens(name, request.input_ids)
        content = await self._post(name, requests)
        try:
            answers = orjson.loads(content)
            pairs = list(zip(requests, answers if len(requests) > 1 else [answers], strict=True))
            first = first_experts(requests)
            return [self._result(answer, request, first_expert_row=first) for request, answer in pairs]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{name}: not an answer to /generate: {error!r}") from error

    def _result(self, answer: dict[str, Any], request: GenerateRequest, *, first_expert_row: int) -> GenerateResult:
        result = parse_answer(answer, request, self._routed_experts_shape, first_expert_row=first_expert_row)
        if (group := answer["meta_info"].get("dp_rank")) is not None:
            self._group_of[request.session_id] = group
        return self._with_stale_tokens(request, result)

    def _with_stale_tokens(self, request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if self._caches is None:
            return result
        cache = self._caches.setdefault(request.session_id, SessionCache())
        stale = cache.add(len(request.input_ids), result.cached_tokens, result.weight_versions)
        return replace(result, counts={**result.counts, STALE_CACHE_TOKENS: stale})

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """Score tokens under the engine's weights; see Scorer.score.

        Raises:
            EngineError: as `generate`.
        """
        assert 1 <= request.start < len(request.tokens), request.start
        name = f"{self._url}, score of {request.session_id}"
        self._check_tokens(name, request.tokens)
        rid = uuid.uuid4().hex
        content = await self._send(name, score_body(request, rid), [rid])
        try:
            return parse_scores(orjson.loads(content), len(request.tokens) - request.start)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{name}: not the scores that were asked for: {error!r}") from error

    async def aclose(self) -> None:
        """Close the connections after all aborts have been sent."""
        await self._batches.aclose()
        await asyncio.gather(*self._aborts)
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The caller limits concurrency and gives each request its deadline.
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._http

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        largest = max(tokens, default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise EngineError(f"{name}: token {largest} is outside of the vocabulary")

    async def _post(self, name: str, requests: Sequence[GenerateRequest]) -> bytes:
        rids = [uuid.uuid4().hex for _ in requests]
        experts = self._routed_experts_shape is not None
        if len(requests) == 1:
            group = self._group_of.get(requests[0].session_id)
            body = request_body(requests[0], rids[0], routed_experts=experts, group=group)
        else:
            body = batch_body(requests, rids, routed_experts=experts)
        return await self._send(name, body, rids)

    async def _send(self, name: str, body: dict[str, Any], rids: Sequence[str]) -> bytes:
        """The content of the answer; without one the requests `rids` are aborted at the engine. Raises EngineError."""
        try:
            async with self._session().post(**self._call(body)) as response:
                content = await response.read()
        except BaseException as error:
            self._abort_later(rids)
            if isinstance(error, aiohttp.ClientError):
                raise _failure(name, error) from error
            raise
        if response.status != 200:
            raise _refusal(name, response.status, content)
        return content

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a POST to /generate."""
        headers = {"content-type": "application/json"}
        return {"url": f"{self._url}/generate", "data": orjson.dumps(body), "headers": headers}

    def _abort_later(self, rids: Sequence[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(rids))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rids: Sequence[str]) -> None:
        async def post(rid: str) -> None:
            url, timeout = f"{self._url}/abort_request", aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S)
            async with self._session().post(url, json={"rid": rid}, timeout=timeout) as response:
                await response.read()

        # An engine that is gone has nothing to abort.
        await asyncio.gather(*(post(rid) for rid in rids), return_exceptions=True)

    def _name(self, requests: Sequence[GenerateRequest]) -> str:
        more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        return f"{self._url}, session {requests[0].session_id}{more}"


def _failure(name: str, error: aiohttp.ClientError) -> EngineError:
    kind = EngineUnreachable if isinstance(error, _BROKEN) else EngineError
    if isinstance(error, aiohttp.ClientConnectorError):
        kind = EngineAbsent
    return kind(f"{name}: {type(error).__name__} {error}".rstrip())


def _refusal(name: str, status: int, content: bytes) -> EngineError:
    kind = EngineUnreachable if status in _NOT_NOW else EngineError
    return kind(f"{name}: {status} {content[:500].decode(errors='replace')}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event `data: JSON`, up to `data: [DONE]`.

    It reads to the end, without which the connection could not be used again.
    """
    parts: list[bytes] = []
    has_ended = False
    async for part in content.iter_any():
        if parts and parts[-1].endswith(b"\n"):  # perhaps half of the separator
            part = parts.pop() + part
        *ends, rest = part.split(b"\n\n")
        for end in ends:
            event = b"".join([*parts, end]).removeprefix(b"data: ")
            parts = []
            has_ended = has_ended or event == b"[DONE]"
            if not has_ended:
                yield event
        parts.append(rest)
