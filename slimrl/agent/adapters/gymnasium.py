"""Environments of Gymnasium whose actions are words or numbers (docs/agents.md#gymnasium).

Their observations become text, the policy's answers become actions. Gymnasium is synchronous, so each call of it runs
in a thread.
"""

import functools
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from PIL import Image

from slimrl.agent.adapters.first_observation import first_observation, reset_seed, user
from slimrl.agent.environment import Observation, Turn
from slimrl.base.extras import extra
from slimrl.base.threads import OwnThread
from slimrl.config.import_path import resolve
from slimrl.data.prompt import Prompt

if TYPE_CHECKING:
    from gymnasium import Env

_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m")
"""What `ansi` marks by its colour, such as the place of a player"""


class GymnasiumEnvironment:
    """The prompt's metadata may have `seed`, with which all its trajectories begin alike, and `reset_options`.

    Args:
        id: of the environment, as `gymnasium.make` takes it.
        make: further arguments of `gymnasium.make`, such as `max_episode_steps` or `render_mode`. With `render_mode:
            rgb_array` each state is kept as an image for those who read the conversations.
        actions: names of the actions of a Discrete space, the lowest first; empty for their numbers.
        render: import path of a function (observation, env) -> text. Without it a text is shown as it is, anything else
            as `env.render()` draws it with `render_mode: ansi`, coloured parts in brackets, or as `str` writes it.
        parse: import path of a function (text, env) -> action, which raises ValueError for a text that is none. Without
            it, the last action that the text names, or all of the text in a Text space.
        state: import path of a function (observation, env) -> text that is equal for equal states, for GiGPO. Without
            it, the text that the policy is shown.
    """

    def __init__(
        self, id: str, make: dict[str, Any] | None = None, actions: list[str] | None = None, render: str = "",
        parse: str = "", state: str = "",
    ) -> None:  # fmt: skip
        self._id, self._make, self._actions = id, make or {}, actions or []
        self._render_path, self._parse_path, self._state_path = render, parse, state
        self._thread: OwnThread | None = None
        """Runs all calls, since some libraries are bound to the thread that made them; None before the start"""
        self._env: Env | None = None
        self._shown = self._state = ""
        """The last observation as text, and the state that it came from"""
        self._image: bytes | None = None
        """The same as a PNG, if the environment draws it"""
        self._counts = {"steps": 0, "invalid_actions": 0}

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Make the environment once.

        Raises:
            ValueError: Gymnasium is absent, it cannot make the environment, or its actions need `parse`.
        """
        made = cls(**arguments)
        made._open()
        assert made._env is not None
        made._env.close()

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._thread = OwnThread()
        text = await self._thread.run(functools.partial(self._reset, prompt, seed))
        return first_observation(prompt, text, state_id=self._state, image=self._image)

    async def step(self, turn: Turn) -> Observation:
        assert self._thread is not None
        return await self._thread.run(functools.partial(self._step, turn.text))

    async def close(self) -> None:
        if self._thread is None:
            return
        try:
            if self._env is not None:
                await self._thread.run(self._env.close)
        finally:
            self._thread.end()

    def _open(self) -> None:
        gymnasium = extra("gymnasium")
        try:
            self._env = gymnasium.make(self._id, **self._make)
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise ValueError(f"gymnasium.make({self._id!r}): {error}") from error
        self._render = resolve(self._render_path) if self._render_path else _text
        self._state_of = resolve(self._state_path) if self._state_path else None
        self._parse = resolve(self._parse_path) if self._parse_path else self._parser(self._env)

    def _parser(self, env: "Env") -> Callable[[str, Any], Any]:
        """Raises ValueError: there is none for such a space, or it has another number of actions."""
        spaces = extra("gymnasium").spaces
        space = env.action_space
        if isinstance(space, spaces.Text):
            return _text_action
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"{self._id}: actions of {space} need `parse` in agent.environment_args")
        numbers = range(int(space.start), int(space.start + space.n))
        if self._actions and len(self._actions) != len(numbers):
            raise ValueError(f"{self._id} has {len(numbers)} actions, and `actions` names {len(self._actions)}")
        return functools.partial(_named_action, dict(zip(self._actions or map(str, numbers), numbers, strict=True)))

    def _reset(self, prompt: Prompt, seed: int) -> str:
        self._open()
        assert self._env is not None
        options = prompt.metadata.get("reset_options")
        observation, _ = self._env.reset(seed=reset_seed(prompt, seed), options=options)
        self._look(observation)
        return self._shown

    def _look(self, observation: Any) -> None:
        assert self._env is not None
        self._shown = self._render(observation, self._env)
        self._state = self._shown if self._state_of is None else self._state_of(observation, self._env)
        if self._env.render_mode == "rgb_array":
            self._image = _png(self._env.render())

    def _step(self, text: str) -> Observation:
        assert self._env is not None
        try:
            action = self._parse(text, self._env)
            if not self._env.action_space.contains(action):
                raise ValueError(f"{action!r} is no action")
        except ValueError as error:
            self._counts["invalid_actions"] += 1
            return Observation(
                messages=[user(f"Invalid action: {error}")],
                reward=0.0,
                state_id=self._state,
                metrics=dict(self._counts),
            )
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._counts["steps"] += 1
        self._look(observation)
        return Observation(
            messages=[user(self._shown)],
            reward=float(reward),
            done=bool(terminated),
            truncated=bool(truncated and not terminated),
            state_id=self._state,
            image=self._image,
            metrics=dict(self._counts),
        )


def _png(pixels: Any) -> bytes:
    """
    Args:
        pixels: uint8 [height, width, 3].
    """
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def _text(observation: Any, env: "Env") -> str:
    if isinstance(observation, str):
        return observation
    return _COLOURED.sub(r"[\1]", str(env.render())) if env.render_mode == "ansi" else str(observation)


def _text_action(text: str, env: "Env") -> str:
    return text.strip()


def _named_action(names: dict[str, int], text: str, env: "Env") -> int:
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{known})(?!\w)", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"name one of {', '.join(names)}")
    return {name.lower(): number for name, number in names.items()}[found[-1].lower()]
