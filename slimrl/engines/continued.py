"""Whole turns out of several requests to an engine, each of which goes on from the tokens of those before it.

1. A turn is asked for in chunks (`rollout.chunk_tokens`), so that an engine that dies takes one of them along.
2. What an engine aborts, because it pauses for new weights (`resync.pause: abort`), goes on after the pause.
3. The engine looks for stop texts in its own answer; those that lie across two answers are found here.
4. What has been answered is noted for checkpoints, and a resumed run goes on from there (turn_logs.py).

The parts have one seed. SGLang samples a token by the request's seed and the token's position in the whole sequence,
so that a turn in parts is the same as the whole one, but for the last bits of its log-probs: a token that a decode
would have computed comes from a prefill.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import Engine, EngineError, GenerateRequest, GenerateResult
from slimrl.engines.turn_logs import TurnLogs

ABORT_DELAY_S = 0.1
"""Seconds to wait before the part after an aborted one."""

Decode = Callable[[Sequence[int]], str]
"""Function that gives the text of tokens, special ones included."""


def continued(engine: Engine, recipe: Recipe, decode: Decode, logs: TurnLogs | None = None) -> Engine:
    """The engine as the recipe's episodes see it: itself, if a request is a turn and nothing of it is noted."""
    chunk_tokens = recipe.rollout.chunk_tokens
    if not chunk_tokens and recipe.resync.pause is not PauseMode.abort and logs is None:
        return engine
    return ContinuedEngine(engine, chunk_tokens=chunk_tokens, decode=decode, logs=logs)


class ContinuedEngine(Engine):
    """An engine whose turns are whole, though its requests are not.

    Args:
        chunk_tokens: most tokens of a request; 0 for no limit.
        decode: of the policy's tokenizer.
        logs: notes what is answered to the trajectories that it has, and answers what it knows; None for none.
    """

    def __init__(self, engine: Engine, *, chunk_tokens: int, decode: Decode, logs: TurnLogs | None = None) -> None:
        self._engine, self._chunk_tokens, self._decode = engine, chunk_tokens, decode
        self._logs = TurnLogs() if logs is None else logs

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        self._engine.open(session_ids, at_once=at_once)

    def close(self, session_id: str) -> None:
        self._engine.close(session_id)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one whole turn; it does not end with `abort`.

        Raises:
            EngineError: a part failed, or the turn was not whole before the deadline.
        """
        logged = self._logs.turn(request)
        if logged.is_whole:
            return logged.answers[0]
        turn = _Turn(request, self._decode, logged.answers)
        try:
            async with asyncio.timeout(request.timeout_s):
                result = await self._whole(turn)
        except TimeoutError as error:
            parts = f"{len(turn.tokens)} of at most {request.max_new_tokens} tokens"
            raise EngineError(
                f"session {request.session_id}: {parts} within {request.timeout_s:g} s, and no end of the turn"
            ) from error
        logged.end(result)
        return result

    async def aclose(self) -> None:
        await self._engine.aclose()

    async def _whole(self, turn: "_Turn") -> GenerateResult:
        deadline = asyncio.get_running_loop().time() + turn.request.timeout_s
        while True:
            part = turn.rest(self._chunk_tokens, deadline - asyncio.get_running_loop().time())
            answer = await self._engine.generate(part)
            if (finish := turn.add(answer, part.max_new_tokens)) is not None:
                return turn.result(finish)
            if answer.finish_reason == "abort":
                await asyncio.sleep(ABORT_DELAY_S)


class _Turn:
    """The parts of a turn so far, which it adds to `answers`."""

    def __init__(self, request: GenerateRequest, decode: Decode, answers: list[GenerateResult]) -> None:
        self.request, self._decode, self._answers = request, decode, answers
        self.tokens = [token for answer in answers for token in answer.tokens]

    def rest(self, chunk_tokens: int, timeout_s: float) -> GenerateRequest:
        """The request for the next part."""
        left = self.request.max_new_tokens - len(self.tokens)
        return replace(
            self.request,
            input_ids=[*self.request.input_ids, *self.tokens],
            max_new_tokens=min(left, chunk_tokens) if chunk_tokens else left,
            timeout_s=timeout_s,
            experts_from=self.request.experts_from + sum(map(len, self._experts)),
        )

    def add(self, answer: GenerateResult, num_asked: int) -> Literal["stop", "length"] | None:
        """Why the turn ends with this answer; None if it goes on.

        Args:
            num_asked: most tokens that the answer could have.
        """
        begin = len(self.tokens)
        self.tokens += answer.tokens
        self._answers.append(answer)
        if (end := self._end_of_stop(begin)) is not None:
            del self.tokens[end:]
            return "stop"
        is_full = len(self.tokens) >= self.request.max_new_tokens
        if answer.finish_reason == "abort":
            # An abort hides that the token before it was the last one.
            if self.tokens[begin:] and self.tokens[-1] in self.request.stop_token_ids:
                return "stop"
            return "length" if is_full else None
        # An engine gives fewer tokens where its context ends.
        if answer.finish_reason == "length" and not is_full and len(answer.tokens) == num_asked:
            return None
        return answer.finish_reason

    def result(self, finish: Literal["stop", "length"]) -> GenerateResult:
        """All parts, up to the end of the turn."""
        count = len(self.tokens)
        rows = len(self.request.input_ids) + count - 1 - self.request.experts_from
        return GenerateResult(
            tokens=self.tokens,
            logprobs=[logprob for answer in self._answers for logprob in answer.logprobs][:count],
            weight_versions=np.concatenate([answer.weight_versions for answer in self._answers])[:count],
            finish_reason=finish,
            routed_experts=np.concatenate(self._experts)[:rows] if self._experts else None,
            cached_tokens=self._answers[0].cached_tokens,
            num_retries=sum(answer.num_retries for answer in self._answers),
            # Also for the tokens behind a stop text, which are dropped.
            counts=sum((Counter(answer.counts) for answer in self._answers), Counter()),
        )

    @property
    def _experts(self) -> list[np.ndarray]:
        """Rows of the parts, which follow each other; a request that was aborted in the queue has none."""
        return [answer.routed_experts for answer in self._answers if answer.routed_experts is not None]

    def _end_of_stop(self, begin: int) -> int | None:
        """Length of the turn with the token that completes a stop text, which is one of those from `begin` on; None if
        none does."""
        stop = self.request.stop
        if not stop or begin == len(self.tokens):
            return None
        # A token of a text has at least a byte of it. One more, since some tokenizers drop a text's first space.
        first = max(0, begin - max(len(text.encode()) for text in stop))

        def has_stop(end: int) -> bool:
            text = self._decode(self.tokens[first:end])
            return any(one in text for one in stop)

        if not has_stop(len(self.tokens)):
            return None
        return bisect_left(range(len(self.tokens)), True, lo=begin + 1, key=has_stop)
