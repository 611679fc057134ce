"""An environment in a process of its own, in which its copies are too."""

from dataclasses import asdict
from typing import Any, Self

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.isolation.environment_process import EnvironmentProcess
from slimrl.agent.isolation.messages import read_observation
from slimrl.data.prompt import Prompt


class RemoteEnvironment:
    """All methods raise EnvironmentFailure.

    Args:
        number: of the instance in the process.
        scratch: of the trajectory, which a copy has from the beginning.
    """

    def __init__(self, process: EnvironmentProcess, number: int = 0, scratch: dict[str, Any] | None = None) -> None:
        self._process, self._number, self._scratch = process, number, scratch if scratch is not None else {}

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._scratch = scratch
        await self._process.connect()
        return await self._observed("reset", {"seed": seed, "prompt": asdict(prompt), "scratch": scratch})

    async def step(self, turn: Turn) -> Observation:
        return await self._observed("step", asdict(turn))

    async def copy(self, *, scratch: dict[str, Any]) -> Self | None:
        answer = await self._process.ask("copy", self._number, {"scratch": scratch})
        if answer["instance"] is None:
            return None
        self._process.instances.add(answer["instance"])
        return type(self)(self._process, answer["instance"], scratch)

    async def close(self) -> None:
        await self._process.close(self._number)

    async def _observed(self, kind: str, data: dict[str, Any]) -> Observation:
        answer = await self._process.ask(kind, self._number, data)
        self._scratch.clear()
        self._scratch.update(answer["observation"].pop("scratch"))
        return read_observation(answer)
