"""Scores of prompts, and how far their mean may be from that of all prompts like them.

Letters: P prompts, B resamples at a time, M measures.
"""

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np

from slimrl.config.schema.data import EvalConfig
from slimrl.data.trajectory import Status
from slimrl.evaluation.item import Item

RESAMPLES = 10_000
"""Number of resamples of the bootstrap. The ends of the interval then vary by about 1% of its width with the seed."""

CONFIDENCE = 0.95

_DRAWS_AT_ONCE = 1 << 20
"""Number of prompts drawn at a time, which bounds the memory."""


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k of the samples passes: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    The mean over prompts is an unbiased estimate of pass@k. 1 <= k <= n.
    """
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def prompt_scores(items: Sequence[Item], settings: EvalConfig) -> dict[str, np.ndarray]:
    """What is measured of one set, float64 [P] each, by the last part of its metric's name.

    `reward_mean` is the mean of a prompt's samples; `accuracy` is the same, and only there if every reward is 0 or 1;
    `parts/<part>` is the mean of a named part of the reward before its cap and weight, where there are several;
    `pass_at_<k>` is for each k of `eval.pass_at`.

    Args:
        items: of one set; prompts are in the order of their first item.
    """
    groups = items_by_prompt(items)
    scores = {"reward_mean": np.array([np.mean([item.reward for item in group]) for group in groups.values()])}
    if all(item.reward in (0.0, 1.0) for item in items):
        scores["accuracy"] = scores["reward_mean"]
    parts = sorted({name for item in items for name in item.rewards})
    for part in parts if len(parts) > 1 else ():
        means = [np.mean([item.rewards.get(part, 0.0) for item in group]) for group in groups.values()]
        scores[f"parts/{part}"] = np.array(means)
    for k in settings.pass_at:
        passed = [sum(_passes(item, settings) for item in group) for group in groups.values()]
        pairs = zip(groups.values(), passed, strict=True)
        scores[f"pass_at_{k}"] = np.array([pass_at(len(group), count, k) for group, count in pairs])
    return scores


def items_by_prompt(items: Sequence[Item]) -> dict[str, list[Item]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.prompt_id, []).append(item)
    return groups


def eval_metrics(items: Sequence[Item], settings: EvalConfig) -> dict[str, float]:
    """Metrics of one set for metrics.jsonl: each mean over prompts, and of more than one prompt its standard error."""
    scores, prefix = prompt_scores(items, settings), f"eval/{items[0].set}"
    metrics = {f"{prefix}/{name}": float(np.mean(values_P)) for name, values_P in scores.items()}
    for name, values_P in scores.items():
        if len(values_P) > 1:
            metrics[f"{prefix}/stderr/{name}"] = float(np.std(values_P, ddof=1) / np.sqrt(len(values_P)))
    return metrics


def intervals(scores: Mapping[str, np.ndarray], seed: int) -> dict[str, tuple[float, float]]:
    """Ends of the interval of each mean: percentiles of the means of resampled prompts (Efron 1979).

    Every measure is computed on the same resamples.

    Args:
        scores: float [P] each, of the same prompts.
    """
    values_PM = np.stack(list(scores.values()), axis=1)
    num_prompts = len(values_PM)
    rng, block = np.random.default_rng(seed), max(1, _DRAWS_AT_ONCE // num_prompts)
    means = []
    for start in range(0, RESAMPLES, block):
        drawn_BP = rng.integers(num_prompts, size=(min(block, RESAMPLES - start), num_prompts))
        means.append(values_PM[drawn_BP].mean(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(scores, low_M, high_M, strict=True)}


def _passes(item: Item, settings: EvalConfig) -> bool:
    return item.status is not Status.failed and item.reward >= settings.pass_reward
