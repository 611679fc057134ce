"""A process ends with its own exit code while a thread of it is in native code: of the resync, or of a tool."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PROCESS = """
import sys, threading, time
# Threads of gloo get the interpreter late.
sys.setswitchinterval(5.0)
import torch
from slimrl.data.model_weights import GroupSpec
from slimrl.resync.p2p.peer_group import Move, PeerGroup, serve_store
from slimrl.resync.engine_calls import SendThread

store = serve_store("127.0.0.1", 2.0)
spec = GroupSpec(name="group", address="127.0.0.1", port=store.port, world_size=2, backend="gloo", timeout_s=2.0)
deadline = time.monotonic() + 2
data = torch.zeros(1000, dtype=torch.uint8)
members = {}

def join(member):
    members[member] = PeerGroup(spec, member)

def exchange(member):
    join(member)
    for _ in range(50):
        members[member].start([Move(1 - member, data.clone(), sends=member == 0)], deadline).wait()

other = threading.Thread(target=exchange if sys.argv[1] == "none" else join, args=(1,))
other.start()
if sys.argv[1] == "none":
    exchange(0)
    other.join()
else:
    join(0)
    other.join()
    message = Move(1, data, sends=sys.argv[1] == "send")
    sending = SendThread(lambda: members[0].start([message], deadline).wait())
    time.sleep(0.5)
print(*sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.mark.parametrize(("moment", "threads"), [("receive", ["resync-send"]), ("send", ["resync-send"]), ("none", [])])
def test_it_ends_after_the_last_message_or_once_that_is_out_of_time(moment: str, threads: list[str]):
    command = [sys.executable, "-c", PROCESS, moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["MainThread", *threads]
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


HANGING_TOOL = """
import asyncio, contextlib, time
from slimrl.agent.tools import ToolBox, ToolError, make_tool
from slimrl.cli import app

def wait(seconds: float) -> str:
    '''Wait.

    Args:
        seconds: How long.
    '''
    time.sleep(seconds)
    return "done"

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

async def ask():
    with contextlib.suppress(ToolError):
        await ToolBox([make_tool(wait)]).call("wait", {"seconds": 1.0}, 0.05)

asyncio.run(ask())
# Removed when the interpreter ends, while the tool comes back.
long_end = LongEnd()
app(["no-such-command"])
"""


def test_a_tool_that_hangs_does_not_change_how_the_command_ends():
    done = subprocess.run(
        [sys.executable, "-c", HANGING_TOOL], capture_output=True, text=True, timeout=100, check=False
    )
    assert "No such command 'no-such-command'" in done.stderr
    assert done.returncode == 2
