"""An engine, environments and a reward that episode workers can import."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import numpy as np

from slimrl.agent.environment import Observation
from slimrl.data.engine import Engine, GenerateRequest, GenerateResult

TURNS = 3


class SeededEngine(Engine):
    """What it says follows from the request and the version of its weights."""

    def __init__(self, end: int, version: int = 1) -> None:
        self.end, self.version = end, version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert request.seed is not None
        chosen = random.Random(f"{request.seed} {request.input_ids} {self.version}")
        await asyncio.sleep(chosen.random() / 100)
        tokens = [chosen.randrange(20, 200) for _ in range(chosen.randrange(1, 6))]
        return GenerateResult(
            tokens=[*tokens, self.end],
            logprobs=[-chosen.random() for _ in range(len(tokens) + 1)],
            weight_versions=np.full(len(tokens) + 1, self.version, np.int32),
            finish_reason="stop",
            routed_experts=None,
            cached_tokens=0,
        )

    async def aclose(self) -> None:
        return


class NumberedEngine(SeededEngine):
    """Begins each turn with the number that its address is."""

    def __init__(self, end: int, url: str) -> None:
        super().__init__(end)
        self.number = int(url)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        result.tokens[0] = self.number
        return result


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise KeyError("no such object here")


class Played:
    """Does in its second turn what the prompt's label says; notes in `folder` that it was closed."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def start(self, prompt, *, seed, scratch):
        self.label, self.scratch, self.random = prompt.label, scratch, random.Random(seed)
        self.scratch |= {"pid": os.getpid(), "total": 0.0, "latest_s": 0.0}
        self.file = self.folder / f"{os.getpid()}-{id(self)}"
        self.file.write_text(prompt.prompt_id)
        return Observation(messages=[{"role": "user", "content": f"Begin with {self.random.random()}."}])

    async def step(self, turn):
        self.scratch["total"] += self.random.random()
        if turn.index == 1:
            await self.act()
        if turn.index == TURNS - 1:
            return Observation(done=True, reward=1.0)
        return Observation(messages=[{"role": "user", "content": f"{turn.index}: {self.random.random()}"}], reward=0.5)

    async def act(self) -> None:
        match self.label:
            case "blocks":
                time.sleep(2.0)
            case "blocks for good":
                time.sleep(600.0)
            case "waits":
                await asyncio.sleep(600.0)
            case "is awake":
                until = time.monotonic() + 2.0
                while time.monotonic() < until:
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    self.scratch["latest_s"] = max(self.scratch["latest_s"], time.monotonic() - before)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "keeps a function":
                self.scratch["function"] = lambda: None
            case "keeps what cannot be read":
                self.scratch["object"] = Unreadable()

    async def close(self) -> None:
        self.file.unlink()


class Broken(Played):
    @classmethod
    def check(cls, **arguments):
        raise KeyError("no such table")


async def total(trajectory, prompt) -> float:
    return trajectory.scratch["total"]
