"""The conversation of a role that an older version of the policy plays."""

from slimrl.agent.conversation import Conversation
from slimrl.data.trajectory import Segment


class PastConversation(Conversation):
    """A Conversation on the engines of older versions. It is told, samples and is limited as if the policy played the
    role, but none of its tokens are the policy's."""

    @property
    def segments(self) -> list[Segment]:
        return []

    @property
    def version(self) -> int | None:
        """The step whose weights sampled the newest token, as the engine says; None before the first one."""
        segments = [*self._finished, self.transcript.segment()]
        sampled = [segment.weight_versions[segment.loss_mask] for segment in segments if segment.loss_mask.any()]
        return int(sampled[-1][-1]) if sampled else None
