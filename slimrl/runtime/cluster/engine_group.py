"""The engines of a run, from the driver's side: their actors, and the client of all of them.

An engine has an actor on each of its nodes. The first one's server answers for the whole engine; the actors start, end
and are replaced together.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from slimrl.config.environment import engine_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import Engine
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.client import SglangEngine
from slimrl.rollout.lockstep import LockstepEngine
from slimrl.rollout.routing import RoutedEngines
from slimrl.rollout.servers.control import EngineMemory
from slimrl.rollout.servers.server import ENGINE, TEACHER, part_name
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.engine_actor import EngineActor, EngineAddress, actor_log
from slimrl.runtime.cluster.errors import StageError
from slimrl.runtime.cluster.reservation import Reservation

CHECK_TIMEOUT_S = 60.0
"""Longer than the cluster takes to miss a node that went silent."""
STOP_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class EngineGroup:
    """All engines of a role. The constructor starts their processes; `wait_ready` waits until they answer."""

    def __init__(self, recipe: Recipe, folder: RunFolder, places: Reservation, role: str = ENGINE) -> None:
        """
        Args:
            role: ENGINE; or TEACHER, and the recipe is that of its engines (`teacher_recipe`).
        """
        self._recipe, self._folder, self._role = recipe, folder, role
        actors, logs, nodes = {}, {}, {}
        variables = engine_variables(recipe, os.environ)
        self._parts: dict[str, list[str]] = {}
        placed = places.placement.teachers if role == TEACHER else places.placement.engines
        for index, engine in enumerate(placed):
            for part, (node, of_node) in enumerate(groupby(engine, key=lambda slot: slot.node)):
                slots, name = tuple(of_node), part_name(index, part, role)
                actors[name] = EngineActor.options(**places.options(slots[0], variables)).remote(  # type: ignore[attr-defined]
                    recipe, folder.logs.absolute(), Path.cwd(), index, node, places.devices(slots), part, role
                )
                logs[name], nodes[name] = folder.logs / actor_log(index, part, role), node
                self._parts.setdefault(part_name(index, 0, role), []).append(name)
        self._actors = ActorGroup(actors, logs, nodes)
        self._starts = self._actors.begin("start", self._with_meetings(self._parts))
        self._asked: dict[str, Any] | None = None
        self._restarts: tuple[list[str], dict[str, Any]] | None = None
        """A teacher's engines that are being restarted, with what their actors were asked"""
        self._tolerated: set[str] = set()
        self.num_replaced = 0
        self._routed: RoutedEngines | None = None
        self.addresses: list[EngineAddress] = []

    def wait_ready(self) -> None:
        """Raises StageError with the cause from its log if an engine does not come up."""
        rollout = self._recipe.rollout
        started = self._actors.wait(self._starts, "start", timeout_s=rollout.startup_timeout_s + 60)
        self.addresses = [self._joined(name, started) for name in self._parts]

    def replace(self, names: Collection[str]) -> None:
        """Restart these engines, paused, at their addresses. The others keep running without requests.

        Raises:
            StageError: an engine does not come up.
        """
        parts = self._all_parts(names)
        for name, ending in self._actors.call("ending", dict.fromkeys(parts, ()), timeout_s=CHECK_TIMEOUT_S).items():
            log.warning("%s", ending or f"{name} is still running and is ended")
        timeout_s = self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        restarted = self._actors.call("restart", self._with_meetings(names), timeout_s=timeout_s)
        self._rejoin(names, restarted)

    def _rejoin(self, names: Collection[str], restarted: Mapping[str, EngineAddress]) -> None:
        """Count engines that were restarted, at the addresses that they had."""
        fresh = {name: self._joined(name, restarted) for name in names}
        self.addresses = [fresh.get(address.name, address) for address in self.addresses]
        self.num_replaced += len(fresh)
        # The pending question of `watch` is about the old servers.
        self._asked = None
        self._tolerated -= fresh.keys()
        self._route()
        for address in fresh.values():
            for pid, node in zip(address.pids[1::2], address.nodes, strict=True):
                log.info("process %d: %s, server on %s", pid, address.name, node)

    @property
    def is_restarting(self) -> bool:
        """Whether `watch` restarts engines."""
        return self._restarts is not None

    def flush_caches(self) -> None:
        """Flush the prefix cache of every engine; raises StageError if one has running requests."""
        self._actors.call("flush_cache", dict.fromkeys(self._parts, ()), timeout_s=self._recipe.resync.timeout_s + 30)

    def pause(self) -> None:
        """Abort what runs, and let new requests wait until the next resync ends."""
        self._actors.call("pause", dict.fromkeys(self._parts, ()), timeout_s=self._recipe.resync.timeout_s)

    def release_memory(self, parts: Collection[EngineMemory]) -> None:
        """See SglangControl.release_memory."""
        self._move_memory("release_memory", parts)

    def resume_memory(self, parts: Collection[EngineMemory]) -> None:
        """With the KV cache the engines serve requests again."""
        self._move_memory("resume_memory", parts)

    @property
    def logs(self) -> Path:
        """Folder of the run's logs."""
        return self._folder.logs

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of actors and servers."""
        return tuple(
            (f"{address.name}, {process} on {node}", pid)
            for address in self.addresses
            for part, node in enumerate(address.nodes)
            for process, pid in zip(("actor", "server"), address.pids[2 * part : 2 * part + 2], strict=True)
        )

    def client(self, *, vocab_size: int, routed_experts_shape: tuple[int, int] | None) -> Engine:
        """The engines' client; it belongs to the event loop that first uses it."""
        connect = partial(SglangEngine, vocab_size=vocab_size, routed_experts_shape=routed_experts_shape)
        if self._recipe.deterministic:
            return LockstepEngine([connect(address.url) for address in self.addresses])
        self._routed = RoutedEngines(partial(connect, retries=False))
        self._route()
        return self._routed

    def check(self) -> None:
        """Raises StageError with the cause from the log if an engine has ended that `watch` does not tolerate."""
        endings = self._actors.call("ending", timeout_s=CHECK_TIMEOUT_S)
        if causes := [text for name, text in self._ended(endings).items() if name not in self._tolerated]:
            raise StageError("; ".join(causes))

    def watch(self) -> None:
        """Call it repeatedly while episodes run: it asks the engines, and reads their answers in a later call.

        If an engine has ended, its sessions go on at the others, and the next resync replaces it. A teacher's engine,
        which no resync reaches, is restarted at once.

        Raises:
            StageError: an engine's actor has ended; or an engine has ended and there is no other one, no replacement
                left (`rollout.max_replacements`), or the run is deterministic.
        """
        if self._restarts is not None:
            names, refs = self._restarts
            if (restarted := self._actors.answers(refs, "restart")) is not None:
                self._restarts = None
                self._rejoin(names, restarted)
        elif self._asked is None:
            self._asked = self._actors.begin("ending")
        elif (endings := self._actors.answers(self._asked, "ending")) is not None:
            self._asked = None
            self._judge(self._ended(endings))

    def _judge(self, ended: Mapping[str, str]) -> None:
        """Tolerate engines that have ended, given with their causes, or raise; see `watch`."""
        if ended.keys() <= self._tolerated:
            return
        causes = "; ".join(ended.values())
        is_teacher = self._role == TEACHER
        if not is_teacher and (self._recipe.deterministic or len(ended) == len(self.addresses)):
            raise StageError(causes)
        limit = self._recipe.rollout.max_replacements
        if self.num_replaced + len(ended) > limit:
            raise StageError(
                f"{causes}; {'teacher' if is_teacher else 'rollout'}.max_replacements = {limit} allows no more "
                f"replacements of engines ({self.num_replaced} so far)"
            )
        if is_teacher:
            log.warning("restarting: %s", causes)
            self._restarts = list(ended), self._actors.begin("restart", self._with_meetings(ended))
            return
        log.warning("the other engines continue, and the next resync replaces: %s", causes)
        broken = [name for name in ended if name not in self._tolerated and len(self._parts[name]) > 1]
        if broken:
            # What is left of an engine would keep its requests until they are late.
            self._actors.call("stop", dict.fromkeys(self._all_parts(broken), ()), timeout_s=STOP_TIMEOUT_S)
        self._tolerated |= ended.keys()
        self._route()

    def _all_parts(self, names: Collection[str]) -> list[str]:
        """Names of the actors of these engines."""
        return [part for name in names for part in self._parts[name]]

    def _with_meetings(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Arguments with which all actors of these engines start: where those of an engine on several nodes meet."""
        several = [name for name in names if len(self._parts[name]) > 1]
        timeout_s = self._recipe.rollout.startup_timeout_s
        met = self._actors.call("meeting", dict.fromkeys(several, ()), timeout_s=timeout_s) if several else {}
        return {part: (met[name],) if name in met else () for name in names for part in self._parts[name]}

    def _joined(self, name: str, started: Mapping[str, EngineAddress]) -> EngineAddress:
        """The address of an engine, with the nodes and processes of all of its parts."""
        parts = [started[part] for part in self._parts[name]]
        nodes = tuple(node for part in parts for node in part.nodes)
        return replace(parts[0], nodes=nodes, pids=tuple(pid for part in parts for pid in part.pids))

    def _ended(self, endings: Mapping[str, str]) -> dict[str, str]:
        """Engines of which a part has ended, with the causes."""
        causes = {name: [endings[part] for part in parts if endings[part]] for name, parts in self._parts.items()}
        return {name: "; ".join(texts) for name, texts in causes.items() if texts}

    def _route(self) -> None:
        """Tell the client which engines may serve: those that have not ended."""
        if self._routed is not None:
            self._routed.use([address.url for address in self.addresses if address.name not in self._tolerated])

    def _move_memory(self, method: str, parts: Collection[EngineMemory]) -> None:
        # Pause, flush and release have a deadline each.
        timeout_s = 3 * self._recipe.resync.timeout_s + 30
        self._actors.call(method, dict.fromkeys(self._parts, (list(parts),)), timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop the engines, then kill the actors.

        The engine of an actor that is still starting it, or cannot stop it, ends with the actor.
        """
        try:
            if self.addresses:
                self._actors.call("stop", timeout_s=STOP_TIMEOUT_S)
        except StageError as error:
            log.warning("stopping the engines: %s", error)
        finally:
            self._actors.kill()
