"""Shaping of searches: whether the passages that a question needs were found. A proxy: give it a small weight."""

from slimrl.agent.retrieval.passages import shown_ids
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.texts import own_messages


class Found:
    """The fraction of the needed passages that the first searches of a trajectory returned, 0 to 1.

    The prompt's metadata has the ids of the needed passages as `supporting`, and the tool shows an id in front of each
    passage. What was found counts once, whatever is found again; what other tools or the policy say does not count.
    Only the first `max_passages` passages count, so that neither many searches nor long answers of the tool earn more.

    Args:
        max_passages: of all searches together, in the order in which they were returned.
        tool: name of the tool that searches.
    """

    def __init__(self, *, max_passages: int = 12, tool: str = "search") -> None:
        if max_passages < 1:
            raise ValueError(f"max_passages: {max_passages} is not at least 1")
        self._max_passages, self._tool = max_passages, tool

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError for a prompt that does not name its passages."""
        _needed(prompt)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError for a prompt that does not name its passages."""
        needed = _needed(prompt)
        own = own_messages(trajectory)
        names = {call.get("id"): call["function"]["name"] for one in own for call in one.get("tool_calls") or ()}
        answers = [
            message["content"] or ""
            for message in own
            if message["role"] == "tool"
            and self._tool == (message.get("name") or names.get(message.get("tool_call_id", "")))
        ]
        returned = [name for answer in answers for name in shown_ids(answer)][: self._max_passages]
        return len(needed & set(returned)) / len(needed)


def _needed(prompt: Prompt) -> set[str]:
    names = prompt.metadata.get("supporting")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError('the metadata has no "supporting", a list of the ids of the passages that the question needs')
    return set(names)
