"""`slimrl plan`: a plan or suggestions, printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from slimrl.planner.hardware import Hardware
from slimrl.planner.recipe import read


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
    """Whether it fits; with suggestions, whether one of them does.

    Args:
        suggestions_wanted: rank layouts, of `gpus` trainer ranks or of as many as the recipe has, instead of planning.
        top: layouts to show.

    Raises:
        ValueError: the recipe is refused, or its model is not known here.
    """
    if mean_tokens is not None and mean_tokens < 1:
        raise ValueError(f"--mean-tokens {mean_tokens}: must be at least 1")
    if gpus is not None and not suggestions_wanted:
        raise ValueError("--gpus goes with --suggest.")
    planned = read(path, overrides)
    longest = planned.longest_tokens
    if mean_tokens is not None and mean_tokens > longest:
        raise ValueError(f"--mean-tokens {mean_tokens}: the recipe allows at most {longest:,}")
    # What needs torch and Megatron comes after what is refused without them.
    from slimrl.planner.plan import as_json, make_plan
    from slimrl.planner.suggest import suggest
    from slimrl.planner.tables import print_plan, print_suggestions

    if not suggestions_wanted:
        plan = make_plan(planned, hardware, mean_tokens=mean_tokens)
        if to_json:
            print(json.dumps(as_json(plan), indent=2))
        else:
            print_plan(plan)
        return plan.layout.fits
    suggestions, tried, ranks = suggest(planned, hardware, gpus=gpus, count=top, mean_tokens=mean_tokens)
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
