"""The policy's side of an episode: its context and the turns that it samples, tokens in, tokens out.

1. The chat template renders the first messages once, tools included.
2. The engine continues the tokens until the end of the turn or the end of a tool call.
3. The turn is split into thinking and answer; calls are only looked for in the answer.
4. The environment's messages are appended as tokens that the loss masks. Where `agent.history` lets the template
   rewrite what the policy said, and where the context is compacted (compaction.py), a new segment begins. A summary
   that the policy writes is the beginning of its next turn.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slimrl.agent.assistant_turn import parse_turn
from slimrl.agent.chat.chat_format import CallName, Context
from slimrl.agent.compaction import SummaryRule, compacted, summary_of
from slimrl.agent.dialogue import Dialogue
from slimrl.agent.environment import UNKNOWN_TOOL, EnvironmentFailure, Message, Turn, call_name
from slimrl.agent.subagents import Delegation, account_of, add_tool_counts, segments_in_turn
from slimrl.agent.tool_call import MalformedCall
from slimrl.agent.tools import shortened
from slimrl.agent.transcript import Transcript
from slimrl.agent.turn_request import TurnRequests
from slimrl.base.spans import SPANS
from slimrl.config.schema.agent import AgentConfig, HistoryMode
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.data.trajectory import ENGINE_COUNTS, Segment, Status, Trajectory


class Conversation:
    """One conversation of the policy with its environment, which grows turn by turn.

    Args:
        session_id: of the engine's requests.
        seed: the seeds of the requests are derived from it; None lets the engine choose.
        summary_rule: writes the summaries of compaction; None for the policy.
        role: of the segments, in an episode of several roles.

    Raises:
        ValueError: the chat template refuses the messages, or leaves a part of them out.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        engine: Engine,
        dialogue: Dialogue,
        rollout: RolloutConfig,
        agent: AgentConfig,
        sampling: SamplingConfig,
        session_id: str,
        seed: int | None,
        summary_rule: SummaryRule | None = None,
        role: str = "",
    ) -> None:
        self._role = role
        self._engine, self._dialogue, self._rollout, self._agent = engine, dialogue, rollout, agent
        self._sampling = sampling
        self._requests = TurnRequests(rollout=rollout, sampling=sampling, session_id=session_id, seed=seed)
        self.messages = list(messages)
        self.num_prompt_messages = len(messages)
        """Number of messages before the first turn"""
        context = dialogue.chat.prompt(self.messages, dialogue.schemas, whole=True)
        self.transcript = Transcript(context.tokens)
        self._in_thinking = context.opens_thinking
        """Whether the context of the next turn ends within thinking."""
        self._turn_tokens: list[int] = []
        """Tokens that the policy has sampled of a turn that goes on."""
        self._finished: list[Segment] = []
        self._summary_rule = summary_rule
        self._shown = list(messages)
        """The messages of the present context"""
        self._summary_is_due = self._turn_has_summary = False
        self.num_compactions = 0
        self.num_calls = 0
        self.tool_calls: dict[str, dict[str, int]] = {}
        """`calls`, `errors` and `malformed` of each tool that was called, by its name"""
        self.num_sampled_tokens = 0
        self.num_cached_tokens = 0
        self.num_retries = 0
        self.engine_counts = Counter[str]()
        """Sums of `GenerateResult.counts` over the conversation's requests"""
        self.subagents: list[dict[str, Any]] = []
        """What each sub-agent was asked and said, see `account_of`"""
        self._subagent_turns = self._subagent_tokens = 0
        self.tokens_of_others = 0
        """Tokens of the conversations of other roles, which count in the limit too"""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools"""
        return self._dialogue.schemas

    @property
    def num_turns(self) -> int:
        """Assistant turns so far, in an episode of several roles those of all."""
        return self.transcript.num_turns

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._finished)) + len(self.transcript.tokens)

    @property
    def segments(self) -> list[Segment]:
        """The segments of the conversation, with all tokens so far."""
        found = [*self._finished, self.transcript.segment()]
        for segment in found:
            segment.role = self._role
        return found

    def fork(self, number: int) -> "Conversation":
        """Another conversation that goes on from here, with seeds of its own. Between two turns alone.

        Args:
            number: tells it from all other forks of the trajectory.
        """
        other = copy.copy(self)
        other._requests = self._requests.fork(number)
        other.transcript = self.transcript.copy()
        other.messages, other._shown, other._finished = [*self.messages], [*self._shown], [*self._finished]
        other._turn_tokens = [*self._turn_tokens]
        other.tool_calls = copy.deepcopy(self.tool_calls)
        other.engine_counts = self.engine_counts.copy()
        return other

    def follow(self, num_turns: int) -> None:
        """Number the next turn after so many of all roles."""
        self.transcript.num_turns = num_turns

    @property
    def has_room(self) -> bool:
        """Whether another token may be sampled."""
        return self._max_tokens > len(self.transcript.tokens)

    async def sample_turn(self) -> Turn | Status:
        """The policy's next turn, or how the trajectory ends because there is none.

        Raises:
            EngineError: the engine refused, ended, or did not answer before the deadline.
            EnvironmentFailure: the context could not be compacted, or the turn not be read.
        """
        if self._summary_is_due and (ended := await self._compact()) is not None:
            return ended
        while True:
            room = self._max_tokens - len(self.transcript.tokens)
            wanted = self._sampling.max_new_tokens - len(self._turn_tokens)
            no_turn_left = not self._turn_has_begun and self.transcript.num_turns >= self._max_turns
            if room <= 0 or wanted <= 0 or no_turn_left:
                return Status.truncated
            with SPANS("generate"):
                result = await self._engine.generate(self._request(min(room, wanted)))
            with SPANS("parse"):
                turn = await self._record(result)
            if turn is None:
                continue
            if result.finish_reason == "abort":
                return Status.aborted
            return Status.truncated if result.finish_reason == "length" else turn

    def append_observation(self, turn: Turn, messages: Sequence[Message]) -> bool:
        """Append what the policy is told after a turn.

        Returns:
            Whether there is room for another turn.

        Raises:
            ValueError: the chat template refuses such messages there.
        """
        told = [self._cleaned(message) for message in messages]
        self.messages += told
        self._shown += told
        tokens, limit = self.transcript.tokens, self._max_tokens
        written = self._written_context()
        if written is not None and written.tokens[: len(tokens)] != tokens:
            if len(written.tokens) >= limit:
                return False
            self._finished.append(self.transcript.segment())
            self.transcript = Transcript(written.tokens, num_turns=self.transcript.num_turns)
            self._in_thinking = written.opens_thinking
            return True
        calls = [CallName(id=call.id, name=call_name(call)) for call in turn.calls]
        joined = self._dialogue.chat.join(tokens[-1], calls, told, self._dialogue.schemas)
        compaction = self._agent.compaction
        if compaction.at_tokens is not None and len(tokens) + len(joined.tokens) >= compaction.at_tokens:
            self._summary_is_due = True
            if self._summary_rule is not None:
                return True
            told = [*told, {"role": "user", "content": compaction.prompt}]
            joined = self._dialogue.chat.join(tokens[-1], calls, told, self._dialogue.schemas)
        if len(tokens) + len(joined.tokens) >= limit:
            return False
        self.transcript.add_tool_results(joined.tokens)
        self._in_thinking = joined.opens_thinking
        return True

    async def _compact(self) -> Status | None:
        """Begin the new segment; or how the trajectory ends because there is none."""
        if self._summary_rule is not None:
            summary = await summary_of(self._summary_rule, self._shown, self._agent.step_timeout_s)
        else:
            sampled = await self._sample_summary()
            if isinstance(sampled, Status):
                return sampled
            summary = sampled
        compaction = self._agent.compaction
        assert compaction.at_tokens is not None
        escaped = self.escaped(summary)
        for keep_turns in range(compaction.keep_turns, -1, -1):
            messages = compacted(self._shown, self.num_prompt_messages, escaped, keep_turns)
            try:
                context = self._dialogue.chat.prompt(messages, self._dialogue.schemas)
            except ValueError as error:
                raise EnvironmentFailure(f"the compacted context cannot be written: {error}") from error
            if len(context.tokens) < compaction.at_tokens:
                break
        if len(context.tokens) >= self._max_tokens:
            return Status.truncated
        self._finished.append(self.transcript.segment())
        self.transcript = Transcript(context.tokens, num_turns=self.transcript.num_turns)
        self._in_thinking, self._shown = context.opens_thinking, messages
        self._summary_is_due = False
        self.num_compactions += 1
        return None

    async def _sample_summary(self) -> str | Status:
        """The policy's summary, whose tokens belong to its next turn."""
        room = self._max_tokens - len(self.transcript.tokens)
        if self.transcript.num_turns >= self._max_turns:
            return Status.truncated
        request = self._requests.make(
            self.transcript.tokens,
            self._dialogue,
            path=("summary", self.transcript.num_turns),
            max_new_tokens=min(room, self._sampling.max_new_tokens),
            experts_from=self.transcript.num_expert_rows,
        )
        # It calls no tools, so the end of a call ends nothing.
        stops = self._dialogue.chat.stop_token_ids if request.stop_token_ids else ()
        result = await self._engine.generate(replace(request, stop_token_ids=stops))
        self._add_turn(result)
        self._turn_has_summary = True
        if result.finish_reason != "stop":
            return Status.aborted if result.finish_reason == "abort" else Status.truncated
        text = self._dialogue.chat.turn_text(result.tokens)
        return self._dialogue.chat.split_turn(text, opened=self._in_thinking).answer.strip()

    @property
    def _turn_has_begun(self) -> bool:
        return bool(self._turn_tokens) or self._turn_has_summary

    def _add_turn(self, result: GenerateResult) -> None:
        self.transcript.add_turn(result, goes_on=self._turn_has_begun)
        self.num_sampled_tokens += len(result.tokens)
        self.num_cached_tokens += result.cached_tokens
        self.num_retries += result.num_retries
        self.engine_counts.update(result.counts)

    def _request(self, max_new_tokens: int) -> GenerateRequest:
        # A turn that has begun with a summary is counted already.
        turn = self.transcript.num_turns - self._turn_has_summary
        return self._requests.make(
            self.transcript.tokens,
            self._dialogue,
            path=(turn, len(self._turn_tokens)) if self._turn_tokens else (turn,),
            max_new_tokens=max_new_tokens,
            experts_from=self.transcript.num_expert_rows,
        )

    async def _record(self, result: GenerateResult) -> Turn | None:
        """Keep what was sampled, and read it. None if the turn goes on: it stopped at a call within its thinking."""
        self._add_turn(result)
        self._turn_tokens += result.tokens
        try:
            parsed = await parse_turn(
                self._turn_tokens,
                self._dialogue,
                in_thinking=self._in_thinking,
                cut_off=result.finish_reason != "stop",
                num_calls=self.num_calls,
            )
        except Exception as error:
            # A parser of the task's own may raise anything, and so may schemas of tools that others wrote.
            raise EnvironmentFailure(f"a turn cannot be read: {error!r}") from error
        if parsed is None:
            return None
        self._turn_tokens, self._turn_has_summary = [], False
        self.messages.append(parsed.message)
        self._shown.append(parsed.message)
        index = self.transcript.num_turns - 1
        return Turn(
            index=index,
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            finish_reason="stop" if parsed.can_be_answered else "end",
            is_last=index + 1 >= self._max_turns,
        )

    def left(self) -> tuple[int, int]:
        """Turns and tokens that sub-agents may use now; a turn to answer them is kept."""
        return self._max_turns - self.transcript.num_turns - 1, self._max_tokens - len(self.transcript.tokens)

    def adopt(self, delegation: Delegation, trajectory: Trajectory) -> None:
        """Take over the segments and figures of a sub-agent that the last turn has called."""
        turn = self.transcript.num_turns - 1
        self.subagents.append(account_of(delegation, trajectory, turn=turn, first_segment=len(self._finished)))
        self._finished += segments_in_turn(trajectory, turn)
        counts = trajectory.metadata
        self._subagent_turns += counts["num_turns"]
        self._subagent_tokens += trajectory.num_tokens
        self.num_calls += counts["num_tool_calls"]
        self.num_cached_tokens += counts["num_cached_tokens"]
        self.num_retries += counts["num_retries"]
        self.num_compactions += counts.get("num_compactions", 0)
        self.engine_counts.update({key: counts[key] for key in ENGINE_COUNTS if key in counts})
        add_tool_counts(self.tool_calls, counts["tool_calls"])

    @property
    def _max_turns(self) -> int:
        return self._rollout.max_turns - self._subagent_turns

    @property
    def _max_tokens(self) -> int:
        return self._rollout.max_trajectory_tokens - self._subagent_tokens - self.tokens_of_others

    def count_calls(self, turn: Turn) -> None:
        """Count the calls of a turn, answered or not."""
        self.num_calls += len(turn.calls)
        for call in turn.calls:
            counts = self._counts_of(call.name)
            counts["calls"] += 1
            counts["malformed"] += isinstance(call, MalformedCall)

    def count_errors(self, names: Sequence[str]) -> None:
        """Count answers that were errors, by the tools' names."""
        for name in names:
            self._counts_of(name)["errors"] += 1

    def _counts_of(self, name: str) -> dict[str, int]:
        known = {schema["function"]["name"] for schema in self._dialogue.schemas}
        empty = {"calls": 0, "errors": 0, "malformed": 0}
        return self.tool_calls.setdefault(name if name in known else UNKNOWN_TOOL, empty)

    def escaped(self, text: str) -> str:
        """A text that a tokenizer can encode and whose words end no turn."""
        # Half of a surrogate pair is no character that a tokenizer could encode.
        return self._dialogue.chat.template.escape(text.encode("utf-8", "replace").decode())

    def _cleaned(self, message: Message) -> Message:
        """A message with such a text; a tool's not too long."""
        text = str(message["content"])
        if message["role"] == "tool":
            text = shortened(text, self._agent.max_result_chars)
        return {**message, "content": self.escaped(text)}

    def _written_context(self) -> Context | None:
        """The conversation so far as the template writes it; None if the sampled tokens are kept."""
        if self._agent.history is HistoryMode.keep:
            return None
        try:
            return self._dialogue.chat.prompt(self.messages, self._dialogue.schemas)
        except ValueError:
            return None  # it has no words for a malformed call, which then stays as it was sampled
