"""A server written with OpenEnv, for tests: `python openenv_word_server.py PORT SESSIONS`.

It runs where OpenEnv is installed. A word is guessed letter by letter: `letter` is the action, `shown` and `left` are
the observation.
"""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

WORDS = ("apple", "berry", "cherry", "grape")


class LetterAction(Action):
    """Guess a letter."""

    letter: str = Field(max_length=1)


class WordObservation(Observation):
    shown: str
    left: int


class WordEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, word="", **kwargs):
        self.word, self.guessed, self.left = word or WORDS[seed % len(WORDS)], set(), 5
        return self._seen(None)

    def step(self, action, timeout_s=None, **kwargs):
        if action.letter == "!":
            raise RuntimeError("the dictionary burns")
        self.guessed.add(action.letter)
        right = action.letter in self.word
        self.left -= not right
        return self._seen(float(right))

    @property
    def state(self):
        return State()

    def _seen(self, reward):
        shown = "".join(letter if letter in self.guessed else "_" for letter in self.word)
        return WordObservation(shown=shown, left=self.left, reward=reward, done="_" not in shown or not self.left)


if __name__ == "__main__":
    app = create_fastapi_app(WordEnvironment, LetterAction, WordObservation, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
