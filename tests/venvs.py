"""Virtual environments of environments, for tests of what is made of their packages."""

import subprocess
from pathlib import Path

import pytest

import slimrl
from slimrl.environments.catalogue import ENVIRONMENTS
from slimrl.environments.venvs import venv_python, why_not_here

_FIND_SLIMRL = """
import sys
from pathlib import Path
sys.path.insert(0, {bootstrap!r})
import bootstrap
sys.path.pop(0)
bootstrap._find_slimrl(Path({slimrl!r}))
"""


def environment_python(name: str) -> Path:
    """The interpreter of an environment; skips the test if that is not installed."""
    if why := why_not_here(ENVIRONMENTS[name]):
        pytest.skip(f"{name}: {why}; `make environments` installs it")
    return venv_python(name)


def run_in(name: str, code: str, timeout_s: float = 120.0) -> str:
    """What code prints that the environment's interpreter runs, where slimrl's modules can be imported."""
    folder = Path(slimrl.__file__).parent
    prelude = _FIND_SLIMRL.format(bootstrap=str(folder / "agent" / "isolation"), slimrl=str(folder))
    command = [str(environment_python(name)), "-c", prelude + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
