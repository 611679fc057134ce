"""The prompts of groups in the order in which they begin: that of the data, and for refills that of their values."""

from collections.abc import Collection, Sequence
from typing import Any

from slimrl.algorithms.advantages import groups_of
from slimrl.algorithms.prompt_values import PromptValues
from slimrl.algorithms.shaping import unpenalized_reward
from slimrl.base.seeds import derive_seed
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.curriculum import Curriculum
from slimrl.data.mixture import DataOrder
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory


class PromptSource:
    """Its state is the position in the data and the results of prompts; the latter are part of the run's state."""

    def __init__(
        self, recipe: Recipe, data: DataOrder[Prompt], prompts: Sequence[Prompt], tried: dict[str, list[float]]
    ) -> None:
        """
        Args:
            prompts: all prompts of the training data that may be chosen.
            tried: results of prompts so far, see PromptValues; changed by `count`.
        """
        self._seed, self._data, self._prompts = recipe.seed, data, prompts
        self._overlong = recipe.algorithm.overlong
        settings = recipe.algorithm.dynamic_sampling
        self._values = PromptValues(settings, tried) if settings.refill is RefillMode.value else None

    def take(self, count: int) -> list[Prompt]:
        """The next prompts of the data."""
        return self._data.take(count)

    def refill(self, count: int, step: int, number: int, used: Collection[str]) -> list[Prompt]:
        """The prompts of refill `number` of a step, fewer if there are no more.

        Args:
            used: ids of the step's prompts so far, which values do not choose again.
        """
        if self._values is None:
            return self.take(count)
        others = [prompt for prompt in self._prompts if prompt.prompt_id not in used]
        seed = derive_seed(self._seed, "refill", step, number)
        return [others[i] for i in self._values.draw([prompt.prompt_id for prompt in others], count, seed)]

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the shaped results of a step's prompts, where values choose any or there is a curriculum.

        A level is solved by right answers, however long: the penalty of `algorithm.overlong` does not count there.
        """
        scored = [t for t in trajectories if t.status is not Status.failed]
        groups = groups_of([t.group_id for t in scored])
        rewards = {name: [scored[i].reward for i in members] for name, members in groups.items()}
        if self._values is not None:
            self._values.update(rewards)
        if isinstance(self._data, Curriculum):
            for prompt_id, members in groups.items():
                self._data.count(prompt_id, [unpenalized_reward(scored[i], self._overlong) for i in members])

    def metrics(self) -> dict[str, float]:
        """Metrics of the curriculum, if there is one."""
        return self._data.metrics() if isinstance(self._data, Curriculum) else {}

    def state(self) -> dict[str, Any]:
        """Position in the data."""
        return self._data.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._data.restore(state)
