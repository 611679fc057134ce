"""The result of an evaluation on one set: what summary.json, --json-file and the tables show."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.data import EvalConfig
from slimrl.data.trajectory import Status
from slimrl.evaluation.estimates import intervals, items_by_prompt, prompt_scores
from slimrl.evaluation.item import Item


@dataclass(frozen=True, kw_only=True)
class TurnRow:
    """Figures of a set's trajectories at one turn."""

    turn: int
    """Number of the turn, from 1."""
    reached: int
    """Number of trajectories that have this turn."""
    ended: int
    """Number of trajectories for which it is the last turn."""
    reward_mean: float | None
    """Mean reward of the trajectories that ended at this turn; None if none did."""
    tokens_mean: float
    """Mean of the sampled tokens of the turn, over the trajectories that have it."""


@dataclass(frozen=True, kw_only=True)
class ToolRow:
    """The calls of one tool, over all trajectories of a set."""

    calls: int
    errors: int
    """Number of calls that were answered with an error message."""
    malformed: int
    """Number of these errors for which the call itself was wrong."""


@dataclass(frozen=True, kw_only=True)
class SetResult:
    name: str
    num_prompts: int
    samples_per_prompt: int
    means: dict[str, float]
    """Mean of each measure of `prompt_scores`, by its name; a failed trajectory counts as 0."""
    intervals: dict[str, tuple[float, float]]
    """Ends of the 95% interval of each mean."""
    turns_mean: float
    tool_calls_mean: float
    tokens_mean: float
    """Mean number of sampled tokens of a trajectory."""
    truncated_fraction: float
    aborted_fraction: float
    failed_fraction: float
    turns: list[TurnRow]
    tools: dict[str, ToolRow]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON, with the means among the other figures."""
        value = asdict(self)
        means = value.pop("means")
        head = {name: value.pop(name) for name in ("name", "num_prompts", "samples_per_prompt")}
        return {**head, **means, **value}


def set_result(items: Sequence[Item], settings: EvalConfig, seed: int) -> SetResult:
    """The result of all items of one set.

    Args:
        seed: the recipe's; the resamples follow from it and the set's name.
    """
    name = items[0].set
    scores = prompt_scores(items, settings)
    tools = tool_rows(items)
    return SetResult(
        name=name,
        num_prompts=len(items_by_prompt(items)),
        samples_per_prompt=settings.samples_per_prompt,
        means={measure: float(np.mean(values_P)) for measure, values_P in scores.items()},
        intervals=intervals(scores, derive_seed(seed, "bootstrap", name)),
        turns_mean=float(np.mean([item.num_turns for item in items])),
        tool_calls_mean=sum(row.calls for row in tools.values()) / len(items),
        tokens_mean=float(np.mean([item.num_sampled_tokens for item in items])),
        truncated_fraction=_fraction(items, Status.truncated),
        aborted_fraction=_fraction(items, Status.aborted),
        failed_fraction=_fraction(items, Status.failed),
        turns=turn_rows(items),
        tools=tools,
    )


def turn_rows(items: Sequence[Item]) -> list[TurnRow]:
    rows = []
    for turn in range(1, max(item.num_turns for item in items) + 1):
        reached = [item for item in items if item.num_turns >= turn]
        ended = [item.reward for item in reached if item.num_turns == turn]
        rows.append(
            TurnRow(
                turn=turn,
                reached=len(reached),
                ended=len(ended),
                reward_mean=float(np.mean(ended)) if ended else None,
                tokens_mean=float(np.mean([item.turn_tokens[turn - 1] for item in reached])),
            )
        )
    return rows


def tool_rows(items: Sequence[Item]) -> dict[str, ToolRow]:
    """Figures of each tool's calls, by the name of the tool."""
    names = sorted({name for item in items for name in item.tool_calls})
    return {
        name: ToolRow(
            **{
                count: sum(item.tool_calls[name][count] for item in items if name in item.tool_calls)
                for count in ("calls", "errors", "malformed")
            }
        )
        for name in names
    }


def _fraction(items: Sequence[Item], status: Status) -> float:
    return sum(item.status is status for item in items) / len(items)
