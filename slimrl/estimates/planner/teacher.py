"""Memory of a teacher's engines, which are planned as a rollout's are, on GPUs of their own and without a resync."""

from dataclasses import dataclass, replace

from slimrl.config.teacher import teacher_key, teacher_recipe
from slimrl.estimates.planner.engine import GIB, EnginePlan
from slimrl.estimates.planner.facts import buckets_of, model_facts, with_engines
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import engine_problems
from slimrl.estimates.planner.parameters import ModelParameters
from slimrl.models.offline_recipe import OfflineRecipe


@dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    parameters: ModelParameters
    engine: EnginePlan
    problems: list[str]
    """Reasons why its engines cannot start, or cannot score the longest trajectory"""
    gpu_bytes: int
    """Bytes on one of the teacher's GPUs"""


def plan_teacher(planned: OfflineRecipe, hardware: Hardware) -> TeacherPlan | None:
    """Plan of the teacher's engines; None if the run starts no teacher, or if its model is not known.

    Raises:
        ValueError: its family is not supported by slimrl, though SGLang may serve it.
    """
    if planned.teacher_config is None:
        return None
    recipe = teacher_recipe(planned.recipe)
    loaded = replace(planned.loaded, recipe=recipe)
    known = model_facts(replace(planned, loaded=loaded, hf_config=planned.teacher_config))
    known = with_engines(known, recipe, buckets_of(known, recipe), hardware)
    engine, limit = known.engine, hardware.gpu_memory_gib
    assert engine is not None
    gpu_bytes = engine.weights + engine.kv_cache + round(hardware.reserve_gib * GIB)
    found = engine_problems(engine, recipe.rollout, hardware, in_fp8=known.transform is not None)
    problems = [teacher_key(problem) for problem in found]
    if gpu_bytes > limit * GIB:
        problems.append(f"{gpu_bytes / GIB:.1f} GiB of {limit:g} on a GPU; raise teacher.engine_tp")
    return TeacherPlan(
        parameters=known.parameters,
        engine=engine,
        problems=[f"teacher: {problem.removeprefix('engines: ')}" for problem in problems],
        gpu_bytes=gpu_bytes,
    )
