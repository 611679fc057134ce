"""Converting a checkpoint to Megatron and back, against `cp` of the same bytes and transformers' load and save.

1. A random Qwen3-MoE in bfloat16 with experts as in Qwen3-30B-A3B and as many layers as the size asks for is written.
   Below one whole layer it has fewer experts and a smaller vocabulary.
2. It is copied with `cp -r`, converted to torch_dist and back with `slimrl-tools convert`, and loaded and saved by
   transformers, each in a process of its own, each followed by `sync` of that file system. `cp` comes first and last.
3. Everything includes its start: `startup` is how long a dry run of the same command takes, which does all but the
   writing. The ratios are to the mean of the two copies, with and without that.

The source lies in the system's page cache for all of them alike. What comes back is compared with the source.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.safetensors_folder import SafetensorsFolder, spec_bytes, write_safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LEAST_EXPERTS, LEAST_VOCABULARY = 8, 256
BY_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16").save_pretrained(sys.argv[2])
"""
LIMIT_S = 1800
"""Deadline of each command."""
POLL_S = 0.02


def write_source(path: Path, config: dict[str, Any]) -> int:
    """Write the checkpoint; returns its tensors' bytes."""
    specs = family_of(config).hf_tensor_specs(config)
    path.mkdir()
    write_safetensors(path, specs, random_tensors(specs))
    (path / "config.json").write_text(json.dumps(config))
    return sum(map(spec_bytes, specs))


def config_of(gigabytes: float) -> dict[str, Any]:
    """config.json of a model of about this size, in 1e9 bytes.

    Raises:
        ValueError: it is below half of that of the smallest.
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
        raise ValueError(f"--gigabytes {gigabytes:g}: the smallest has {smallest / 1e9:.3f}.")
    return config


def tensor_bytes(config: dict[str, Any]) -> int:
    return sum(map(spec_bytes, family_of(config).hf_tensor_specs(config)))


def random_tensors(specs: list[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Pieces of one long row of random numbers, each from another place in it."""
    row = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number, spec in enumerate(specs):
        count = torch.Size(spec.shape).numel()
        start = number * 7919 % (row.numel() // 2)
        repeated = row[start:].repeat(-(-count // (row.numel() - start)))
        yield spec.name, repeated[:count].view(spec.shape)


def run(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds of a command with the `sync` behind it, and its peak memory in GiB.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=LIMIT_S)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        peak_kib = 0
        while process.poll() is None:
            peak_kib = max(peak_kib, high_water_kib(process.pid))
            if time.perf_counter() - start > LIMIT_S:
                process.kill()
            time.sleep(POLL_S)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {said.read().decode()[-2000:]}")
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=LIMIT_S)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_gib": peak_kib / 2**20}


def high_water_kib(pid: int) -> int:
    """Largest resident memory of a process so far; 0 where it has ended. What its parent had does not count."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def same_tensors(path: Path, other: Path) -> bool:
    with SafetensorsFolder(path) as one, SafetensorsFolder(other) as two:
        if one.specs != two.specs:
            return False
        for name, spec in one.specs.items():
            whole = tuple(slice(0, size) for size in spec.shape)
            if not torch.equal(one.read(name, whole), two.read(name, whole)):
                return False
    return True


def measure(folder: Path, config: dict[str, Any], processes: int) -> dict[str, object]:
    """All figures; the folder is left empty."""
    hf, copy, megatron, back, saved = (folder / name for name in ("hf", "copy", "megatron", "back", "saved"))
    nbytes = write_source(hf, config)
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
    if not same_tensors(hf, back):
        raise RuntimeError("what came back is not what was converted")
    shutil.rmtree(back)
    rows["megatron-to-hf, no check"] = run([*again, "--no-check"], folder)
    shutil.rmtree(back)
    shutil.rmtree(megatron)
    rows["hf-to-megatron, no check"] = run([*there, "--no-check"], folder)
    shutil.rmtree(megatron)
    rows["transformers"] = run([sys.executable, "-c", BY_TRANSFORMERS, str(hf), str(saved)], folder)
    shutil.rmtree(saved)
    rows["cp again"] = run(["cp", "-r", str(hf), str(copy)], folder)
    shutil.rmtree(copy)
    shutil.rmtree(hf)
    copy_s = statistics.mean(rows[name]["seconds"] for name in ("cp", "cp again"))
    for name, row in rows.items():
        row["startup_s"] = starts.get(name.split(",")[0], 0.0)
        row["ratio"] = row["seconds"] / copy_s
        row["ratio_without_startup"] = (row["seconds"] - row["startup_s"]) / copy_s
    return {"bytes": nbytes, "copy_seconds": copy_s, "rows": rows}


def print_table(figures: dict, processes: int) -> None:
    table = Table(title=f"{figures['bytes'] / 1e9:.2f} GB, {processes} processes")
    columns = ("what", "seconds", "GB/s", "times cp", "startup s", "times cp without", "peak GiB")
    for column in columns:
        table.add_column(column, justify="left" if column == "what" else "right")
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
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {**figures, "processes": options.processes, "machine": machine}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
