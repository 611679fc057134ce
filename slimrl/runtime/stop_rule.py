"""Stops a run whose metrics stay beyond the limits of the recipe's section `stop`.

1. After each step with an optimizer update, each metric with a limit is compared with it.
2. A metric beyond its limit adds its value to the list of its last values in a row; one within its limit clears it.
3. A list of `stop.patience_steps` values stops the run, with a report of what the run knows.
NaN is beyond every limit. The lists are part of RunState, so a resumed run counts on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import StopConfig

ALWAYS_RECORDED = "policy/grad_norm"
"""Metric of every step with an optimizer update, in reinforcement learning and in supervised training."""

SHOWN = {
    "engines": ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/kl_k3"),
    "routing": (
        "mismatch/routing_flips",
        "mismatch/flip_reached_fraction",
        "mismatch/flip_margin_max",
        "mismatch/logprob_abs_mean_unflipped",
        "moe/expert_load_max_over_mean",
    ),
    "weights": ("resync/version", "resync/fingerprint_mismatches", "resync/stale_requests", "resync/replaced_engines"),
    "tokens": (
        "rollout/tokens",
        "rollout/truncated_fraction",
        "rollout/failed_fraction",
        "rollout/malformed_call_fraction",
    ),
    "policy": ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/clip_fraction", "policy/kl"),
}
"""Metrics in a report, by where trainer and engines may differ; those that the step does not have are left out."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    key: str
    """Key of the limit in the recipe"""
    metric: str
    bound: float
    is_lower: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.is_lower else value <= self.bound


def limits_of(settings: StopConfig) -> list[Limit]:
    """The limits that the recipe sets."""
    metrics = {
        "mismatch": ("mismatch/logprob_abs_mean", False),
        "kl": ("policy/kl", False),
        "entropy_min": ("policy/entropy", True),
        "entropy_max": ("policy/entropy", False),
        "grad_norm": (ALWAYS_RECORDED, False),
        "effective_sample_size_min": ("policy/effective_sample_size", True),
    }
    return [
        Limit(key=f"stop.{name}", metric=metric, bound=bound, is_lower=is_lower)
        for name, (metric, is_lower) in metrics.items()
        if (bound := getattr(settings, name)) is not None
    ]


def count_crossed(
    crossed: Mapping[str, Sequence[float]], metrics: Mapping[str, float], limits: Sequence[Limit]
) -> dict[str, list[float]]:
    """The values beyond each limit in the last steps in a row, by key of the recipe; limits that hold are left out.

    Args:
        crossed: the result after the step before.
        metrics: of this step. One without an optimizer update changes nothing.

    Raises:
        ValueError: the run does not record a metric that has a limit.
    """
    if ALWAYS_RECORDED not in metrics:
        return {key: list(values) for key, values in crossed.items()}
    for limit in limits:
        if limit.metric not in metrics:
            raise ValueError(f"{limit.key}: this run does not record {limit.metric}. Set it to null.")
    return {
        limit.key: [*crossed.get(limit.key, ()), metrics[limit.metric]]
        for limit in limits
        if not limit.holds(metrics[limit.metric])
    }


def stop_report(
    crossed: Mapping[str, Sequence[float]], metrics: Mapping[str, float], step: int, recipe: Recipe
) -> str | None:
    """Why the run stops, and what it knows of differences between trainer and engines; None to continue."""
    patience = recipe.stop.patience_steps
    lines = []
    for limit in limits_of(recipe.stop):
        values = crossed.get(limit.key, ())
        if len(values) >= patience:
            side = "below" if limit.is_lower else "above"
            last = ", ".join(f"{value:.3g}" for value in values[-patience:])
            lines.append(f"{limit.metric} {side} {limit.key} {limit.bound:g} in {len(values)} steps in a row: {last}")
    if not lines:
        return None
    for part, names in SHOWN.items():
        if known := [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]:
            lines.append(f"  {part}: {', '.join(known)}")
    if "rollout/tokens" in metrics:
        lines.append(f"  sampling: {_sampling(recipe)}")
    return f"step {step}: " + "\n".join(lines)


def _sampling(recipe: Recipe) -> str:
    sampling, rollout = recipe.rollout.sampling, recipe.rollout
    fields = [f"{name} {getattr(sampling, name)}" for name in ("temperature", "top_p", "top_k", "max_new_tokens")]
    return ", ".join([*fields, f"max_trajectory_tokens {rollout.max_trajectory_tokens}"])
