"""`slimrl-tools convert`: there and back bit for bit, interrupted and continued, in bounded memory; what it refuses."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.conversion import RECORDS, Options
from slimrl_tools.hf_to_megatron import hf_to_megatron
from slimrl_tools.megatron_to_hf import megatron_to_hf
from slimrl_tools.terminal import show_bytes
from slimrl_tools.toy import write_toy
from slimrl_tools.toy_configs import ToySize
from small_models import small_model
from typer.testing import CliRunner

from slimrl.config.schema import ParallelConfig
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import read_hf_config
from slimrl.models.safetensors_folder import SafetensorsFolder
from slimrl.models.torch_dist_reader import read_metadata

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2, sequence=True),
    "pp2": ParallelConfig(pipeline=2),
    "ep2": ParallelConfig(expert=2),
    "tp2_ep2_etp1": ParallelConfig(tensor=2, expert=2, sequence=True),
    "etp2": ParallelConfig(expert_tensor=2),
    "tp2_pp2_ep2_etp2": ParallelConfig(tensor=2, pipeline=2, expert=2, expert_tensor=2, sequence=True),
}
KEPT_BYTES = 64 * 1024**2
"""What the libraries themselves may take while they convert, besides tensors."""


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_tensors(path: Path, other: Path) -> None:
    tensors, others = tensors_of(path), tensors_of(other)
    assert set(tensors) == set(others)
    assert not [name for name, tensor in tensors.items() if tensor.dtype != others[name].dtype]
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def there_and_back(src: Path, tmp: Path, parallel: ParallelConfig, options: Options | None = None, **back) -> Path:
    options = options or Options()
    hf_to_megatron(src, tmp / "megatron", parallel, options)
    megatron_to_hf(tmp / "megatron", tmp / "back", options, **back)
    return tmp / "back"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, family):
    mtp = 0 if family == "qwen3_moe" else 1
    write_toy(family, tmp_path / "hf", ToySize(layers=2, mtp_layers=mtp), seed=1)
    back = there_and_back(tmp_path / "hf", tmp_path, LAYOUTS["tp2_ep2_etp1"], shard_bytes=500_000)
    assert_same_tensors(tmp_path / "hf", back)
    assert read_hf_config(back) == read_hf_config(tmp_path / "hf")
    assert (back / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    tensors = tensors_of(back)
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: set(load_file(back / file)) >= {name} for name, file in index["weight_map"].items()} == dict.fromkeys(
        tensors, True
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "deepseek_v3", "moonlight", "qwen3_tied", "qwen2", "llama"]
)
def test_every_family_comes_back_bit_for_bit_from_every_layout(tmp_path, name, layout):
    parallel = LAYOUTS[layout]
    src = small_model(name, tmp_path / "hf")
    dense = not any(key in read_hf_config(src) for key in ("num_experts", "n_routed_experts"))
    if dense and (parallel.expert > 1 or parallel.expert_tensor > 1):
        pytest.skip("a dense model has no experts")
    assert_same_tensors(src, there_and_back(src, tmp_path, parallel))


def test_the_dtype_option_casts_all_but_what_a_model_keeps_in_float32(tmp_path):
    src = small_model("deepseek_v3", tmp_path / "hf")
    back = there_and_back(src, tmp_path, LAYOUTS["one"], Options(dtype="bfloat16"))
    before, after = tensors_of(src), tensors_of(back)
    for name, tensor in before.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(after[name], tensor if kept else tensor.bfloat16()), name
    assert read_hf_config(back).get("dtype") == "bfloat16"


def test_a_checkpoint_in_block_fp8_becomes_plain_weights(tmp_path):
    write_toy("qwen3_moe", tmp_path / "plain", ToySize(layers=2), seed=1)
    made = CliRunner().invoke(app, ["quantize", str(tmp_path / "plain"), str(tmp_path / "hf")])
    assert made.exit_code == 0, made.output
    back = there_and_back(tmp_path / "hf", tmp_path, LAYOUTS["tp2"])
    assert "quantization_config" not in read_hf_config(back)
    tensors = tensors_of(back)
    with open_hf_checkpoint(tmp_path / "hf") as reader:
        assert set(reader.specs) == set(tensors)
        for name, spec in reader.specs.items():
            assert torch.equal(tensors[name], reader.read(name, tuple(slice(0, size) for size in spec.shape))), name


@pytest.mark.full
def test_several_processes_write_the_same_files_as_one(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    for count in (1, 2):
        options = Options(processes=count, check=False)
        hf_to_megatron(src, tmp_path / f"m{count}", ParallelConfig(), options, file_bytes=20_000)
        megatron_to_hf(tmp_path / f"m{count}", tmp_path / f"h{count}", options, shard_bytes=40_000)
    assert len(list((tmp_path / "m1").glob("*.distcp"))) > 4
    assert digests(tmp_path / "h1") == digests(tmp_path / "h2")
    one, two = digests(tmp_path / "m1"), digests(tmp_path / "m2")
    assert {name for name in one if one[name] != two[name]} <= {"common.pt"}  # a zip file, with times in it


KILLED = """
import os, signal, sys
import {module} as share
real = share.{function}
count = 0
def dying(*args):
    global count
    real(*args)
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
share.{function} = dying
from slimrl_tools.cli import app
app(sys.argv[1:])
"""


def run_killed(tmp_path: Path, module: str, function: str, *arguments: str) -> None:
    """The command, killed by SIGKILL when it has finished its second file."""
    script = textwrap.dedent(KILLED.format(module=module, function=function))
    done = subprocess.run([sys.executable, "-c", script, *arguments], timeout=100, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_conversion_leaves_no_output_and_continues_to_the_same_files(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(src, tmp_path / "expected", ParallelConfig(), Options(), file_bytes=20_000)
    out = tmp_path / "out"
    arguments = ["convert", "hf-to-megatron", str(src), str(out), "--shard-gb", "0.00002"]
    run_killed(tmp_path, "slimrl_tools.torch_dist_share", "write_record", *arguments)
    assert not out.exists()
    partial = tmp_path / ".out.partial"
    recorded = [file.name.removesuffix(".json") for file in (partial / RECORDS).glob("*.json")]
    assert len(recorded) == 2
    finished = {name: (partial / name).stat().st_mtime_ns for name in recorded}

    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "--resume" in again.output
    other = CliRunner().invoke(app, [*arguments, "--resume", "--dtype", "bf16"])
    assert other.exit_code == 2
    assert "dtype" in other.output

    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0
    assert not partial.exists()
    kept = {name: (out / name).stat().st_mtime_ns for name in finished}
    assert kept == finished
    expected, found = digests(tmp_path / "expected"), digests(out)
    assert {name for name in expected if expected[name] != found[name]} <= {"common.pt"}


@pytest.mark.full
def test_a_killed_conversion_to_hugging_face_continues_to_the_same_files(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
    out = tmp_path / "out"
    arguments = ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(out), "--shard-gb", "0.00004"]
    run_killed(tmp_path, "slimrl_tools.safetensors_share", "write_digests", *arguments)
    assert not out.exists()
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0
    assert_same_tensors(src, out)
    with SafetensorsFolder(out) as folder:
        assert len(folder.specs) == len(tensors_of(src))


MEASURED = """
import sys
from pathlib import Path
from slimrl.config.schema import ParallelConfig
from slimrl_tools import hf_to_megatron as there, megatron_to_hf as back
from slimrl_tools.conversion import Options

def peak_of(module, work):
    # Measured from where files are written; what is held before does not grow with tensors.
    real, peak = module.run_plan, []
    def measured(*args):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        real(*args)
        peak.append(status("VmHWM") - before)
    module.run_plan = measured
    work()
    return max(peak)

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

src, tmp = map(Path, sys.argv[1:])
print(peak_of(there, lambda: there.hf_to_megatron(src, tmp / "m", ParallelConfig(), Options(), file_bytes=10**8)))
print(peak_of(back, lambda: back.megatron_to_hf(tmp / "m", tmp / "h", Options(), shard_bytes=10**8)))
"""


def test_memory_is_bounded_by_a_few_of_the_largest_tensors_however_large_the_model_is(tmp_path):
    size = ToySize(layers=6, hidden=768, heads=8, kv_heads=4, head_dim=96, experts=8, moe_intermediate=1536)
    write_toy("qwen3_moe", tmp_path / "hf", size, seed=0)
    largest = 4 * 2 * 1536 * 768  # gate and up of an expert, float32
    total = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    assert total > 50 * largest
    bound = 3 * largest + KEPT_BYTES
    assert total > 5 * bound
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "hf"), str(tmp_path)]
    done = subprocess.run(
        command, timeout=150, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 2
    assert max(peaks) < bound, (peaks, bound)


def convert(*arguments: str):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    told = convert("hf-to-megatron", src, tmp_path / "out", "--dry-run", "--tensor", "2")
    assert told.exit_code == 0
    expected = sum(tensor.nbytes for tensor in tensors_of(src).values()) + 2 * 32 * 4  # a padding row of each end
    assert f"{show_bytes(expected)} in 1 files" in told.output
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_what_cannot_be_converted_is_refused_with_its_reason_and_nothing_is_written(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    (tmp_path / "there").mkdir()

    def refused(*arguments: str) -> str:
        result = convert(*arguments)
        assert result.exit_code == 2, result.output
        return result.output

    assert "is not overwritten" in refused("hf-to-megatron", src, tmp_path / "there")
    assert "--tensor: 8 does not divide" in refused("hf-to-megatron", src, tmp_path / "out", "--tensor", "8")
    assert "--expert: 3 does not divide" in refused("hf-to-megatron", src, tmp_path / "out", "--expert", "3")
    assert "--dtype int8" in refused("hf-to-megatron", src, tmp_path / "out", "--dtype", "int8")
    assert "already" in refused("megatron-to-hf", src, tmp_path / "out")

    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "not part of this model" in refused("hf-to-megatron", src, tmp_path / "out")
    (src / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert "'gpt2' is not supported" in refused("hf-to-megatron", src, tmp_path / "out")
    (src / "config.json").write_text(json.dumps(config))
    with (src / "model.safetensors").open("r+b") as stream:
        stream.truncate(50_000)
    assert "cut short" in refused("hf-to-megatron", src, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "there"]


def test_layers_for_multi_token_prediction_that_training_left_out_come_from_the_checkpoint_before(tmp_path):
    write_toy("glm4_moe", tmp_path / "hf", ToySize(layers=2, mtp_layers=1), seed=1)
    without = tmp_path / "without"
    without.mkdir()
    kept = {name: tensor for name, tensor in tensors_of(tmp_path / "hf").items() if ".layers.2." not in name}
    save_file(kept, without / "model.safetensors")
    (without / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    hf_to_megatron(without, tmp_path / "megatron", ParallelConfig(), Options())
    assert not [key for key in read_metadata(tmp_path / "megatron").state_dict_metadata if key.startswith("mtp.")]

    megatron_to_hf(tmp_path / "megatron", tmp_path / "plain", Options())
    assert_same_tensors(without, tmp_path / "plain")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "whole", Options(), hf_dir=tmp_path / "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "whole")


def test_an_output_that_reads_back_differently_is_an_error(tmp_path, monkeypatch):
    src = small_model("qwen3", tmp_path / "hf")
    real = os.fsync

    def spoil(descriptor: int) -> None:
        real(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".distcp" in name:
            with Path(name).open("r+b") as stream:
                stream.seek(8_000)  # within the first tensor
                stream.write(b"\x01\x02\x03\x04")

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(OSError, match="reads back differently"):
        hf_to_megatron(src, tmp_path / "out", ParallelConfig(), Options())
    assert not (tmp_path / "out").exists()
