"""The calculator behind a service that fails when it is told to; of one episode in four it runs in the sandbox.

While FOLDER/slow exists, a call waits for longer than its deadline; while FOLDER/fails exists, it raises.
"""

import asyncio
import os
from pathlib import Path

from slimrl.agent.calculator import calculator as sound_calculator
from slimrl.agent.sandbox.interface import Program
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.sandbox.tools import answer
from slimrl.agent.tools import EpisodeInfo

FOLDER = "SLIMRL_CHAOS"
"""The variable that names the folder."""
SLOW, FAILS = "slow", "fails"
WAIT_S = 600.0
IN_SANDBOX = 4
"""One episode of so many"""


async def calculator(expression: str, episode: EpisodeInfo, sandbox: SandboxPool) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    folder = Path(os.environ[FOLDER])
    if (folder / SLOW).exists():
        await asyncio.sleep(WAIT_S)
    if (folder / FAILS).exists():
        raise RuntimeError("the service is down")
    result = sound_calculator(expression)
    if episode.seed % IN_SANDBOX:
        return result
    return answer(await sandbox.run(Program(code=f"print({result!r})")))
