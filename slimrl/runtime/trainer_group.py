"""The trainer of a run as the driver sees it: one actor per rank, called together."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slimrl.config.schema import Recipe
from slimrl.data.packing import MicroBatch
from slimrl.data.training import Layout, LogProbs, MemoryPart, UpdateResult
from slimrl.models.digests import FileDigest
from slimrl.observability.progress import Phase, Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.session import ResyncReport
from slimrl.runtime.actors import ActorGroup
from slimrl.runtime.engine_actor import EngineAddress
from slimrl.runtime.reservation import Reservation
from slimrl.runtime.trainer_actor import ObjectiveName, TrainerActor

PackedBatch = list[list[MicroBatch]]
"""Micro-batches by data-parallel rank."""


class TrainerGroup:
    """All ranks of the trainer. Every method raises StageError if a rank fails or is late."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, progress: Progress, places: Reservation, *, total_updates: int
    ) -> None:
        """Start the processes; `start` waits for them.

        Args:
            places: where they go.
            total_updates: optimizer updates of the whole run, at which learning-rate schedules end.
        """
        self._recipe, self._progress = recipe, progress
        actors, logs, nodes = {}, {}, {}
        for rank, slot in enumerate(places.placement.ranks):
            name, log_file = f"trainer {rank}", folder.log_file(f"trainer_{rank}")
            options = places.options(slot, recipe.trainer.threads_per_rank)
            actors[name] = TrainerActor.options(**options).remote(  # type: ignore[attr-defined]
                recipe, log_file.absolute(), Path.cwd(), rank, slot.node.name, total_updates
            )
            logs[name], nodes[name] = log_file, slot.node
        self._nodes = nodes
        self._actors = ActorGroup(actors, logs, nodes)
        self._layouts: dict[str, Layout] = {}
        self.pids: tuple[int, ...] = ()

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(what it is, process id) of each rank, with its node."""
        return tuple(
            (f"{name} on {self._nodes[name].name}", pid) for name, pid in zip(self._nodes, self.pids, strict=True)
        )

    def start(self, checkpoint: Path | None = None) -> None:
        """Join the ranks, build the model and load the weights that the recipe names.

        Args:
            checkpoint: of a run; its weights and its optimizer's state take their place.
        """
        timeout_s = self._recipe.trainer.startup_timeout_s
        self.pids = tuple(self._actors.call("pid", timeout_s=timeout_s).values())
        first = self._actors.names[0]
        place = self._actors.call("rendezvous", {first: ()}, timeout_s=timeout_s)[first]
        self._layouts = self._actors.call("start", self._same(*place), timeout_s=timeout_s)
        self._actors.call("load_weights", timeout_s=timeout_s)
        if checkpoint is not None:
            self._call("load_checkpoint", (checkpoint / "trainer").absolute())

    @property
    def layout(self) -> Layout:
        """Rank 0's; the sizes in it are everyone's."""
        return next(iter(self._layouts.values()))

    def compute_logprobs(
        self, batch: PackedBatch, temperature: float, *, routing: bool = False
    ) -> list[list[LogProbs]]:
        """Log-probs of every micro-batch, by data-parallel rank; with `routing` the experts of each token too."""
        results = self._call_counted(
            "log-probs", "micro-batches", "compute_logprobs", self._per_data_rank(batch, temperature, routing)
        )
        reported = {self._layouts[name].data_rank: result for name, result in results.items() if result is not None}
        return [reported[rank] for rank in range(len(batch))]

    def train_update(
        self, batch: PackedBatch, objective: ObjectiveName, *, denominator: float, temperature: float
    ) -> UpdateResult:
        """One optimizer update; see Stepper.train_update."""
        arguments = self._per_data_rank(batch, objective, denominator, temperature)
        results = self._call_counted("train", "micro-batches", "train_update", arguments)
        return next(iter(results.values()))

    def connect_engines(self, engines: Sequence[EngineAddress]) -> None:
        self._call("connect_engines", list(engines))

    def resync(self, version: int) -> ResyncReport:
        """Send the weights to the engines as `version`, which they serve when this returns."""
        results = self._call_counted("resync", "buckets", "resync", self._same(version))
        return next(report for report in results.values() if report is not None)

    def use_engines(self, engines: Sequence[EngineAddress]) -> None:
        """Some of those that `connect_engines` named have been started anew."""
        self._call("use_engines", list(engines))

    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """See Offload.release."""
        self._call("release_memory", list(parts))

    def resume_memory(self, parts: Collection[MemoryPart]) -> None:
        """See Offload.restore."""
        self._call("resume_memory", list(parts))

    def save_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Checksums of all files that the ranks wrote, by their names in the folder."""
        written = self._call("save_checkpoint", directory.absolute())
        return {name: digest for files in written.values() for name, digest in files.items()}

    def export_hf(self, directory: Path) -> None:
        self._call("export_hf", directory.absolute())

    def close(self) -> None:
        """Have the ranks give back what outlives a process; for the way out of a run that went well."""
        self._call("close")

    def kill(self) -> None:
        """End all processes at once."""
        self._actors.kill()

    def _same(self, *arguments: Any) -> dict[str, tuple[Any, ...]]:
        return dict.fromkeys(self._actors.names, arguments)

    def _per_data_rank(self, batch: PackedBatch, *rest: Any) -> dict[str, tuple[Any, ...]]:
        # The experts that the engines took are compared here; the trainer has no use for them.
        shares = [ray.put([replace(micro_batch, routed_experts=None) for micro_batch in share]) for share in batch]
        return {name: (shares[layout.data_rank], *rest) for name, layout in self._layouts.items()}

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        return self._actors.call(method, self._same(*arguments), timeout_s=self._recipe.trainer.timeout_s)

    def _call_counted(self, name: str, unit: str, method: str, arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """A call whose progress on rank 0 is shown."""
        with self._progress.phase(name, 0, unit) as phase:
            watch = _Watch(self._actors.first, phase)
            return self._actors.call(method, arguments, timeout_s=self._recipe.trainer.timeout_s, while_waiting=watch)


class _Watch:
    """Asks an actor for its progress whenever it has answered the last question."""

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
