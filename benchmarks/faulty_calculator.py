"""The calculator behind a service that fails when it is told to: benchmarks/faults.py makes and removes its files.

While FOLDER/slow exists, a call waits for longer than its deadline; while FOLDER/fails exists, it raises.
"""

import asyncio
import os
from pathlib import Path

from slimrl.agent.calculator import calculator as sound_calculator

FOLDER = "SLIMRL_FAULTS"
"""The variable that names the folder."""
SLOW, FAILS = "slow", "fails"
WAIT_S = 600.0


async def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    folder = Path(os.environ[FOLDER])
    if (folder / SLOW).exists():
        await asyncio.sleep(WAIT_S)
    if (folder / FAILS).exists():
        raise RuntimeError("the service is down")
    return sound_calculator(expression)
