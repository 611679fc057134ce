"""One rollout engine as a Ray actor: a process that owns an SGLang server."""

import os
from dataclasses import dataclass
from pathlib import Path

import ray

from slimrl import device
from slimrl.config.schema import Recipe
from slimrl.data.seeds import derive_seed
from slimrl.observability.logs import capture_output
from slimrl.rollout.server import EngineServer


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where an engine answers."""

    name: str
    url: str
    tensor: int
    """Its tensor-parallel ranks"""
    pids: tuple[int, ...]
    """The actor's process and the server's main process"""


@ray.remote(max_restarts=0)
class EngineActor:
    """Starts an SGLang server, watches it and ends it. The server ends with this process, however that ends."""

    def __init__(self, recipe: Recipe, model_path: Path, logs: Path, index: int) -> None:
        capture_output(logs / f"engine_{index}_actor.log")
        self.recipe, self.model_path, self.logs, self.index = recipe, model_path, logs, index

    def start(self) -> EngineAddress:
        rollout = self.recipe.rollout
        self.server = EngineServer(
            self.index,
            rollout,
            self.model_path,
            self.logs / f"engine_{self.index}.log",
            precision=self.recipe.trainer.precision,
            cuda=device.device_type() == "cuda",
            seed=derive_seed(self.recipe.seed, "engine", self.index),
        )
        self.server.wait_ready()
        return EngineAddress(
            name=f"engine {self.index}",
            url=self.server.url,
            tensor=rollout.engine_tensor,
            pids=(os.getpid(), self.server.process.pid),
        )

    def check(self) -> None:
        """Raises ServerError with the cause from the log if the server has ended."""
        self.server.check()

    def stop(self) -> None:
        self.server.stop()
