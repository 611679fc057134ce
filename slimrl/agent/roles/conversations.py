"""The conversations of an episode: one, or one for each role, whose turns are numbered through all of them."""

import copy
from collections.abc import Callable

from slimrl.agent.conversation import Conversation
from slimrl.agent.environment import Message, Observation, Turn
from slimrl.agent.roles.past_conversation import PastConversation
from slimrl.agent.roles.player_conversation import PlayerConversation
from slimrl.data.trajectory import Segment, Status

AnyConversation = Conversation | PlayerConversation


class Conversations:
    """
    Args:
        begin: begins the conversation of the observation's role with its messages.
        first: the start of the episode.
    """

    def __init__(self, begin: Callable[[Observation], AnyConversation], first: Observation) -> None:
        self._begin = begin
        self.by_role = {first.role: begin(first)}
        self.role = first.role
        """Whose turn is next"""
        self.groups = {first.role: first.group}
        self._last_turns: dict[str, Turn] = {}

    @property
    def current(self) -> AnyConversation:
        return self.by_role[self.role]

    @property
    def num_turns(self) -> int:
        return max(one.num_turns for one in self.by_role.values())

    @property
    def num_sampled_tokens(self) -> int:
        return sum(one.num_sampled_tokens for one in self.of_policy)

    @property
    def of_policy(self) -> list[Conversation]:
        others = (PlayerConversation, PastConversation)
        return [one for one in self.by_role.values() if not isinstance(one, others)]

    @property
    def segments(self) -> list[Segment]:
        return [segment for one in self.by_role.values() for segment in one.segments]

    @property
    def messages(self) -> list[Message]:
        """The messages of all roles, one conversation after the other, each with its role as `conversation`."""
        if list(self.by_role) == [""]:
            return self.by_role[""].messages
        return [{**message, "conversation": role} for role, one in self.by_role.items() for message in one.messages]

    def fork(self, number: int) -> "Conversations":
        """Those of a branch of the episode; see Conversation.fork. Of the policy alone, without roles."""
        other = copy.copy(self)
        other.by_role = {role: one.fork(number) for role, one in self.by_role.items() if isinstance(one, Conversation)}
        other._last_turns, other.groups = {**self._last_turns}, {**self.groups}
        return other

    async def sample_turn(self) -> Turn | Status:
        """The next turn of the role whose turn it is; see Conversation.sample_turn."""
        self.current.follow(self.num_turns)
        self._count_others()
        return await self.current.sample_turn()

    def append_observation(self, turn: Turn, observation: Observation) -> bool:
        """Tell a role what its last turn led to, or begin its conversation; its turn is next.

        Args:
            turn: that of the role whose turn it was, which led to the observation.

        Returns:
            Whether there is room for another turn.

        Raises:
            ValueError, LookupError, EnvironmentFailure: the chat template has no words for these messages.
        """
        self._last_turns[self.role] = turn
        self.role = observation.role
        if self.role not in self._last_turns:
            self.by_role[self.role] = self._begin(observation)
            self.groups[self.role] = observation.group
            self._count_others()
            return self.current.has_room
        self._count_others()
        return self.current.append_observation(self._last_turns[self.role], observation.messages)

    def _count_others(self) -> None:
        others = (one.num_tokens for role, one in self.by_role.items() if role != self.role)
        self.current.tokens_of_others = sum(others)
