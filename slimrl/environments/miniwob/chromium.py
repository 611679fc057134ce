"""One chromium that several processes use: each connects to it and opens a browser context of its own.

A context ends with the connection that opened it, so a process that is killed leaves none behind.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slimrl.environments.miniwob.chromium_keeper import PROGRAM

_KEEPER = Path(__file__).with_name("chromium_keeper.py")
_END_S = 20.0


class Chromium:
    """A chromium that runs until `close`, or until this process and those that it forked have ended.

    Raises:
        ValueError: there is none on this machine, or it does not start.
    """

    def __init__(self) -> None:
        find_chromium()
        self._folder = Path(tempfile.mkdtemp(prefix="slimrl-miniwob-"))
        self._keeper = subprocess.Popen(
            [sys.executable, str(_KEEPER), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if line != b"\n":
            self.close()
            raise ValueError(line.decode().strip() or "the process that keeps chromium ended")

    @property
    def endpoint(self) -> str:
        """Address of its DevTools, which changes when chromium was started anew."""
        return (self._folder / "endpoint").read_text()

    def close(self) -> None:
        """End chromium and remove its files. Only where it was started."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(_END_S)
        self._keeper.stdout.close()


def find_chromium() -> None:
    """Raises ValueError: there is no chromium."""
    if shutil.which(PROGRAM) is None:
        raise ValueError(f"there is no {PROGRAM} on PATH; Debian's is installed by `apt-get install chromium`")
