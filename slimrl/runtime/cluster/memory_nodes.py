"""The nodes that hold a run's checkpoints in memory, from the driver's side.

Ranks write into the memory of their own node. A copy of each node's files goes to the next one, beside the training, so
that a node that is lost takes none with it. A rank that loads gets the files that its node lacks from another.
Where all ranks are on the driver's node, there are no other nodes and no actors.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from slimrl.base.errors import NotWritten
from slimrl.checkpoints.digests import FileDigest
from slimrl.runtime.cluster.node_memory import Fetched, cause_of, start_memory
from slimrl.runtime.cluster.placement import Node

ANSWER_S = 120.0
"""Deadline of a node's actor to start, to make or name a folder, or to list its files"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Place:
    """The memory of a node."""

    node: Node
    actor: Any
    path: Path
    """The folder's path on the node"""


class MemoryNodes:
    """Places by their nodes. What a node does not answer is a NotWritten that names it."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """
        Args:
            path: the driver's folder.
            timeout_s: deadline of a checkpoint's copies.
        """
        self._path, self._timeout_s = path, timeout_s
        self._nodes: list[Node] = []
        self._places: dict[Node, Place] = {}
        self._copying: dict[str, tuple[list[Any], float]] = {}
        """Ray's references to the copies of checkpoints, by their names, and the deadline on the monotonic clock"""
        self._holders: dict[str, dict[str, list[Place]]] = {}
        """Who has which file of the checkpoints that were looked up"""

    def use(self, nodes: Collection[Node]) -> None:
        """Hold checkpoints on these nodes and the driver's, in the place of those before."""
        others = list(dict.fromkeys(node for node in nodes if not _is_own(node)))
        self._nodes = [own_node(), *others] if others else []
        for place in [place for node, place in self._places.items() if node not in self._nodes]:
            self._drop(place)

    @property
    def are_several(self) -> bool:
        """Whether a node besides the driver's has ranks."""
        return bool(self._nodes)

    def on(self, node: Node) -> Path:
        """The folder on a node."""
        return self._path if _is_own(node) else self._place(node).path

    def make(self, name: str) -> None:
        """Make a folder, which the driver has, on the others."""
        for node in self._nodes:
            self._place(node)
        self._ask(self._others(), "make", name)

    def rename(self, name: str, final: str, own: Sequence[str]) -> dict[Place, Sequence[str]]:
        """Give the folder its final name on the others.

        Args:
            own: names of the files on the driver's node, in this folder.

        Returns:
            The files of each node, by their names in its memory.
        """
        named: dict[Place, Sequence[str]] = dict(self._ask(self._others(), "rename", name, final))
        there = [f"{final}/{file}" for file in own]
        return named | {place: there for place in self._places.values() if _is_own(place.node)}

    def keep(self, names: Sequence[str]) -> None:
        """Remove all folders but these on the others, and what is known of them on the driver's."""
        for place in self._places.values():
            (place.actor.forget if _is_own(place.node) else place.actor.keep).remote(names)
        self._copying = {name: copying for name, copying in self._copying.items() if name in names}

    def copy(self, name: str, files: Mapping[Place, Sequence[str]]) -> None:
        """Begin to copy the files of each node to the next."""
        places = list(files)
        nexts = [*places[1:], *places[:1]]
        begun = [
            holder.actor.fetch.remote(files[place], place.actor)
            for place, holder in zip(places, nexts, strict=True)
            if holder is not place
        ]
        self._copying[name] = begun, time.monotonic() + self._timeout_s

    def is_copying(self, name: str) -> bool:
        """Whether files of a checkpoint are still on the way to a second node, and not late."""
        _, left, deadline = self._copies(name)
        return bool(left) and time.monotonic() < deadline

    def is_copied(self, name: str) -> bool:
        """Whether all files of a checkpoint are on two nodes, or on the only one. Logs what could not be copied."""
        done, left, _ = self._copies(name)
        try:
            ray.get(done)
        except RayError as error:
            log.warning("%s: its files are not all on two nodes: %s", name, cause_of(error))
            return False
        return not left

    def _copies(self, name: str) -> tuple[list[Any], list[Any], float]:
        """References to copies that have ended, and to others, and the deadline of these."""
        refs, deadline = self._copying.get(name, ([], 0.0))
        done, left = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        return done, left, deadline

    def look_up(self, name: str, files: Mapping[str, FileDigest]) -> list[str]:
        """Find out which node has which file of a checkpoint.

        Args:
            files: all files, by name in the checkpoint.

        Returns:
            Those that no node has.
        """
        asked = {place: place.actor.digests.remote(name) for place in self._places.values()}
        held: dict[Place, dict[str, FileDigest]] = {}
        for place, ref in asked.items():
            try:
                held[place] = ray.get(ref, timeout=self._timeout_s)
            except RayError as error:
                log.warning("%s does not say what it has in memory: %s", place.node.name, type(error).__name__)
        self._holders[name] = {
            file: [place for place, found in held.items() if found.get(f"{name}/{file}") == digest]
            for file, digest in files.items()
        }
        return [file for file, places in self._holders[name].items() if not places]

    def fetched(self, node: Node, part: Path) -> Fetched | None:
        """What brings files of a part of a checkpoint to a node; None if there is one node.

        Args:
            part: relative to the driver's folder, of a checkpoint that was looked up.
        """
        if not self._nodes:
            return None
        place, prefix = self._place(own_node() if _is_own(node) else node), f"{part.name}/"
        sources = {
            file.removeprefix(prefix): places[0].actor
            for file, places in self._holders[part.parent.name].items()
            if file.startswith(prefix) and place not in places
        }
        # Before the deadline of the rank's own call, so that the rank says what is late.
        return Fetched(place.actor, str(part), sources, self._timeout_s / 2)

    def remove(self) -> None:
        """Remove all folders of the others, and wait for it: the end of a job may end janitors before they have."""
        asked = [place.actor.keep.remote(()) for place in self._others()]
        if asked:
            # One that is lost or late keeps none from its end.
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        for place in list(self._places.values()):
            self._drop(place)

    def _others(self) -> list[Place]:
        return [place for place in self._places.values() if not _is_own(place.node)]

    def _place(self, node: Node) -> Place:
        if node not in self._places:
            actor = start_memory(node, self._path if _is_own(node) else None)
            try:
                path = ray.get(actor.folder.remote(), timeout=ANSWER_S)
            except RayError as error:
                ray.kill(actor)
                raise NotWritten(f"{node.name} does not answer: {cause_of(error)}", str(error)) from error
            self._places[node] = Place(node, actor, path)
        return self._places[node]

    def _ask(self, places: Sequence[Place], method: str, *given: Any) -> dict[Place, Any]:
        asked = {place: getattr(place.actor, method).remote(*given) for place in places}
        answers = {}
        for place, ref in asked.items():
            try:
                answers[place] = ray.get(ref, timeout=ANSWER_S)
            except RayError as error:
                if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                    # Another takes its place. One that is late or has no room keeps what it has.
                    self._drop(place)
                raise NotWritten(f"{place.node.name}: {method}: {cause_of(error)}", str(error)) from error
        return answers

    def _drop(self, place: Place) -> None:
        ray.kill(self._places.pop(place.node).actor)


def own_node() -> Node:
    """The driver's node, which need not have a slot."""
    return Node(node_id=ray.get_runtime_context().get_node_id(), name="the driver's node", address="", slots=0)


def _is_own(node: Node) -> bool:
    """Whether it is the driver's node."""
    return bool(node.node_id == ray.get_runtime_context().get_node_id())
