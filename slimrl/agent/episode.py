"""The multi-turn episode: one coroutine generates one trajectory, tokens in, tokens out.

1. The chat template renders the prompt once, tools included.
2. The engine continues the tokens until the end of the turn or the end of a tool call.
3. The turn is split into thinking and answer; calls are only looked for in the answer.
4. Without a call, or if the model ended the text instead of its turn, the trajectory is completed. Otherwise the tools'
   answers are appended as tokens that the loss masks. A malformed call, an unknown tool or a ToolError is answered with
   an error message.
5. The trajectory is truncated when it runs out of turns or tokens, aborted at its deadline or by the engine, and failed
   if the engine does not answer or a tool crashes. It always keeps the tokens so far.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from slimrl.agent.dialogue import Dialogue
from slimrl.agent.parsers import MalformedCall, ParsedTurn, ToolCall
from slimrl.agent.tools import ToolCrash, ToolError, shortened
from slimrl.agent.transcript import Transcript
from slimrl.chat.chat_format import CallName, Context
from slimrl.chat.thinking import split_thinking
from slimrl.config.schema import AgentConfig, HistoryMode, RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, EngineError, GenerateRequest, GenerateResult
from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt, Segment, Status, Trajectory

UNKNOWN_TOOL = "unknown"
"""Name of a call that names no tool."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Runs the episodes. `rollout` has their limits (turns, tokens, deadlines), `agent` what they are shown."""

    engine: Engine
    dialogue: Dialogue
    rollout: RolloutConfig
    agent: AgentConfig

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        """One trajectory, not yet scored.

        Args:
            trajectory_id: unique in the run; also the engine's session id.
            seed: the seeds of the requests are derived from it; None lets the engine choose.
        """
        messages = first_messages(prompt, self.agent.system_prompt)
        context = self.dialogue.chat.prompt(messages, self.dialogue.tools.schemas)
        transcript = Transcript(context.tokens)
        episode = _Episode(self, trajectory_id, sampling, seed, transcript, messages, context.opens_thinking)
        try:
            async with asyncio.timeout(self.rollout.trajectory_timeout_s):
                status = await episode.play()
        except TimeoutError:
            status = Status.aborted
            episode.error = f"not finished within {self.rollout.trajectory_timeout_s:g} s"
        except (EngineError, ToolCrash) as error:
            status = Status.failed
            episode.error = str(error)
        return episode.trajectory(prompt, status)


@dataclass(eq=False)
class _Episode:
    """The state of one episode."""

    runner: EpisodeRunner
    trajectory_id: str
    sampling: SamplingConfig
    seed: int | None
    transcript: Transcript
    messages: list[dict[str, Any]]
    in_thinking: bool
    """Whether the context of the next turn ends within thinking."""
    turn_tokens: list[int] = field(default_factory=list)
    """What the policy has sampled of a turn that goes on."""
    finished: list[Segment] = field(default_factory=list)
    error: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_malformed_calls: int = 0
    tool_calls: dict[str, dict[str, int]] = field(default_factory=dict)
    """`calls`, `errors` and `malformed` of each tool that was called, by its name."""
    num_cached_tokens: int = 0
    num_retries: int = 0

    async def play(self) -> Status:
        limits = self.runner.rollout
        while True:
            room = limits.max_trajectory_tokens - len(self.transcript.tokens)
            if room <= 0:
                return Status.truncated
            wanted = self.sampling.max_new_tokens - len(self.turn_tokens)
            if wanted <= 0:
                return Status.truncated
            result = await self.runner.engine.generate(self._request(min(room, wanted)))
            turn = self._record(result)
            if turn is None:
                continue
            if result.finish_reason == "abort":
                self.error = "aborted by the engine"
                return Status.aborted
            if result.finish_reason == "length":
                return Status.truncated
            if not turn.calls or self.transcript.tokens[-1] not in self.runner.dialogue.call_ends:
                return Status.completed
            if self.transcript.num_turns >= limits.max_turns:
                return Status.truncated
            names = self._call_names(turn)
            answers = await asyncio.gather(*map(self._answer, turn.calls))
            self.messages += [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": answer}
                for call, answer in zip(names, answers, strict=True)
            ]
            if not self._continue(names, answers):
                return Status.truncated

    def trajectory(self, prompt: Prompt, status: Status) -> Trajectory:
        metadata: dict[str, Any] = {
            "num_turns": self.transcript.num_turns,
            "num_tool_calls": self.num_tool_calls,
            "num_tool_errors": self.num_tool_errors,
            "num_malformed_calls": self.num_malformed_calls,
            "tool_calls": self.tool_calls,
            "num_cached_tokens": self.num_cached_tokens,
            "num_retries": self.num_retries,
        }
        if self.error is not None:
            metadata["error"] = self.error
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=self.trajectory_id,
            segments=[*self.finished, self.transcript.segment()],
            status=status,
            messages=self.messages,
            metadata=metadata,
        )

    def _request(self, max_new_tokens: int) -> GenerateRequest:
        turn = self.transcript.num_turns
        path = (turn, len(self.turn_tokens)) if self.turn_tokens else (turn,)
        return GenerateRequest(
            session_id=self.trajectory_id,
            input_ids=list(self.transcript.tokens),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            max_new_tokens=max_new_tokens,
            stop_token_ids=() if self.sampling.ignore_end_of_turn else self.runner.dialogue.stop_token_ids,
            timeout_s=self.runner.rollout.request_timeout_s,
            seed=None if self.seed is None else derive_seed(self.seed, "turn", *path),
            experts_from=self.transcript.num_expert_rows,
        )

    def _record(self, result: GenerateResult) -> ParsedTurn | None:
        """Keep what was sampled, and read it. None if the turn goes on: it stopped at a call within its thinking."""
        chat = self.runner.dialogue.chat
        self.transcript.add_turn(result, goes_on=bool(self.turn_tokens))
        self.num_cached_tokens += result.cached_tokens
        self.num_retries += result.num_retries
        self.turn_tokens += result.tokens
        thought = split_thinking(chat.turn_text(self.turn_tokens), opened=self.in_thinking)
        last = self.turn_tokens[-1] if self.turn_tokens else None
        at_call = last in self.runner.dialogue.stop_token_ids and last not in chat.stop_token_ids
        if at_call and not thought.closed and result.finish_reason == "stop":
            return None
        self.turn_tokens = []
        turn = self.runner.dialogue.parser.parse(thought.answer)
        if len(turn.calls) > 1 and not self.runner.dialogue.chat.takes_parallel_calls:
            turn = ParsedTurn(content=turn.content, calls=[MalformedCall(problem="only one tool call at a time")])
        malformed = any(isinstance(call, MalformedCall) for call in turn.calls)
        message: dict[str, Any] = {"role": "assistant", "content": thought.answer if malformed else turn.content}
        if thought.thinking is not None:
            message["reasoning_content"] = thought.thinking
        if turn.calls and not malformed:
            message["tool_calls"] = [
                {"id": name.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call, name in zip(turn.calls, self._call_names(turn), strict=True)
                if isinstance(call, ToolCall)
            ]
        self.messages.append(message)
        return turn

    def _call_names(self, turn: ParsedTurn) -> list[CallName]:
        """Names and ids of a turn's calls, before they are counted."""
        return [
            CallName(id=call.id or _call_id(self.num_tool_calls + number), name=call.name)
            if isinstance(call, ToolCall)
            else CallName(id=_call_id(self.num_tool_calls + number), name=UNKNOWN_TOOL)
            for number, call in enumerate(turn.calls)
        ]

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        self.num_tool_calls += 1
        name = call.name if call.name in self._tool_names() else UNKNOWN_TOOL
        counts = self.tool_calls.setdefault(name, {"calls": 0, "errors": 0, "malformed": 0})
        counts["calls"] += 1
        try:
            if isinstance(call, MalformedCall):
                self.num_malformed_calls += 1
                counts["malformed"] += 1
                raise ToolError(call.problem)
            answer = await self.runner.dialogue.tools.call(
                call.name, call.arguments, self.runner.rollout.tool_timeout_s
            )
        except ToolError as error:
            self.num_tool_errors += 1
            counts["errors"] += 1
            answer = error_text(str(error))
        # Half of a surrogate pair is no character that a tokenizer could encode.
        answer = answer.encode("utf-8", "replace").decode()
        return self.runner.dialogue.chat.template.escape(shortened(answer, self.runner.agent.max_result_chars))

    def _tool_names(self) -> set[str]:
        return {schema["function"]["name"] for schema in self.runner.dialogue.tools.schemas}

    def _continue(self, calls: list[CallName], answers: list[str]) -> bool:
        """Append the answers, or begin a new segment if the template rewrites what the policy said.

        Returns:
            Whether there is room for another turn.
        """
        tokens, limit = self.transcript.tokens, self.runner.rollout.max_trajectory_tokens
        written = self._written_context()
        if written is not None and written.tokens[: len(tokens)] != tokens:
            if len(written.tokens) >= limit:
                return False
            self.finished.append(self.transcript.segment())
            self.transcript = Transcript(written.tokens, num_turns=self.transcript.num_turns)
            self.in_thinking = written.opens_thinking
            return True
        joined = self.runner.dialogue.chat.join(tokens[-1], calls, answers, self.runner.dialogue.tools.schemas)
        if len(tokens) + len(joined.tokens) >= limit:
            return False
        self.transcript.add_tool_results(joined.tokens)
        self.in_thinking = joined.opens_thinking
        return True

    def _written_context(self) -> Context | None:
        """The conversation so far as the template writes it; None if the sampled tokens are kept."""
        if self.runner.agent.history is HistoryMode.keep:
            return None
        try:
            return self.runner.dialogue.chat.prompt(self.messages, self.runner.dialogue.tools.schemas)
        except ValueError:
            return None  # it has no words for a malformed call, which then stays as it was sampled


def first_messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, Any]]:
    """The prompt's messages, after the system prompt if they have none of their own."""
    if system_prompt is None or prompt.messages[0]["role"] == "system":
        return list(prompt.messages)
    return [{"role": "system", "content": system_prompt}, *prompt.messages]


def error_text(problem: str) -> str:
    """The answer to a call that failed."""
    return f"error: {problem}"


def _call_id(number: int) -> str:
    """Id of a call whose format has none."""
    return f"call_{number}"
