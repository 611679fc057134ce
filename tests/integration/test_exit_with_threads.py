"""A process ends with its own exit code while a thread of it is in native code: of the resync, or of a tool."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PROCESS = """
import sys, threading, time
import torch
from slimrl.data.weights import GroupSpec
from slimrl.ipc.broadcast_group import BroadcastGroup, serve_store
from slimrl.resync.sending import SendThread
from slimrl.sglang_plugin.bucket_receiver import EngineReceivers

# Threads of gloo get the interpreter late.
sys.setswitchinterval(5.0)

class OnlyRank:
    rank, per_node = 0, 1

    def exchange(self, value):
        return [value]

store = serve_store("127.0.0.1", 2, 2.0)
spec = GroupSpec(
    name="group", address="127.0.0.1", port=store.port, world_size=2, backend="gloo", bucket_bytes=160, timeout_s=2.0
)
receivers = EngineReceivers(OnlyRank())
if sys.argv[1] == "receive":
    receivers.open_version(spec, 1)
    source = BroadcastGroup(spec, 0, store)
else:
    silent = []
    joining = threading.Thread(target=lambda: silent.append(BroadcastGroup(spec, 1)))
    joining.start()
    source = BroadcastGroup(spec, 0, store)
    joining.join()
    sending = SendThread(lambda: source.broadcast(torch.zeros(1000)))
time.sleep(0.5)
print(*sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.mark.parametrize(("moment", "thread"), [("receive", "receive-buckets"), ("send", "resync-send")])
def test_it_ends_once_the_broadcast_is_out_of_time(moment: str, thread: str):
    command = [sys.executable, "-c", PROCESS, moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["MainThread", thread]
    assert done.returncode == 0, done.stderr


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
