"""The trainer of a run, from the driver's side: one actor per rank, called together."""

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any, Concatenate, Protocol

import ray

from slimrl.base.errors import ActorLost, NoAnswer, NotLoaded, NotWritten, PeerLost, StageError, TrainerLost
from slimrl.base.spans import SPANS
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.env_vars import trainer_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import PackedBatch
from slimrl.data.training import Layout, MemoryPart
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.report import ResyncReport
from slimrl.runtime.checks.checkpoint_check import refusal
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.calls import Calls
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.node_memory import Fetched
from slimrl.runtime.cluster.node_processes import NodeProcess, end_processes
from slimrl.runtime.cluster.placement import Node, Slot
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.rank_watch import RankWatch
from slimrl.runtime.cluster.reservation import Reservation, Room, is_alive
from slimrl.runtime.cluster.spare_nodes import SpareNodes
from slimrl.runtime.cluster.trainer_actor import RemoteTrainer, TrainerActor

TRAINER, CRITIC = "trainer", "critic"
"""Roles of ranks; also the folders of their parts of a run's checkpoint."""
MEANWHILE_S = 1.0
"""Seconds between two calls of `meanwhile`."""
ANSWER_S = 10.0
"""How long ranks may take to say whether they have written a checkpoint's files."""
ENGINES_S = 120.0
"""Seconds added to the deadlines of two stages of a resync, for questions about engines that are late."""
ROOM_POLL_S = 1.0
"""Seconds between two looks for room on another node."""

log = logging.getLogger(__name__)

_SHOWN = {
    RankBatches.add_logprobs.__name__: ("log-probs", "micro-batches"),
    RankBatches.report_own_routing.__name__: ("log-probs", "micro-batches"),
    RankBatches.set_remote.__name__: ("log-probs", "micro-batches"),
    RankBatches.add_values.__name__: ("values", "micro-batches"),
    RankBatches.accumulate.__name__: ("train", "micro-batches"),
    RankBatches.faults.__name__: ("what is not finite", "micro-batches"),
    RankBatches.has_finite_gradient.__name__: ("what is not finite", "micro-batches"),
    TrainerActor.resync.__name__: ("resync", "buckets"),
    TrainerActor.export_hf.__name__: ("export", "tensors"),
}
"""Methods whose progress is shown: the phase and its unit"""
_FILES = {
    TrainerActor.compare_files.__name__,
    TrainerActor.load_checkpoint.__name__,
    TrainerActor.begin_checkpoint.__name__,
    TrainerActor.finish_checkpoint.__name__,
    TrainerActor.export_hf.__name__,
}
"""Methods that read or write the whole model"""


class NodeFolders(Protocol):
    """Folders of the driver's node, as other nodes find them."""

    def on(self, node: Node, folder: Path) -> Path:
        """The absolute path of a folder on a node."""

    def is_of_one_layout(self, folder: Path) -> bool:
        """Whether checkpoints there are for this layout alone."""

    def fetched(self, node: Node, folder: Path) -> Fetched | None:
        """What brings the files of a folder to a node that may lack some of them."""


class SharedFolders:
    """Folders of a file system that all nodes share."""

    def on(self, node: Node, folder: Path) -> Path:
        return folder.absolute()

    def is_of_one_layout(self, folder: Path) -> bool:
        return False

    def fetched(self, node: Node, folder: Path) -> None:
        return None


class TrainerGroup:
    """All ranks of the trainer, or of its critic.

    Every method raises StageError if a rank fails; TrainerLost if it has ended, is late, or is not reached by others.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        progress: Progress,
        places: Reservation,
        role: str = TRAINER,
        *,
        total_updates: int,
        spares: SpareNodes | None = None,
    ) -> None:
        """Start the processes; `start` waits for them.

        Args:
            spares: nodes for the ranks of one that is lost.
            role: TRAINER; or CRITIC, and the recipe is the critic's (`critic_recipe`).
        """
        self._recipe, self._folder, self._progress, self.role = recipe, folder, progress, role
        self._total_updates, self._spares = total_updates, spares
        self._actors: ActorGroup[TrainerActor] = ActorGroup()
        placed = places.placement.critics if role == CRITIC else places.placement.ranks
        self._sites = [(slot, places) for slot in placed]
        """Slot of each rank, and the reservation that holds it"""
        self._make()
        self._layouts: dict[str, Layout] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        """Function that is called every MEANWHILE_S in a `call`; what it raises ends the wait"""
        self._looked = 0.0
        """Time of the last call of `meanwhile`, on the monotonic clock"""
        self._processes: list[NodeProcess] = []
        self.folders: NodeFolders = SharedFolders()
        """Where the ranks find the folders of checkpoints"""
        self.has_failed = False
        """Whether a rank has raised an error, so that others may still wait for it in a collective"""

    def _make(self) -> None:
        variables = trainer_variables(self._recipe, os.environ)
        for rank, (slot, places) in enumerate(self._sites):
            name, log_file = f"{self.role} {rank}", self._folder.log_file(f"{self.role}_{rank}")
            actor = RemoteTrainer.options(**places.options(slot, variables)).remote(
                self._recipe,
                log_file.absolute(),
                Path.cwd(),
                rank,
                slot.node.name,
                self._total_updates,
                critic=self.role == CRITIC,
            )
            self._actors.add(name, actor, log_file, slot.node)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def nodes(self) -> list[Node]:
        """The node of each rank."""
        return [slot.node for slot, _ in self._sites]

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of each rank."""
        named = zip(self._actors.names, self.nodes, self.pids, strict=True)
        return tuple((f"{name} on {node.name}", pid) for name, node, pid in named)

    def start(self, checkpoint: Path | None = None, files: Mapping[str, FileDigest] | None = None) -> None:
        """Join the ranks, build the model and load the recipe's weights.

        Args:
            checkpoint: a run's checkpoint; its weights and optimizer state replace these.
            files: digests of the checkpoint's files by name, with which the ranks compare them first, each its share.

        Raises:
            StageError: a file differs.
            NotLoaded: the checkpoint cannot be brought to a rank, or a rank cannot load it.
        """
        ranks, timeout_s = self._actors, self._recipe.trainer.startup_timeout_s
        try:
            self._processes = list(ranks.begin(TrainerActor.process).wait(timeout_s=timeout_s).values())
            first = ranks.on(ranks.names[:1]).begin(TrainerActor.rendezvous, len(set(self.nodes)) == 1)
            (meeting,) = first.wait(timeout_s=timeout_s).values()
            self._layouts = ranks.begin(TrainerActor.start, meeting).wait(timeout_s=timeout_s)
            ranks.begin(TrainerActor.load_weights).wait(timeout_s=timeout_s)
        except (ActorLost, NoAnswer, PeerLost) as error:
            raise TrainerLost(str(error), error.details) from error
        if checkpoint is not None:
            if files and (differ := self._compared(checkpoint, files)):
                raise StageError(refusal(checkpoint, differ))
            part = checkpoint / self.role
            try:
                given = [(self.folders.on(node, part), self.folders.fetched(node, part)) for node in self.nodes]
                self._finish(self._each(TrainerActor.load_checkpoint, given))
            except StageError as error:
                # An engine that fails meanwhile, or a rank that is lost, says nothing of the checkpoint.
                if self.has_failed or isinstance(error, NotWritten):
                    raise NotLoaded(str(error), error.details) from error
                raise

    def end(self) -> None:
        """End all ranks, whatever they do, and wait until they have."""
        self.kill()
        processes = defaultdict(list)
        for node, process in zip(self.nodes, self._processes, strict=False):
            processes[node].append(process)
        end_processes(processes)

    def restart(self, checkpoint: Path | None, files: Mapping[str, FileDigest] | None = None) -> None:
        """Start all ranks anew after `end`, those of a node that was lost on another one that has room for them.

        Args:
            checkpoint, files: as for `start`.

        Raises:
            StageError: no node has room, or as `start`.
        """
        self._leave_lost_nodes()
        self._processes, self.has_failed = [], False
        self._make()
        self.start(checkpoint, files)
        for role, pid in self.roles:
            log.info("process %d: %s", pid, role)

    def _compared(self, checkpoint: Path, files: Mapping[str, FileDigest]) -> list[str]:
        """What differs between the files of a checkpoint, which all nodes see, and their digests."""
        # By turns, the largest first, so that all ranks read about as much.
        names, count = sorted(files, key=lambda name: -files[name].bytes), len(self.nodes)
        shares = [{name: files[name] for name in names[rank::count]} for rank in range(count)]
        given = [(checkpoint.absolute(), share) for share in shares]
        found = self._finish(self._each(TrainerActor.compare_files, given))
        return sorted(chain(*found.values()))

    def _leave_lost_nodes(self) -> None:
        counts = Counter(self.nodes)
        for node in [node for node in counts if not is_alive(node)]:
            spare = None if self._spares is None else self._spares.take(counts[node])
            resource = self._sites[self.nodes.index(node)][1].resource
            found, places_there = spare or self._find_room(node, counts[node], resource)
            log.info("ranks of %s start on %s", node.name, found[0].node.name)
            slots = iter(found)
            self._sites = [
                (next(slots), places_there) if slot.node == node else (slot, places) for slot, places in self._sites
            ]

    def _find_room(self, lost: Node, num_slots: int, resource: str) -> tuple[list[Slot], Reservation]:
        """Slots on another node, as many as ranks were on the lost one, and their reservation."""
        room, deadline = Room(num_slots, resource), time.monotonic() + self._recipe.trainer.startup_timeout_s
        with self._progress.stage(f"node {lost.name} is lost: waiting for another with {num_slots} {resource}s"):
            while (found := room.find()) is None:
                if time.monotonic() > deadline:
                    waited = f"trainer.startup_timeout_s = {self._recipe.trainer.startup_timeout_s:g} s"
                    raise StageError(
                        f"{self.role}: node {lost.name} was lost, and no other has {num_slots} {resource}s for its "
                        f"ranks within {waited}. Give the job a node more than it needs."
                    )
                time.sleep(ROOM_POLL_S)
        return list(found.placement.slots), found

    @property
    def layout(self) -> Layout:
        """Rank 0's; all ranks have its sizes."""
        return next(iter(self._layouts.values()))

    def call[**P, T](self, method: Callable[Concatenate[TrainerActor, P], T], *given: P.args, **options: P.kwargs) -> T:
        """Call a method of all ranks; returns what it returns on the first one."""
        return next(iter(self._finish(self._actors.begin(method, *given, **options)).values()))

    def gather[**P, T](
        self, method: Callable[Concatenate[TrainerActor, P], list[T] | None], *given: P.args, **options: P.kwargs
    ) -> list[T]:
        """Call a method of which one rank of each data-parallel rank has results, and the others none.

        Returns:
            These results, in the order of the data-parallel ranks, and so of `put_batches`.
        """
        results = self._finish(self._actors.begin(method, *given, **options))
        in_order = sorted(results, key=lambda name: self._layouts[name].data_rank)
        return [result for name in in_order for result in results[name] or ()]

    def put_batches(self, updates: Sequence[PackedBatch]) -> None:
        """Give the ranks a rollout's batches, which they hold until the next; an update's number is its index."""
        begun = []
        for data_rank in range(self.layout.data):
            batches: Any = ray.put([batch[data_rank] for batch in updates])
            holders = [name for name, layout in self._layouts.items() if layout.data_rank == data_rank]
            begun.append(self._actors.on(holders).begin(TrainerActor.put_batches, batches))
        self._finish(reduce(or_, begun))

    def send(self, update: int, names: Sequence[str], receivers: "TrainerGroup") -> None:
        """Add arrays of an update's batch to that of another group's ranks; they do not come to the driver."""
        found = self.gather(TrainerActor.give, update, names)
        # As an object of its own, so that the references are not serialized for each rank.
        references: Any = ray.put(found)
        receivers.call(TrainerActor.take, update, references)

    def connect_engines(self, engines: Sequence[EngineAddress]) -> None:
        """Connect the ranks with the engines; before the first resync, and again when some engines have been
        restarted."""
        self._finish(self._actors.begin(TrainerActor.connect_engines, list(engines)), alone=True)

    def resync(self, version: int) -> ResyncReport:
        """Send the weights to the engines; when this returns, they serve them as `version`."""
        results = self._finish(self._actors.begin(TrainerActor.resync, version), alone=True)
        return next(report for report in results.values() if report is not None)

    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Release parts of the ranks' device memory; see Offload.release."""
        self.call(TrainerActor.release_memory, list(parts))

    def resume_memory(self, parts: Collection[MemoryPart]) -> None:
        """Restore parts of the ranks' device memory; see Offload.restore."""
        self.call(TrainerActor.resume_memory, list(parts))

    def begin_checkpoint(self, directory: Path) -> None:
        """Begin a checkpoint of the present weights and optimizer's state; the ranks write it beside what comes."""
        paths, same_layout = self._paths(directory), self.folders.is_of_one_layout(directory)
        given = [(path, path not in paths[:rank], same_layout) for rank, path in enumerate(paths)]
        self._finish(self._each(TrainerActor.begin_checkpoint, given))

    def has_written(self, directory: Path) -> bool:
        """Whether the ranks have written their files of the checkpoint, so that `finish_checkpoint` does not wait."""
        ranks = zip(self._actors.handles.values(), self._paths(directory), strict=True)
        asked = [actor.has_written.remote(path) for actor, path in ranks]
        answered, late = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        # A rank that has ended is found out by the next call of all.
        return not late and all(map(_is_true, answered))

    def finish_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Wait until the checkpoint is complete; checksums of all files that the ranks wrote, by name in the folder.

        Raises:
            NotWritten: they could not be written.
        """
        given = [(path,) for path in self._paths(directory)]
        # What fails beside it would be taken for its failure.
        written = self._finish(self._each(TrainerActor.finish_checkpoint, given), alone=True)
        return {name: digest for files in written.values() for name, digest in files.items()}

    def export_hf(self, directory: Path) -> None:
        self.call(TrainerActor.export_hf, directory.absolute())

    def begin_torch_profile(self) -> None:
        """Record what torch does on every rank."""
        self._finish(self._actors.begin(TrainerActor.begin_torch_profile), alone=True)

    def end_torch_profile(self, folder: Path) -> None:
        """Add each rank's record to a profile's folder."""
        self._finish(self._actors.begin(TrainerActor.end_torch_profile, folder), alone=True)

    def close(self) -> None:
        """Have the ranks release what outlives a process; for a successful end of a run."""
        self._finish(self._actors.begin(TrainerActor.close), alone=True)

    def kill(self) -> None:
        """End all processes at once."""
        self._actors.kill()

    def _paths(self, directory: Path) -> list[Path]:
        """A folder, as each rank finds it."""
        return [self.folders.on(node, directory) for node in self.nodes]

    def _each(self, method: Callable[..., Any], given: Sequence[tuple[Any, ...]]) -> Calls[Any]:
        """Call a method of all ranks, with arguments for each."""
        names = zip(self._actors.names, given, strict=True)
        return reduce(or_, [self._actors.on([name]).begin(method, *arguments) for name, arguments in names])

    def _finish[T](self, calls: Calls[T], *, alone: bool = False) -> dict[str, T]:
        """The results of calls of the ranks; until they come, the first rank's progress is shown.

        Args:
            alone: leave out `meanwhile`, for example in a resync: engines that load weights are not asked how they are.
        """
        phase, unit = _SHOWN.get(calls.method, ("", ""))
        display = self._progress.phase(phase, 0, unit) if phase else nullcontext()
        with SPANS(f"{self.role}: {calls.method}"), display as shown:
            hang_s = None if calls.method in _FILES else self._recipe.trainer.hang_timeout_s
            if hang_s is not None and alone:
                # Engines may answer late, one stage after the other, and are left out then.
                hang_s = max(hang_s, 2 * self._recipe.resync.timeout_s + ENGINES_S)
            beside = False
            watch = RankWatch(self.role, calls.method, self._actors.handles, shown, hang_s)

            def wait() -> None:
                nonlocal beside
                if not alone and time.monotonic() - self._looked > MEANWHILE_S:
                    self._looked, beside = time.monotonic(), True
                    self.meanwhile()
                    beside = False
                watch()

            try:
                return calls.wait(timeout_s=self._recipe.trainer.timeout_s, while_waiting=wait)
            except StageError as error:
                # A broken connection to an engine is none to a rank; a rank that has ended says so itself.
                if beside or not isinstance(error, (ActorLost, NoAnswer) if alone else (ActorLost, NoAnswer, PeerLost)):
                    self.has_failed = self.has_failed or not (beside or isinstance(error, NotWritten))
                    raise
                raise TrainerLost(str(error), error.details) from error


def _is_true(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except ray.exceptions.RayError:
        return False
