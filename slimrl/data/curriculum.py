"""The order of training through files of rising difficulty: the next begins when the present one is mostly solved, and
the one before comes back when it is hardly solved.

1. A ladder is a list of training files, the easiest first. Its present level is the first file at the start.
2. Prompts come from the files as in a Mixture. Within a ladder the file of the present level has its weight, those of
   passed levels `passed_weight` times theirs, later ones none.
3. The success rate of a group is the fraction of its trajectories with the reward `pass_reward` or more. Groups count
   that are of the present level, also if they began before it was the present one.
4. When the mean over the last `window` groups, all since the level began, is `raise_at` or more, the next level begins;
   when it is `lower_at` or less, the level before begins again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from slimrl.config.schema.data import CurriculumConfig
from slimrl.data.mixture import Mixture
from slimrl.data.prompt import Prompt

_ROUNDING = 1e-9
"""Error of a reward from which a penalty was taken away again"""


class Curriculum(Mixture[Prompt]):
    """Its state is that of a Mixture, and the level and the last success rates of each ladder."""

    def __init__(
        self,
        files: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        settings: CurriculumConfig,
        *,
        pass_reward: float,
        seed: int,
        shuffle: bool,
    ) -> None:
        """
        Args:
            files: prompts by the file's name.
            weights: of the same names, greater than 0; empty for equal ones.
            pass_reward: smallest reward of a trajectory that succeeds.
        """
        self._base = dict(weights) or dict.fromkeys(files, 1.0)
        super().__init__(files, self._base, seed=seed, shuffle=shuffle)
        self._settings, self._pass_reward = settings, pass_reward
        self._files_of = {prompt.prompt_id: name for name, prompts in files.items() for prompt in prompts}
        self._ladder_of = {name: ladder for ladder, names in settings.levels.items() for name in names}
        self._level = dict.fromkeys(settings.levels, 0)
        self._rates = {ladder: self._window() for ladder in settings.levels}
        self._weigh()

    def count(self, prompt_id: str, rewards: Sequence[float]) -> None:
        """Count a group that has ended.

        Args:
            rewards: of its trajectories that did not fail, before penalties for their length; without one the group
                does not count.
        """
        name = self._files_of[prompt_id]
        ladder = self._ladder_of.get(name)
        if ladder is None or not rewards or name != self._settings.levels[ladder][self._level[ladder]]:
            return
        rates = self._rates[ladder]
        rates.append(sum(reward >= self._pass_reward - _ROUNDING for reward in rewards) / len(rewards))
        if len(rates) == rates.maxlen and (step := self._step(ladder, sum(rates) / len(rates))):
            self._level[ladder] += step
            self._rates[ladder] = self._window()
            self._weigh()

    def _step(self, ladder: str, rate: float) -> int:
        """How far a success rate moves the level of a ladder: 1, 0 or -1."""
        level, settings = self._level[ladder], self._settings
        if rate >= settings.raise_at and level + 1 < len(settings.levels[ladder]):
            return 1
        return -1 if settings.lower_at is not None and rate <= settings.lower_at and level else 0

    def metrics(self) -> dict[str, float]:
        """`data/level/<ladder>`, from 0, and `data/level_success/<ladder>`, which is missing before the first group."""
        levels = {f"data/level/{ladder}": float(level) for ladder, level in self._level.items()}
        return levels | {
            f"data/level_success/{ladder}": sum(rates) / len(rates) for ladder, rates in self._rates.items() if rates
        }

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        ladders = {
            ladder: {"files": self._settings.levels[ladder][: level + 1], "rates": list(self._rates[ladder])}
            for ladder, level in self._level.items()
        }
        return {**super().state(), "ladders": ladders}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Settings may have changed since, and the order of levels above the present one.

        Raises:
            ValueError: as Mixture.restore; the state has other ladders, or other files up to a present level than now.
        """
        super().restore(state)
        ladders = state.get("ladders", {})
        if ladders.keys() != self._level.keys():
            before = ", ".join(ladders) or "a run without data.curriculum"
            raise ValueError(
                f"the saved levels are of {before}, but data.curriculum.levels has {', '.join(self._level)}"
            )
        for ladder, saved in ladders.items():
            begun = saved["files"]
            if self._settings.levels[ladder][: len(begun)] != begun:
                raise ValueError(
                    f"data.curriculum.levels.{ladder} must begin with the levels that the run has begun: "
                    f"{', '.join(begun)}. It has {', '.join(self._settings.levels[ladder])}; only later ones may change"
                )
            self._level[ladder] = len(begun) - 1
            self._rates[ladder] = self._window(saved["rates"])
        self._weigh()

    def _window(self, rates: Sequence[float] = ()) -> deque[float]:
        return deque(rates, maxlen=self._settings.window)

    def _weigh(self) -> None:
        weights = dict(self._base)
        for ladder, names in self._settings.levels.items():
            for number, name in enumerate(names):
                if number != (level := self._level[ladder]):
                    weights[name] *= self._settings.passed_weight if number < level else 0.0
        self.weigh(weights)
