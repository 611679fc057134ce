"""The recipe of a teacher's engines: they are placed, started and planned by the same code as those of a rollout."""

from dataclasses import replace

from slimrl.config.schema.model import ModelConfig
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
        threads_per_engine=teacher.threads_per_engine,
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
