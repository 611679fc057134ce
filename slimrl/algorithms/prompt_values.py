"""What each prompt is worth as a replacement of one with a zero-variance group (docs/algorithms.md#dynamic-sampling).

After VSPO (arXiv:2512.07478), which draws replacements by difficulty and uncertainty; the formulas here are slimrl's:

1. A prompt has a number of tries n and of successes s, both decayed: n <- decay n + 1, s <- decay s + success.
2. Its success rate is p = (s + 1/2) / (n + 1).
3. Its value is 4 p (1 - p) + uncertainty_weight / sqrt(n + 1): largest at p = 1/2 and for a prompt not tried yet.
4. Replacements are drawn without repetition, with weights proportional to the values and at most `max_weight` times
   their mean.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from slimrl.config.schema.credit import DynamicSamplingConfig


class PromptValues:
    """The results of prompts so far. `tried` is the whole state: [n, s] by prompt id."""

    def __init__(self, settings: DynamicSamplingConfig, tried: dict[str, list[float]]) -> None:
        """Continues from `tried`, which is updated in place."""
        self._settings, self._tried = settings, tried

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Count one try of each prompt, whose success is the mean of its rewards, each limited to 0..1."""
        decay = self._settings.value_decay
        for prompt_id, own in rewards.items():
            count, successes = self._tried.get(prompt_id, (0.0, 0.0))
            success = math.fsum(np.clip(own, 0.0, 1.0).tolist()) / len(own)
            self._tried[prompt_id] = [decay * count + 1, decay * successes + success]

    def value(self, prompt_id: str) -> float:
        count, successes = self._tried.get(prompt_id, (0.0, 0.0))
        rate = (successes + 0.5) / (count + 1)
        return 4 * rate * (1 - rate) + self._settings.uncertainty_weight / math.sqrt(count + 1)

    def weights(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Relative weights of the draw, float64."""
        values = np.array([self.value(prompt_id) for prompt_id in prompt_ids], np.float64)
        return np.minimum(values, self._settings.max_weight * values.mean())

    def draw(self, prompt_ids: Sequence[str], count: int, seed: int) -> list[int]:
        """Positions of `count` different prompts, all if there are no more; the same for the same seed and state.

        Exponential keys (Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003): the smallest of E / weight with
        E exponentially distributed are a draw without replacement.
        """
        if not prompt_ids:
            return []
        keys = -np.log1p(-np.random.default_rng(seed).random(len(prompt_ids))) / self.weights(prompt_ids)
        return np.argsort(keys, kind="stable")[:count].tolist()
