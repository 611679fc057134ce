"""The conversation of a role that a player plays: messages without tokens."""

import json
from collections.abc import Sequence
from typing import Any

from slimrl.agent.environment import EnvironmentFailure, Message, Turn
from slimrl.agent.roles.player import Player
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.base.seeds import derive_seed
from slimrl.base.threads import call_task_code
from slimrl.data.trajectory import Segment


class PlayerConversation:
    """
    Args:
        name: of the player, for messages.
        max_turns: of the episode.
        seed: the seeds of the turns are derived from it.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        name: str,
        player: Player,
        max_turns: int,
        seed: int,
    ) -> None:
        self.messages, self.tools = list(messages), tools
        self.num_prompt_messages = len(messages)
        self._name, self._player, self._max_turns, self._seed = name, player, max_turns, seed
        self._num_turns = self.tokens_of_others = 0

    @property
    def segments(self) -> list[Segment]:
        """None: what a player says is no token of the policy."""
        return []

    @property
    def num_turns(self) -> int:
        return self._num_turns

    @property
    def num_tokens(self) -> int:
        return 0

    @property
    def has_room(self) -> bool:
        return True

    def follow(self, num_turns: int) -> None:
        """Number the next turn after so many of all roles."""
        self._num_turns = num_turns

    async def sample_turn(self) -> Turn:
        """Raises EnvironmentFailure: the player raised, or said something else than a turn."""
        index = self._num_turns
        try:
            seed = derive_seed(self._seed, "player", index)
            said = await call_task_code(self._player, list(self.messages), tools=self.tools, seed=seed)
            message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else dict(said)
            calls = tuple(map(_call, message.get("tool_calls") or ()))
        except EnvironmentFailure:
            raise
        except Exception as error:
            # A script of the task's own may raise anything.
            raise EnvironmentFailure(f"the player {self._name} raised {error!r}") from error
        self._num_turns += 1
        self.messages.append(message)
        return Turn(
            index=index,
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content"),
            calls=calls,
            is_last=self._num_turns >= self._max_turns,
        )

    def count_calls(self, turn: Turn) -> None:
        """Nothing: counts are those of the policy."""

    def count_errors(self, names: Sequence[str]) -> None:
        """Nothing, too."""

    def append_observation(self, turn: Turn, messages: Sequence[Message]) -> bool:
        """Append what the player is told after a turn; there is always room."""
        self.messages += messages
        return True


def _call(call: dict[str, Any]) -> ToolCall | MalformedCall:
    function = call["function"]
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return MalformedCall(
            problem=f"the arguments are no JSON: {error}", name=function["name"], id=call.get("id", "")
        )
    return ToolCall(name=function["name"], arguments=parsed, id=call.get("id", ""))
