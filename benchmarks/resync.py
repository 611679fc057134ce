"""Resyncs of a random Qwen3-MoE from two trainer ranks (expert parallelism 2) into a real SGLang engine, as ratios.

At each size it sends the weights over `ipc`; at the largest it measures the other ways and the baselines too, and
resync_delta.py the versions on the disk at the smallest. docs/resync.md has the figures.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import resync_delta
from figures import make_table, write_figures
from resync_ranks import TrainerRanks
from rich.console import Console

from slimrl.base.errors import RunError
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.engines.engine_key import new_key
from slimrl.engines.servers.process import ServerError
from slimrl.engines.servers.server import EngineServer
from slimrl.estimates.resync.machine import GB
from slimrl.observability.memory import MemoryWatch, session_members
from slimrl.resync.report import ResyncReport
from slimrl.runtime.resync_tools.memcpy import memcpy_gb_per_s
from slimrl.runtime.resync_tools.resync_bench import over_disk
from slimrl.toys.sized_toy import sized_config, write_sized_toy

TIMEOUT_S = 120.0
DELTA_TIMEOUT_S = 600.0
KEY = new_key()
FLOORS = {"ipc": 0.3, "ipc over disk": 2.0}
"""Smallest ratio that each should reach"""
TRAINER = TrainerConfig(
    num_ranks=2,
    parallel=ParallelConfig(expert=2),
    precision=Precision.bf16,
    max_tokens_per_rank=512,
    optimizer=OptimizerConfig(lr=1e-6),
)
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=128,
    # The trainer allocates memory while the engine starts, which SGLang subtracts from the engine's fraction.
    sglang={"max_total_tokens": 1024, "skip_tokenizer_init": True, "mem_fraction_static": 0.5},
)


class Bench:
    """A started trainer and engines with a model of one size."""

    def __init__(self, ranks: TrainerRanks, servers: list[EngineServer], folder: Path, bucket_bytes: int) -> None:
        self.ranks, self.servers, self._folder, self._bucket_bytes = ranks, servers, folder, bucket_bytes
        self._urls = {f"engine {server.index}": server.url for server in servers}
        self._version = 0

    def resyncs(self, transport: TransportName, repeats: int) -> dict[str, Any]:
        config = ResyncConfig(
            transport=transport, bucket_bytes=self._bucket_bytes, verify=VerifyMode.full, timeout_s=TIMEOUT_S
        )
        pids = [pid for server in self.servers for pid in session_members(server.process.pid)]
        with MemoryWatch(self.ranks.pids) as trainer, MemoryWatch(pids) as engine:
            self.ranks.call("connect", config, self._urls, KEY, self._folder)
            first, *reports = [self._resync() for _ in range(repeats + 1)]
        return {
            "bytes": first.bytes,
            "buckets": first.buckets,
            "seconds": statistics.median(report.transfer_seconds for report in reports),
            "first_seconds": first.transfer_seconds,
            "stage_seconds": {
                stage: statistics.median(report.stage_seconds[stage] for report in reports)
                for stage in reports[0].stage_seconds
            },
            "trainer_extra_bytes": trainer.extra_bytes,
            "engine_extra_bytes": engine.extra_bytes,
            "verified_tensors": first.verified_tensors,
        }

    def over_disk(self, repeats: int) -> dict[str, float]:
        """Seconds of an export and of the engine's reload."""
        export = partial(self.ranks.call, "export")
        seconds = [over_disk(export, self._urls, KEY, self._folder / f"export-{i}", TIMEOUT_S) for i in range(repeats)]
        exports, reloads = zip(*seconds, strict=True)
        return {"export_seconds": statistics.median(exports), "reload_seconds": statistics.median(reloads)}

    def one_by_one(self, repeats: int) -> float:
        return statistics.median(
            self.ranks.call("send_one_by_one", self.servers[0].url, KEY)[0] for _ in range(repeats)
        )

    def bare_broadcast(self, nbytes: int, repeats: int) -> float:
        return statistics.median(self.ranks.call("broadcast", nbytes, self._bucket_bytes, repeats + 1)[0][1:])

    def _resync(self) -> ResyncReport:
        self._version += 1
        report = self.ranks.call("resync", self._version)[0]
        if report.mismatching or report.failed_engines:
            raise RuntimeError(f"version {self._version}: {report.mismatching[:5]} {report.failed_engines}")
        return report


@contextmanager
def started(gigabytes: float, bucket_bytes: int, *, num_engines: int = 1) -> Iterator[Bench]:
    """Start trainer and engines with a model of about this size; end all and remove all files afterwards."""
    with tempfile.TemporaryDirectory(prefix="slimrl-bench-") as name:
        folder = Path(name)
        model = folder / "model"
        write_sized_toy(sized_config("qwen3_moe", round(gigabytes * GB), "bfloat16", TRAINER.parallel), model, 0)
        servers: list[EngineServer] = []
        try:
            for index in range(num_engines):
                log = folder / f"engine_{index}.log"
                servers.append(EngineServer(index, ROLLOUT, model, log, key=KEY, precision=TRAINER.precision))
            with TrainerRanks(TRAINER, model) as ranks:
                for server in servers:
                    server.wait_ready()
                yield Bench(ranks, servers, folder, bucket_bytes)
        finally:
            for server in servers:
                server.stop()


def measure(sizes: list[float], bucket_bytes: int, repeats: int) -> dict[str, Any]:
    """All figures; at the last size everything is measured."""
    figures: dict[str, Any] = {"ipc": {}}
    for gigabytes in sizes:
        with started(gigabytes, bucket_bytes) as bench:
            before = memcpy_gb_per_s()
            figures["ipc"][f"{gigabytes:g}"] = ipc = bench.resyncs(TransportName.ipc, repeats)
            if gigabytes != sizes[-1]:
                continue
            figures["memcpy_gb_per_s"] = statistics.median([before, memcpy_gb_per_s(), memcpy_gb_per_s()])
            figures["memcpy_two_threads_gb_per_s"] = memcpy_gb_per_s(2)
            figures["disk"] = bench.over_disk(2)
            figures["one_by_one_seconds"] = bench.one_by_one(2)
            figures["p2p"] = bench.resyncs(TransportName.p2p, repeats)
            figures["broadcast_seconds"] = bench.bare_broadcast(ipc["bytes"], repeats)
    with started(sizes[-1], bucket_bytes, num_engines=2) as bench:
        figures["p2p, two engines"] = bench.resyncs(TransportName.p2p, repeats)
    figures["delta"] = {precision.value: deltas(precision, sizes[0]) for precision in Precision}
    return {**figures, "ratios": ratios(figures, ipc)}


def deltas(precision: Precision, gigabytes: float) -> dict[str, Any]:
    """The figures of resync_delta.py, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="slimrl-bench-") as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, resync_delta.__file__, "--precision", precision.value, "--json", str(file)]
        command += ["--gigabytes", f"{gigabytes:g}", "--updates", "2", "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DELTA_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"resync_delta.py failed: {done.stderr[-2000:]}")
        return json.loads(file.read_text())


def ratios(figures: dict[str, Any], ipc: dict[str, Any]) -> dict[str, float]:
    rate = ipc["bytes"] / GB / ipc["seconds"]
    return {
        "ipc": rate / figures["memcpy_gb_per_s"],
        # Each byte is copied twice, and two cores can copy at once.
        "ipc over the copies' limit": rate / (figures["memcpy_two_threads_gb_per_s"] / 2),
        "ipc over disk": sum(figures["disk"].values()) / ipc["seconds"],
        "ipc over one by one": figures["one_by_one_seconds"] / ipc["seconds"],
        "p2p over a broadcast": figures["broadcast_seconds"] / figures["p2p"]["seconds"],
        "p2p to two engines over one": figures["p2p, two engines"]["seconds"] / figures["p2p"]["seconds"],
    }


def print_tables(figures: dict[str, Any], bucket_bytes: int) -> None:
    console = Console()
    *_, ipc = figures["ipc"].values()
    title = f"{ipc['bytes'] / GB:.2f} GB in buckets of {bucket_bytes / 1e6:.0f} MB"
    table = make_table(title, ("what", "seconds", "GB/s"))
    gigabytes = ipc["bytes"] / GB
    rows = [
        ("memcpy, one thread", gigabytes / figures["memcpy_gb_per_s"]),
        ("memcpy, two threads", gigabytes / figures["memcpy_two_threads_gb_per_s"]),
        ("ipc", ipc["seconds"]),
        *((f"  {stage}", seconds) for stage, seconds in ipc["stage_seconds"].items()),
        ("ipc, the first", ipc["first_seconds"]),
        ("disk", sum(figures["disk"].values())),
        ("  export", figures["disk"]["export_seconds"]),
        ("  reload", figures["disk"]["reload_seconds"]),
        ("one by one", figures["one_by_one_seconds"]),
        ("gloo broadcast", figures["broadcast_seconds"]),
        ("p2p", figures["p2p"]["seconds"]),
        *((f"  {stage}", seconds) for stage, seconds in figures["p2p"]["stage_seconds"].items()),
        ("p2p, two engines", figures["p2p, two engines"]["seconds"]),
    ]
    for name, seconds in rows:
        table.add_row(name, f"{seconds:.3f}", f"{gigabytes / seconds:.2f}" if seconds else "")
    console.print(table)
    for name, ratio in figures["ratios"].items():
        floor = f" (at least {FLOORS[name]:g})" if name in FLOORS else ""
        console.print(f"{name}: {ratio:.2f}{floor}")
    table = make_table("Peak extra memory", ("transport", "model GB", "trainer MB", "engines MB"))
    measured = [("ipc", row) for row in figures["ipc"].values()]
    for name, row in (*measured, *((name, figures[name]) for name in ("p2p", "p2p, two engines"))):
        extra = (f"{row[f'{side}_extra_bytes'] / 1e6:.0f}" for side in ("trainer", "engine"))
        table.add_row(name, f"{row['bytes'] / GB:.2f}", *extra)
    console.print(table)
    for precision, row in figures["delta"].items():
        resync_delta.print_table(Precision(precision), row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="sizes, in 1e9 bytes")
    parser.add_argument("--bucket-bytes", type=int, default=64_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="counted resyncs of each transport")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if min(options.gigabytes) <= 0 or options.repeats < 1 or options.bucket_bytes < 1:
        print("--gigabytes, --bucket-bytes: above 0; --repeats: at least 1.", file=sys.stderr)
        return 2
    try:
        figures = measure(sorted(options.gigabytes), options.bucket_bytes, options.repeats)
    except (OSError, RuntimeError, ServerError, RunError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print_tables(figures, options.bucket_bytes)
    write_figures(options.json, {**figures, "bucket_bytes": options.bucket_bytes, "repeats": options.repeats})
    return 0


if __name__ == "__main__":
    sys.exit(main())
