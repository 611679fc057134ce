"""Who may talk to a run's private Ray cluster: this user's processes on this machine.

Whoever can talk to Ray's ports can run programs as the user who started it.

1. The cluster listens on the loopback interface. Ray does so by itself on other systems than Linux, where it serves no
   cluster of several nodes, and has a switch for that.
2. It asks for a token of the run's own, which a file in the run's private folder holds. Left to itself Ray writes one
   token for all clusters into the home folder, with the permissions of any file.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

_TOKEN = "RAY_AUTH_TOKEN"
"""Environment variable of Ray's token, which Ray would prefer to the file."""


@contextmanager
def private_access(folder: Path) -> Iterator[None]:
    """Make a token and Ray's settings for a cluster that this process starts inside the block.

    Args:
        folder: that only this user can enter.
    """
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    given = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    }
    before = {name: os.environ.get(name) for name in (*given, _TOKEN)}
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.pop(_TOKEN, None)
    os.environ.update(given)
    # Read when Ray was imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    _read_again()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    """Ray keeps the mode and the token that it has read."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
