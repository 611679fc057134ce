"""One rollout engine as a Ray actor: a process that owns an SGLang server."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from slimrl import device
from slimrl.config.schema import Recipe
from slimrl.data.protocols import EngineError
from slimrl.data.seeds import derive_seed
from slimrl.observability.logs import capture_output
from slimrl.resync.shared_buffer import clean_stale_segments
from slimrl.rollout.control import EngineMemory, SglangControl
from slimrl.rollout.process import ServerError
from slimrl.rollout.server import EngineServer
from slimrl.runtime.placement import Node

ENDS_WITHIN_S = 2.0
"""A server whose worker has ended takes about a second to end."""


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where an engine answers."""

    name: str
    url: str
    tensor: int
    """Its tensor-parallel ranks"""
    node: str
    """Name of the node that it is on"""
    pids: tuple[int, ...]
    """The actor's process and the server's main process, on that node"""


@ray.remote(max_restarts=0)
class EngineActor:
    """Starts an SGLang server, watches it and ends it. The server ends with this process, however that ends."""

    def __init__(
        self,
        recipe: Recipe,
        model_path: Path,
        logs: Path,
        working_directory: Path,
        index: int,
        node: Node,
        devices: tuple[str, ...],
    ) -> None:
        """
        Args:
            working_directory: the driver's.
            node: that this process is on; the server listens on its address.
            devices: ids of the GPUs of an engine of several; empty where this process sees what the engine needs.
        """
        capture_output(logs / f"engine_{index}_actor.log")
        os.chdir(working_directory)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self.recipe, self.model_path, self.logs, self.index, self.node = recipe, model_path, logs, index, node
        self.starts = 0

    def start(self) -> EngineAddress:
        return self._start(port=None)

    def restart(self) -> EngineAddress:
        """End the server, whatever state it is in, and start another at its address, which is left paused.

        It holds the weights of the checkpoint, and of its memory what engines hold when weights are sent.
        """
        self.server.stop()
        self.control.close()
        address = self._start(port=self.server.port)
        self.control.pause()
        if self.recipe.rollout.colocated:
            self.control.release_memory([EngineMemory.kv_cache])
        return address

    def flush_cache(self) -> None:
        """Raises EngineError if the engine does not flush its prefix cache."""
        self.control.flush_when_idle()

    def release_memory(self, parts: list[EngineMemory]) -> None:
        """A server that has ended holds none; the next resync replaces it."""
        with self._unless_ended():
            self.control.release_memory(parts)

    def resume_memory(self, parts: list[EngineMemory]) -> None:
        """Take memory back, unless the server has ended; with that of the KV cache the engine serves requests again."""
        with self._unless_ended():
            self.control.resume_memory(parts)
            if EngineMemory.kv_cache in parts:
                self.control.resume()

    @contextmanager
    def _unless_ended(self) -> Iterator[None]:
        """Lets pass that a server which has ended does not answer; it may be about to."""
        try:
            yield
        except EngineError:
            deadline = time.monotonic() + ENDS_WITHIN_S
            while not self.ending():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def ending(self) -> str:
        """How the server ended, with the cause from the log; empty while it lives."""
        try:
            self.server.check()
        except ServerError as error:
            return str(error)
        return ""

    def stop(self) -> None:
        """End the server, and remove from this node what trainer ranks that are gone left in shared memory."""
        self.server.stop()
        clean_stale_segments()

    def _start(self, port: int | None) -> EngineAddress:
        rollout = self.recipe.rollout
        again = f"_start_{self.starts}" if self.starts else ""
        self.starts += 1
        self.server = EngineServer(
            self.index,
            rollout,
            self.model_path,
            self.logs / f"engine_{self.index}{again}.log",
            precision=self.recipe.trainer.precision,
            cuda=device.device_type() == "cuda",
            host=self.node.address,
            port=port,
            seed=derive_seed(self.recipe.seed, "engine", self.index),
        )
        self.server.wait_ready()
        name = f"engine {self.index}"
        self.control = SglangControl(name, self.server.url, timeout_s=self.recipe.resync.timeout_s)
        return EngineAddress(
            name=name,
            url=self.server.url,
            tensor=rollout.engine_tensor,
            node=self.node.name,
            pids=(os.getpid(), self.server.process.pid),
        )
