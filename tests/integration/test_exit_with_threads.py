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
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, serve_store
from slimrl.resync.engine_calls import SendThread
from slimrl.engines.plugin.bucket_receiver import EngineReceivers

class OnlyRank:
    rank, per_node = 0, 1

    def exchange(self, value):
        return [value]

store = serve_store("127.0.0.1", 2, 2.0)
spec = GroupSpec(
    name="group", address="127.0.0.1", port=store.port, world_size=2, backend="gloo", bucket_bytes=160, timeout_s=2.0
)
if sys.argv[1] == "receive":
    receivers = EngineReceivers(OnlyRank())
    receivers.open_version(spec, 1)
    source = BroadcastGroup(spec, 0, store)
    time.sleep(0.5)
elif sys.argv[1] == "send":
    silent = []
    joining = threading.Thread(target=lambda: silent.append(BroadcastGroup(spec, 1)))
    joining.start()
    source = BroadcastGroup(spec, 0, store)
    joining.join()
    sending = SendThread(lambda: source.broadcast(torch.zeros(1000)))
    time.sleep(0.5)
else:
    members = []

    def receive():
        members.append(BroadcastGroup(spec, 1))
        for _ in range(50):
            members[0].broadcast(torch.zeros(1000))

    joining = threading.Thread(target=receive)
    joining.start()
    source = BroadcastGroup(spec, 0, store)
    for _ in range(50):
        source.broadcast(torch.zeros(1000))
    joining.join()
print(*sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.mark.parametrize(
    ("moment", "threads"), [("receive", ["receive-buckets"]), ("send", ["resync-send"]), ("none", [])]
)
def test_it_ends_after_the_last_broadcast_or_once_that_is_out_of_time(moment: str, threads: list[str]):
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
