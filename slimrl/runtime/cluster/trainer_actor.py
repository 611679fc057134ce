"""One trainer rank as a Ray actor: a process that holds the model, the batches that it learns from, and its side of the
resync.

Only the actor's process imports Megatron: the driver, which imports this module to name the methods that it calls, does
not pay for it.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_node_ip_address

from slimrl.algorithms.passes import needs_reference
from slimrl.base.imports import imports_uncollected
from slimrl.base.meeting_folder import meeting_folder
from slimrl.base.spans import SPANS
from slimrl.checkpoints.digests import FileDigest, differences
from slimrl.config.hub import fetch_to_this_node
from slimrl.config.schema.recipe import Recipe
from slimrl.config.speculative_rules import sends_drafts
from slimrl.data.training import Layout, MemoryPart
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.ports import free_port
from slimrl.observability.logs import capture_output
from slimrl.observability.profiling.trace import TORCH_SUFFIX
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.ipc.allocator import forbid_expandable_segments
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.resync.session import ResyncReport, ResyncSession
from slimrl.rollout.task.engine_format import engine_transform
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.node_memory import Fetched
from slimrl.runtime.cluster.node_processes import NodeProcess
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.rank_position import RankPosition, RankProgress, position

if TYPE_CHECKING:
    from slimrl.trainer.checkpointing.writing import CheckpointWriting

MOST_CHECKPOINTS = 2
"""Checkpoints that are written at a time: one on the disk, and one in memory"""


class TrainerActor(RankBatches):
    """One trainer rank. The driver calls all ranks at once and in the same order.

    What it has as RankBatches is there once `start` has built the model.
    """

    def __init__(
        self,
        recipe: Recipe,
        log_file: Path,
        working_directory: Path,
        rank: int,
        node: str,
        total_updates: int,
        *,
        critic: bool = False,
    ) -> None:
        """
        Args:
            working_directory: the driver's; the recipe's paths are relative to it.
            node: name of this process's node.
            critic: the rank is one of a critic, and the recipe is the critic's.
        """
        capture_output(log_file)
        os.chdir(working_directory)
        os.environ.update(recipe.trainer.env)
        forbid_expandable_segments(os.environ)
        clean_stale_segments()
        SPANS.open(
            RunFolder(Path(recipe.run.dir) / recipe.run.name).profile, f"{'critic' if critic else 'trainer'} {rank}"
        )
        self.node = node
        self.recipe, self.rank, self.total_updates = recipe, rank, total_updates
        self.is_critic = critic
        self._progress = RankProgress(0, 0, 0)
        self._checkpoints: dict[Path, tuple[CheckpointWriting, Future[None]]] = {}
        """The checkpoints under way by their folders, and the end of their writing on this rank"""
        self._writers = ThreadPoolExecutor(MOST_CHECKPOINTS, "checkpoint")
        self.resync_session: ResyncSession | None = None
        self.controls: list[SglangControl] = []
        self.connected: list[tuple[EngineAddress, SglangControl]] = []
        self.meeting: TemporaryDirectory[str] | None = None

    def rendezvous(self, on_one_node: bool) -> str:
        """The address at which the ranks find each other: a file where they are on one node, else a port of rank 0.

        Torch's store behind a port obeys whoever reaches it.
        """
        if on_one_node:
            self.meeting = meeting_folder("ranks")
            return f"file://{self.meeting.name}/ranks"
        address = get_node_ip_address()
        return f"tcp://{address}:{free_port(address)}"

    def process(self) -> NodeProcess:
        return NodeProcess.own()

    def start(self, meeting: str) -> Layout:
        """Join the other ranks and build the model; weights are random until loaded."""
        with imports_uncollected():
            from slimrl.observability.profiling.megatron_passes import time_passes
            from slimrl.trainer.worker import TrainerWorker

        fetch_to_this_node(self.recipe.model.path)
        time_passes(SPANS)
        self.worker = TrainerWorker(
            self.recipe.trainer,
            Path(self.recipe.model.path),
            seed=self.recipe.seed,
            rank=self.rank,
            world_size=self.recipe.trainer.num_ranks,
            meeting=meeting,
            total_updates=self.total_updates,
            deterministic=self.recipe.deterministic,
            routing_replay=self.recipe.algorithm.routing_replay,
            critic=self.is_critic,
        )
        self.worker.runner.on_progress = self._set_progress
        super().__init__(self.worker.runner, self.recipe.algorithm.routing_replay)
        return self.worker.layout

    def load_weights(self) -> None:
        """Load the weights from `model.megatron` if it is set, else from `model.path`; keep them as reference where one
        is needed."""
        if self.recipe.model.megatron:
            self.worker.load_megatron(Path(self.recipe.model.megatron))
        else:
            self.worker.load_hf()
        if needs_reference(self.recipe):
            self.reference = self.worker.keep_reference()

    def compare_files(self, root: Path, files: Mapping[str, FileDigest]) -> list[str]:
        """What differs between files and their digests; see `differences`."""
        return differences(root, files, contents=True)

    def load_checkpoint(self, directory: Path, fetch: Fetched | None) -> None:
        """Load a checkpoint; `fetch` brings the files that this node lacks, or None if it has all."""
        self.worker.load_checkpoint(directory, fetch)

    def begin_checkpoint(self, directory: Path, leads: bool, same_layout: bool) -> None:
        """Copy what a checkpoint has of this rank into host memory, and write it beside what comes.

        Args:
            leads: whether this rank, of those that write into this folder, makes it.
            same_layout: see checkpoint.begin.
        """
        writing = self.worker.begin_checkpoint(directory, leads=leads, same_layout=same_layout)
        self._checkpoints[directory] = writing, self._writers.submit(writing.write)

    @ray.method(concurrency_group="progress")  # type: ignore[untyped-decorator]
    def has_written(self, directory: Path) -> bool:
        """Whether the files of this rank are written."""
        return directory in self._checkpoints and self._checkpoints[directory][1].done()

    def finish_checkpoint(self, directory: Path) -> dict[str, FileDigest]:
        """Wait until the files of all ranks are written, and complete the checkpoint.

        Returns:
            Checksums of the files that this rank wrote, by name in the folder.
        """
        writing, written = self._checkpoints.pop(directory)
        written.result()
        return writing.finish()

    def export_hf(self, directory: Path) -> None:
        self._set_progress(0, 0)
        self.worker.export_hf(directory, self._set_progress)

    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Release parts of the device memory, which must be restored before they are used."""
        self.worker.offload.release(parts)

    def resume_memory(self, parts: Collection[MemoryPart]) -> None:
        """Restore parts that `release_memory` freed; gradients come back as zeros."""
        self.worker.offload.restore(parts)

    def give(self, update: int, names: Sequence[str]) -> list[Any]:
        """References to the pieces that this rank has of an update's batch: one, or none."""
        found = self.pieces(update, names)
        return [ray.put(found)] if found else []

    def take(self, update: int, references: list[Any]) -> None:
        """Add what `give` has given on other ranks."""
        if self.runner.layout.is_last_stage:
            self.place(update, [piece for pieces in ray.get(references) for piece in pieces])

    def connect_engines(self, engines: list[EngineAddress]) -> None:
        """Name the engines that `resync` updates; again when some were restarted, with the same names and addresses."""
        drafts = sends_drafts(self.recipe)

        def control_of(engine: EngineAddress) -> SglangControl:
            return SglangControl(
                engine.name,
                engine.url,
                key=engine.key,
                num_ranks=engine.tensor,
                nodes=engine.nodes,
                timeout_s=self.recipe.resync.timeout_s,
                updates_draft=drafts,
            )

        before = dict(self.connected)
        # An engine that was not restarted, which has the same processes, keeps its control, and so its group.
        self.connected = [
            (engine, before.pop(engine) if engine in before else control_of(engine)) for engine in engines
        ]
        self.controls = [control for _, control in self.connected]
        if self.resync_session is None:
            self.resync_session = ResyncSession(
                self.worker.weight_source(mtp=drafts),
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
        else:
            self.resync_session.use(self.controls)
        for control in before.values():
            control.close()

    def resync(self, version: int) -> ResyncReport | None:
        """Send the weights to all engines; only rank 0 returns a report."""
        assert self.resync_session is not None, "connect_engines comes first"
        self._set_progress(0, 0)
        return self.resync_session.run(version, self._set_progress)

    def begin_torch_profile(self) -> None:
        from torch.profiler import profile

        self.torch_profile = profile()
        self.torch_profile.start()

    def end_torch_profile(self, folder: Path) -> None:
        self.torch_profile.stop()
        self.torch_profile.export_chrome_trace(str(folder / f"{SPANS.process.replace(' ', '_')}{TORCH_SUFFIX}"))

    def close(self) -> None:
        """Leave the process groups and remove what this rank has in shared memory."""
        if self.resync_session is not None:
            self.resync_session.close()
        for control in self.controls:
            control.close()
        self.worker.close()
        if self.meeting is not None:
            self.meeting.cleanup()

    @ray.method(concurrency_group="progress")  # type: ignore[untyped-decorator]
    def progress(self) -> RankProgress:
        return self._progress

    @ray.method(concurrency_group="progress")  # type: ignore[untyped-decorator]
    def position(self) -> RankPosition:
        return position(self._progress)

    def _set_progress(self, done: int, total: int) -> None:
        self._progress = RankProgress(done, total, self._progress.count + 1)


RemoteTrainer = ray.remote(max_restarts=0, concurrency_groups={"progress": 1})(TrainerActor)  # type: ignore[call-overload]
"""TrainerActor as Ray starts it in a process of its own"""
