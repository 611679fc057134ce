"""One trainer rank as a Ray actor: a process that holds a TrainerWorker and its side of the resync.

Megatron is imported in the actor's process alone: the driver, which needs this module for the actor's name, does not
pay for it.
"""

import os
from pathlib import Path
from typing import Literal

import ray
from ray.util import get_node_ip_address

from slimrl.config.schema import Recipe
from slimrl.data.packing import MicroBatch
from slimrl.data.training import Layout, LogProbs, MemoryPart, UpdateResult
from slimrl.models.digests import FileDigest
from slimrl.observability.logs import capture_output
from slimrl.resync.session import ResyncReport, ResyncSession
from slimrl.resync.shared_buffer import clean_stale_segments
from slimrl.rollout.control import SglangControl
from slimrl.rollout.ports import free_port
from slimrl.runtime.engine_actor import EngineAddress
from slimrl.runtime.engine_format import engine_transform

ObjectiveName = Literal["policy", "sft"]


@ray.remote(max_restarts=0, concurrency_groups={"progress": 1})  # type: ignore[call-overload]
class TrainerActor:
    """Every rank of the trainer is one. Calls come from the driver, to all ranks at once and in one order."""

    def __init__(
        self, recipe: Recipe, log_file: Path, working_directory: Path, rank: int, node: str, total_updates: int
    ) -> None:
        """
        Args:
            working_directory: the driver's; what the recipe names lies relative to it.
            node: name of the node that this process is on.
        """
        capture_output(log_file)
        os.chdir(working_directory)
        clean_stale_segments()
        self.node = node
        self.recipe, self.rank, self.total_updates = recipe, rank, total_updates
        self.done, self.total = 0, 0
        self.resync_session: ResyncSession | None = None
        self.controls: list[SglangControl] = []

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port at which rank 0 is found."""
        address = get_node_ip_address()
        return address, free_port(address)

    def pid(self) -> int:
        return os.getpid()

    def start(self, address: str, port: int) -> Layout:
        """Join the other ranks and build the model; weights are random until loaded."""
        from slimrl.trainer.worker import TrainerWorker

        self.worker = TrainerWorker(
            self.recipe.trainer,
            Path(self.recipe.model.path),
            seed=self.recipe.seed,
            rank=self.rank,
            world_size=self.recipe.trainer.num_ranks,
            master_addr=address,
            master_port=port,
            total_updates=self.total_updates,
        )
        self.worker.stepper.on_micro_batch = self._advance
        return self.worker.layout

    def load_weights(self) -> None:
        """Of `model.megatron` where it is set, else of `model.path`."""
        if self.recipe.model.megatron:
            self.worker.load_megatron(Path(self.recipe.model.megatron))
        else:
            self.worker.load_hf()

    def compute_logprobs(
        self, micro_batches: list[MicroBatch], temperature: float, routing: bool
    ) -> list[LogProbs] | None:
        self._count(len(micro_batches))
        return self.worker.compute_logprobs(micro_batches, temperature, routing=routing)

    def train_update(
        self, micro_batches: list[MicroBatch], objective: ObjectiveName, denominator: float, temperature: float
    ) -> UpdateResult:
        from slimrl.trainer.objectives import gspo_objective, sft_objective

        self._count(len(micro_batches))
        loss_function = gspo_objective(self.recipe.algorithm) if objective == "policy" else sft_objective()
        return self.worker.train_update(micro_batches, loss_function, denominator=denominator, temperature=temperature)

    def connect_engines(self, engines: list[EngineAddress]) -> None:
        """Meet the engines that `resync` will update."""
        self.controls = self._make_controls(engines)
        self.resync_session = ResyncSession(
            self.worker.weight_source(),
            self.controls,
            self.recipe.resync,
            rank=self.rank,
            run_id=self.recipe.run.name,
            node=self.node,
            address=get_node_ip_address(),
            model_dir=Path(self.recipe.model.path),
            run_dir=Path(self.recipe.run.dir) / self.recipe.run.name,
            transform=engine_transform(Path(self.recipe.model.path)),
        )

    def resync(self, version: int) -> ResyncReport | None:
        """Send this trainer's weights to all engines; the report is rank 0's."""
        assert self.resync_session is not None, "connect_engines comes first"
        self._count(0)
        return self.resync_session.run(version, self._set_progress)

    def use_engines(self, engines: list[EngineAddress]) -> None:
        """Some of them have been started anew, under the names and addresses that they had."""
        assert self.resync_session is not None, "connect_engines comes first"
        replaced, self.controls = self.controls, self._make_controls(engines)
        self.resync_session.use(self.controls)
        for control in replaced:
            control.close()

    def release_memory(self, parts: list[MemoryPart]) -> None:
        self.worker.release_memory(parts)

    def resume_memory(self, parts: list[MemoryPart]) -> None:
        self.worker.resume_memory(parts)

    def save_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        return self.worker.save_checkpoint(directory)

    def load_checkpoint(self, directory: Path) -> None:
        self.worker.load_checkpoint(directory)

    def export_hf(self, directory: Path) -> None:
        self.worker.export_hf(directory)

    def close(self) -> None:
        """Leave the groups and remove what lies in shared memory."""
        if self.resync_session is not None:
            self.resync_session.close()
        for control in self.controls:
            control.close()
        self.worker.close()

    @ray.method(concurrency_group="progress")  # type: ignore[untyped-decorator]
    def progress(self) -> tuple[int, int]:
        """(done, total) of the call under way: micro-batches or buckets."""
        return self.done, self.total

    def _make_controls(self, engines: list[EngineAddress]) -> list[SglangControl]:
        timeout_s = self.recipe.resync.timeout_s
        return [SglangControl(e.name, e.url, num_ranks=e.tensor, node=e.node, timeout_s=timeout_s) for e in engines]

    def _count(self, total: int) -> None:
        self.done, self.total = 0, total

    def _advance(self) -> None:
        self.done += 1

    def _set_progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
