"""metrics.jsonl: one JSON object per step; and the names of all metrics (docs/observing.md#metrics)."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.base.atomic import write_whole

METRIC_NAMES = (
    "step",
    "data/left_out_prompts",
    "data/level/<ladder>",
    "data/level_success/<ladder>",
    "reward/mean",
    "reward/parts/<part>",
    "reward/source/<source>",
    "reward/role/<role>",
    "reward/turns",
    "reward/timeouts",
    "reward/retries",
    "reward/hacking_alarm",
    "eval/<set>/reward_mean",
    "eval/<set>/accuracy",
    "eval/<set>/parts/<part>",
    "eval/<set>/pass_at_<k>",
    "eval/<set>/stderr/<measure>",
    "policy/loss",
    "policy/clip_fraction",
    "policy/clamped_fraction",
    "policy/kl",
    "policy/effective_sample_size",
    "policy/reference_kl",
    "policy/correction_weight",
    "policy/entropy",
    "policy/grad_norm",
    "critic/loss",
    "critic/clip_fraction",
    "critic/value_mean",
    "critic/return_mean",
    "critic/explained_variance",
    "critic/grad_norm",
    "critic/lr",
    "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max",
    "mismatch/kl_k3",
    "mismatch/far_fraction",
    "mismatch/routing_flips",
    "mismatch/flip_reached_fraction",
    "mismatch/flip_margin_max",
    "mismatch/logprob_abs_mean_unflipped",
    "mismatch/stale_logprob_abs_mean",
    "mismatch/stale_kl_k3",
    "async/age_mean",
    "async/age_max",
    "async/current_token_fraction",
    "async/running_groups",
    "async/waiting_groups",
    "async/filtered_groups",
    "async/failed_groups",
    "async/dropped_groups",
    "async/wait_s",
    "async/group_s_max",
    "async/replayed_tokens",
    "past/version",
    "past/versions",
    "past/win_rate",
    "rollout/trajectories",
    "rollout/tokens",
    "rollout/tokens_per_s",
    "rollout/turns_mean",
    "rollout/truncated_fraction",
    "rollout/aborted_fraction",
    "rollout/failed_fraction",
    "rollout/tool_error_fraction",
    "rollout/malformed_call_fraction",
    "rollout/stale_cache_tokens",
    "rollout/draft_accept_rate",
    "rollout/retries",
    "rollout/retractions",
    "rollout/token_usage_max",
    "rollout/concurrency_limit",
    "rollout/compactions_mean",
    "rollout/subagents_mean",
    "rollout/env_start_retries",
    "env/<metric>",
    "gateway/segments_mean",
    "gateway/requests",
    "gateway/refused",
    "gateway/abandoned",
    "gateway/repeated",
    "gateway/skipped",
    "rollout/zero_variance_fraction",
    "rollout/groups_sampled",
    "rollout/groups_useful",
    "rollout/groups_kept",
    "rollout/refills",
    "mtp/loss",
    "distill/reverse_kl",
    "distill/score_s",
    "moe/expert_load_max_over_mean",
    "moe/expert_load_worst",
    "moe/expert_load_worst_layer",
    "moe/dead_experts",
    "moe/router_entropy",
    "routing/differs_fraction",
    "routing/replayed_fraction",
    "routing/replay_changed_fraction",
    "routing/unreplayed_differs_fraction",
    "routing/unreplayed_logprob_abs_mean",
    "train/lr",
    "train/skipped_steps",
    "resync/bytes",
    "resync/written_bytes",
    "resync/changed_fraction",
    "resync/seconds",
    "resync/version",
    "resync/engines",
    "resync/verified_tensors",
    "resync/fingerprint_mismatches",
    "resync/stale_requests",
    "resync/replaced_engines",
    "sft/loss",
    "sft/tokens",
    "time/rollout_s",
    "time/env_start_s",
    "time/env_step_s",
    "time/env_close_s",
    "time/loop_lag_p99_s",
    "time/loop_lag_max_s",
    "time/teacher_s",
    "time/logprobs_s",
    "time/train_s",
    "time/drain_s",
    "time/eval_wait_s",
    "time/resync_s",
    "time/eval_s",
    "time/other_s",
    "time/step_s",
)
"""Names of all metrics. The recipe names a `<set>`, a `<source>`, a `<ladder>` and each `<k>`, the reward a `<part>`,
an environment a `<role>` and a `<metric>`; the latter three may hold slashes: `format/think`. A `<measure>` is the rest
of another name of an evaluation."""
_NAMED = {
    "<set>": "[^/]+",
    "<source>": "[^/]+",
    "<role>": ".+",
    "<ladder>": "[^/]+",
    "<k>": "[1-9][0-9]*",
    "<part>": ".+",
    "<metric>": ".+",
    "<measure>": "(?:reward_mean|accuracy|pass_at_[1-9][0-9]*|parts/.+)",
}
_PATTERNS = [
    re.compile(re.sub("<[a-z]+>", lambda named: _NAMED[named.group()], re.escape(name)), re.DOTALL)
    for name in METRIC_NAMES
]


def is_metric(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _PATTERNS)


class MetricsWriter:
    """Appends steps to a metrics file; a killed process leaves at most one broken line, the last."""

    def __init__(self, path: Path, *, keep_through_step: int | None = None) -> None:
        """Open the file for appending; it is created if absent.

        Args:
            keep_through_step: step of the checkpoint at which the run continues; later lines and a broken last line are
                removed. None for a new run.

        Raises:
            ValueError: a new run's file exists already.
        """
        if keep_through_step is None and path.exists():
            raise ValueError(f"{path} exists.")
        if keep_through_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= keep_through_step]
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append metrics of a step and sync the file; a value that is not finite is written as null."""
        unknown = [name for name in metrics if not is_metric(name)]
        assert not unknown, f"metrics without documentation: {unknown}"
        line = {"step": step, **{name: plain_number(value) for name, value in metrics.items()}}
        self._file.write((json.dumps(line) + "\n").encode())
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def plain_number(value: Any) -> int | float | None:
    """An int, float or zero-dimensional array as a Python number; None if it is NaN or infinite."""
    number = value if isinstance(value, int | float) else value.item()
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics file in order, without the broken last line that a killed process may leave.

    A step may have several lines: a background evaluation ends in a later step.

    Raises:
        ValueError: another line is not a JSON object with a `step`; names file and line.
        OSError: the file cannot be read.
    """
    lines = path.read_text().split("\n")
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            value = json.loads(line)
            steps.setdefault(value["step"], {}).update(value)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a line of metrics: {error!r}") from error
    return [steps[step] for step in sorted(steps)]
