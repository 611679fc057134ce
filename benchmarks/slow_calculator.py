"""The calculator behind a slow service, for benchmarks: each call waits, a few of them for long.

Waiting takes no CPU time, so that a run in which tools dominate can be timed on two cores.
"""

import asyncio
import random

from slimrl.agent.calculator import calculator as fast_calculator
from slimrl.agent.tools import EpisodeInfo

MEDIAN_S, SIGMA, LONGEST_S = 1.0, 1.2, 60.0
"""Lognormal distribution of the waits, with an upper limit: one call in a hundred takes 16 s or longer."""
HELDOUT = "heldout"
"""Prompts of the file of this name are answered at once: an evaluation measures the policy alone."""


async def calculator(expression: str, episode: EpisodeInfo) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    answer = fast_calculator(expression)
    if not episode.prompt.prompt_id.startswith(HELDOUT):
        waits = random.Random(f"{episode.seed} {expression}")
        await asyncio.sleep(min(LONGEST_S, MEDIAN_S * waits.lognormvariate(0, SIGMA)))
    return answer
