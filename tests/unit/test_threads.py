"""A task's own code in a thread: whatever it raises reaches the coroutine that waits."""

import asyncio
import sys

import pytest

from slimrl.data.threads import TaskCodeExited, in_thread


def raises(error):
    def call():
        raise error

    return call


async def test_an_error_is_raised_as_it_is():
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught:
        await asyncio.wait_for(in_thread(raises(error)), 5)
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(1)])
async def test_what_is_no_ordinary_error_is_named_at_once(error):
    with pytest.raises(TaskCodeExited) as caught:
        await asyncio.wait_for(in_thread(raises(error)), 5)
    assert repr(error) in str(caught.value)
    assert caught.value.__cause__ is error


async def test_code_that_calls_exit_is_named_at_once():
    with pytest.raises(TaskCodeExited, match=r"SystemExit\('bye'\)"):
        await asyncio.wait_for(in_thread(lambda: sys.exit("bye")), 5)
