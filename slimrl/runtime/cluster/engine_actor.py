"""One rollout engine as a Ray actor, a process that owns an SGLang server; on several nodes an actor for each."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray

from slimrl import device
from slimrl.base.seeds import derive_seed
from slimrl.config.hub import fetch_to_this_node
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import EngineError
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import EngineMemory, SglangControl
from slimrl.engines.servers.ports import free_port
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import ENGINE, TEACHER, EnginePart, EngineServer, part_name
from slimrl.observability.logs import capture_output
from slimrl.resync.ipc.allocator import forbid_expandable_segments
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.runtime.cluster.placement import Node

HEALTH_EVERY_S = 5.0
"""Shortest time between two health checks of an engine."""
ENDS_WITHIN_S = 2.0
"""Seconds within which a server ends after its worker; about one is usual."""


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """An engine's address and processes."""

    name: str
    url: str
    key: EngineKey
    tensor: int
    """Number of tensor-parallel ranks of the engine"""
    nodes: tuple[str, ...]
    """Names of the engine's nodes, that of the first part first"""
    pids: tuple[int, ...]
    """Process ids: of the actor and of the server's main process, for each part"""


def actor_log(index: int, part: int, role: str = ENGINE) -> str:
    """File name of an actor's log."""
    return f"{part_name(index, part, role).replace(' ', '_')}_actor.log"


class EngineActor:
    """Starts, watches and ends an SGLang server, which ends with this process, however that ends."""

    def __init__(
        self,
        recipe: Recipe,
        key: EngineKey,
        logs: Path,
        working_directory: Path,
        index: int,
        node: Node,
        devices: tuple[str, ...],
        part: int = 0,
        role: str = ENGINE,
        starts: int = 0,
    ) -> None:
        """
        Args:
            key: of the run's engines.
            working_directory: the driver's.
            node: this process's node; the server listens on its address.
            devices: GPU ids of an engine with several GPUs; empty if this process sees the right ones already.
            part: number of the engine's part that this actor owns.
            role: ENGINE, TEACHER or PAST.
            starts: of this engine's servers before, by other actors.
        """
        capture_output(logs / actor_log(index, part, role))
        os.chdir(working_directory)
        for environment in (os.environ, recipe.rollout.env):
            forbid_expandable_segments(environment)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self.recipe, self.logs, self.index, self.node, self.part, self.role = recipe, logs, index, node, part, role
        self._key = key
        self.starts = starts
        self.has_started = False
        """Whether there is a server, which may have ended"""
        self.answered = 0.0
        """When the server last did, on the monotonic clock"""

    def meeting(self) -> str:
        """An address on this node at which the parts of an engine can find each other."""
        return f"{self.node.address}:{free_port(self.node.address)}"

    def start(self, meeting: str | None = None) -> EngineAddress:
        """
        Args:
            meeting: for an engine on several nodes, whose actors are told to start together; of its first part.
        """
        return self._start(None, meeting)

    def restart(self, meeting: str | None = None, port: int | None = None) -> EngineAddress:
        """Replace the server, whatever its state, by a new one at the same address.

        It has the checkpoint's weights. One that a resync will give others is left paused, and holds the memory that
        engines hold during a resync.

        Args:
            port: of the server of an actor that has ended; None for this one's, or if there was none for any.
        """
        if self.has_started:
            self.server.stop()
            self.control.close()
            port = self.server.port
        address = self._start(port, meeting)
        if self.part > 0 or self.role == TEACHER:
            return address
        self.control.pause()
        if self.recipe.rollout.colocated:
            self.control.release_memory([EngineMemory.kv_cache, EngineMemory.cuda_graph])
        return address

    def load_checkpoint(self, folder: Path, version: int) -> None:
        """Serve a Hugging Face checkpoint of the same model as this version; no request may run. Raises EngineError."""
        self.control.load_checkpoint(str(folder))
        self.control.flush_when_idle()
        self.control.set_version(version)

    def flush_cache(self) -> None:
        """Raises EngineError if the engine cannot flush its prefix cache."""
        self.control.flush_when_idle()

    def pause(self) -> None:
        """Abort running requests and let new ones wait; see EngineGroup.pause."""
        self._unless_ended(lambda: self.control.pause(PauseMode.abort))

    def release_memory(self, parts: list[EngineMemory]) -> None:
        """Release these parts of the engine's memory. A server that has ended holds none; the next resync replaces
        it."""
        self._unless_ended(lambda: self.control.release_memory(parts))

    def resume_memory(self, parts: list[EngineMemory]) -> None:
        """Take these parts of the memory back; with the KV cache the engine serves requests again. A server that has
        ended is skipped."""

        def resume() -> None:
            self.control.resume_memory(parts)
            if EngineMemory.kv_cache in parts:
                self.control.resume()

        self._unless_ended(resume)

    def _unless_ended(self, act: Callable[[], None]) -> None:
        """Ignore EngineError if the server has ended, or ends within ENDS_WITHIN_S.

        Raises EngineError within `health_timeout_s` if it hangs: what follows has a longer deadline.
        """
        try:
            self.control.probe(self.recipe.rollout.health_timeout_s)
            act()
        except EngineError:
            deadline = time.monotonic() + ENDS_WITHIN_S
            while not self._has_ended():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def ending(self) -> str:
        """How the server ended, with the cause from its log, or that it does not answer; empty while all is well.

        It is asked for the state of its workers, which they give between two batches, paused or not.
        """
        try:
            self.server.check()
            now = time.monotonic()
            if self.part == 0 and now - self.answered > HEALTH_EVERY_S:
                self.control.probe(self.recipe.rollout.health_timeout_s)
                self.answered = time.monotonic()
        except (ServerError, EngineError) as error:
            return str(error)
        return ""

    def _has_ended(self) -> bool:
        try:
            self.server.check()
        except ServerError:
            return True
        return False

    def stop(self) -> None:
        """End the server, and remove leftovers of dead trainer ranks in this node's shared memory."""
        if self.has_started:
            self.server.stop()
        clean_stale_segments()

    def _start(self, port: int | None, meeting: str | None) -> EngineAddress:
        fetch_to_this_node(self.recipe.model.path)
        rollout = self.recipe.rollout
        stem = actor_log(self.index, self.part, self.role).removesuffix("_actor.log")
        again = f"_start_{self.starts}" if self.starts else ""
        self.starts += 1
        self.server = EngineServer(
            self.index,
            rollout,
            Path(self.recipe.model.path).absolute(),
            self.logs / f"{stem}{again}.log",
            key=self._key,
            precision=self.recipe.trainer.precision,
            cuda=device.device_type() == "cuda",
            host=self.node.address,
            port=port,
            seed=derive_seed(self.recipe.seed, self.role, self.index),
            deterministic=self.recipe.deterministic,
            trust_remote_code=self.recipe.model.trust_remote_code,
            part=None if meeting is None else EnginePart(number=self.part, meeting=meeting),
            role=self.role,
            # A teacher's requests are counted by its own concurrency.
            trajectories=None if self.role == TEACHER else self.recipe.step_trajectories,
            metrics=bool(self.recipe.tracking.prometheus),
        )
        try:
            self.server.wait_ready()
        except ServerError:
            self.server.stop()
            raise
        self.answered = time.monotonic()
        name = part_name(self.index, self.part, self.role)
        self.control = SglangControl(name, self.server.url, key=self._key, timeout_s=self.recipe.resync.timeout_s)
        self.has_started = True
        return EngineAddress(
            name=name,
            url=self.server.url,
            key=self._key,
            tensor=rollout.engine_tp,
            nodes=(self.node.name,),
            pids=(os.getpid(), self.server.process.pid),
        )


RemoteEngine = ray.remote(max_restarts=0)(EngineActor)
"""EngineActor as Ray starts it in a process of its own"""
