"""Rules of the section `stop`."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

LIMITS = ("mismatch", "kl", "entropy_min", "entropy_max", "grad_norm", "effective_sample_size_min")
"""Settings of the section that limit a metric."""

OF_SFT = ("grad_norm",)
"""Settings of LIMITS whose metric supervised training records."""


def stop_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Limits that cannot hold, never apply, or are of metrics that the command does not record."""
    stop, most = recipe.stop, recipe.algorithm.max_logprob_mismatch
    given = {name: value for name in LIMITS if (value := getattr(stop, name)) is not None}
    for name in given:
        if command == "sft" and name not in OF_SFT:
            yield f"stop.{name}", "supervised training does not record this metric. Use null."
    if command == "train" and stop.mismatch is not None and stop.mismatch >= most:
        yield (
            "stop.mismatch",
            f"{stop.mismatch} is not below algorithm.max_logprob_mismatch {most}, above which the run stops at once.",
        )
    if stop.entropy_min is not None and stop.entropy_max is not None and stop.entropy_min >= stop.entropy_max:
        yield "stop.entropy_min", f"{stop.entropy_min} is not below stop.entropy_max {stop.entropy_max}."
