"""Work that fails in one of two processes, each way in which a process can; the other would go on for a minute."""

import os
import signal
import sys
import time
from pathlib import Path


class NotToBePickled(OSError):
    """Can be sent to another process, where it cannot be made again."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


def work(how: str, advance) -> None:
    if how == "wait":
        for _ in range(600):
            advance(16 * 1024**2)
            time.sleep(0.1)
    elif how == "ValueError":
        raise ValueError("broken source")
    elif how == "OSError":
        raise OSError(28, "No space left on device", "out/file")
    elif how == "not to be pickled":
        raise NotToBePickled("out/file", "lost")
    elif how == "bug":
        assert how == "right", "a mistake of ours"
    elif how == "exit":
        sys.exit(0)
    elif how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        Path(how).touch()
        advance(5)
