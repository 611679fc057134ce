"""Sandboxes on all nodes of a Ray cluster: an actor on each, which has a pool of its own.

A run goes to the node with the fewest of them; a session stays on its node. Each node has the limits of one pool, so
more nodes run more at a time, and one that has too many waiting refuses. A node that is lost takes its own runs and
sessions with it; later ones go to the others.
"""

import asyncio
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.agent.sandbox.folder_archive import packed, unpacked
from slimrl.agent.sandbox.interface import FileChange, Language, Program, Result, SandboxError, SessionEnded
from slimrl.agent.sandbox.pool import PooledSession, SandboxPool
from slimrl.agent.sandbox.session_files import FILES_S
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits
from slimrl.runtime.cluster.placement import Node

MARGIN_S = 60.0
"""Seconds on top of a run's own deadlines after which its node counts as lost"""

MOST_CALLS = 10_000
"""Most calls of an actor at the same time; its pool decides how many run."""

log = logging.getLogger(__name__)


@ray.remote(max_restarts=0)
class SandboxActor:
    """The pool of one node. Its methods are those of `SandboxPool`; a session is known by a name."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._pool: SandboxPool | None = None
        self._sessions: dict[str, PooledSession] = {}

    async def run(self, program: Program, limits: SandboxLimits | None) -> Result:
        return await self._own().run(program, limits)

    async def open(self, language: Language, archive: bytes | None, limits: SandboxLimits | None) -> str:
        """The name of a new session, in a private copy of the folder that the archive holds."""
        with tempfile.TemporaryDirectory(prefix="slimrl-session-") as folder:
            if archive is not None:
                await asyncio.to_thread(unpacked, archive, Path(folder))
            given = None if archive is None else Path(folder)
            return self._named(await self._own().session(language, folder=given, limits=limits))

    async def open_image(self, image: str, limits: SandboxLimits) -> str:
        """The name of a new session in an image's files."""
        return self._named(await self._own().image_session(image, limits))

    async def run_in(self, name: str, code: str, wall_s: float | None) -> Result:
        return await self._sessions[name].run(code, wall_s=wall_s)

    async def run_program_in(self, name: str, program: Program, limits: SandboxLimits | None) -> Result:
        return await self._sessions[name].run_program(program, limits)

    async def put(self, name: str, files: Mapping[str, bytes]) -> None:
        await self._sessions[name].put(files)

    async def changed(self, name: str) -> dict[str, FileChange]:
        return await self._sessions[name].changed()

    async def diff(self, name: str) -> str:
        return await self._sessions[name].diff()

    async def close_session(self, name: str) -> None:
        await self._sessions.pop(name).close()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    def _named(self, session: PooledSession) -> str:
        name = uuid.uuid4().hex
        self._sessions[name] = session
        return name

    def _own(self) -> SandboxPool:
        """The pool, made in the actor's event loop."""
        if self._pool is None:
            self._pool = SandboxPool(self._config)
        return self._pool


@dataclass(eq=False)
class _Place:
    """A node with its actor, and its present load."""

    node: Node
    actor: Any
    num_running: int = 0
    lost: bool = False
    sessions: set["NodeSession"] = field(default_factory=set)


class NodeSandboxes:
    """The backend of a `SandboxPool` that is spread over these nodes.

    Args:
        nodes: of the cluster that this process has joined.
    """

    def __init__(self, config: SandboxConfig, nodes: Sequence[Node]) -> None:
        self._config = config
        self._places = [_Place(node, _start(node, config)) for node in nodes]

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        """Raises SandboxError if the node is lost meanwhile or none is left, besides what `SandboxPool.run` raises."""
        place = self._freest()
        return await self.call(place, "run", program, limits, wall_s=(limits or self._config.limits).wall_s)

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> "NodeSession":
        """Raises SandboxError as `run`."""
        archive = None if folder is None else await asyncio.to_thread(packed, folder)
        return await self._opened(limits or self._config.limits, "open", language, archive, limits)

    async def image_session(self, image: str, limits: SandboxLimits) -> "NodeSession":
        return await self._opened(limits, "open_image", image, limits)

    async def _opened(self, limits: SandboxLimits, method: str, *arguments: Any) -> "NodeSession":
        place = self._freest()
        session = NodeSession(self, place, await self.call(place, method, *arguments), limits)
        place.sessions.add(session)
        return session

    async def close(self) -> None:
        """End all runs and sessions."""
        living = [place for place in self._places if not place.lost]
        await asyncio.gather(*(self.call(place, "close") for place in living), return_exceptions=True)
        for place in self._places:
            ray.kill(place.actor)

    async def call(self, place: _Place, method: str, *arguments: Any, wall_s: float = 0.0) -> Any:
        """The answer of a node's actor; raises SandboxError if the node is lost, or too late."""
        ref = getattr(place.actor, method).remote(*arguments)
        timeout_s = wall_s + self._config.wait_s + MARGIN_S
        async with self._counted(place):
            try:
                async with asyncio.timeout(timeout_s):
                    return await ref
            except asyncio.CancelledError:
                ray.cancel(ref)
                raise
            except TimeoutError as error:
                self._lose(place, f"{method} had no answer within {timeout_s:g} s")
                raise SandboxError(f"the sandbox of {place.node.name} does not answer") from error
            except RayActorError as error:
                self._lose(place, str(error))
                raise SandboxError(f"the sandbox of {place.node.name} was lost") from error
            except RayTaskError as error:
                raise error.cause from None

    @asynccontextmanager
    async def _counted(self, place: _Place) -> AsyncIterator[None]:
        place.num_running += 1
        try:
            yield
        finally:
            place.num_running -= 1

    def _freest(self) -> _Place:
        living = [place for place in self._places if not place.lost]
        if not living:
            raise SandboxError("no node with a sandbox is left")
        return min(living, key=lambda place: place.num_running + len(place.sessions))

    def _lose(self, place: _Place, cause: str) -> None:
        if not place.lost:
            log.warning("the sandbox of %s is lost: %s", place.node.name, cause)
        place.lost = True


class NodeSession:
    """A session on one of the nodes."""

    def __init__(self, sandboxes: NodeSandboxes, place: _Place, name: str, limits: SandboxLimits) -> None:
        self._sandboxes, self._place, self._name, self._limits = sandboxes, place, name, limits
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        return await self._call("run_in", code, wall_s, wall_s=wall_s or self._limits.wall_s)

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        wall_s = (limits or self._limits).wall_s
        return await self._call("run_program_in", program, limits, wall_s=wall_s)

    async def put(self, files: Mapping[str, bytes]) -> None:
        await self._call("put", files)

    async def changed(self) -> dict[str, FileChange]:
        return await self._call("changed")

    async def diff(self) -> str:
        return await self._call("diff")

    async def _call(self, method: str, *arguments: Any, wall_s: float = FILES_S) -> Any:
        if self._closed:
            raise SessionEnded("the session has ended")
        return await self._sandboxes.call(self._place, method, self._name, *arguments, wall_s=wall_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._place.sessions.discard(self)
        if not self._place.lost:
            await self._sandboxes.call(self._place, "close_session", self._name)


def _start(node: Node, config: SandboxConfig) -> Any:
    """The actor of a node, which takes none of its slots."""
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return SandboxActor.options(  # type: ignore[attr-defined]
        num_cpus=0, max_concurrency=MOST_CALLS, scheduling_strategy=there
    ).remote(config)
