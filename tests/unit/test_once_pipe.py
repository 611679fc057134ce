"""Pipes that hand a command what can be read once."""

import os

import pytest

from slimrl.agent.gateway.once_pipe import OncePipe


@pytest.mark.parametrize("size", [10, 1 << 20])
async def test_what_was_not_read_is_taken_back_also_while_a_copied_process_has_the_writing_end(size: int):
    before = len(os.listdir("/proc/self/fd"))
    pipe = OncePipe(b"x" * size)
    copied, commands = os.dup(pipe._write_end), os.dup(pipe.read_end)
    pipe._write()
    pipe.close()
    pipe.close()
    with pytest.raises(BlockingIOError):
        os.read(commands, 1)
    os.close(copied)
    assert os.read(commands, 1) == b""
    os.close(commands)
    assert len(os.listdir("/proc/self/fd")) == before
