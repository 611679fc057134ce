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
CALLS = ".calls"
"""End of the name of a file that grows by a byte with each call at fault"""
WAIT_S = 600.0
IN_SANDBOX = 4
"""One episode of so many"""


async def calculator(expression: str, episode: EpisodeInfo, sandbox: SandboxPool) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    folder = Path(os.environ[FOLDER])
    if is_at_fault(folder, SLOW):
        await asyncio.sleep(WAIT_S)
    if is_at_fault(folder, FAILS):
        raise RuntimeError("the service is down")
    result = sound_calculator(expression)
    if episode.seed % IN_SANDBOX:
        return result
    return answer(await sandbox.run(Program(code=f"print({result!r})")))


def is_at_fault(folder: Path, how: str) -> bool:
    if not (folder / how).exists():
        return False
    with (folder / f"{how}{CALLS}").open("a") as file:
        file.write(".")
    return True


def calls_at_fault(folder: Path, how: str) -> int:
    """Calls that met this fault so far."""
    file = folder / f"{how}{CALLS}"
    return file.stat().st_size if file.exists() else 0
