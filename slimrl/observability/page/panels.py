"""The curves of the page: which metrics stand together, and the values of each run."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slimrl.observability.run_files import Run


@dataclass(frozen=True)
class Panel:
    title: str
    metrics: tuple[str, ...]
    """Regular expressions that match the whole name of a metric"""
    unit: str = ""
    log: bool = False
    """Whether its scale is logarithmic at first"""
    zero: bool = False
    """Whether its scale begins at 0"""


PANELS = (
    Panel("Reward", ("reward/mean", "eval/[^/]+/reward_mean")),
    Panel("Parts of the reward", ("reward/parts/.+", "reward/turns")),
    Panel("Reward by source", ("reward/source/.+",)),
    Panel("Reward by role", ("reward/role/.+",)),
    Panel("Evaluation", ("eval/[^/]+/accuracy", "eval/[^/]+/pass_at_.+")),
    Panel("Parts of the reward in evaluations", ("eval/[^/]+/parts/.+",)),
    Panel("Environment", ("env/.+",)),
    Panel("Sampled tokens of a step", ("rollout/tokens",), "tokens", zero=True),
    Panel("Turns", ("rollout/turns_mean",), "turns", zero=True),
    Panel(
        "Ends of trajectories",
        ("rollout/truncated_fraction", "rollout/aborted_fraction", "rollout/failed_fraction"),
        "fraction",
    ),
    Panel("Tool errors", ("rollout/tool_error_fraction", "rollout/malformed_call_fraction"), "fraction"),
    Panel("Zero-variance groups", ("rollout/zero_variance_fraction",), "fraction"),
    Panel("Entropy", ("policy/entropy",), "nat per token", zero=True),
    Panel("KL", ("policy/kl", "policy/reference_kl"), "nat per token", log=True),
    Panel("Clip fraction", ("policy/clip_fraction", "policy/clamped_fraction"), "fraction", zero=True),
    Panel("Gradient norm", ("policy/grad_norm", "critic/grad_norm"), log=True),
    Panel("Loss", ("policy/loss", "sft/loss", "critic/loss", "mtp/loss")),
    Panel("Learning rate", ("train/lr", "critic/lr")),
    Panel(
        "Mismatch of trainer and engines",
        ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/logprob_abs_mean_unflipped",
         "mismatch/stale_logprob_abs_mean"),
        "nat",
        log=True,
    ),
    Panel("Effective sample size", ("policy/effective_sample_size",), "fraction"),
    Panel("Staleness", ("async/age_mean", "async/age_max"), "updates", zero=True),
    Panel("Expert load, busiest over mean", ("moe/expert_load_max_over_mean", "moe/expert_load_worst"), "ratio"),
    Panel("Dead experts", ("moe/dead_experts",), "experts", zero=True),
    Panel("Router entropy", ("moe/router_entropy",), "nat"),
    Panel("Routing: trainer against engines", ("routing/.+_fraction",), "fraction"),
    Panel("Critic", ("critic/explained_variance",), "fraction"),
    Panel("Distillation", ("distill/reverse_kl",), "nat per token"),
    Panel("Speed of the rollout", ("rollout/tokens_per_s",), "tokens/s", zero=True),
)  # fmt: skip
"""In the order of the page; a panel of which a run has no value is left out."""


def panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The panels that have values; `metrics` are the names that the runs recorded."""
    recorded = sorted({name for run in runs for line in run.steps for name, value in line.items() if value is not None})
    found = []
    for panel in PANELS:
        names = [name for pattern in panel.metrics for name in recorded if re.fullmatch(pattern, name)]
        if names:
            found.append({**asdict(panel), "metrics": names})
    return found


def curves(run: Run) -> dict[str, list[Any]]:
    """All metrics by name, one value for each step, null where it was not measured; `step` has the steps."""
    names = dict.fromkeys(name for line in run.steps for name in line)
    return {name: [line.get(name) for line in run.steps] for name in names}
