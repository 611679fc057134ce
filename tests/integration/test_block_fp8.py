"""Block FP8 against SGLang's own code and in a trainer, and conversions that are killed or run out of disk."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from slimrl_tools.convert.output_folder import RECORDS
from slimrl_tools.derive.quantize import dequantization, quantization
from slimrl_tools.derive.rewrite import write_checkpoint
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from weight_cases import EXPECTED_NAME, MOE_LAYOUTS_OF_2, round_trip

from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.quantization.fp8 import BlockFp8, dequantize, quantize

pytestmark = pytest.mark.integration

DEADLINE_S = 120


def run_python(program: str) -> str:
    """Standard output of a program in a process of its own.

    SGLang is imported with stand-ins for its GPU packages, which must not come into this process.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = (["lm_head"], ["mlp.gate"], ["gate"], ["model.layers.1"], ["layers.1."], ["self_attn"], ["down_proj"],
         ["model.layers.1.self_attn.o_proj"], ["model.layers.1.mlp.experts.3.up_proj"], ["mlp"], ["attn"], [],
         ["experts"], ["shared_experts"], ["model.layers.10.mlp.experts"])  # fmt: skip
MODULES = [
    *(f"model.layers.{i}.self_attn.{name}" for i in (1, 10) for name in ("q_a_proj", "q_b_proj", "o_proj")),
    *(f"model.layers.{i}.mlp.{name}" for i in (1, 10) for name in ("gate", "down_proj", "experts")),
    *(f"model.layers.{i}.mlp.shared_experts.down_proj" for i in (1, 10)),
    "lm_head",
]


def test_sglang_skips_the_same_modules_and_dequantises_to_the_same_bits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes, scale = quantize(torch.randn(300, 200, generator=generator))
    expected = dequantize(codes, scale, torch.bfloat16)
    save_file({"codes": codes, "scale": scale, "expected": expected}, tmp_path / "tensors")
    configs = [BlockFp8(not_converted=tuple(names)).as_config() for names in NAMES]
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    out = run_python(f"""
        import json, pathlib
        from slimrl.engines.plugin.cpu import install
        install()
        import torch
        from safetensors.torch import load_file
        from sglang.srt.layers.quantization.fp8 import Fp8Config
        from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
        from sglang.srt.layers.quantization.utils import is_layer_skipped
        folder = pathlib.Path({str(tmp_path)!r})
        tensors = load_file(folder / "tensors")
        back = block_quant_dequant(tensors["codes"], tensors["scale"], [128, 128], torch.bfloat16)
        assert torch.equal(back, tensors["expected"])
        configs = json.loads((folder / "configs.json").read_text())
        ignored = [Fp8Config.from_config(raw).ignored_layers for raw in configs]
        print(json.dumps([[is_layer_skipped(module, names) for module in {MODULES!r}] for names in ignored]))
    """)
    for names, skipped in zip(NAMES, json.loads(out.splitlines()[-1]), strict=True):
        for module, theirs in zip(MODULES, skipped, strict=True):
            tensor = f"{module}.7.gate_proj.weight" if module.endswith(".experts") else f"{module}.weight"
            assert BlockFp8(not_converted=tuple(names)).converts(tensor) is not theirs, (names, module)


def test_a_trainer_loads_it_under_any_layout_as_if_it_were_plain(tmp_path):
    write_toy("qwen3_moe", tmp_path / "toy", ToySize(layers=2, hidden=64, head_dim=16, moe_intermediate=40), seed=3)
    with SafetensorsFolder(tmp_path / "toy") as folder:
        # No shard of these layouts begins or ends with a tile.
        write_checkpoint(quantization(folder, (24, 28), []), tmp_path / "fp8", resume=False)
    with SafetensorsFolder(tmp_path / "fp8") as folder:
        write_checkpoint(dequantization(folder, "float32"), tmp_path / "plain", resume=False)
    plain = {name: tensor for file in (tmp_path / "plain").glob("model-*") for name, tensor in load_file(file).items()}
    save_file(plain, tmp_path / "fp8" / EXPECTED_NAME)
    layouts = {name: MOE_LAYOUTS_OF_2[name] for name in ("tp2_sp_etp2", "ep2")}
    run_ranks(round_trip, 2, [(tmp_path / "fp8", layouts)], timeout_s=DEADLINE_S)


def test_the_system_s_own_limit_on_a_file_stops_the_write_midway(tmp_path):
    said = run_python(f"""
        import resource, signal, pathlib, torch
        from slimrl.data.model_weights import TensorSpec
        from slimrl.checkpoints.safetensors_file import write_safetensors_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        spec = TensorSpec(name="a", shape=(100_000,), dtype="float32")
        try:
            write_safetensors_file(pathlib.Path({str(tmp_path)!r}, "f"), [spec], [("a", torch.zeros(100_000))])
        except OSError as error:
            print(error)
    """)
    assert "could not be written: File too large" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_killed_run_is_continued_and_gives_the_same_files(tmp_path):
    write_toy("qwen3_moe", tmp_path / "toy", ToySize(layers=4, hidden=64, experts=32), seed=0)
    command = [sys.executable, "-m", "slimrl_tools.cli", "quantize", str(tmp_path / "toy")]
    options = ["--block", "16", "--shard-gb", "0.00002"]
    run = subprocess.Popen([*command, str(tmp_path / "out"), *options], stdout=subprocess.DEVNULL)
    partial = tmp_path / ".out.partial"
    wait_for_records(partial / RECORDS, 5, run)
    run.send_signal(signal.SIGKILL)
    run.wait(DEADLINE_S)
    assert not (tmp_path / "out").exists()
    recorded = [file.name.removesuffix(".json") for file in (partial / RECORDS).glob("*.json")]
    kept = {name: os.stat(partial / name).st_mtime_ns for name in recorded}
    assert len(kept) >= 5
    for out in ("out", "whole"):
        subprocess.run([*command, str(tmp_path / out), *options, "--resume"], timeout=DEADLINE_S, check=True)
    assert {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in kept} == kept
    files = [{file.name: file.read_bytes() for file in (tmp_path / out).iterdir()} for out in ("out", "whole")]
    assert files[0] == files[1]


def wait_for_records(folder: Path, count: int, run: subprocess.Popen) -> None:
    """Until so many files are on the disk, checked and recorded; stops waiting when the process ends."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("*.json"))) < count:
        assert run.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline, "no files"
        time.sleep(0.002)
