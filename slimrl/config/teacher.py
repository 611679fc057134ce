"""The recipe of a teacher's engines, and its rules: they are placed, started, checked and planned by the same code as
those of a rollout."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slimrl.config.fp8_tiles import fp8_tile_violations
from slimrl.config.hf_config import first_of
from slimrl.config.model_rules import engine_violations
from slimrl.config.problems import Violation
from slimrl.config.rollout_rules import rollout_violations
from slimrl.config.schema.model import ModelConfig, TeacherConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import ResyncConfig, TransportName
from slimrl.config.schema.rollout import RolloutConfig


def teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe whose `rollout` is the teacher's engines and whose `model` is the teacher; `teacher.path` is given.

    Its engines share no devices. In a deterministic run they keep no prefix cache, whose content would decide the shape
    of a prefill and so its last bits.
    """
    teacher = recipe.teacher
    uncached = {"disable_radix_cache": True} if recipe.deterministic else {}
    rollout = RolloutConfig(
        num_engines=teacher.num_engines,
        engine_tp=teacher.engine_tp,
        engine_ep=teacher.engine_ep,
        engine_nodes=teacher.engine_nodes,
        threads_per_engine=recipe.rollout.threads_per_engine,
        max_concurrency_per_engine=teacher.max_concurrency_per_engine,
        max_trajectory_tokens=recipe.rollout.max_trajectory_tokens,
        request_timeout_s=teacher.request_timeout_s,
        startup_timeout_s=teacher.startup_timeout_s,
        max_replacements=teacher.max_replacements,
        env=teacher.env,
        sglang={**uncached, **teacher.sglang},
    )
    return replace(
        recipe,
        model=ModelConfig(path=teacher.path, trust_remote_code=recipe.model.trust_remote_code),
        rollout=rollout,
        # Any transport that reaches engines on devices of their own.
        resync=ResyncConfig(transport=TransportName.disk, timeout_s=recipe.resync.timeout_s),
    )


def teacher_key(key: str) -> str:
    """The recipe's key of a key of `teacher_recipe`; also replaces the keys in a message."""
    return key.replace("rollout.", "teacher.").replace("model.path", "teacher.path")


_URL = re.compile(r"https?://[^/\s]+/?")
_SIZES = ("rollout.engine_", "rollout.sglang.mem_fraction_static")
"""Rules of a rollout's engines that hold for a teacher's too; the others are about generation and resync."""


def teacher_violations(recipe: Recipe) -> Iterator[Violation]:
    """What the recipe alone says about its teacher."""
    teacher = recipe.teacher
    if not teacher.is_given:
        yield from _unused(teacher)
        if recipe.algorithm.teacher_coef:
            message = f"{recipe.algorithm.teacher_coef}, but there is no teacher. Give teacher.path or teacher.urls."
            yield "algorithm.teacher_coef", message
        return
    if teacher.path and teacher.urls:
        yield "teacher.urls", "names servers, and teacher.path has the run start others. Give one of the two."
    for url in teacher.urls:
        if not _URL.fullmatch(url):
            yield "teacher.urls", f"{url!r} is not the address of a server. Write http://HOST:PORT."
    if teacher.api_key_env and not teacher.urls:
        yield "teacher.api_key_env", "is the key of servers that others run, and teacher.urls names none."
    if teacher.urls and recipe.deterministic:
        yield (
            "teacher.urls",
            "requests of others share the batches of these servers, so a deterministic run cannot repeat its scores. "
            "Use teacher.path, or deterministic false.",
        )
    if recipe.rollout.sampling.temperature != 1:
        yield (
            "rollout.sampling.temperature",
            f"{recipe.rollout.sampling.temperature}: SGLang scores tokens at temperature 1, so log-probs of policy and "
            "teacher would be of different temperatures. Use 1.",
        )
    if teacher.path:
        of_engines = rollout_violations(teacher_recipe(recipe), 0)
        yield from (_translated(violation) for violation in of_engines if violation[0].startswith(_SIZES))


def teacher_model_violations(
    recipe: Recipe, teacher_config: dict[str, Any], hf_config: dict[str, Any] | None
) -> Iterator[Violation]:
    """Sizes of its engines that do not divide the teacher, and tokens that it cannot score.

    Args:
        teacher_config: the teacher's config.json.
        hf_config: the policy's; None if it is not known.
    """
    engines = teacher_recipe(recipe)
    if engines.rollout.engine_tp % engines.rollout.engine_ep == 0:
        yield from map(_translated, engine_violations(engines, teacher_config))
        yield from map(_translated, fp8_tile_violations(engines, teacher_config))
    has, needs = first_of(teacher_config, "vocab_size"), first_of(hf_config or {}, "vocab_size")
    # A larger one is padded further: Qwen2.5 has 151,936 rows or 152,064, by size.
    if has < needs:
        yield (
            "teacher.path",
            f"{recipe.teacher.path}: its vocab_size {has} is below the {needs} of the policy, which can sample tokens "
            "that the teacher lacks.",
        )
    given = recipe.teacher.sglang.get("context_length")
    limit, longest = given or first_of(teacher_config, "max_position_embeddings"), recipe.rollout.max_trajectory_tokens
    if limit and longest >= limit:
        yield (
            "rollout.max_trajectory_tokens",
            f"{longest}: the teacher scores less than its {limit} positions. Use {limit - 1} or less, or set "
            "teacher.sglang.context_length.",
        )


def _unused(teacher: TeacherConfig) -> Iterator[Violation]:
    """Settings of a teacher without a teacher."""
    changed = [name for name, value in vars(TeacherConfig()).items() if getattr(teacher, name) != value]
    if changed:
        yield f"teacher.{changed[0]}", "there is no teacher. Set teacher.path or teacher.urls."


def _translated(violation: Violation) -> Violation:
    key, message = violation
    return teacher_key(key), teacher_key(message)
