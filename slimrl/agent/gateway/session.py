"""One trajectory's session at the gateway: its requests become turns of its history, within the run's limits.

1. A request whose history a sampled turn ends is joined to that turn's tokens. The chat template writes any other
   whole.
2. The engine samples. Nothing is kept until it has answered, so that an abandoned request leaves no turn.
3. The turns are kept before the client gets them. They are taken back if it is gone by then.
4. A client that sends a request again says so (`x-stainless-retry-count`). If its first attempt was answered, it gets
   the same answer; one that is still under way is abandoned (attempts.py). The same request from a client that does not
   say so asks for another sample, as agents do that choose the best of several.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slimrl.agent.assistant_turn import parse_turn
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.gateway.aside import Aside
from slimrl.agent.gateway.attempts import Attempt, Attempts
from slimrl.agent.gateway.chat_request import ChatRequest, Reply
from slimrl.agent.gateway.contexts import TurnContext, context_of
from slimrl.agent.gateway.errors import ApiError, BudgetSpent, refused
from slimrl.agent.gateway.history import History, SampledTurn
from slimrl.agent.turn_request import TurnRequests
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.engine import Engine, EngineError, GenerateResult
from slimrl.data.trajectory import Status


@dataclass(kw_only=True)
class Counts:
    """Numbers of a trajectory's requests."""

    requests: int = 0
    refused: int = 0
    """Requests that were answered with an error of the client's"""
    abandoned: int = 0
    """Requests whose client was gone before the answer"""
    repeated: int = 0
    """Requests that were answered again, because the client did not get the first answer"""
    skipped: int = 0
    """Requests that were answered, and left out of training by `agent.gateway.skip`"""


class Session:
    """The gateway's side of one trajectory.

    Args:
        one_at_a_time: its requests reach the engine one after another.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        dialogues: Dialogues,
        requests: TurnRequests,
        agent: AgentConfig,
        one_at_a_time: bool,
        aside: Aside,
    ) -> None:
        self._engine, self._dialogues, self._requests, self._agent = engine, dialogues, requests, agent
        self._aside = aside
        self._computing = asyncio.Lock()
        """Long computations are one at a time, in the order of the requests"""
        self._request_slots = asyncio.Semaphore(1 if one_at_a_time else agent.gateway.max_concurrent_requests)
        self.history = History()
        self.counts = Counts()
        self.replies: dict[str, Reply] = {}
        """Answers that later requests may refer to, by their ids"""
        self.posted_reward: float | None = None
        self.posted_by_role: dict[str, float] = {}
        self.spent: BudgetSpent | None = None
        """Why a request was refused for a limit of the run"""
        self.refusal = ""
        """The first request that was refused as wrong, and why"""
        self._num_wrong = 0
        """Number of requests that were refused as wrong"""
        self.num_open = 0
        """Number of requests that have not been answered, those included whose body is still being read"""
        self.fault: tuple[Status, str] | None = None
        """Status and cause with which the trajectory failed or was aborted; None while neither"""
        self._is_over = False
        self.crash: Exception | None = None
        """Unexpected exception in the answer to a request, a bug of slimrl's"""
        self._attempts = Attempts()
        self._samples: dict[bytes, set[int]] = {}
        """Numbers of the samples that were taken of each history"""
        self._num_taken = 0
        """Number of turns that are sampled or under way"""
        self._under_way: set[asyncio.Task[Any]] = set()
        self._rate = _Rate(agent.gateway.max_requests_per_s)
        self._idle_since, self.idle_s = time.monotonic(), 0.0
        """Time since which no request is under way, and the sum of all earlier seconds without one"""

    async def answer(self, request: ChatRequest, *, is_retry: bool, is_gone: Callable[[], bool]) -> Reply:
        """Turns of the policy that answer a request. The caller takes them back if the client does not get them.

        Args:
            is_gone: whether the connection of its client has ended.

        Raises:
            ApiError: the request is refused, or the engine failed.
        """
        task = asyncio.current_task()
        assert task is not None
        asked = request.key + repr((request.n, request.max_tokens, request.stop)).encode()
        if is_retry and (earlier := self._attempts.before(asked)) is not None:
            if earlier.reply is not None:
                self.counts.repeated += 1
                earlier.is_gone = is_gone
                return earlier.reply
            await self._attempts.end(asked, earlier, self._agent.close_timeout_s)
        try:
            self._admit()
        except ApiError as error:
            if error.retry:
                self._attempts.refuse(asked)
            raise
        attempt = Attempt(task, is_gone)
        self._attempts.add(asked, attempt)
        self._begin(task)
        try:
            attempt.reply = await self._sampled(request)
        except asyncio.CancelledError:
            self.counts.abandoned += 1
            self._attempts.lose(asked, attempt)
            raise
        except Exception as error:
            self._attempts.forget(asked, attempt)
            if not isinstance(error, ApiError):
                self.crash = error
            raise
        finally:
            self._end(task)
        self.replies[attempt.reply.id] = attempt.reply
        return attempt.reply

    async def num_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the context after which the policy would answer a request. Raises ApiError."""
        self._admit()
        return len((await self._context(request)).tokens)

    async def _context(self, request: ChatRequest) -> TurnContext:
        return await self.compute(
            lambda: context_of(request, self.history, self._dialogues, self._agent.history), request.num_bytes
        )

    @property
    def chat(self) -> ChatFormat:
        return self._dialogues.chat

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a context"""
        return self._requests.rollout.max_trajectory_tokens

    async def compute[T](self, call: Callable[[], T], size: int) -> T:
        """What a call gives that would hold up other trajectories if it is long; see `Aside.run`."""
        return await self._aside.run(call, size, self._computing)

    def take_back(self, reply: Reply) -> None:
        """Remove the turns that the client did not get."""
        if not reply.is_kept or self.history.take_back(reply.turns):
            self.counts.abandoned += 1
            self._num_taken -= len(reply.turns)
            self.replies.pop(reply.id, None)
            for turn in reply.turns:
                self._samples[turn.asked].discard(turn.number)
            self._attempts.take_back(reply)

    def refuse(self, what: str, error: ApiError) -> None:
        """Note a request that is wrong; a limit of the run or of the gateway is no mistake of the agent's.

        Args:
            what: method and path.
        """
        if isinstance(error, BudgetSpent) or error.retry or error.status == 401 or error.status >= 500:
            return
        self._num_wrong += 1
        self.refusal = self.refusal or f"{what} was refused with {error.status}: {error.message}"
        most = self._agent.gateway.max_refused
        if self._num_wrong > most and self.fault is None:
            cause = f"{self._num_wrong} requests were refused, more than agent.gateway.max_refused: {most}"
            self.fault = (Status.failed, f"{cause}. The first: {self.refusal}")

    def post_reward(self, value: Any, by_role: Any = None) -> None:
        """
        Args:
            by_role: rewards of roles, an object of numbers; None for none.

        Raises:
            ApiError: one is no finite number, or of a role that the agent has not.
        """
        roles = by_role if by_role is not None else {}
        if not isinstance(roles, dict):
            raise refused(f"by_role: {str(roles)[:40]} is no object of numbers")
        known = {*self._agent.roles, *(turn.role for turn in self.history.turns() if turn.role)}
        if unknown := sorted(set(roles) - known):
            said = f"roles are {', '.join(sorted(known))}" if known else "no request named a role"
            more = "one that may be paid before it asks is named in agent.roles of the recipe"
            raise refused(f"by_role: {', '.join(unknown)[:80]}: {said}; {more}")
        # Both or neither.
        given = {role: _posted(one) for role, one in roles.items()}
        self.posted_reward, self.posted_by_role = _posted(value), given

    async def close(self, timeout_s: float) -> None:
        """End the requests that are under way, and admit no more."""
        self._is_over = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=timeout_s)
        if not self._under_way:
            self.idle_s += time.monotonic() - self._idle_since

    def _admit(self) -> None:
        if self._is_over:
            raise ApiError(401, "the session is over")
        if self.fault is not None:
            raise ApiError(502, f"the trajectory has failed: {self.fault[1]}")
        limit = self._agent.gateway.max_concurrent_requests
        if len(self._under_way) >= limit:
            raise ApiError(429, f"{limit} requests are under way, agent.gateway.max_concurrent_requests", retry=True)
        if not self._rate.admits():
            most = self._agent.gateway.max_requests_per_s
            raise ApiError(429, f"more than {most:g} requests a second, agent.gateway.max_requests_per_s", retry=True)

    def _begin(self, task: "asyncio.Task[Any]") -> None:
        if not self._under_way:
            self.idle_s += time.monotonic() - self._idle_since
        self._under_way.add(task)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.discard(task)
        if not self._under_way:
            self._idle_since = time.monotonic()

    async def _sampled(self, request: ChatRequest) -> Reply:
        key = request.key
        context = await self._context(request)
        limit = self.max_tokens
        if len(context.tokens) >= limit:
            said = f"this model's maximum context length is {limit} tokens, and the messages have"
            raise BudgetSpent(f"{said} {len(context.tokens)}", code="context_length_exceeded")
        if self._num_taken + request.n > (most := self._requests.rollout.max_turns):
            raise BudgetSpent(f"the trajectory has no turns left of {most}", code="max_turns_exceeded")
        run = self._requests.sampling
        room = limit - len(context.tokens)
        most = min(run.max_new_tokens, room, request.max_tokens or run.max_new_tokens)
        taken = self._samples.setdefault(key, set())
        numbers = _free_numbers(taken, request.n)
        taken.update(numbers)
        self._num_taken += request.n
        turns: list[SampledTurn] = []
        try:
            turns = await self._gathered([self._turn(context, request, key, one, most) for one in numbers])
        finally:
            if not turns:
                taken.difference_update(numbers)
                self._num_taken -= request.n
        is_kept = not self._is_skipped(request)
        if is_kept:
            self.history.add(turns)
        else:
            self.counts.skipped += 1
        used = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, "max_tokens": most}
        return Reply(
            turns=turns,
            chat=self.chat,
            sampling=used,
            overridden=request.overridden(run),
            has_instructions=request.has_instructions,
            is_kept=is_kept,
        )

    def _is_skipped(self, request: ChatRequest) -> bool:
        skip = self._agent.gateway.skip
        told = "\n".join(one["content"] for one in request.messages if one["role"] == "system")
        return request.model in skip.models or any(text in told for text in skip.system)

    async def _gathered(self, turns: Sequence[Any]) -> list[SampledTurn]:
        """All turns or none: what one of them raises ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(turn) for turn in turns]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _turn(
        self, context: TurnContext, request: ChatRequest, asked: bytes, number: int, max_new_tokens: int
    ) -> SampledTurn:
        """Sample one turn of the policy.

        Args:
            asked: key of the request's history.
            number: of the sample of that history.
        """
        parent, results, sampled = context.parent, list[GenerateResult](), list[int]()
        num_calls = parent.num_calls if parent else sum(len(one.get("tool_calls") or ()) for one in request.messages)
        experts = sum(map(len, parent.experts)) if parent else 0
        parse = partial(
            parse_turn,
            dialogue=context.dialogue,
            in_thinking=context.in_thinking,
            num_calls=num_calls,
            stop=request.stop,
        )
        while True:
            result = await self._generated(
                self._requests.make(
                    [*context.tokens, *sampled],
                    context.dialogue,
                    path=(asked.hex(), number, len(sampled)),
                    max_new_tokens=max_new_tokens - len(sampled),
                    experts_from=experts,
                    stop=request.stop,
                )
            )
            results.append(result)
            sampled += result.tokens
            experts += 0 if result.routed_experts is None else len(result.routed_experts)
            finish = "length" if result.finish_reason == "length" else "stop"
            try:
                parsed = await parse(sampled, cut_off=finish == "length")
                if parsed is None and len(sampled) >= max_new_tokens:
                    finish, parsed = "length", await parse(sampled, cut_off=True)
            except Exception as error:
                # The schemas of an agent's tools may break the parser in any way.
                cause = f"a turn cannot be read with the agent's tools: {error!r}"
                self.fault = (Status.failed, cause)
                raise refused(cause) from error
            if parsed is not None:
                break
        text = context.dialogue.chat.turn_text(sampled)
        return SampledTurn(
            parent=parent,
            told=context.told,
            told_messages=context.told_messages,
            results=results,
            parsed=replace(parsed, can_be_answered=parsed.can_be_answered and finish == "stop"),
            is_cut_off=finish == "length",
            stop_text=min((one for one in request.stop if one in text), key=text.find, default=None),
            asked=asked,
            number=number,
            role=request.role,
        )

    async def _generated(self, request: Any) -> GenerateResult:
        try:
            async with self._request_slots:
                result = await self._engine.generate(request)
        except EngineError as error:
            self.fault = (Status.failed, str(error))
            raise ApiError(502, str(error)) from error
        if result.finish_reason == "abort":
            self.fault = (Status.aborted, "aborted by the engine")
            raise ApiError(502, "aborted by the engine")
        return result


class _Rate:
    """Admits so many requests a second, and as many at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._left, self._since = per_s, max(per_s, 1.0), time.monotonic()

    def admits(self) -> bool:
        now = time.monotonic()
        self._left = min(max(self._per_s, 1.0), self._left + (now - self._since) * self._per_s)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _free_numbers(taken: set[int], count: int) -> list[int]:
    """The smallest numbers that are not taken."""
    return [number for number in range(len(taken) + count) if number not in taken][:count]


def _posted(value: Any) -> float:
    """Raises ApiError: it is no finite number."""
    try:
        reward = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise refused(f'write {{"reward": number}}; {str(value)[:40]} is no finite number of 64 bits')
    return reward
