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

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.wrapper import text_config
from slimrl.models.hf_config import BLOCK_FP8
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


WRAPPED_MODULES = {
    "linear_attn.in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
    "linear_attn.out_proj": ("out_proj",),
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.shared_expert.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts": ("experts",),
}
"""Modules of SGLang's layers -> those of a checkpoint that they hold"""
WRAPPED_NAMES = [
    [f"model.language_model.layers.0.linear_attn.in_proj_{name}" for name in "ab"],
    [f"model.language_model.layers.1.linear_attn.in_proj_{name}" for name in ("qkv", "z")],
    [f"model.language_model.layers.0.self_attn.{name}_proj" for name in "qkv"],
    ["model.language_model.layers.0.mlp.experts", "model.visual.blocks.0.attn.qkv"],
    ["self_attn", "lm_head"],
    ["model.language_model.layers.1"],
]


@pytest.mark.parametrize(
    ("kind", "module", "class_name"),
    [
        ("qwen3_vl_moe", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        ("qwen3_5_moe", "qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
def test_sglangs_wrapped_models_skip_the_modules_that_we_do(kind, module, class_name):
    configs = [BlockFp8(not_converted=tuple(names)).as_config() for names in WRAPPED_NAMES]
    modules = [f"layers.{layer}.{name}" for layer in (0, 1, 10) for name in WRAPPED_MODULES]
    out = run_python(f"""
        import json
        from slimrl.engines.plugin.cpu import install
        install()
        from sglang.srt.layers.quantization.fp8 import Fp8Config
        from sglang.srt.layers.quantization.utils import is_layer_skipped
        from sglang.srt.models.{module} import {class_name} as Model
        found = []
        for raw in {configs!r}:
            packed = getattr(Model, "packed_modules_mapping", {{}})
            fp8 = Fp8Config.from_config(raw | {{"packed_modules_mapping": packed}})
            # As SGLang's loader does, and the names that the classes give their modules.
            if Model.hf_to_sglang_mapper is not None:
                fp8.apply_weight_name_mapper(Model.hf_to_sglang_mapper)
            prefixes = ["model.language_model." + module for module in {modules!r}]
            found.append([is_layer_skipped(p, fp8.ignored_layers, fp8.packed_modules_mapping) for p in prefixes])
        print(json.dumps(found))
    """)
    text = {"model_type": f"{kind}_text"}
    for raw, skipped in zip(configs, json.loads(out.splitlines()[-1]), strict=True):
        fp8 = BlockFp8.of_config(text_config({"model_type": kind, "text_config": text, "quantization_config": raw}))
        for name, theirs in zip(modules, skipped, strict=True):
            if kind == "qwen3_vl_moe" and "linear_attn" in name:
                continue
            layer, held = name.rpartition(".")[0], WRAPPED_MODULES[name.split(".", 2)[2]]
            tensors = [
                f"model.{layer}.experts.7.up_proj.weight" if each == "experts" else f"model.{layer}.{each}.weight"
                for each in held
            ]
            assert {fp8.converts(tensor) for tensor in tensors} == {not theirs}, (raw, name)


def stack_in_fp8(src: Path, out: Path, tile: tuple[int, int], *, inputs_first: bool) -> dict[str, torch.Tensor]:
    """Quantise the stacked experts of a wrapped toy, as they are stacked; returns codes and scales of each matrix."""
    config = json.loads((src / "config.json").read_text())
    out.mkdir()
    block = {**BLOCK_FP8, "weight_block_size": list(tile), "modules_to_not_convert": KEPT}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    matrices, stored = {}, {}
    for name, tensor in load_file(next(src.glob("*.safetensors"))).items():
        before, experts, kind = name.partition(".experts.")
        if not experts:
            stored[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        whole = []
        for expert, matrix in enumerate(tensor):
            halves = (matrix.T if inputs_first else matrix).chunk(len(parts))
            pairs = [quantize(half, tile) for half in halves]
            for part, (codes, scales) in zip(parts, pairs, strict=True):
                matrices[f"{before}.experts.{expert}.{part}.weight"] = codes
                matrices[f"{before}.experts.{expert}.{part}.weight_scale_inv"] = scales
            whole.append([torch.cat(each) for each in zip(*pairs, strict=True)])
        for suffix, each in zip(("", "_scale_inv"), zip(*whole, strict=True), strict=True):
            stack = torch.stack([one.view(torch.uint8) if not suffix else one for one in each])
            stack = (stack.transpose(1, 2) if inputs_first else stack).contiguous()
            stored[name + suffix] = stack if suffix else stack.view(torch.float8_e4m3fn)
    save_file(stored, out / "model.safetensors")
    return matrices


KEPT = ["self_attn", "linear_attn", "shared_expert", "lm_head"]
"""Modules of a toy that stay plain: all but the experts"""
TILE = (16, 8)


@pytest.mark.parametrize(
    ("kind", "module", "class_name", "inputs_first"),
    [
        ("qwen3_vl_moe", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", True),
        ("qwen3_5_moe_wrapped", "qwen3_5", "Qwen3_5MoeForConditionalGeneration", False),
    ],
)
def test_stacked_experts_and_scales_are_read_as_sglangs_loader_reads_them(
    tmp_path, kind, module, class_name, inputs_first
):
    size = ToySize(layers=4, hidden=64, moe_intermediate=48, experts=4)
    write_toy(kind, tmp_path / "toy", size, seed=2)
    matrices = stack_in_fp8(tmp_path / "toy", tmp_path / "fp8", TILE, inputs_first=inputs_first)
    check_checkpoint(tmp_path / "fp8")
    with open_stored(tmp_path / "fp8") as stored, open_hf_checkpoint(tmp_path / "fp8", "float32") as plain:
        for name, tensor in matrices.items():
            text = name.replace("model.language_model.", "model.")
            assert torch.equal(read_whole(stored, text).view(torch.uint8), tensor.view(torch.uint8)), name
            if name.endswith(".weight"):
                expected = dequantize(tensor, matrices[f"{name}_scale_inv"], torch.float32, TILE)
                assert torch.equal(read_whole(plain, text), expected), name
        # Written plain, they are stacked as they were.
        write_checkpoint(dequantization(stored, "float32"), tmp_path / "plain")
    before, after = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("toy", "plain"))
    assert {name: tensor.shape for name, tensor in after.items()} == {name: t.shape for name, t in before.items()}
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with open_stored(tmp_path / "plain") as written, open_hf_checkpoint(tmp_path / "fp8", "float32") as plain:
        assert all(torch.equal(read_whole(written, name), read_whole(plain, name)) for name in written.specs)
    run_python(f"""
        from types import SimpleNamespace
        from slimrl.engines.plugin.cpu import install
        install()
        from safetensors.torch import load_file, save_file
        from sglang.srt.models.{module} import {class_name} as Model
        loaded = {{}}
        def load(param, tensor, name, shard_id, expert_id):
            loaded[f"{{name}}/{{shard_id}}/{{expert_id}}"] = tensor.contiguous()
        names = ["w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"]
        params = {{
            f"model.layers.{{layer}}.mlp.experts.{{name}}": SimpleNamespace(weight_loader=load)
            for layer in range(4) for name in names
        }}
        config = SimpleNamespace(
            num_experts=4, encoder_only=False, language_only=True, tie_word_embeddings=False, model_type=""
        )
        model = SimpleNamespace(
            config=config, named_parameters=lambda remove_duplicate=True: params.items(),
            enable_shared_expert_fusion=False, num_fused_shared_experts=0,
        )
        # SGLang's reader gives the tensors of a file by their names.
        Model.load_weights(model, sorted(load_file({str(tmp_path / "fp8" / "model.safetensors")!r}).items()))
        save_file(loaded, {str(tmp_path / "loaded")!r})
    """)
    held = {"w1": ("w13", "gate_proj"), "w3": ("w13", "up_proj"), "w2": ("w2", "down_proj")}
    loaded = load_file(tmp_path / "loaded")
    assert len(loaded) == len(matrices)
    for name, tensor in loaded.items():
        path, shard, expert = name.split("/")
        parameter, matrix = held[shard]
        before, after = path.replace("model.", "model.language_model.", 1).split(parameter)
        ours = matrices[f"{before}{expert}.{matrix}.{after.removeprefix('_')}"]
        assert torch.equal(tensor.view(torch.uint8), ours.view(torch.uint8)), name


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
