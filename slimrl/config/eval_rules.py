"""Rules of the section `eval`."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode


def eval_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Evaluations without anything to evaluate on, without engines, of equal samples, pass@k of more than there are."""
    if command == "eval" and not recipe.data.eval:
        yield "data.eval", "names no evaluation set."
    if command == "train" and recipe.eval.every_steps and not recipe.data.eval:
        yield "eval.every_steps", f"{recipe.eval.every_steps}, but data.eval names no evaluation set. Use 0."
    if command == "train" and recipe.eval.engines:
        yield from _engine_violations(recipe)
    if command in ("train", "eval") and recipe.data.eval:
        yield from _sample_violations(recipe)


def _engine_violations(recipe: Recipe) -> Iterator[Violation]:
    count, rollout = recipe.eval.engines, recipe.rollout
    if not recipe.data.eval:
        yield "eval.engines", f"{count}, but data.eval names no evaluation set. Use 0."
    elif not recipe.eval.every_steps and not recipe.eval.at_start:
        yield (
            "eval.engines",
            f"{count}, but eval.every_steps is 0 and eval.at_start false, and the evaluation after the last step has "
            "all engines. Use 0, or set one of them.",
        )
    if rollout.mode is RolloutMode.sync:
        yield (
            "eval.engines",
            f"{count}, but with rollout.mode sync all engines wait for the trainer. Use 0, or rollout.mode async or "
            "one_step_off.",
        )
    elif count >= rollout.num_engines:
        yield (
            "eval.engines",
            f"{count} of rollout.num_engines {rollout.num_engines} leave none for the rollouts. Use at most "
            f"{rollout.num_engines - 1}, or 0 to evaluate between two steps.",
        )


def _sample_violations(recipe: Recipe) -> Iterator[Violation]:
    samples, sampling = recipe.eval.samples_per_prompt, recipe.rollout.eval_sampling
    greedy = {"temperature": sampling.temperature == 0, "top_k": sampling.top_k == 1}
    for name, holds in greedy.items():
        if samples > 1 and holds:
            value = f"{getattr(sampling, name):g}"
            other = "a temperature such as 0.7" if name == "temperature" else "-1"
            yield (
                "eval.samples_per_prompt",
                f"{samples} samples of a prompt would all be the same, since rollout.eval_sampling.{name} is {value}. "
                f"Set that to {other}, or samples_per_prompt to 1.",
            )
    for k in recipe.eval.pass_at:
        if k > samples:
            yield (
                "eval.pass_at",
                f"pass@{k} needs {k} samples of each prompt, and eval.samples_per_prompt is {samples}. "
                "Raise that, or leave this k out.",
            )
