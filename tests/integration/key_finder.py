"""A reward that tells the test the key of the run's engines, which is in the driver's memory and nowhere else."""

import gc
import os
from pathlib import Path

from toy_reward import low_tokens_of_any_version

from slimrl.data.engine_key import EngineKey
from slimrl.data.trajectory import Prompt, Trajectory

KEY_FILE = "SLIMRL_TEST_KEY_FILE"


def low_tokens(trajectory: Trajectory, prompt: Prompt) -> float:
    path = Path(os.environ[KEY_FILE])
    if not path.exists():
        keys = {found.value for found in gc.get_objects() if isinstance(found, EngineKey)}
        path.with_suffix(".part").write_text("\n".join(keys))
        path.with_suffix(".part").rename(path)
    return low_tokens_of_any_version(trajectory, prompt)
