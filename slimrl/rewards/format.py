"""Rewards for the form of what the policy says: 1.0 if all of it has the form, else 0.0.

They say nothing of the content: give them a small weight. Thinking and calls are not part of the texts.
"""

from collections.abc import Sequence
from enum import Enum

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.patterns import compiled, matches
from slimrl.rewards.texts import last_text, own_texts


class Texts(str, Enum):
    """The texts of a trajectory that must have the form: the policy's last one, or every one."""

    last = "last"
    every = "every"


class Pattern:
    """Whether texts match a regular expression of the package `regex`, as a whole and without white space around them.

    Args:
        pattern: for example `"(?s).*Answer: \\\\d+"`.
        texts: `last` or `every`.
    """

    def __init__(self, *, pattern: str, texts: str = "last") -> None:
        self._pattern, self._texts = compiled(pattern, "pattern"), _which(texts)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        given = _given(trajectory, self._texts)
        return float(bool(given) and all(matches(self._pattern, text.strip()) for text in given))


class Tags:
    """Whether texts are a sequence of tags, each once, closed, with something in it, and with nothing between them.

    Args:
        names: such as `[plan, answer]` for `<plan>...</plan><answer>...</answer>`.
        texts: `last` or `every`.
    """

    def __init__(self, *, names: Sequence[str], texts: str = "last") -> None:
        if not names or isinstance(names, str) or len(set(names)) < len(names):
            raise ValueError(f"names: {names!r} is no list of different tags such as [plan, answer]")
        self._names, self._texts = list(names), _which(texts)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        given = _given(trajectory, self._texts)
        return float(bool(given) and all(map(self._fits, given)))

    def _fits(self, text: str) -> bool:
        for name in self._names:
            before, opening, rest = text.partition(f"<{name}>")
            within, closing, text = rest.partition(f"</{name}>")
            if before.strip() or not opening or not closing or not within.strip():
                return False
            if any(f"<{other}>" in within or f"</{other}>" in within for other in self._names):
                return False
        return not text.strip()


def _which(texts: str) -> Texts:
    try:
        return Texts(texts)
    except ValueError:
        raise ValueError(f"texts: {texts!r} is neither last nor every") from None


def _given(trajectory: Trajectory, texts: Texts) -> list[str]:
    """The texts that must have the form; none if the last message is not the policy's."""
    last = last_text(trajectory)
    if last is None:
        return []
    return [last] if texts is Texts.last else own_texts(trajectory)
