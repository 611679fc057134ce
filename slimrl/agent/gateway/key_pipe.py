"""Hands a command the key that posts rewards, before the policy has said a word.

1. The key lies in a pipe whose reading end the command inherits, and in no variable, argument or file.
2. A pipe can be read once. What the command has not read is taken back when it asks the policy for the first time, so
   that whatever the policy makes it run finds an empty pipe.
"""

import os

KEY_VARIABLE = "SLIMRL_REWARD_FD"
"""Environment variable with the number of the reading end"""


class KeyPipe:
    """
    Args:
        key: what the command reads, as a line.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._read_end: int | None = None

    def open(self) -> int:
        """The reading end, which stays open here until `close`. Raises OSError."""
        assert self._read_end is None
        self._read_end, write_end = os.pipe()
        with open(write_end, "w") as pipe:
            pipe.write(f"{self._key}\n")
        return self._read_end

    def close(self) -> None:
        """Take the key back if it has not been read. Does nothing if there is no pipe, or no longer one."""
        if self._read_end is None:
            return
        os.set_blocking(self._read_end, False)
        while os.read(self._read_end, 4096):
            pass  # to the end: the writing end is closed
        os.close(self._read_end)
        self._read_end = None
