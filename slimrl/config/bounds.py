"""The range of each number of a recipe, and the form of its names and paths."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from slimrl.config.keys import KEY_TYPES, NAME, REWARD_SECTIONS, flatten, schema_key
from slimrl.config.package_fields import tool_call_parsers
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.recipe import Recipe

_AT_LEAST_1 = (lambda value: value >= 1, "must be at least 1")
_FRACTION = (lambda value: 0 <= value <= 1, "must lie between 0 and 1")
_TOP_P = (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1")
_TOP_K = (lambda value: value == -1 or value >= 1, "must be at least 1, or -1 for off")
_DECAY = (lambda value: 0 <= value < 1, "must be at least 0 and below 1")
_NOT_NEGATIVE = (
    "seed",
    "algorithm.dual_clip",
    "algorithm.teacher_coef",
    "algorithm.kl_coef",
    "algorithm.entropy_coef",
    "algorithm.correction.low",
    "algorithm.correction.veto",
    "algorithm.correction.max_gap",
    "trainer.optimizer.warmup_updates",
    "trainer.optimizer.min_lr",
    "trainer.optimizer.weight_decay",
    "trainer.optimizer.clip_grad",
    "trainer.lora.rank",
    "critic.value_clip",
    "critic.warmup_steps",
    "rollout.sampling.temperature",
    "rollout.eval_sampling.temperature",
    "rollout.max_replacements",
    "rollout.min_engines",
    "rollout.max_engines",
    "rollout.max_staleness",
    "rollout.chunk_tokens",
    "teacher.max_replacements",
    "algorithm.replay_gap_every_steps",
    "algorithm.score_every_steps",
    "reward.retries",
    "eval.every_steps",
    "eval.engines",
    "checkpoint.every_steps",
    "tracking.trajectories_per_step",
)

BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{key: _AT_LEAST_1 for key, kind in KEY_TYPES.items() if kind is int},
    **{key: (lambda value: value > 0, "must be greater than 0") for key, kind in KEY_TYPES.items() if kind is float},
    **dict.fromkeys(_NOT_NEGATIVE, (lambda value: value >= 0, "must not be negative")),
    **dict.fromkeys(
        ("algorithm.credit.discount", "critic.discount"),
        (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1"),
    ),
    "critic.gae_lambda": _FRACTION,
    **dict.fromkeys(("algorithm.selection.min_reward", "eval.pass_reward"), (lambda value: True, "")),
    "algorithm.dynamic_sampling.oversampling": _AT_LEAST_1,
    "rollout.oversample": _AT_LEAST_1,
    "rollout.speculative.num_draft_tokens": (lambda value: value >= 2, "must be at least 2"),
    "algorithm.dynamic_sampling.value_decay": _DECAY,
    "algorithm.dynamic_sampling.max_weight": _AT_LEAST_1,
    "algorithm.overlong.max_tokens": _AT_LEAST_1,
    "trainer.optimizer.beta1": _DECAY,
    "trainer.optimizer.beta2": _DECAY,
    "trainer.lora.dropout": _DECAY,
    "rollout.sampling.top_p": _TOP_P,
    "rollout.eval_sampling.top_p": _TOP_P,
    "rollout.sampling.top_k": _TOP_K,
    "rollout.eval_sampling.top_k": _TOP_K,
    "rollout.max_failed_fraction": _FRACTION,
    "algorithm.max_far_tokens": _FRACTION,
    **dict.fromkeys(
        (key for key, kind in KEY_TYPES.items() if key.startswith("stop.") and kind == float | None),
        (lambda value: value > 0, "must be greater than 0"),
    ),
    "algorithm.entropy_target": (lambda value: value > 0, "must be greater than 0"),
    "data.max_prompt_tokens": _AT_LEAST_1,
    "agent.max_tool_calls": _AT_LEAST_1,
    "agent.compaction.at_tokens": _AT_LEAST_1,
    **dict.fromkeys(
        ("agent.start_retries", "agent.compaction.keep_turns", f"agent.mcp.{NAME}.restarts"),
        (lambda value: value >= 0, "must be at least 0"),
    ),
    **{f"{section}.{NAME}.weight": (lambda value: True, "") for section in REWARD_SECTIONS},
    **{f"{section}.{NAME}.cap": (lambda value: value > 0, "must be greater than 0") for section in REWARD_SECTIONS},
    "reward.alarm_steps": (lambda value: value == 0 or value >= 4, "must be at least 4, or 0 for off"),
    "agent.max_result_chars": (lambda value: value >= 16, "must be at least 16"),
    "trainer.megatron.num_layers_in_first_pipeline_stage": _AT_LEAST_1,
    "trainer.megatron.num_layers_in_last_pipeline_stage": _AT_LEAST_1,
    "trainer.megatron.recompute_num_layers": _AT_LEAST_1,
    "trainer.megatron.optimizer_offload_fraction": _FRACTION,
    "rollout.sglang.context_length": _AT_LEAST_1,
}
"""Range of each number: whether a value lies in it, and how it reads. An int is at least 1 and a float greater than 0
where nothing else is said."""
BOUNDS |= {f"critic.{key}": rule for key, rule in BOUNDS.items() if key.startswith("trainer.")}

DIVISORS = (
    *(
        prefix + name
        for prefix in ("trainer.", "critic.trainer.")
        for name in ("parallel.", "num_ranks", "megatron.num_layers_in_")
    ),
    "rollout.engine_",
    "teacher.engine_",
)
"""Sizes that other rules divide by; those rules are left out while one of these is below 1."""

_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*?)(?:\.py)?\.([A-Za-z_]\w*)")
MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
TOOL_PROMPTS = ("deepseek_v3", "deepseek_v31")
"""Published prompts that tell a model its tools (slimrl/agent/chat/tool_prompts.py)"""
MAY_BE_EMPTY = ("reward.function", "agent.environment", "agent.episode", "agent.function")
"""Import paths without which a recipe does something else."""
PATHS = (
    "run.dir",
    "model.path",
    "model.megatron",
    "model.chat_template",
    "teacher.path",
    "data.train",
    "resync.dir",
    "resync.local_dir",
)
"""Settings that are a file or a folder, besides those to which a recipe gives a name."""
SHELL_WORDS = re.compile(r"~(?=/|$)|.*?\$\{?(\w+)")
"""Parts of a path that a shell would expand: a home folder at its start, a variable."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def no_import_path(path: str, kind: str = "function") -> str:
    """What is wrong with a text that is no import path."""
    found = _DOTTED.fullmatch(path)
    meant = f" Did you mean {found[1]}:{found[2]}?" if found else ""
    return f"{path!r} is not an import path; write module:{kind}.{meant}"


def bound_violations(recipe: Recipe) -> Iterator[Violation]:
    """Numbers outside their range, and names that cannot be a folder, a metric or an import path."""
    values = dict(flatten(recipe))
    chosen = {key: BOUNDS[known] for key in values if (known := schema_key(key)) != key and known in BOUNDS}
    for key, (holds, rule) in (BOUNDS | chosen).items():
        value = values.get(key)
        if isinstance(value, int | float) and not holds(value):
            yield key, f"{value}: {rule}."
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield key, f"{value}: must be a finite number."
    if not FILE_NAME.fullmatch(recipe.run.name):
        yield "run.name", f"{recipe.run.name!r} is not a folder name; use letters, digits, '.', '_' and '-'."
    named = {f"data.{section}.{name}": name for section in ("eval", "more") for name in getattr(recipe.data, section)}
    for key, name in named.items():
        if not FILE_NAME.fullmatch(name):
            yield key, f"{name!r} is not a valid name; use letters, digits, '.', '_' and '-'."
    for key in (*PATHS, *named):
        if found := SHELL_WORDS.match(values[key]):
            variable = found.group(1) or "HOME"
            yield key, f"{values[key]!r} is not expanded. Write ${{oc.env:{variable}}} instead."
    parser = recipe.agent.parser
    if parser and parser not in tool_call_parsers() and not MODULE_FUNCTION.fullmatch(parser):
        meant = suggestion(parser, tool_call_parsers()) or f" SGLang has {', '.join(tool_call_parsers())}."
        yield "agent.parser", f"{parser!r} is neither a parser of SGLang nor an import path module:name.{meant}"
    told = recipe.agent.tool_prompt
    if told and told not in TOOL_PROMPTS and "{tools}" not in told:
        names = ", ".join(TOOL_PROMPTS)
        yield "agent.tool_prompt", f"{told!r} is neither {names}, nor a text with {{tools}} where the schemas go."
    for name in (*MAY_BE_EMPTY, "reward.group_filters", "agent.tools"):
        paths = values[name] if isinstance(values[name], list) else [values[name]]
        kind = "Class" if name == "agent.environment" else "function"
        for path in paths:
            if not MODULE_FUNCTION.fullmatch(path) and (path or name not in MAY_BE_EMPTY):
                yield name, no_import_path(path, kind)
