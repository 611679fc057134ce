"""The range of each number of a recipe, and the form of its names and paths."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from slimrl.config.keys import flatten
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema import ParserName, Recipe

_POSITIVE = "must be greater than 0"
_FROM_ONE = "must be at least 1"
_FROM_ZERO = "must not be negative"
_FRACTION = "must lie between 0 and 1"

BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        [
            "steps",
            "trainer.num_ranks",
            "trainer.threads_per_rank",
            "trainer.parallel.tensor",
            "trainer.parallel.pipeline",
            "trainer.parallel.expert",
            "trainer.parallel.expert_tensor",
            "trainer.parallel.context",
            "trainer.max_tokens_per_rank",
            "trainer.updates_per_rollout",
            "trainer.logprob_chunk_tokens",
            "trainer.max_skipped_steps",
            "rollout.num_engines",
            "rollout.engine_tensor",
            "rollout.engine_expert",
            "rollout.threads_per_engine",
            "rollout.prompts_per_step",
            "rollout.samples_per_prompt",
            "rollout.max_concurrency_per_engine",
            "rollout.sampling.max_new_tokens",
            "rollout.eval_sampling.max_new_tokens",
            "rollout.max_turns",
            "rollout.max_trajectory_tokens",
            "resync.bucket_bytes",
            "resync.sampled_versions",
            "resync.sampled_bytes",
            "resync.keep",
            "resync.full_every",
            "sft.batch_conversations",
            "sft.max_tokens",
            "sft.summary_every_steps",
            "checkpoint.keep",
            "trainer.megatron.num_layers_in_first_pipeline_stage",
            "trainer.megatron.num_layers_in_last_pipeline_stage",
            "trainer.megatron.recompute_num_layers",
            "rollout.sglang.context_length",
        ],
        (lambda value: value >= 1, _FROM_ONE),
    ),
    **dict.fromkeys(
        [
            "trainer.optimizer.lr",
            "trainer.optimizer.eps",
            "trainer.startup_timeout_s",
            "trainer.timeout_s",
            "algorithm.clip_low",
            "algorithm.clip_high",
            "algorithm.max_logprob_mismatch",
            "rollout.request_timeout_s",
            "rollout.tool_timeout_s",
            "rollout.trajectory_timeout_s",
            "rollout.startup_timeout_s",
            "resync.timeout_s",
            "checkpoint.grace_s",
        ],
        (lambda value: value > 0, _POSITIVE),
    ),
    **dict.fromkeys(
        [
            "seed",
            "trainer.optimizer.warmup_steps",
            "trainer.optimizer.min_lr",
            "trainer.optimizer.weight_decay",
            "trainer.optimizer.clip_grad",
            "rollout.sampling.temperature",
            "rollout.eval_sampling.temperature",
            "eval.every_steps",
            "checkpoint.every_steps",
            "rollout.max_replacements",
            "tracking.trajectories_per_step",
        ],
        (lambda value: value >= 0, _FROM_ZERO),
    ),
    "agent.max_result_chars": (lambda value: value >= 16, "must be at least 16"),
    **dict.fromkeys(
        ["rollout.max_failed_fraction", "trainer.megatron.optimizer_offload_fraction"],
        (lambda value: 0 <= value <= 1, _FRACTION),
    ),
    **dict.fromkeys(
        ["trainer.optimizer.beta1", "trainer.optimizer.beta2"],
        (lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    ),
    **dict.fromkeys(
        ["rollout.sampling.top_p", "rollout.eval_sampling.top_p"],
        (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1"),
    ),
    **dict.fromkeys(
        ["rollout.sampling.top_k", "rollout.eval_sampling.top_k"],
        (lambda value: value == -1 or value >= 1, "must be at least 1, or -1 for off"),
    ),
}
"""Range of each number that has one."""

DIVISORS = ("trainer.parallel.", "trainer.num_ranks", "trainer.megatron.num_layers_in_", "rollout.engine_")
"""Sizes that the rules below divide by; while one of them is below 1, those rules say nothing sensible."""

MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
PATHS = ("run.dir", "model.path", "model.megatron", "data.train", "resync.dir", "resync.local_dir")
"""Settings that are a file or a folder, besides the evaluation sets."""
SHELL_WORDS = re.compile(r"~(?=/|$)|.*?\$\{?(\w+)")
"""What a shell would replace in a path: a home folder at its start, a variable."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def bound_violations(recipe: Recipe) -> Iterator[Violation]:
    """Numbers outside their range, and names that cannot be a folder, a metric or an import path."""
    values = dict(flatten(recipe))
    for key, (holds, rule) in BOUNDS.items():
        value = values.get(key)
        if isinstance(value, int | float) and not holds(value):
            yield key, f"{value}: {rule}."
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield key, f"{value}: must be a finite number."
    if not FILE_NAME.fullmatch(recipe.run.name):
        yield "run.name", f"{recipe.run.name!r} is no folder name; use letters, digits, '.', '_' and '-'."
    for name in recipe.data.eval:
        if not FILE_NAME.fullmatch(name):
            yield f"data.eval.{name}", f"{name!r} is no name of a set; use letters, digits, '.', '_' and '-'."
    for key in (*PATHS, *(f"data.eval.{name}" for name in recipe.data.eval)):
        if found := SHELL_WORDS.match(values[key]):
            variable = found.group(1) or "HOME"
            yield key, f"{values[key]!r} is taken as it is written. Write ${{oc.env:{variable}}}, which is filled in."
    parsers = [parser.value for parser in ParserName]
    if recipe.agent.parser not in parsers and not MODULE_FUNCTION.fullmatch(recipe.agent.parser):
        meant = suggestion(recipe.agent.parser, parsers)
        yield (
            "agent.parser",
            f"{recipe.agent.parser!r} is neither {' nor '.join(parsers)} nor an import path module:name.{meant}",
        )
    for name in ("reward.function", "reward.group_filters", "agent.tools"):
        paths = values[name] if isinstance(values[name], list) else [values[name]]
        for path in paths:
            if not MODULE_FUNCTION.fullmatch(path) and path != "???":
                yield name, f"{path!r} is no import path; write module:function."
