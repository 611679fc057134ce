"""An episode in a game of text: each turn of the policy is a command."""

import hashlib
from typing import Any

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.data.prompt import Prompt

COMMANDS = "Commands: "
"""Start of the line that lists the admissible commands, separated by `; `"""
SEPARATOR = "; "


class TextGame:
    """What the environments share; a subclass opens the game and calls `_begin`."""

    def __init__(self, show_commands: bool) -> None:
        self._show_commands = show_commands
        self._game: Any = None
        """A `textworld.Environment`, or what has its method `step`"""
        self._state: Any = None
        """The `textworld.GameState` after the last command, or what has its fields"""
        self._max_score = 1
        self._score: float = 0

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        raise NotImplementedError

    def step(self, turn: Turn) -> Observation:
        """The game's answer to the turn's last line, and the share of the score that it gained."""
        command = command_of(turn.text)
        refusal = self._refusal(command)
        if refusal:
            return self._observation(refusal, gained=0)
        self._state, score, done = self._game.step(self._spelled(command))
        gained, self._score = score - self._score, score
        return self._observation(self._shown(self._state.feedback), gained=gained, done=done)

    def _begin(self, prompt: Prompt, text: str, max_score: int = 1) -> Observation:
        """What the policy is told first: the prompt's messages, of which the last one goes on with the text."""
        self._max_score = max_score
        *others, last = prompt.messages
        content = f"{last['content']}\n{self._with_commands(text)}"
        return Observation(messages=[*others, {**last, "content": content}], state_id=self._state_id())

    def _observation(self, text: str, *, gained: float, done: bool = False) -> Observation:
        messages: list[Message] = [] if done else [{"role": "user", "content": self._with_commands(text)}]
        return Observation(
            messages=messages,
            reward=gained / self._max_score,
            done=done,
            state_id=self._state_id(),
            metrics={"success": float(bool(self._state.won)), "score": self._score / self._max_score},
        )

    def _with_commands(self, text: str) -> str:
        if not self._show_commands:
            return text
        return f"{text}\n{COMMANDS}{SEPARATOR.join(filter(self._is_listed, self._state.admissible_commands))}"

    def _state_id(self) -> str:
        """Digest of the facts and the score: what was paid is not paid again, so equal facts may be worth less."""
        facts = sorted(str(fact) for fact in self._state.facts if self._counts(fact))
        return hashlib.sha256("\n".join([f"{self._score:g}", *facts]).encode()).hexdigest()[:16]

    def _refusal(self, command: str) -> str:
        """The answer to a command that the game must not see; empty for all others."""
        return ""

    def _spelled(self, command: str) -> str:
        """The command as the game reads it."""
        return command

    def _shown(self, feedback: str) -> str:
        """The game's answer as the policy is told it."""
        return feedback.strip()

    def _is_listed(self, command: str) -> bool:
        """Whether the list of commands has it."""
        return True

    def _counts(self, fact: Any) -> bool:
        """Whether two states that differ in it are different."""
        return True


def check_flags(**flags: object) -> None:
    """Raises ValueError: an argument is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: {value!r} is not a bool.")


def command_of(text: str) -> str:
    """The last line of a turn that is not empty, without a prompt's `>` and a full stop."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[-1].strip().lstrip(">").rstrip(".").split()) if lines else ""
