"""Two evaluations of the same prompts, compared prompt by prompt.

1. Each prompt has a difference, its score in B minus its score in A, whatever the number of samples there.
2. The mean difference has the interval of its bootstrap over prompts. What is hard for both cancels, so the interval is
   narrower than those of the two means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.data import EvalConfig
from slimrl.config.show import changed_settings
from slimrl.evaluation.estimates import intervals, items_by_prompt, prompt_scores
from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.item import Item
from slimrl.evaluation.items import read_items
from slimrl.evaluation.record import read_record

EQUAL = 1e-9
"""Scores that differ by less are equal: the same rewards in another order may add up to other last bits."""
ALL_SETS = "all sets"
Scores = dict[str, np.ndarray]
"""Measure -> float64 [2, P], the scores of each prompt in A and in B"""


@dataclass(frozen=True, kw_only=True)
class PairedMeasure:
    a: float
    b: float
    difference: float
    """Difference of the means, b - a."""
    interval: tuple[float, float]
    """Ends of the difference's 95% interval."""
    better: int
    """Number of prompts with a higher score in B."""
    worse: int


@dataclass(frozen=True, kw_only=True)
class SetComparison:
    name: str
    num_prompts: int
    measures: dict[str, PairedMeasure]
    """Comparison of each measure of `prompt_scores` that both evaluations have, by its name."""


def compare(folder_a: EvalFolder, folder_b: EvalFolder) -> list[SetComparison]:
    """The sets that both evaluations have, and all their prompts together if there are several.

    Raises:
        ValueError: one of them is no complete evaluation, or they cannot be paired: no set in common, other prompts,
            another reward.
    """
    a, b = read_complete(folder_a), read_complete(folder_b)
    record_a, record_b = read_record(folder_a.record), read_record(folder_b.record)
    both = f"{folder_a.path} and {folder_b.path}"
    reward_a, reward_b = ({"reward": record["settings"]["reward"]} for record in (record_a, record_b))
    if changes := list(changed_settings(reward_a, reward_b)):
        raise ValueError(f"{both} have other rewards, which cannot be compared: {'; '.join(changes)}.")
    if record_a["pass_reward"] != record_b["pass_reward"]:
        raise ValueError(
            f"{both} have another eval.pass_reward: {record_a['pass_reward']:g} -> {record_b['pass_reward']:g}. "
            "Evaluate one of them again with that of the other and the same --out, which samples nothing anew."
        )
    names = [name for name in record_a["sets"] if name in record_b["sets"]]
    if not names:
        only = (", ".join(record["sets"]) for record in (record_a, record_b))
        raise ValueError(f"{both} have no set in common: {' -> '.join(only)}.")
    for name in names:
        _check_prompts(name, a[name], b[name], record_a["sets"][name], record_b["sets"][name], both)
    settings = EvalConfig(
        pass_at=[k for k in record_a["pass_at"] if k in record_b["pass_at"]], pass_reward=record_a["pass_reward"]
    )
    seed = int(record_a["settings"]["seed"])
    scores = {name: _paired(a[name], b[name], settings) for name in names}
    if len(names) > 1:
        scores[ALL_SETS] = _together(list(scores.values()))
    return [_compare_scores(name, of_set, seed) for name, of_set in scores.items()]


def read_complete(folder: EvalFolder) -> dict[str, list[Item]]:
    """The items of each set of a complete evaluation.

    Raises:
        ValueError: it is not complete, or no evaluation.
    """
    if not folder.record.is_file():
        raise ValueError(f"{folder.path}: not an evaluation; give the --out of a `slimrl eval`.")
    if not folder.summary.is_file():
        raise ValueError(f"{folder.path}: the evaluation is not complete; the same `slimrl eval` continues it.")
    sets: dict[str, list[Item]] = {}
    for item in read_items(folder.items):
        sets.setdefault(item.set, []).append(item)
    return sets


def _check_prompts(
    name: str,
    a: Sequence[Item],
    b: Sequence[Item],
    record_a: Mapping[str, Any],
    record_b: Mapping[str, Any],
    both: str,
) -> None:
    ids_a, ids_b = (items_by_prompt(items).keys() for items in (a, b))
    if lone := sorted(ids_a ^ ids_b):
        raise ValueError(
            f"{both}: {len(lone)} prompts of {name} are in one alone, such as {lone[0]}. "
            "Evaluate both on the same file."
        )
    if record_a["sha256"] != record_b["sha256"]:
        raise ValueError(f"{both}: prompts of {name} have the same ids and other texts or labels.")


def _paired(a: Sequence[Item], b: Sequence[Item], settings: EvalConfig) -> Scores:
    scores_a, scores_b = prompt_scores(a, settings), prompt_scores(b, settings)
    place_b = {prompt_id: place for place, prompt_id in enumerate(items_by_prompt(b))}
    order = [place_b[prompt_id] for prompt_id in items_by_prompt(a)]
    return {name: np.stack([scores_a[name], scores_b[name][order]]) for name in scores_a if name in scores_b}


def _together(sets: Sequence[Scores]) -> Scores:
    """The prompts of all sets as those of one, with the measures that all of them have."""
    shared = [name for name in sets[0] if all(name in scores for scores in sets)]
    return {name: np.concatenate([scores[name] for scores in sets], axis=1) for name in shared}


def _compare_scores(name: str, scores: Scores, seed: int) -> SetComparison:
    gaps = {measure: b_P - a_P for measure, (a_P, b_P) in scores.items()}
    ends = intervals(gaps, derive_seed(seed, "bootstrap", name))
    return SetComparison(
        name=name,
        num_prompts=len(next(iter(gaps.values()))),
        measures={
            measure: PairedMeasure(
                a=float(np.mean(scores[measure][0])),
                b=float(np.mean(scores[measure][1])),
                difference=float(np.mean(gap_P)),
                interval=ends[measure],
                better=int((gap_P > EQUAL).sum()),
                worse=int((gap_P < -EQUAL).sum()),
            )
            for measure, gap_P in gaps.items()
        },
    )
