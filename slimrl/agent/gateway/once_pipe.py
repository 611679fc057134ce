"""Hands a command what the policy must not find, before the policy has said a word: the data line, which has the label,
and the key that posts rewards.

1. It lies in a pipe whose reading end the command inherits, and in no variable, argument or file.
2. A pipe can be read once. What the command has not read is taken back when it asks the policy for the first time, so
   that whatever the policy makes it run finds an empty pipe.
"""

import asyncio
import os
from contextlib import suppress

KEY_VARIABLE = "SLIMRL_REWARD_FD"
"""Environment variable with the number of the descriptor that has the key"""


class OncePipe:
    """
    Args:
        content: what the command reads, of any size.

    Raises:
        OSError: the process has no descriptors left.
    """

    def __init__(self, content: bytes) -> None:
        self._left = memoryview(content)
        self._loop = asyncio.get_running_loop()
        self.read_end, self._write_end = os.pipe()
        self._is_open = True
        os.set_blocking(self._write_end, False)
        self._loop.add_writer(self._write_end, self._write)

    def close(self) -> None:
        """Take back what has not been read."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_writing()
        os.set_blocking(self.read_end, False)
        with suppress(BlockingIOError):  # another process still has the writing end, since slimrl forks without exec
            while os.read(self.read_end, 65536):
                pass
        os.close(self.read_end)

    def _write(self) -> None:
        self._left = self._left[os.write(self._write_end, self._left) :]
        if not self._left:
            self._end_writing()

    def _end_writing(self) -> None:
        """Does nothing the second time."""
        if self._write_end >= 0:
            self._loop.remove_writer(self._write_end)
            os.close(self._write_end)
            self._write_end = -1
