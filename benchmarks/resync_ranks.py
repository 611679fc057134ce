"""Trainer ranks for benchmarks/resync.py: processes that execute calls together."""

import base64
import multiprocessing
import os
import time
import traceback
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx

from slimrl.config.schema.resync import ResyncConfig
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.ports import free_port
from slimrl.resync.report import ResyncReport

DEADLINE_S = 300.0


class TrainerRanks:
    """A trainer with the weights of a checkpoint. A context manager that ends its processes by pid."""

    def __init__(self, trainer: TrainerConfig, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(trainer.num_ranks):
            here, there = context.Pipe()
            self._pipes.append(here)
            self._processes.append(
                context.Process(target=_serve, args=(there, rank, trainer, model, port), daemon=True)
            )
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of `Trainer` returns on each rank; raises RuntimeError where one fails or is late."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise RuntimeError(f"rank {rank}: no answer to {method} within {DEADLINE_S:g} s")
            error, value = pipe.recv()
            if error is not None:
                raise RuntimeError(f"rank {rank}: {method} failed\n{error}")
            answers.append(value)
        return answers

    def __enter__(self) -> "TrainerRanks":
        self.call("ready")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


def _serve(pipe: Any, rank: int, trainer: TrainerConfig, model: Path, port: int) -> None:
    served = Trainer(rank, trainer, model, port)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((None, getattr(served, method)(*arguments)))
        except Exception:  # noqa: BLE001 - the caller raises it
            pipe.send((traceback.format_exc(), None))


class Trainer:
    """One rank."""

    def __init__(self, rank: int, trainer: TrainerConfig, model: Path, port: int) -> None:
        from slimrl.trainer.worker import TrainerWorker

        self.rank, self.model = rank, model
        self.worker = TrainerWorker(
            trainer,
            model,
            seed=0,
            rank=rank,
            world_size=trainer.num_ranks,
            meeting=f"tcp://127.0.0.1:{port}",
            total_updates=100,
        )
        self.worker.load_hf()
        self.session: Any = None

    def ready(self) -> int:
        return os.getpid()

    def connect(self, config: ResyncConfig, engines: dict[str, str], key: EngineKey, run_dir: Path) -> None:
        """Connect to these engines, name -> URL, in place of earlier ones."""
        from slimrl.resync.session import ResyncSession

        if self.session is not None:
            self.session.close()
        controls = [SglangControl(name, url, key=key, timeout_s=config.timeout_s) for name, url in engines.items()]
        run_id = f"bench-{config.transport.value}"
        self.session = ResyncSession(
            self.worker.weight_source(), controls, config, rank=self.rank, run_id=run_id,
            model_dir=self.model, run_dir=run_dir,
        )  # fmt: skip

    def resync(self, version: int) -> ResyncReport | None:
        return self.session.run(version)

    def export(self, folder: Path) -> None:
        self.worker.export_hf(folder)

    def send_one_by_one(self, url: str, key: EngineKey) -> float:
        """Seconds to send tensor by tensor from rank 0 through SGLang's own route."""
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")
        source = self.worker.weight_source()
        with httpx.Client(base_url=url, headers=key.headers, timeout=DEADLINE_S, trust_env=False) as http:

            def post(route: str, **body: Any) -> None:
                if self.rank == 0:
                    http.post(f"/{route}", json=body).raise_for_status()

            start = time.perf_counter()
            post("pause_generation", mode="retract")
            post("begin_weight_update")
            for name, tensor in source.tensors():
                if tensor is not None:
                    # The clone has its own shared memory, of which a handle is serialised.
                    data = bytes(ForkingPickler.dumps([(name, tensor.clone())]))
                    text = base64.b64encode(data).decode()
                    post("update_weights_from_tensor", serialized_named_tensors=[text], flush_cache=False)
            post("end_weight_update")
            post("flush_cache")
            post("continue_generation")
            return time.perf_counter() - start

    def broadcast(self, nbytes: int, bucket_bytes: int, repeats: int) -> list[float]:
        """Seconds of bare broadcasts of `nbytes` from rank 0, in buckets."""
        import torch
        import torch.distributed as dist

        group: Any = dist.new_group(backend="gloo")
        flat = torch.ones(nbytes, dtype=torch.uint8)
        seconds = []
        for _ in range(repeats):
            dist.barrier(group=group)
            start = time.perf_counter()
            for first in range(0, nbytes, bucket_bytes):
                dist.broadcast(flat[first : first + bucket_bytes], 0, group=group)
            dist.barrier(group=group)
            seconds.append(time.perf_counter() - start)
        dist.destroy_process_group(group)
        return seconds
