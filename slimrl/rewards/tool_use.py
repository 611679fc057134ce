"""Shaping of how tools are used: whether calls succeed, whether their results are used, whether a plan is kept.

The measures are slimrl's own. All are proxies: give them small weights, and add a verified part.
"""

import json
import re
from collections.abc import Sequence

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.texts import check_tag, only_tagged, own_messages

_WORD = re.compile(r"\w+(?:\.\d+)?")
_STEP = re.compile(r"\s*(?:\d{1,3}[.)]|[-*])\s+`?(?P<tool>[\w.-]*\w)")
MIN_LETTERS = 4
"""Fewest letters of a word that may show the use of a result; numbers may have any length."""


class ToolSuccess:
    """1 less `cost` for each call that was malformed or answered with an error, at least 0; 0 without a good call.

    Further good calls do not earn more, nor make up for a bad one.
    """

    def __init__(self, *, cost: float = 0.25) -> None:
        if not 0 < cost <= 1:
            raise ValueError(f"cost: {cost:g} is not above 0 and at most 1")
        self._cost = cost

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        bad = trajectory.metadata["num_tool_errors"]
        if trajectory.metadata["num_tool_calls"] <= bad:
            return 0.0
        return max(0.0, 1 - self._cost * bad)


class ResultUse:
    """The fraction of tools' results that the policy uses: a word of the result that is new in the conversation stands
    in the policy's later texts or calls.

    Words that the policy itself gave to the tool are not new, and passages of `copied` words or more that are the
    result's own are left out of the later texts: an echo and a copy are no use. Results without a new word do not
    count; 0 without any result that counts.
    """

    def __init__(self, *, copied: int = 12) -> None:
        if copied < 2:
            raise ValueError(f"copied: {copied} is less than 2")
        self._copied = copied

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        own = own_messages(trajectory)
        known = {word for message in prompt.messages for word in _words(str(message["content"]))}
        used: list[bool] = []
        for place, message in enumerate(own):
            words = _words(str(message["content"] or ""))
            if message["role"] == "tool":
                new = {word for word in words if len(word) >= MIN_LETTERS or word[0].isdigit()} - known
                if new:
                    later = [_said(one) for one in own[place + 1 :] if one["role"] == "assistant"]
                    used.append(any(new & set(_without_copies(said, words, self._copied)) for said in later))
            known.update(words if message["role"] == "tool" else _said(message))
        return sum(used) / len(used) if used else 0.0


class PlanConsistency:
    """How far the calls follow the plan: 2 * LCS / (steps + calls), where LCS is the longest common subsequence of the
    tools' names in both (the F-measure of ROUGE-L, Lin 2004, over names). 0 without a plan or calls.

    The plan stands in the first turn, once, between `<tag>` and `</tag>`; each step is a line `1. tool: why`.

    Args:
        tag: name of the tag.
    """

    def __init__(self, *, tag: str = "plan") -> None:
        check_tag(tag, "plan")
        self._tag = tag

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        turns = [message for message in own_messages(trajectory) if message["role"] == "assistant"]
        told = only_tagged(turns[0]["content"] or "", self._tag) if turns else None
        plan = [step["tool"] for line in (told or "").splitlines() if (step := _STEP.match(line))]
        calls = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls") or ()]
        return 2 * _common(plan, calls) / (len(plan) + len(calls)) if plan and calls else 0.0


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _said(message: dict) -> list[str]:
    """Words of a message's text and of its calls' arguments."""
    calls = json.dumps([call["function"]["arguments"] for call in message.get("tool_calls") or ()], ensure_ascii=False)
    return _words(f"{message['content'] or ''} {calls}")


def _without_copies(said: Sequence[str], result: Sequence[str], length: int) -> list[str]:
    """The words that are in no passage of so many words which the result has too."""
    passages = {tuple(result[at : at + length]) for at in range(len(result) - length + 1)}
    copied: set[int] = set()
    for at in range(len(said) - length + 1):
        if tuple(said[at : at + length]) in passages:
            copied.update(range(at, at + length))
    return [word for place, word in enumerate(said) if place not in copied]


def _common(plan: Sequence[str], calls: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    before = [0] * (len(calls) + 1)
    for step in plan:
        now = [0]
        for diagonal, above, call in zip(before, before[1:], calls, strict=False):
            now.append(diagonal + 1 if step == call else max(above, now[-1]))
        before = now
    return before[-1]
