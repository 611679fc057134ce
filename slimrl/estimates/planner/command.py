"""`slimrl plan`: prints a plan or suggestions."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from slimrl.config.load import intended_command
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.schedule import longest_tokens
from slimrl.models.offline_recipe import read_offline

ABOUT_THE_CLUSTER = ("rollout.", "trainer.parallel.")
"""Settings whose warnings a plan shows; files and packages that this machine lacks do not matter to it."""


def run(
    path: Path,
    overrides: Sequence[str],
    hardware: Hardware,
    *,
    mean_tokens: int | None,
    suggestions_wanted: bool,
    gpus: int | None,
    top: int,
    to_json: bool,
) -> bool:
    """Print it; returns whether the plan, or one of the suggestions, fits.

    Args:
        suggestions_wanted: rank layouts of `gpus` trainer ranks, by default the recipe's number, instead of planning.
        top: number of layouts to show.

    Raises:
        ValueError: the recipe is refused, or its model is unknown.
    """
    if mean_tokens is not None and mean_tokens < 1:
        raise ValueError(f"--mean-tokens {mean_tokens}: must be at least 1")
    if gpus is not None and not suggestions_wanted:
        raise ValueError("--gpus goes with --suggest. A plan is for the recipe's trainer.num_ranks.")
    planned = read_offline(path, overrides, intended_command(path, overrides))
    longest = longest_tokens(planned.recipe, sft=planned.sft)
    if mean_tokens is not None and mean_tokens > longest:
        raise ValueError(f"--mean-tokens {mean_tokens}: the recipe allows at most {longest:,}")
    # These import torch and Megatron, which the checks above do not need.
    from slimrl.estimates.planner.plan import as_json, make_plan
    from slimrl.estimates.planner.suggest import suggest
    from slimrl.estimates.planner.tables import print_plan, print_suggestions
    from slimrl.observability.progress import Progress
    from slimrl.observability.terminal import plain_console

    if not suggestions_wanted:
        plan = make_plan(planned, hardware, mean_tokens=mean_tokens)
        if to_json:
            print(json.dumps(as_json(plan), indent=2))
        else:
            print_plan(plan)
        for note in planned.notes:
            if note.key.startswith(ABOUT_THE_CLUSTER):
                print(note, file=sys.stderr)
        return not plan.problems
    with Progress(0, plain_console(stderr=True)) as progress, progress.phase("planning", 0, "layouts") as phase:
        suggestions, tried, ranks = suggest(
            planned, hardware, gpus=gpus, count=top, mean_tokens=mean_tokens, seen=phase.update
        )
    fits = any(suggestion.plan.fits for suggestion in suggestions)
    if not to_json:
        print_suggestions(suggestions, tried, ranks)
        return fits
    rows = [
        {
            "settings": suggestion.settings,
            "layout": asdict(suggestion.plan.recipe.trainer.parallel),
            "memory_gib": suggestion.memory_gib,
            "step_seconds_without_resync": suggestion.plan.step_s,
            "fits": suggestion.plan.fits,
            "reason": suggestion.reason,
        }
        for suggestion in suggestions
    ]
    print(json.dumps({"gpus": ranks, "legal_layouts": tried, "suggestions": rows}, indent=2))
    return fits
