"""Converting a checkpoint to Megatron and back, against `cp` of the same bytes and transformers' load and save.

Each runs in its own process, followed by `sync`, and `cp` first and last. The source is in the page cache for all of
them. docs/benchmarks.md has the model and the figures.
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


def measure(folder: Path, config: dict[str, Any], processes: int) -> dict[str, object]:
    """All figures; the folder holds at most three times the checkpoint."""
    hf, copy, megatron, back, saved = (folder / name for name in ("hf", "copy", "megatron", "back", "saved"))
    nbytes = write_sized_toy(config, hf, seed=0)
    tools = str(Path(sys.executable).with_name("slimrl-tools"))
    there = [tools, "convert", "hf-to-megatron", str(hf), str(megatron), "--processes", str(processes)]
    again = [tools, "convert", "megatron-to-hf", str(megatron), str(back), "--processes", str(processes)]
    rows: dict[str, dict[str, float]] = {}
    rows["cp"] = run(["cp", "-r", str(hf), str(copy)], folder)
    shutil.rmtree(copy)
    starts = {"hf-to-megatron": run([*there, "--dry-run"], folder)["seconds"]}
    rows["hf-to-megatron"] = run(there, folder)
    starts["megatron-to-hf"] = run([*again, "--dry-run"], folder)["seconds"]
    rows["megatron-to-hf"] = run(again, folder)
    with SafetensorsFolder(hf) as source, SafetensorsFolder(back) as result:
        if not compare_checkpoints(source, result, lambda _, __: EXACT).same:
            raise RuntimeError("the round trip changed the checkpoint")
    shutil.rmtree(back)
    rows["megatron-to-hf, no check"] = run([*again, "--no-check"], folder)
    shutil.rmtree(back)
    shutil.rmtree(megatron)
    rows["hf-to-megatron, no check"] = run([*there, "--no-check"], folder)
    shutil.rmtree(megatron)
    rows["transformers"] = run([sys.executable, "-c", BY_TRANSFORMERS, str(hf), str(saved)], folder)
    shutil.rmtree(saved)
    rows["cp again"] = run(["cp", "-r", str(hf), str(copy)], folder)
    copy_s = statistics.mean(rows[name]["seconds"] for name in ("cp", "cp again"))
    for name, row in rows.items():
        row["startup_s"] = starts.get(name.split(",")[0], 0.0)
        row["ratio"] = row["seconds"] / copy_s
        row["ratio_without_startup"] = (row["seconds"] - row["startup_s"]) / copy_s
    return {"bytes": nbytes, "copy_seconds": copy_s, "rows": rows}


def print_table(figures: dict, processes: int) -> None:
    columns = ("what", "seconds", "GB/s", "times cp", "startup s", "times cp without", "peak GiB")
    table = make_table(f"{figures['bytes'] / 1e9:.2f} GB, {processes} processes", columns)
    for name, row in figures["rows"].items():
        rate = figures["bytes"] / 1e9 / row["seconds"]
        values = (rate, row["ratio"], row["startup_s"], row["ratio_without_startup"], row["peak_gib"])
        table.add_row(name, f"{row['seconds']:.1f}", *(f"{value:.2f}" for value in values))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint, in 1e9 bytes")
    parser.add_argument("--processes", type=int, default=1, help="of the conversion")
    parser.add_argument("--folder", type=Path, help="where to put the files, three times that size; default: /tmp")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.gigabytes <= 0 or options.processes < 1:
        print("--gigabytes: above 0; --processes: at least 1.", file=sys.stderr)
        return 2
    try:
        config = config_of(options.gigabytes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            figures = measure(Path(name), config, options.processes)
    except (OSError, RuntimeError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print_table(figures, options.processes)
    write_figures(options.json, {**figures, "processes": options.processes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
