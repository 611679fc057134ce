"""The trainer of a run, from the driver's side: one actor per rank, called together."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slimrl.algorithms.mismatch import LogProbReport
from slimrl.algorithms.objective import LossFunction
from slimrl.base.spans import SPANS
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.env_vars import trainer_variables
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import PackedBatch
from slimrl.data.training import Layout, MemoryPart, UpdateResult
from slimrl.observability.progress import Phase, Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.session import ResyncReport
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.reservation import Reservation
from slimrl.runtime.cluster.trainer_actor import TrainerActor

TRAINER, CRITIC = "trainer", "critic"
"""Roles of ranks; also the folders of their parts of a run's checkpoint."""
MEANWHILE_S = 1.0
"""Seconds between two calls of `meanwhile`."""


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
        actors, logs, nodes = {}, {}, {}
        variables = trainer_variables(recipe, os.environ)
        placed = places.placement.critics if role == CRITIC else places.placement.ranks
        for rank, slot in enumerate(placed):
            name, log_file = f"{role} {rank}", folder.log_file(f"{role}_{rank}")
            options = places.options(slot, variables)
            actors[name] = TrainerActor.options(**options).remote(  # type: ignore[attr-defined]
                recipe, log_file.absolute(), Path.cwd(), rank, slot.node.name, total_updates, critic=role == CRITIC
            )
            logs[name], nodes[name] = log_file, slot.node
        self._nodes = nodes
        self._actors = ActorGroup(actors, logs, nodes)
        self._layouts: dict[str, Layout] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        """Function that is called every MEANWHILE_S while the ranks work, but not in a resync; what it raises ends the
        wait"""
        self._looked = 0.0
        """Time of the last call of `meanwhile`, on the monotonic clock"""
        self.pids: tuple[int, ...] = ()

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of each rank."""
        return tuple(
            (f"{name} on {self._nodes[name].name}", pid) for name, pid in zip(self._nodes, self.pids, strict=True)
        )

    def start(self, checkpoint: Path | None = None) -> None:
        """Join the ranks, build the model and load the recipe's weights.

        Args:
            checkpoint: a run's checkpoint; its weights and optimizer state replace these.
        """
        timeout_s = self._recipe.trainer.startup_timeout_s
        self.pids = tuple(self._actors.call("pid", timeout_s=timeout_s).values())
        first = self._actors.names[0]
        on_one_node = len({node.name for node in self._nodes.values()}) == 1
        meeting = self._actors.call("rendezvous", {first: (on_one_node,)}, timeout_s=timeout_s)[first]
        self._layouts = self._actors.call("start", self._same(meeting), timeout_s=timeout_s)
        self._actors.call("load_weights", timeout_s=timeout_s)
        if checkpoint is not None:
            self._work("load_checkpoint", self._same((checkpoint / self.role).absolute()))

    @property
    def layout(self) -> Layout:
        """Rank 0's; all ranks have its sizes."""
        return next(iter(self._layouts.values()))

    def put_batches(self, updates: Sequence[PackedBatch]) -> None:
        """Give the ranks a rollout's batches, which they hold until the next; an update's number is its index."""
        batches = [ray.put([batch[rank] for batch in updates]) for rank in range(self.layout.data)]
        self._work("put_batches", {name: (batches[layout.data_rank],) for name, layout in self._layouts.items()})

    def add_logprobs(self, update: int, name: str, temperature: float, *, routing: bool = False) -> list[LogProbReport]:
        """Add the current policy's log-probs to an update's batch on the ranks, as array `name`.

        Args:
            routing: compare the experts of each token too.

        Returns:
            A report for each micro-batch, in the order of `put_batches`; none of the reference.
        """
        return self._reports(self._pass("log-probs", "add_logprobs", update, name, temperature, routing))

    def report_own_routing(self, update: int, temperature: float) -> list[LogProbReport]:
        """What `add_logprobs` would report if no routing were replayed."""
        return self._reports(self._pass("log-probs", "report_own_routing", update, temperature))

    def add_advantages(self, settings: AlgorithmConfig) -> None:
        """See RankBatches.add_advantages."""
        self._work("add_advantages", self._same(settings))

    def set_remote(self, update: int, settings: AlgorithmConfig, temperature: float) -> None:
        """See RankBatches.set_remote."""
        self._pass("log-probs", "set_remote", update, settings, temperature)

    def pieces(self, update: int, names: Sequence[str]) -> list[Any]:
        """Ray references to what RankBatches.pieces gives on each rank; the arrays do not come to the driver."""
        found = self._actors.call("give", self._same(update, list(names)), timeout_s=self._recipe.trainer.timeout_s)
        return [reference for of_rank in found.values() for reference in of_rank]

    def place(self, update: int, pieces: Sequence[Any]) -> None:
        """Add the arrays of another group's `pieces` to an update's batch; see RankBatches.place."""
        # As an object of its own, so that the references are not serialized for each rank.
        self._call("take", update, ray.put(list(pieces)))

    def add_values(self, update: int) -> None:
        """See RankBatches.add_values."""
        self._pass("values", "add_values", update)

    def estimate(self, update: int, algorithm: AlgorithmConfig) -> None:
        """See RankBatches.estimate.

        Args:
            algorithm: the policy's.
        """
        self._work("estimate", self._same(update, algorithm, self._recipe.critic))

    def accumulate(
        self,
        update: int,
        loss: LossFunction,
        *,
        denominator: float,
        temperature: float,
        logprobs: bool = False,
    ) -> list[LogProbReport]:
        """Gradients of an update's batch, for `step`; see RankBatches.accumulate."""
        return self._reports(self._pass("train", "accumulate", update, loss, denominator, temperature, logprobs))

    def step(self) -> UpdateResult:
        """Do one optimizer step with the gradients of `accumulate`."""
        return next(iter(self._work("step", self._same()).values()))

    def train_update(self, update: int, loss: LossFunction, *, denominator: float, temperature: float) -> UpdateResult:
        """Do one optimizer update on an update's batch: `accumulate` and `step`."""
        self.accumulate(update, loss, denominator=denominator, temperature=temperature)
        return self.step()

    def connect_engines(self, engines: Sequence[EngineAddress]) -> None:
        """Connect the ranks with the engines; before the first resync, and again when some engines have been
        restarted."""
        self._call("connect_engines", list(engines))

    def resync(self, version: int) -> ResyncReport:
        """Send the weights to the engines; when this returns, they serve them as `version`."""
        with self._watched("resync", "buckets") as watch, SPANS(f"{self.role}: resync"):
            results = self._actors.call(
                "resync", self._same(version), timeout_s=self._recipe.trainer.timeout_s, while_waiting=watch
            )
        return next(report for report in results.values() if report is not None)

    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Release parts of the ranks' device memory; see Offload.release."""
        self._work("release_memory", self._same(list(parts)))

    def resume_memory(self, parts: Collection[MemoryPart]) -> None:
        """Restore parts of the ranks' device memory; see Offload.restore."""
        self._work("resume_memory", self._same(list(parts)))

    def save_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Checksums of all files that the ranks wrote, by name in the folder."""
        written = self._work("save_checkpoint", self._same(directory.absolute()))
        return {name: digest for files in written.values() for name, digest in files.items()}

    def export_hf(self, directory: Path) -> None:
        self._work("export_hf", self._same(directory.absolute()))

    def begin_torch_profile(self) -> None:
        """Record what torch does on every rank."""
        self._call("begin_torch_profile")

    def end_torch_profile(self, folder: Path) -> None:
        """Add each rank's record to a profile's folder."""
        self._call("end_torch_profile", folder)

    def close(self) -> None:
        """Have the ranks release what outlives a process; for a successful end of a run."""
        self._call("close")

    def kill(self) -> None:
        """End all processes at once."""
        self._actors.kill()

    def _reports(self, results: Mapping[str, list[LogProbReport] | None]) -> list[LogProbReport]:
        """Reports of the ranks in the order of `put_batches`."""
        reported = {self._layouts[name].data_rank: result for name, result in results.items() if result is not None}
        return [report for rank in sorted(reported) for report in reported[rank]]

    def _same(self, *arguments: Any) -> dict[str, tuple[Any, ...]]:
        return dict.fromkeys(self._actors.names, arguments)

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        return self._actors.call(method, self._same(*arguments), timeout_s=self._recipe.trainer.timeout_s)

    def _work(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], while_waiting: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Call a method of the ranks' workers; errors have its name."""
        with SPANS(f"{self.role}: {method}"):
            calls = self._actors.begin("work", {name: (method, *given) for name, given in arguments.items()})
            timeout_s = self._recipe.trainer.timeout_s

            def wait() -> None:
                if time.monotonic() - self._looked > MEANWHILE_S:
                    self._looked = time.monotonic()
                    self.meanwhile()
                if while_waiting is not None:
                    while_waiting()

            return self._actors.wait(calls, method, timeout_s=timeout_s, while_waiting=wait)

    def _pass(self, phase: str, method: str, *arguments: Any) -> dict[str, Any]:
        with self._watched(phase, "micro-batches") as watch:
            return self._work(method, self._same(*arguments), watch)

    @contextmanager
    def _watched(self, phase: str, unit: str) -> Iterator[Callable[[], None]]:
        """A function that shows rank 0's progress each time it is called."""
        with self._progress.phase(phase, 0, unit) as shown:
            yield _Watch(self._actors.first, shown)


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
