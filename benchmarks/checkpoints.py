"""Seconds that training waits for a checkpoint: written at once, beside the training, and in memory.

A rank on this machine's CPU holds a random model and its optimizer's state. In turn, it writes a checkpoint and waits
until it is complete, and it copies what is to be written and completes the checkpoint when a thread has written it, on
the disk and in /dev/shm, which has copies in memory.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import make_table, write_figures
from rich.console import Console

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR
from slimrl.toys.sized_toy import sized_config, write_sized_toy
from slimrl.trainer.worker import TrainerWorker

BYTES_OF_WEIGHTS = 4 / 16
"""Part of a checkpoint in float32 that is weights; the rest is the optimizer's main weights and both moments"""
FAMILY = "qwen3_moe"


def start(folder: Path, nbytes: float) -> TrainerWorker:
    """A rank whose checkpoint has about so many bytes."""
    layout = ParallelConfig()
    config = sized_config(FAMILY, int(nbytes * BYTES_OF_WEIGHTS), "float32", layout)
    write_sized_toy(config, folder / "model", seed=0)
    optimizer = OptimizerConfig(lr=1e-4)
    trainer = TrainerConfig(
        num_ranks=1, optimizer=optimizer, precision=Precision.fp32, max_tokens_per_rank=64, parallel=layout
    )
    meeting = f"file://{folder / 'meeting'}"
    worker = TrainerWorker(trainer, folder / "model", seed=0, rank=0, world_size=1, meeting=meeting, total_updates=1)
    worker.load_hf()
    return worker


def waited(worker: TrainerWorker, folder: Path) -> dict[str, float]:
    start_s = time.monotonic()
    worker.save_checkpoint(folder)
    held_s = time.monotonic() - start_s
    return {"held_s": held_s, "complete_s": held_s}


def beside(
    worker: TrainerWorker, folder: Path, thread: ThreadPoolExecutor, *, same_layout: bool = False
) -> dict[str, float]:
    start_s = time.monotonic()
    writing = worker.begin_checkpoint(folder, same_layout=same_layout)
    held_s = time.monotonic() - start_s
    thread.submit(writing.write).result()
    written_s = time.monotonic()
    writing.finish()
    end_s = time.monotonic()
    return {"held_s": held_s + end_s - written_s, "complete_s": end_s - start_s}


def measure(nbytes: float, repeats: int, folder: Path, memory: Path) -> dict[str, float]:
    """Medians, and the bytes of a checkpoint.

    Args:
        memory: a folder in memory.
    """
    worker = start(folder, nbytes)
    found: dict[str, list[dict[str, float]]] = {"waited": [], "beside": [], "memory": []}
    size = 0
    with ThreadPoolExecutor(1) as thread:
        for number in range(repeats + 1):
            for name in found:
                saved = (memory if name == "memory" else folder) / f"{name}_{number}"
                if name == "waited":
                    taken = waited(worker, saved)
                else:
                    taken = beside(worker, saved, thread, same_layout=name == "memory")
                size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
                shutil.rmtree(saved)
                # The first of each makes the optimizer's state and fills caches.
                if number:
                    found[name].append(taken)
    worker.close()
    medians = {
        f"{name}_{what}": statistics.median(one[what] for one in taken)
        for name, taken in found.items()
        for what in ("held_s", "complete_s")
    }
    return {"bytes": size, **medians, "ratio": medians["beside_held_s"] / medians["waited_held_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 4.0], help="of a checkpoint, in 1e9 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder")
    parser.add_argument("--json", type=Path, help="the figures")
    arguments = parser.parse_args()
    timed = ("waited for", "held up beside", "ratio", "complete beside", "held up in memory", "complete in memory")
    table = make_table("seconds", ("checkpoint", *timed))
    results = []
    for gigabytes in arguments.gigabytes:
        with (
            tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
            tempfile.TemporaryDirectory(dir=SHARED_MEMORY_DIR) as memory,
        ):
            result = measure(gigabytes * 1e9, arguments.repeats, Path(folder), Path(memory))
        results.append(result)
        table.add_row(
            f"{result['bytes'] / 1e9:.2f} GB",
            f"{result['waited_held_s']:.2f}",
            f"{result['beside_held_s']:.2f}",
            f"{result['ratio']:.2f}",
            f"{result['beside_complete_s']:.2f}",
            f"{result['memory_held_s']:.2f}",
            f"{result['memory_complete_s']:.2f}",
        )
    Console().print(table)
    write_figures(arguments.json, {"checkpoints": results})


if __name__ == "__main__":
    main()
