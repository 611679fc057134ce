"""`slimrl-tools convert`: there and back bit for bit, interrupted and continued, in bounded memory; what it refuses."""

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import slimrl_tools.convert.hf_to_megatron as there
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.megatron_to_hf import megatron_to_hf
from slimrl_tools.convert.options import Options
from slimrl_tools.convert.output_folder import RECORDS
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import TOYS, ToySize
from small_models import EXPECTED_NAME, WITH_EXPERTS, num_experts, small_model
from typer.testing import CliRunner

from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.units import show_bytes

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
KEPT_BYTES = 24 * 1024**2
"""What the libraries themselves may take while they convert, besides tensors."""


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    files = [file for file in sorted(path.glob("*.safetensors")) if file.name != EXPECTED_NAME]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


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


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, family):
    mtp = int(family_of(TOYS[family](ToySize())).has_mtp)
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
    "name",
    [
        *WITH_EXPERTS,
        "qwen3_moe_mixed",
        "glm_moe_dsa_shared",
        "moonlight",
        "qwen3_tied",
        "qwen2",
        "llama",
        "qwen3_next_mixed",
        "qwen3_5_mixed",
    ],
)
def test_every_family_comes_back_bit_for_bit_from_every_layout(tmp_path, name, layout):
    parallel = LAYOUTS[layout]
    src = small_model(name, tmp_path / "hf")
    if not num_experts(name) and (parallel.expert > 1 or parallel.expert_tensor > 1):
        pytest.skip("a dense model has no experts")
    if name == "gpt_oss" and parallel.expert_tensor > 1:
        pytest.skip("megatron-core shards no experts that have biases")
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
    assert digests(tmp_path / "m1") == digests(tmp_path / "m2")


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
    run_killed(tmp_path, "slimrl_tools.convert.conversion", "write_record", *arguments)
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
    assert digests(tmp_path / "expected") == digests(out)


@pytest.mark.full
def test_a_killed_conversion_to_hugging_face_continues_to_the_same_files(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
    out = tmp_path / "out"
    arguments = ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(out), "--shard-gb", "0.00004"]
    run_killed(tmp_path, "slimrl_tools.convert.conversion", "write_record", *arguments)
    assert not out.exists()
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0
    assert_same_tensors(src, out)
    with SafetensorsFolder(out) as folder:
        assert len(folder.specs) == len(tensors_of(src))


MEASURED = """
import sys
from pathlib import Path
from slimrl.config.schema.trainer import ParallelConfig
from slimrl_tools.convert import hf_to_megatron as there, megatron_to_hf as back
from slimrl_tools.convert.options import Options

def measure(module, work):
    # Measured from where files are written; what is held before does not grow with tensors.
    real, real_plan, plans = module.write_in_parallel, module.Plan, []
    def planned(**fields):
        plans.append(real_plan(**fields))
        return plans[-1]
    def measured(write, files, sizes, *rest, **options):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        real(write, files, sizes, *rest, **options)
        print(status("VmHWM") - before, plans[-1].largest_bytes, sum(sizes.values()))
    module.write_in_parallel, module.Plan = measured, planned
    work()
    module.write_in_parallel, module.Plan = real, real_plan

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

tensor, dtype = int(sys.argv[1]), None if sys.argv[2] == "keep" else sys.argv[2]
parallel, options = ParallelConfig(tensor=tensor, sequence=tensor > 1), Options(dtype=dtype)
# Back to what the source had, so that a cast is measured in both directions.
undone = options if dtype is None else Options(dtype="float32")
for src in map(Path, sys.argv[3:]):
    m, h = src.with_name(src.name + "_m"), src.with_name(src.name + "_h")
    measure(there, lambda: there.hf_to_megatron(src, m, parallel, options, file_bytes=10**8))
    measure(back, lambda: back.megatron_to_hf(m, h, undone, shard_bytes=10**8))
"""


def measured_peaks(sources: list[Path], tensor: int, dtype: str) -> list[list[int]]:
    """For each source and both directions: [peak memory, size of the plan's largest tensor, of all], in bytes."""
    # The allocator is to give back at once what is freed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURED, str(tensor), dtype, *map(str, sources)]
    done = subprocess.run(command, timeout=150, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [[int(field) for field in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("kind", "tensor", "dtype"),
    [
        ("qkv", 2, "bfloat16"),
        pytest.param("experts", 1, "keep", marks=pytest.mark.full),
        pytest.param("experts", 2, "bfloat16", marks=pytest.mark.full),
        pytest.param("qkv", 1, "bfloat16", marks=pytest.mark.full),
        pytest.param("qkv", 1, "keep", marks=pytest.mark.full),
        pytest.param("qkv", 2, "keep", marks=pytest.mark.full),
        pytest.param("fp8", 2, "keep", marks=pytest.mark.full),
    ],
)
def test_memory_grows_by_no_more_than_three_of_the_largest_tensor_however_large_the_model_is(
    tmp_path, kind, tensor, dtype
):
    heads = {"heads": 4, "kv_heads": 4} if kind == "experts" else {"heads": 32, "kv_heads": 16}
    sources = []
    for hidden in (256, 1024) if kind == "experts" else (128, 512):
        size = ToySize(layers=3, hidden=hidden, **heads, head_dim=128, experts=4, moe_intermediate=hidden * 2)
        src = tmp_path / f"of_{hidden}"
        write_toy("qwen3_moe", src, size, seed=0)
        if kind == "fp8":
            made = CliRunner().invoke(app, ["quantize", str(src), f"{src}_fp8", "--no-check"])
            assert made.exit_code == 0, made.output
            src = Path(f"{src}_fp8")
        sources.append(src)
    rows = measured_peaks(sources, tensor, dtype)
    assert len(rows) == 4
    for (small_peak, small_largest, _), (peak, largest, total) in zip(rows[:2], rows[2:], strict=True):
        assert largest > 3 * small_largest
        assert total > 4 * largest
        slope = (peak - small_peak) / (largest - small_largest)
        assert slope < 3.1, (rows, slope)
        assert peak < 3 * largest + KEPT_BYTES


def convert(*arguments: str):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    told = convert("hf-to-megatron", src, tmp_path / "out", "--dry-run", "--tensor", "2")
    assert told.exit_code == 0
    expected = sum(tensor.nbytes for tensor in tensors_of(src).values()) + 2 * 32 * 4  # a padding row of each end
    assert f"{show_bytes(expected)} in 1 file\n" in told.output
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


LIGHT = """
import sys
from slimrl_tools.cli import app
from typer.testing import CliRunner
assert CliRunner().invoke(app, ["convert", "hf-to-megatron", "--help"]).exit_code == 0
refused = CliRunner().invoke(app, ["convert", sys.argv[1], sys.argv[2], sys.argv[2]])
assert refused.exit_code == 2 and "is not overwritten" in refused.output, refused.output
print(sorted({"torch", "megatron", "transformers", "ray"} & set(sys.modules)))
"""


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_help_and_the_refusal_of_an_existing_output_do_not_wait_for_libraries(tmp_path, direction):
    command = [sys.executable, "-c", LIGHT, direction, str(tmp_path)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


WITHOUT_MEGATRON = """
import sys
from slimrl_tools.cli import app
from typer.testing import CliRunner
for direction, source, out in (("hf-to-megatron", "hf", "mcore"), ("megatron-to-hf", "mcore", "back")):
    done = CliRunner().invoke(app, ["convert", direction, source, out])
    assert done.exit_code == 0, done.output
print(sorted({"megatron", "megatron_patches", "transformers", "ray"} & set(sys.modules)))
"""


def test_neither_direction_waits_for_megatrons_import(tmp_path):
    write_toy("qwen3_moe", tmp_path / "hf", ToySize(layers=2), seed=1)
    command = [sys.executable, "-c", WITHOUT_MEGATRON]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


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


def test_a_checkpoint_is_not_read_by_the_config_of_another_model_whose_tensors_have_the_same_shapes(tmp_path):
    src = small_model("llama", tmp_path / "hf", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    other = small_model("llama", tmp_path / "other", num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    assert {name: tensor.shape for name, tensor in tensors_of(src).items()} == {
        name: tensor.shape for name, tensor in tensors_of(other).items()
    }
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())

    def assert_refused(*arguments: object) -> None:
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 2, result.output
        assert "a checkpoint of another model" in result.output
        assert "num_attention_heads is 4 there and 8 here" in result.output

    back = tmp_path / "back"
    assert_refused("convert", "megatron-to-hf", tmp_path / "megatron", back, "--hf", other)
    assert_refused("inspect", tmp_path / "megatron", "--hf", other)
    assert_refused("verify", tmp_path / "megatron", src, "--hf", other)
    (tmp_path / "megatron" / "hf" / "config.json").write_text((other / "config.json").read_text())
    assert_refused("convert", "megatron-to-hf", tmp_path / "megatron", back)
    assert not back.exists()


def test_metadata_that_does_not_make_up_the_model_is_an_error(tmp_path, monkeypatch):
    src = small_model("qwen3", tmp_path / "hf")
    real = there.write_metadata

    def half_of_it(partial, schema, dtypes, records):
        real(partial, schema, dtypes, records)
        metadata = read_metadata(partial)
        del metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        (partial / ".metadata").write_bytes(pickle.dumps(metadata))

    monkeypatch.setattr(there, "write_metadata", half_of_it)
    with pytest.raises(OSError, match=r"does not read back(.|\n)*decoder\.final_layernorm\.weight: missing"):
        hf_to_megatron(src, tmp_path / "out", ParallelConfig(), Options())
    assert not (tmp_path / "out").exists()


def test_a_part_of_the_layers_for_multi_token_prediction_is_refused(tmp_path):
    write_toy("glm4_moe", tmp_path / "hf", ToySize(layers=2, mtp_layers=1), seed=1)
    tensors = tensors_of(tmp_path / "hf")
    layers = {name for name in tensors if ".layers.2." in name}
    for folder, dropped in (("part", sorted(layers)[:3]), ("without", layers)):
        (tmp_path / folder).mkdir()
        kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
        save_file(kept, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    hf_to_megatron(tmp_path / "without", tmp_path / "megatron", ParallelConfig(), Options())
    back = convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--hf", tmp_path / "part")
    assert back.exit_code == 2, back.output
    assert f"{sorted(layers)[0]}: missing" in back.output
    assert not (tmp_path / "back").exists()


@pytest.mark.full
def test_a_conversion_does_not_go_on_with_another_config_or_other_weights_beside_it(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
    arguments = ["convert", "megatron-to-hf", tmp_path / "megatron", tmp_path / "out", "--shard-gb", "0.00004"]
    arguments = [*map(str, arguments), "--hf", str(src)]
    run_killed(tmp_path, "slimrl_tools.convert.conversion", "write_record", *arguments)
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "bos_token_id": 7}))
    again = CliRunner().invoke(app, [*arguments, "--resume"])
    assert again.exit_code == 2
    assert "another job (--hf differs)" in again.output


def with_little_room(nbytes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command where files can have so many bytes at most, as on a disk that fills up."""
    script = textwrap.dedent(f"""
        import resource, sys
        from slimrl_tools.cli import app
        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, {nbytes}))
            app(sys.argv[1:])
        """)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, timeout=100, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("direction", "processes", "file"),
    [
        ("hf-to-megatron", 1, "__0_"),
        pytest.param("hf-to-megatron", 2, "__0_", marks=pytest.mark.full),
        pytest.param("megatron-to-hf", 1, "model-000", marks=pytest.mark.full),
        pytest.param("megatron-to-hf", 2, "model-000", marks=pytest.mark.full),
    ],
)
def test_a_disk_that_fills_up_is_told_with_the_file_that_it_happened_to(tmp_path, direction, processes, file):
    src = small_model("qwen3_moe", tmp_path / "hf")
    if direction == "megatron-to-hf":
        hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
        src = tmp_path / "megatron"
    out = tmp_path / "out"
    done = with_little_room(30_000, "convert", direction, src, out, "--shard-gb", "0.00004", "--processes", processes)
    assert done.returncode == 1, done.stderr
    assert re.search(rf"failed: \[Errno 27\] could not be written: File too large: '.*{file}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".out.partial/.*.partial"))


SPOILED = """
import os, sys
from pathlib import Path
real = os.fsync
def spoil(descriptor):
    real(descriptor)
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    if sys.argv[1] in name:
        with Path(name).open("r+b") as stream:
            stream.seek(-64, 2) if name.endswith("safetensors") else stream.seek(8_000)
            stream.write(b"\\x01\\x02\\x03\\x04")
os.fsync = spoil
from slimrl_tools.cli import app
if __name__ == "__main__":
    app(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("direction", "file"),
    [
        pytest.param("hf-to-megatron", "__0_1.", marks=pytest.mark.full),
        ("megatron-to-hf", "model-00002-of"),
    ],
)
def test_a_conversion_that_failed_its_check_makes_the_spoiled_file_anew_on_resume(tmp_path, direction, file):
    src = small_model("qwen3_moe", tmp_path / "hf")
    source = src
    if direction == "megatron-to-hf":
        hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), Options())
        source = tmp_path / "megatron"
    arguments = ["convert", direction, str(source), str(tmp_path / "out"), "--shard-gb", "0.00004"]
    command = [sys.executable, "-c", textwrap.dedent(SPOILED), file, *arguments]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "reads back differently" in done.stderr
    assert not list((tmp_path / ".out.partial" / RECORDS).glob(f"{file}*"))
    again = CliRunner().invoke(app, [*arguments, "--resume"])
    assert again.exit_code == 0, again.output
    if direction == "hf-to-megatron":
        megatron_to_hf(tmp_path / "out", tmp_path / "back", Options())
    assert_same_tensors(src, tmp_path / ("back" if direction == "hf-to-megatron" else "out"))


@pytest.mark.full
def test_several_processes_check_what_they_write(tmp_path):
    src = small_model("qwen3_moe", tmp_path / "hf")
    options = Options(processes=3)
    hf_to_megatron(src, tmp_path / "megatron", ParallelConfig(), options, file_bytes=40_000)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options, shard_bytes=40_000)
    assert_same_tensors(src, tmp_path / "back")


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
