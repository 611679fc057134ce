"""The engines of a run as the driver sees them: one actor each, the router in front, and the client to them."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slimrl.config.schema import Recipe
from slimrl.data.protocols import Engine, EngineError
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.client import SglangEngine
from slimrl.rollout.control import EngineMemory
from slimrl.rollout.lockstep import LockstepEngine
from slimrl.rollout.pinned import PinnedEngines
from slimrl.rollout.process import ServerError
from slimrl.rollout.router import Router
from slimrl.runtime.actors import ActorGroup
from slimrl.runtime.engine_actor import EngineActor, EngineAddress
from slimrl.runtime.errors import StageError
from slimrl.runtime.reservation import Reservation

CHECK_TIMEOUT_S = 60.0
"""Longer than the cluster takes to miss a node that went silent."""
STOP_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class EngineGroup:
    """All engines. Making it starts their processes; `wait_ready` waits until they answer."""

    def __init__(self, recipe: Recipe, folder: RunFolder, model_path: Path, places: Reservation) -> None:
        """
        Args:
            model_path: checkpoint that they load.
            places: where they go.
        """
        self._recipe, self._folder = recipe, folder
        actors, logs, nodes = {}, {}, {}
        for index, slots in enumerate(places.placement.engines):
            name, node = f"engine {index}", slots[0].node
            options = places.options(slots[0], recipe.rollout.threads_per_engine)
            actors[name] = EngineActor.options(**options).remote(  # type: ignore[attr-defined]
                recipe,
                model_path.absolute(),
                folder.logs.absolute(),
                Path.cwd(),
                index,
                node,
                places.devices(slots),
            )
            logs[name], nodes[name] = folder.log_file(f"engine_{index}_actor"), node
        self._actors = ActorGroup(actors, logs, nodes)
        self._starts = self._actors.begin("start")
        self._asked: dict[str, Any] | None = None
        self._tolerated: set[str] = set()
        self.num_replaced = 0
        self._router: Router | None = None
        self.addresses: list[EngineAddress] = []

    def wait_ready(self) -> None:
        """Raises StageError with the cause from its log if an engine or the router does not come up."""
        rollout = self._recipe.rollout
        self.addresses = list(
            self._actors.wait(self._starts, "start", timeout_s=rollout.startup_timeout_s + 60).values()
        )
        if self._uses_router:
            self._start_router(port=None)

    def replace(self, names: Collection[str]) -> None:
        """Start these anew, at their addresses and paused; the others go on, but nobody asks through the router.

        Raises:
            StageError: one does not come up, or the router does not.
        """
        for name, ending in self._actors.call("ending", dict.fromkeys(names, ()), timeout_s=CHECK_TIMEOUT_S).items():
            log.warning("%s", ending or f"{name} has not ended by itself, and is ended")
        timeout_s = self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        fresh = self._actors.call("restart", dict.fromkeys(names, ()), timeout_s=timeout_s)
        self.addresses = [fresh.get(address.name, address) for address in self.addresses]
        self.num_replaced += len(fresh)
        # What `watch` asked before is answered about the servers that are gone.
        self._asked = None
        self._tolerated -= fresh.keys()
        for address in fresh.values():
            log.info("process %d: %s, server on %s", address.pids[-1], address.name, address.node)
        if self._router is not None:
            # It goes on leaving out an engine that failed some requests, whatever has taken the engine's place.
            self._router.stop()
            self._start_router(port=self._router.port)

    def flush_caches(self) -> None:
        """Empty the prefix cache of every engine; raises StageError if one does not, with requests under way."""
        self._actors.call("flush_cache", timeout_s=self._recipe.resync.timeout_s + 30)

    def release_memory(self, parts: Collection[EngineMemory]) -> None:
        """See SglangControl.release_memory."""
        self._move_memory("release_memory", parts)

    def resume_memory(self, parts: Collection[EngineMemory]) -> None:
        """Take memory back; with that of the KV cache the engines serve requests again."""
        self._move_memory("resume_memory", parts)

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(what it is, process id) of actors and servers, with their nodes, and of the router."""
        roles = [
            (f"{address.name}, {part} on {address.node}", pid)
            for address in self.addresses
            for part, pid in zip(("actor", "server"), address.pids, strict=True)
        ]
        return (*roles, *(() if self._router is None else (("router", self._router.process.pid),)))

    def client(self, *, vocab_size: int, routed_experts_shape: tuple[int, int] | None) -> Engine:
        """What episodes talk to; it belongs to the event loop that first uses it."""
        urls = [address.url for address in self.addresses]

        def connect(url: str, engine_urls: list[str]) -> SglangEngine:
            return SglangEngine(
                url, engine_urls=engine_urls, vocab_size=vocab_size, routed_experts_shape=routed_experts_shape
            )

        if self._router is not None:
            return connect(self._router.url, urls)
        engines = [connect(url, [url]) for url in urls]
        if self._recipe.deterministic:
            return LockstepEngine(engines)
        return PinnedEngines(engines)

    def check(self) -> None:
        """Raises StageError with the cause from its log if an engine has ended, other than one that `watch` tolerates,
        or the router has."""
        endings = self._actors.call("ending", timeout_s=CHECK_TIMEOUT_S)
        if causes := [text for name, text in endings.items() if text and name not in self._tolerated]:
            raise StageError("; ".join(causes))
        self._check_router()

    def watch(self) -> None:
        """To be called again and again while episodes run: asks the engines, and reads their answers a call later.

        With the router the others take over the sessions of an engine that has ended, and the next resync replaces it.

        Raises:
            StageError: the router or an engine's actor has ended, or an engine and no other can take its sessions
                (there is no router, or none is left), or it may not be replaced (`rollout.max_replacements`).
        """
        if self._asked is None:
            self._asked = self._actors.begin("ending")
        elif (endings := self._actors.answers(self._asked, "ending")) is not None:
            self._asked = None
            self._judge({name: text for name, text in endings.items() if text})
        self._check_router()

    def _judge(self, ended: Mapping[str, str]) -> None:
        """Whether the episodes go on without the engines that have ended, given with their causes; see `watch`."""
        if ended.keys() <= self._tolerated:
            return
        causes = "; ".join(ended.values())
        if self._router is None or len(ended) == len(self.addresses):
            raise StageError(causes)
        limit = self._recipe.rollout.max_replacements
        if self.num_replaced + len(ended) > limit:
            raise StageError(
                f"{causes}; rollout.max_replacements = {limit} allows no more engines to be replaced "
                f"({self.num_replaced} were)"
            )
        log.warning("the other engines go on, and the next resync replaces what has ended: %s", causes)
        self._tolerated |= ended.keys()

    def _start_router(self, port: int | None) -> None:
        rollout = self._recipe.rollout
        try:
            self._router = Router(
                [address.url for address in self.addresses],
                self._folder.log_file("router"),
                timeout_s=rollout.startup_timeout_s,
                request_timeout_s=rollout.request_timeout_s,
                port=port,
            )
            self._router.wait_ready()
        except (ServerError, EngineError) as error:
            raise StageError(str(error)) from error

    def _move_memory(self, method: str, parts: Collection[EngineMemory]) -> None:
        # Pause, flush and release have a deadline each.
        timeout_s = 3 * self._recipe.resync.timeout_s + 30
        self._actors.call(method, dict.fromkeys(self._actors.names, (list(parts),)), timeout_s=timeout_s)

    def _check_router(self) -> None:
        if self._router is not None:
            try:
                self._router.check()
            except ServerError as error:
                raise StageError(str(error)) from error

    def stop(self) -> None:
        """End the router and the engines, side by side, then their actors.

        An actor that is still starting its engine, or cannot end it, is killed, and its engine ends with it.
        """
        try:
            if self._router is not None:
                self._router.stop()
            if self.addresses:
                self._actors.call("stop", timeout_s=STOP_TIMEOUT_S)
        except StageError as error:
            log.warning("stopping the engines: %s", error)
        finally:
            self._actors.kill()

    @property
    def _uses_router(self) -> bool:
        # Lock-step batches need to know which engine serves a session.
        rollout = self._recipe.rollout
        return rollout.router and rollout.num_engines > 1 and not self._recipe.deterministic
