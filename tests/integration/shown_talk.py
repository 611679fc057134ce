"""Tasks whose runs have what the page of runs shows: images of states, sub-agents, and a reward that raises."""

import struct
import zlib
from dataclasses import replace

from slimrl.api import Episode, Observation, Prompt, Status, ToolCall, Trajectory, Turn

TURNS = 2


def png(shade: int) -> bytes:
    """A picture of 16 x 16 points of one grey."""
    lines = (b"\0" + bytes([shade]) * 16) * 16
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


class ShownTalk:
    """Shows a picture of each state."""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict) -> Observation:
        return Observation(messages=prompt.messages, image=png(0))

    async def step(self, turn: Turn) -> Observation:
        image = png(100 + 50 * turn.index)
        if turn.index == TURNS - 1:
            return Observation(done=True, image=image)
        return Observation(messages=[{"role": "user", "content": "And more?"}], image=image)

    async def close(self) -> None:
        return


async def delegating(episode: Episode) -> Status:
    """Has two sub-agents work on whatever the first turn says, and answers in the second turn."""
    turn = await episode.sample_turn()
    if isinstance(turn, Status):
        return turn
    calls = tuple(ToolCall(name="solver", arguments={"task": f"Solve part {part}."}) for part in ("one", "two"))
    asked = replace(turn, calls=calls, finish_reason="stop", is_last=False)
    if not episode.append_observation(asked, await episode.step(asked)):
        return Status.truncated
    last = await episode.sample_turn()
    return last if isinstance(last, Status) else Status.completed


def raising(trajectory: Trajectory, prompt: Prompt) -> float:
    raise RuntimeError("the judge of the answers has no <b>paper</b>")
