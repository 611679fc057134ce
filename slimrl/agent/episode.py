"""The multi-turn episode: one coroutine makes one trajectory, tokens in, tokens out.

1. The prompt is rendered once, tools included.
2. The engine continues the tokens until the end of the turn or the end of a tool call.
3. Without a call the trajectory is completed, as it is when the model ended the text instead of its turn. With calls
   the tools answer, and their answers are appended as tokens that the loss leaves out. A malformed call, an unknown
   tool and a failing tool are answered with an error message.
4. It is truncated when it runs out of turns or tokens, aborted at its deadline or by the engine, and failed when the
   engine does not answer or a tool breaks. Whatever it ends by, the tokens so far are kept.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from slimrl.agent.parsers import MalformedCall, ParsedTurn, Parser, ToolCall
from slimrl.agent.tools import ToolBox, ToolBroken, ToolError
from slimrl.agent.transcript import Transcript
from slimrl.config.schema import RolloutConfig, SamplingConfig
from slimrl.data.chat import ChatFormat
from slimrl.data.protocols import Engine, EngineError, GenerateRequest, GenerateResult
from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt, Status, Trajectory

CUT = " ... "
"""Stands where the middle of a long tool result was left out."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """What all episodes of a run share.

    `rollout` gives the limits (turns, tokens, deadlines); the sampling settings come with each episode.
    """

    engine: Engine
    chat: ChatFormat
    tools: ToolBox
    parser: Parser
    rollout: RolloutConfig
    system_prompt: str | None
    max_result_chars: int

    def __post_init__(self) -> None:
        """Raises ValueError where the chat template does not fit the way the turns are stopped."""
        for token in self.stop_token_ids:
            self.chat.tool_turn_tokens(token, [""])

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        end_of_turn = self.chat.end_of_turn_id
        if not self.rollout.stop_at_tool_call:
            return (end_of_turn,)
        return (end_of_turn, self.chat.token_id(self.parser.close_marker))

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        """One trajectory, not yet scored.

        Args:
            trajectory_id: unique in the run; the engine's session id too.
            seed: what the seeds of its requests are derived from; None leaves sampling to the engine.
        """
        messages = first_messages(prompt, self.system_prompt)
        tokens = self.chat.prompt_tokens(messages, self.tools.schemas)
        episode = _Episode(self, trajectory_id, sampling, seed, Transcript(tokens), messages)
        try:
            async with asyncio.timeout(self.rollout.trajectory_timeout_s):
                status = await episode.play()
        except TimeoutError:
            status = Status.aborted
            episode.error = f"not finished within {self.rollout.trajectory_timeout_s:g} s"
        except (EngineError, ToolBroken) as error:
            status = Status.failed
            episode.error = str(error)
        return episode.trajectory(prompt, status)


class _Episode:
    """The state of one episode."""

    def __init__(
        self,
        runner: EpisodeRunner,
        trajectory_id: str,
        sampling: SamplingConfig,
        seed: int | None,
        transcript: Transcript,
        messages: list[dict[str, Any]],
    ) -> None:
        self.runner = runner
        self.trajectory_id = trajectory_id
        self.sampling = sampling
        self.seed = seed
        self.transcript = transcript
        self.messages = messages
        self.error: str | None = None
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self.num_cached_tokens = 0
        self.num_retries = 0

    async def play(self) -> Status:
        limits = self.runner.rollout
        while True:
            room = limits.max_trajectory_tokens - len(self.transcript.tokens)
            if room <= 0:
                return Status.truncated
            result = await self.runner.engine.generate(self._request(min(room, self.sampling.max_new_tokens)))
            turn = self._record(result)
            if result.finish_reason == "abort":
                self.error = "aborted by the engine"
                return Status.aborted
            if result.finish_reason == "length":
                return Status.truncated
            if not turn.calls or self.transcript.tokens[-1] not in self.runner.stop_token_ids:
                return Status.completed
            if self.transcript.num_turns >= limits.max_turns:
                return Status.truncated
            answers = await asyncio.gather(*map(self._answer, turn.calls))
            added = self.runner.chat.tool_turn_tokens(self.transcript.tokens[-1], answers)
            self.messages += [{"role": "tool", "content": answer} for answer in answers]
            if len(self.transcript.tokens) + len(added) >= limits.max_trajectory_tokens:
                return Status.truncated
            self.transcript.add_tool_results(added)

    def trajectory(self, prompt: Prompt, status: Status) -> Trajectory:
        metadata: dict[str, Any] = {
            "num_turns": self.transcript.num_turns,
            "num_tool_calls": self.num_tool_calls,
            "num_tool_errors": self.num_tool_errors,
            "num_cached_tokens": self.num_cached_tokens,
            "num_retries": self.num_retries,
        }
        if self.error is not None:
            metadata["error"] = self.error
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=self.trajectory_id,
            segments=[self.transcript.segment()],
            status=status,
            messages=self.messages,
            metadata=metadata,
        )

    def _request(self, max_new_tokens: int) -> GenerateRequest:
        turn = self.transcript.num_turns
        return GenerateRequest(
            session_id=self.trajectory_id,
            input_ids=list(self.transcript.tokens),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            max_new_tokens=max_new_tokens,
            stop_token_ids=() if self.sampling.ignore_end_of_turn else self.runner.stop_token_ids,
            timeout_s=self.runner.rollout.request_timeout_s,
            seed=None if self.seed is None else derive_seed(self.seed, "turn", turn),
        )

    def _record(self, result: GenerateResult) -> ParsedTurn:
        self.transcript.add_turn(result)
        self.num_cached_tokens += result.cached_tokens
        self.num_retries += result.num_retries
        ended = bool(result.tokens) and result.tokens[-1] == self.runner.chat.end_of_turn_id
        text = self.runner.chat.decode(result.tokens[:-1] if ended else result.tokens)
        turn = self.runner.parser.parse(text)
        malformed = any(isinstance(call, MalformedCall) for call in turn.calls)
        message: dict[str, Any] = {"role": "assistant", "content": text if malformed else turn.content}
        if turn.calls and not malformed:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
                if isinstance(call, ToolCall)
            ]
        self.messages.append(message)
        return turn

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        self.num_tool_calls += 1
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.problem)
            answer = await self.runner.tools.call(call.name, call.arguments, self.runner.rollout.tool_timeout_s)
        except ToolError as error:
            self.num_tool_errors += 1
            answer = error_text(str(error))
        return self.runner.chat.without_reserved(_bounded(answer, self.runner.max_result_chars))


def first_messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, Any]]:
    """What an episode begins with: the prompt's messages, after a system prompt where they have none."""
    if system_prompt is None or prompt.messages[0]["role"] == "system":
        return list(prompt.messages)
    return [{"role": "system", "content": system_prompt}, *prompt.messages]


def error_text(problem: str) -> str:
    """What the model reads when a call could not be answered."""
    return f"error: {problem}"


def _bounded(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = (limit - len(CUT)) // 2
    return text[:head] + CUT + text[len(text) - (limit - len(CUT) - head) :]
