"""A reward that writes down the keys that its process makes, which nobody could find out otherwise."""

import os
import secrets
from pathlib import Path

from toy_reward import low_tokens_of_any_version

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory

KEY_FILE = "SLIMRL_TEST_KEY_FILE"

make = secrets.token_urlsafe


def noted(*given: int) -> str:
    key = make(*given)
    with Path(os.environ[KEY_FILE]).open("a") as file:
        file.write(f"{key}\n")
    return key


if KEY_FILE in os.environ:
    # Rewards are loaded before engines start.
    secrets.token_urlsafe = noted


def low_tokens(trajectory: Trajectory, prompt: Prompt) -> float:
    return low_tokens_of_any_version(trajectory, prompt)
