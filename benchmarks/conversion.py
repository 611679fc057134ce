"""Converting a checkpoint to Megatron and back, against `cp` of the same bytes and transformers' load and save.

Each runs in its own process, followed by `sync`, in turn with `cp` of the same folder: a pair of the two each time, and
medians over the pairs. docs/internals.md has the model and the figures.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import make_table, write_figures
from rich.console import Console
from slimrl_tools.verify.compare import EXACT, compare_checkpoints

from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.models.hf_config import published_config
from slimrl.observability.memory import memory_bytes
from slimrl.toys.sized_toy import tensor_bytes, write_sized_toy

CONFIG = published_config("Qwen3-30B-A3B") | {"initializer_range": 0.02}
LEAST_EXPERTS, LEAST_VOCABULARY = 8, 256
BY_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16").save_pretrained(sys.argv[2])
"""
LIMIT_S = 1800
"""Deadline of each command."""
POLL_S = 0.02
SETTLE_S = 3.0
"""Before each command. The host of a virtual machine takes freed memory back within seconds, and memory that it gives
anew takes up to four times as long to write: without a wait the command after a large deletion would be faster."""


def config_of(gigabytes: float) -> dict[str, Any]:
    """config.json of a model of about this size, in 1e9 bytes.

    Raises:
        ValueError: the smallest model is more than twice as large.
    """
    nbytes = gigabytes * 1e9
    config = {**CONFIG, "num_hidden_layers": 1}
    one, two = tensor_bytes(config), tensor_bytes({**config, "num_hidden_layers": 2})
    if nbytes >= one:
        return {**config, "num_hidden_layers": 1 + round((nbytes - one) / (two - one))}
    experts = max(LEAST_EXPERTS, round(CONFIG["num_experts"] * nbytes / one))
    config |= {"num_experts": experts, "vocab_size": LEAST_VOCABULARY}
    # A row of the embedding and one of the head.
    row = 2 * 2 * CONFIG["hidden_size"]
    config["vocab_size"] += max(0, round((nbytes - tensor_bytes(config)) / row))
    if (smallest := tensor_bytes(config)) > 2 * nbytes:
        raise ValueError(f"--gigabytes {gigabytes:g}: the smallest model has {smallest / 1e9:.3f}.")
    return config


def run(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds of a command and a following `sync`, and its peak memory in GiB.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=LIMIT_S)
    time.sleep(SETTLE_S)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        peak_bytes = 0
        while process.poll() is None:
            # Peak resident memory of the process alone.
            peak_bytes = max(peak_bytes, memory_bytes(process.pid, "VmHWM"))
            if time.perf_counter() - start > LIMIT_S:
                process.kill()
            time.sleep(POLL_S)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {said.read().decode()[-2000:]}")
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=LIMIT_S)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_gib": peak_bytes / 2**30}


def evict(folder: Path) -> None:
    """Drop the files of a folder from the page cache; they are on the disk already."""
    for file in folder.iterdir():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_pairs(source: Path, out: Path, command: list[str], pairs: int, *, cold: bool) -> dict[str, float]:
    """Medians over pairs of `cp` and a command that writes `out` from `source`; `out` stays."""
    copy = out.with_name("copy")
    seconds: dict[str, list[float]] = {"cp": [], "command": []}
    peak_gib = 0.0
    for _ in range(pairs):
        for name, what in (("cp", ["cp", "-r", str(source), str(copy)]), ("command", command)):
            for written in (copy, out):
                shutil.rmtree(written, ignore_errors=True)
            if cold:
                evict(source)
            figures = run(what, source.parent)
            seconds[name].append(figures["seconds"])
            peak_gib = max(peak_gib, figures["peak_gib"])
    ratios = [took / copied for copied, took in zip(seconds["cp"], seconds["command"], strict=True)]
    return {
        "seconds": statistics.median(seconds["command"]),
        "copy_seconds": statistics.median(seconds["cp"]),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "peak_gib": peak_gib,
    }


def measure(folder: Path, config: dict[str, Any], processes: int, pairs: int, *, cold: bool) -> dict[str, object]:
    """All figures; the folder holds at most three times the checkpoint."""
    hf, megatron, back, saved = (folder / name for name in ("hf", "megatron", "back", "saved"))
    nbytes = write_sized_toy(config, hf, seed=0)
    tools = str(Path(sys.executable).with_name("slimrl-tools"))
    there = [tools, "convert", "hf-to-megatron", str(hf), str(megatron), "--processes", str(processes)]
    again = [tools, "convert", "megatron-to-hf", str(megatron), str(back), "--processes", str(processes)]
    transformers = [sys.executable, "-c", BY_TRANSFORMERS, str(hf), str(saved)]
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, source: Path, out: Path, command: list[str], *, dry_run: bool = True) -> None:
        shutil.rmtree(out, ignore_errors=True)
        startup_s = run([*command, "--dry-run"], folder)["seconds"] if dry_run else 0.0
        row = measure_pairs(source, out, command, pairs, cold=cold)
        without = (row["seconds"] - startup_s) / row["copy_seconds"]
        rows[name] = {**row, "startup_s": startup_s, "ratio_without_startup": without}

    add("hf-to-megatron, no check", hf, megatron, [*there, "--no-check"])
    add("hf-to-megatron", hf, megatron, there)
    add("megatron-to-hf, no check", megatron, back, [*again, "--no-check"])
    add("megatron-to-hf", megatron, back, again)
    with SafetensorsFolder(hf) as source, SafetensorsFolder(back) as result:
        if not compare_checkpoints(source, result, lambda _, __: EXACT).same:
            raise RuntimeError("the round trip changed the checkpoint")
    shutil.rmtree(back)
    shutil.rmtree(megatron)
    add("transformers", hf, saved, transformers, dry_run=False)
    return {"bytes": nbytes, "pairs": pairs, "cold": cold, "rows": rows}


def print_table(figures: dict, processes: int) -> None:
    columns = ("what", "s", "cp s", "times cp", "least to most", "start s", "without", "peak GiB")
    cache = "not in the page cache" if figures["cold"] else "in the page cache"
    title = f"{figures['bytes'] / 1e9:.2f} GB {cache}; processes: {processes}, pairs: {figures['pairs']}"
    table = make_table(title, columns)
    for name, row in figures["rows"].items():
        spread = f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}"
        start, without, peak = row["startup_s"], row["ratio_without_startup"], row["peak_gib"]
        cells = (row["seconds"], row["copy_seconds"], row["ratio"], spread, start, without, peak)
        table.add_row(name, *(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint, in 1e9 bytes")
    parser.add_argument("--processes", type=int, default=1, help="of the conversion")
    parser.add_argument("--folder", type=Path, help="where to put the files, three times that size; default: /tmp")
    parser.add_argument("--pairs", type=int, default=3, help="of cp and each command")
    parser.add_argument("--cold", action="store_true", help="the source is not in the page cache")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.gigabytes <= 0 or min(options.processes, options.pairs) < 1:
        print("--gigabytes: above 0; --processes and --pairs: at least 1.", file=sys.stderr)
        return 2
    try:
        config = config_of(options.gigabytes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            figures = measure(Path(name), config, options.processes, options.pairs, cold=options.cold)
    except (OSError, RuntimeError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print_table(figures, options.processes)
    write_figures(options.json, {**figures, "processes": options.processes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
