"""The policy's side of an episode: what it is told and what it says, tokens in, tokens out.

1. The chat template renders the first messages once, tools included.
2. The engine continues the tokens until the end of the turn or the end of a tool call.
3. The turn is split into thinking and answer; calls are only looked for in the answer.
4. What the policy is told next is appended as tokens that the loss masks. Where `agent.history` lets the template
   rewrite what the policy said, a new segment begins.
"""

from collections.abc import Sequence

from slimrl.agent.dialogue import Dialogue
from slimrl.agent.environment import UNKNOWN_TOOL, Message, Turn, call_name
from slimrl.agent.parsers import MalformedCall
from slimrl.agent.said_turn import read_turn
from slimrl.agent.tools import shortened
from slimrl.agent.transcript import Transcript
from slimrl.agent.turn_request import TurnRequests
from slimrl.chat.chat_format import CallName, Context
from slimrl.config.schema import AgentConfig, HistoryMode, RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.data.trajectory import Segment, Status


class Conversation:
    """One conversation, which grows.

    Args:
        session_id: of the engine's requests.
        seed: the seeds of the requests are derived from it; None lets the engine choose.

    Raises:
        ValueError: the chat template refuses the messages.
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
    ) -> None:
        self._engine, self._dialogue, self._rollout, self._agent = engine, dialogue, rollout, agent
        self._sampling = sampling
        self._requests = TurnRequests(rollout=rollout, sampling=sampling, session_id=session_id, seed=seed)
        self.messages = list(messages)
        self.num_prompt_messages = len(messages)
        """Those before the first turn"""
        context = dialogue.chat.prompt(self.messages, dialogue.schemas)
        self.transcript = Transcript(context.tokens)
        self._in_thinking = context.opens_thinking
        """Whether the context of the next turn ends within thinking."""
        self._turn_tokens: list[int] = []
        """What the policy has sampled of a turn that goes on."""
        self._finished: list[Segment] = []
        self.num_calls = 0
        self.tool_calls: dict[str, dict[str, int]] = {}
        """`calls`, `errors` and `malformed` of each tool that was called, by its name"""
        self.num_cached_tokens = 0
        self.num_retries = 0

    @property
    def segments(self) -> list[Segment]:
        """All tokens so far."""
        return [*self._finished, self.transcript.segment()]

    async def sample_turn(self) -> Turn | Status:
        """The policy's next turn, or how the trajectory ends because there is none.

        Raises:
            EngineError: the engine refused, ended, or did not answer before the deadline.
        """
        while True:
            room = self._rollout.max_trajectory_tokens - len(self.transcript.tokens)
            wanted = self._sampling.max_new_tokens - len(self._turn_tokens)
            no_turn_left = not self._turn_tokens and self.transcript.num_turns >= self._rollout.max_turns
            if room <= 0 or wanted <= 0 or no_turn_left:
                return Status.truncated
            result = await self._engine.generate(self._request(min(room, wanted)))
            turn = self._record(result)
            if turn is None:
                continue
            if result.finish_reason == "abort":
                return Status.aborted
            return Status.truncated if result.finish_reason == "length" else turn

    def hear(self, turn: Turn, messages: Sequence[Message]) -> bool:
        """Append what the policy is told after a turn.

        Returns:
            Whether there is room for another turn.

        Raises:
            ValueError: the chat template refuses such messages there.
        """
        told = [self._cleaned(message) for message in messages]
        self.messages += told
        tokens, limit = self.transcript.tokens, self._rollout.max_trajectory_tokens
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
        if len(tokens) + len(joined.tokens) >= limit:
            return False
        self.transcript.add_tool_results(joined.tokens)
        self._in_thinking = joined.opens_thinking
        return True

    def _request(self, max_new_tokens: int) -> GenerateRequest:
        turn = self.transcript.num_turns
        return self._requests.make(
            self.transcript.tokens,
            self._dialogue,
            path=(turn, len(self._turn_tokens)) if self._turn_tokens else (turn,),
            max_new_tokens=max_new_tokens,
            experts_from=self.transcript.num_expert_rows,
        )

    def _record(self, result: GenerateResult) -> Turn | None:
        """Keep what was sampled, and read it. None if the turn goes on: it stopped at a call within its thinking."""
        self.transcript.add_turn(result, goes_on=bool(self._turn_tokens))
        self.num_cached_tokens += result.cached_tokens
        self.num_retries += result.num_retries
        self._turn_tokens += result.tokens
        said = read_turn(
            self._turn_tokens,
            self._dialogue,
            in_thinking=self._in_thinking,
            cut_off=result.finish_reason != "stop",
            num_calls=self.num_calls,
        )
        if said is None:
            return None
        self._turn_tokens = []
        self.messages.append(said.message)
        index = self.transcript.num_turns - 1
        return Turn(
            index=index,
            text=said.text,
            reasoning=said.reasoning,
            calls=said.calls,
            finish_reason="stop" if said.can_be_answered else "end",
            is_last=index + 1 >= self._rollout.max_turns,
        )

    def count_calls(self, turn: Turn) -> None:
        """Count the calls of a turn as answered."""
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

    def _cleaned(self, message: Message) -> Message:
        """A message whose text a tokenizer can encode and whose words end no turn; a tool's not too long."""
        # Half of a surrogate pair is no character that a tokenizer could encode.
        text = str(message["content"]).encode("utf-8", "replace").decode()
        if message["role"] == "tool":
            text = shortened(text, self._agent.max_result_chars)
        return {**message, "content": self._dialogue.chat.template.escape(text)}

    def _written_context(self) -> Context | None:
        """The conversation so far as the template writes it; None if the sampled tokens are kept."""
        if self._agent.history is HistoryMode.keep:
            return None
        try:
            return self._dialogue.chat.prompt(self.messages, self._dialogue.schemas)
        except ValueError:
            return None  # it has no words for a malformed call, which then stays as it was sampled
