"""One training step: its number, its times and its metrics."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from slimrl.base.spans import SPANS
from slimrl.data.token_values import TokenValues
from slimrl.data.training import UpdateResult


class Step:
    """Collects the metrics of a step, one line of metrics.jsonl."""

    def __init__(
        self,
        number: int,
        metrics: Mapping[str, float] | None = None,
        note: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            number: from 1.
            metrics: those known already.
            note: takes the name of a phase and notes it as long as it lasts.
        """
        self.number = number
        self.metrics: dict[str, float] = dict(metrics or {})
        self.tokens = TokenValues()
        """What its updates find at the tokens of the trajectories that are recorded"""
        self.expert_load: dict[int, np.ndarray] = {}
        """int64 [experts] by layer, the tokens that each expert got in its updates"""
        self._note = note
        self._start = time.monotonic()
        self._depth = 0
        self._timed_s = 0.0
        """Sum of the durations of the outermost phases"""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's seconds to time/<phase>_s, also where the block is inside another phase's."""
        start = time.monotonic()
        self._depth += 1
        with SPANS(phase), self._note(phase):
            yield
        self._depth -= 1
        seconds = time.monotonic() - start
        if not self._depth:
            self._timed_s += seconds
        key = f"time/{phase}_s"
        self.metrics[key] = self.metrics.get(key, 0.0) + seconds

    def count_experts(self, results: Sequence[UpdateResult]) -> None:
        for result in results:
            for layer, tokens in result.expert_load.items():
                self.expert_load[layer] = self.expert_load.get(layer, 0) + tokens

    def record(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def close(self) -> None:
        """Adds time/step_s, without the checkpoint and evaluation that follow, and time/other_s, what no phase has."""
        self.metrics["time/step_s"] = time.monotonic() - self._start
        self.metrics["time/other_s"] = self.metrics["time/step_s"] - self._timed_s


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Metrics of the updates of one step for any objective: means over the updates, the last learning rate."""
    norms = [r.grad_norm for r in results]
    metrics = {"train/lr": results[-1].lr, "policy/grad_norm": float(np.mean(norms))}
    routed = [r for r in results if np.isfinite(r.router_entropy)]
    if routed:
        metrics["moe/expert_load_max_over_mean"] = float(np.mean([r.expert_load_max_over_mean for r in routed]))
        metrics["moe/router_entropy"] = float(np.mean([r.router_entropy for r in routed]))
        worst = max(routed, key=lambda r: r.expert_load_worst)
        metrics["moe/expert_load_worst"] = worst.expert_load_worst
        metrics["moe/expert_load_worst_layer"] = worst.expert_load_worst_layer
        metrics["moe/dead_experts"] = min(r.dead_experts for r in routed)
    for name in ("replayed_fraction", "replay_changed_fraction"):
        values = [value for r in results if (value := getattr(r, name)) is not None]
        if values:
            metrics[f"routing/{name}"] = float(np.mean(values))
    if all("mtp_loss" in r.sums for r in results):
        metrics["mtp/loss"] = float(np.mean([r.sums["mtp_loss"] for r in results]))
    return metrics


def policy_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """The policy's metrics of one step, from the sums over all of its updates that `policy_objective` reports."""
    sums = {name: sum(r.sums[name] for r in results) for name in results[0].sums}
    tokens = sums["tokens"]
    metrics = {
        "policy/loss": sum(r.sums["loss"] / r.denominator for r in results) / len(results),
        "policy/clip_fraction": sums["clipped"] / sums["weight"],
        "policy/clamped_fraction": sums["clamped"] / tokens,
        "policy/kl": sums["kl_old"] / tokens,
        "policy/effective_sample_size": sums["importance"] ** 2 / (tokens * sums["importance_squared"]),
    }
    for name, metric in (("kl", "policy/reference_kl"), ("correction", "policy/correction_weight")):
        if name in sums:
            metrics[metric] = sums[name] / tokens
    return metrics
