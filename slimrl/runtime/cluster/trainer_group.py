"""The trainer of a run, from the driver's side: one actor per rank, called together."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Concatenate

import ray

from slimrl.base.spans import SPANS
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.env_vars import trainer_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import PackedBatch
from slimrl.data.training import Layout, MemoryPart
from slimrl.observability.progress import Phase, Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.report import ResyncReport
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.calls import Calls
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.reservation import Reservation
from slimrl.runtime.cluster.trainer_actor import RemoteTrainer, TrainerActor

TRAINER, CRITIC = "trainer", "critic"
"""Roles of ranks; also the folders of their parts of a run's checkpoint."""
MEANWHILE_S = 1.0
"""Seconds between two calls of `meanwhile`."""

_SHOWN = {
    RankBatches.add_logprobs.__name__: ("log-probs", "micro-batches"),
    RankBatches.report_own_routing.__name__: ("log-probs", "micro-batches"),
    RankBatches.set_remote.__name__: ("log-probs", "micro-batches"),
    RankBatches.add_values.__name__: ("values", "micro-batches"),
    RankBatches.accumulate.__name__: ("train", "micro-batches"),
    TrainerActor.resync.__name__: ("resync", "buckets"),
    TrainerActor.export_hf.__name__: ("export", "tensors"),
}
"""Methods whose progress is shown: the phase and its unit"""


class TrainerGroup:
    """All ranks of the trainer, or of its critic. Every method raises StageError if a rank fails or is late."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        progress: Progress,
        places: Reservation,
        role: str = TRAINER,
        *,
        total_updates: int,
    ) -> None:
        """Start the processes; `start` waits for them.

        Args:
            role: TRAINER; or CRITIC, and the recipe is the critic's (`critic_recipe`).
        """
        self._recipe, self._progress, self.role = recipe, progress, role
        self._actors: ActorGroup[TrainerActor] = ActorGroup()
        variables = trainer_variables(recipe, os.environ)
        placed = places.placement.critics if role == CRITIC else places.placement.ranks
        for rank, slot in enumerate(placed):
            name, log_file = f"{role} {rank}", folder.log_file(f"{role}_{rank}")
            actor = RemoteTrainer.options(**places.options(slot, variables)).remote(
                recipe, log_file.absolute(), Path.cwd(), rank, slot.node.name, total_updates, critic=role == CRITIC
            )
            self._actors.add(name, actor, log_file, slot.node)
        self._nodes = [slot.node.name for slot in placed]
        self._layouts: dict[str, Layout] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        """Function that is called every MEANWHILE_S in a `call`; what it raises ends the wait"""
        self._looked = 0.0
        """Time of the last call of `meanwhile`, on the monotonic clock"""
        self.pids: tuple[int, ...] = ()

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of each rank."""
        named = zip(self._actors.names, self._nodes, self.pids, strict=True)
        return tuple((f"{name} on {node}", pid) for name, node, pid in named)

    def start(self, checkpoint: Path | None = None) -> None:
        """Join the ranks, build the model and load the recipe's weights.

        Args:
            checkpoint: a run's checkpoint; its weights and optimizer state replace these.
        """
        ranks, timeout_s = self._actors, self._recipe.trainer.startup_timeout_s
        self.pids = tuple(ranks.begin(TrainerActor.pid).wait(timeout_s=timeout_s).values())
        first = ranks.on(ranks.names[:1]).begin(TrainerActor.rendezvous, len(set(self._nodes)) == 1)
        (meeting,) = first.wait(timeout_s=timeout_s).values()
        self._layouts = ranks.begin(TrainerActor.start, meeting).wait(timeout_s=timeout_s)
        ranks.begin(TrainerActor.load_weights).wait(timeout_s=timeout_s)
        if checkpoint is not None:
            self.call(TrainerActor.load_checkpoint, (checkpoint / self.role).absolute())

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

    def save_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Checksums of all files that the ranks wrote, by name in the folder."""
        written = self._finish(self._actors.begin(TrainerActor.save_checkpoint, directory.absolute()))
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

    def _finish[T](self, calls: Calls[T], *, alone: bool = False) -> dict[str, T]:
        """The results of calls of the ranks; until they come, the first rank's progress is shown.

        Args:
            alone: leave out `meanwhile`, for example in a resync: engines that load weights are not asked how they are.
        """
        phase, unit = _SHOWN.get(calls.method, ("", ""))
        display = self._progress.phase(phase, 0, unit) if phase else nullcontext()
        with SPANS(f"{self.role}: {calls.method}"), display as shown:
            watch = None if shown is None else _Watch(self._actors.first, shown)

            def wait() -> None:
                if not alone and time.monotonic() - self._looked > MEANWHILE_S:
                    self._looked = time.monotonic()
                    self.meanwhile()
                if watch is not None:
                    watch()

            return calls.wait(timeout_s=self._recipe.trainer.timeout_s, while_waiting=wait)


class _Watch:
    """Asks an actor for its progress, one question at a time."""

    def __init__(self, actor: Any, phase: Phase) -> None:
        self._actor, self._phase = actor, phase
        self._asked: Any = None

    def __call__(self) -> None:
        if self._asked is not None:
            answered, _ = ray.wait([self._asked], timeout=0)
            if not answered:
                return
            # A failed rank is reported by the call itself.
            try:
                self._phase.update(*ray.get(self._asked))
            except ray.exceptions.RayError:
                return
        self._asked = self._actor.progress.remote()
