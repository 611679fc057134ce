"""The places of a run's engines: the slots of each, and the actors that own its parts.

An engine has an actor on each of its nodes. The first one's server answers for the whole engine and gives it its name.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import Concatenate

from slimrl.config.env_vars import engine_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.server import ENGINE, PAST, TEACHER, part_name
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.calls import Calls
from slimrl.runtime.cluster.engine_actor import EngineActor, EngineAddress, RemoteEngine, actor_log
from slimrl.runtime.cluster.placement import Slot
from slimrl.runtime.cluster.reservation import Reservation, Room

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The slots of an engine."""

    index: int
    """Number of the engine"""
    slots: tuple[Slot, ...]
    places: Reservation
    """Reservation that holds the slots"""


class EngineSites:
    """Engines by their names. The constructor makes the actors of those that are placed."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        places: Reservation,
        role: str,
        actors: ActorGroup[EngineActor],
        key: EngineKey,
    ) -> None:
        """
        Args:
            role: as for EngineGroup.
            actors: gets the actors of all engines.
            key: of all engines.
        """
        self._recipe, self._folder, self._places, self._role, self._actors = recipe, folder, places, role, actors
        self._key, self._variables = key, engine_variables(recipe, os.environ)
        self._sites: dict[str, Site] = {}
        self.parts: dict[str, list[str]] = {}
        """Names of the actors of each engine, by the engine's name"""
        self._num_starts = Counter[str]()
        self._room: Room | None = None
        """Request for the slots of one more engine; None if none is pending"""
        placement = places.placement
        placed = {ENGINE: placement.engines, TEACHER: placement.teachers, PAST: placement.past}[role]
        for index, slots in enumerate(placed):
            self._make(Site(index=index, slots=slots, places=places))
        self._next_index = len(placed)

    def _make(self, site: Site) -> None:
        index, places, role = site.index, site.places, self._role
        engine, logs = part_name(index, 0, role), self._folder.logs
        self._sites[engine], self.parts[engine] = site, []
        for part, (node, of_node) in enumerate(groupby(site.slots, key=lambda slot: slot.node)):
            slots, name, starts = tuple(of_node), part_name(index, part, role), self._num_starts[engine]
            actor = RemoteEngine.options(**places.options(slots[0], self._variables)).remote(
                self._recipe,
                self._key,
                logs.absolute(),
                Path.cwd(),
                index,
                node,
                places.devices(slots),
                part,
                role,
                starts,
            )
            self._actors.add(name, actor, logs / actor_log(index, part, role), node)
            self.parts[engine].append(name)

    def make_again(self, name: str) -> None:
        """Make new actors for an engine of which one has ended."""
        for part in self.parts[name]:
            self._actors.remove(part)
        self._make(self._sites[name])

    def grow(self) -> str | None:
        """The name of a further engine, if there may be more and the cluster has room for it."""
        if len(self.parts) >= self._recipe.rollout.most_engines:
            return None
        if self._room is None:
            self._room = Room(self._recipe.rollout.engine_tp, self._places.resource)
        if (places := self._room.find()) is None:
            return None
        self._room = None
        (slots,) = places.placement.engines
        name = part_name(self._next_index, 0, self._role)
        log.info("%s is added on %s", name, slots[0].node.name)
        self._make(Site(index=self._next_index, slots=slots, places=places))
        self._next_index += 1
        return name

    def remove(self, name: str) -> None:
        """Remove an engine whose node was lost."""
        for part in self.parts.pop(name):
            self._actors.remove(part)
        if (places := self._sites.pop(name).places) is not self._places:
            # Ray would find it other slots.
            places.give_back()

    def parts_of(self, names: Collection[str]) -> list[str]:
        """Names of the actors of these engines."""
        return [part for name in names for part in self.parts[name]]

    def begin[**P](
        self,
        start: Callable[Concatenate[EngineActor, str | None, P], EngineAddress],
        names: Collection[str],
        *given: P.args,
        **options: P.kwargs,
    ) -> Calls[EngineAddress]:
        """Call a method that starts engines, on all of their parts.

        Its first argument is the address at which the parts of an engine on several nodes meet, None for others.
        """
        self._num_starts.update(list(names))
        several = [name for name in names if len(self.parts[name]) > 1]
        timeout_s = self._recipe.rollout.startup_timeout_s
        met = self._actors.on(several).begin(EngineActor.meeting).wait(timeout_s=timeout_s)
        begun = [self._actors.on(self.parts[name]).begin(start, met.get(name), *given, **options) for name in names]
        return reduce(or_, begun)

    def joined(self, name: str, started: Mapping[str, EngineAddress]) -> EngineAddress:
        """The address of an engine, with the nodes and processes of all of its parts."""
        parts = [started[part] for part in self.parts[name]]
        nodes = tuple(node for part in parts for node in part.nodes)
        return replace(parts[0], nodes=nodes, pids=tuple(pid for part in parts for pid in part.pids))
