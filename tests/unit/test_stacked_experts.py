"""gpt-oss's experts as files hold them: stacked, plain or in MXFP4, against transformers' own reading."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.derive.quantize import dequantization, quantization
from slimrl_tools.derive.rewrite import write_checkpoint
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import is_block_fp8, open_hf_checkpoint, open_stored
from slimrl.checkpoints.stacked_experts import read_each, restacked, stacks_of
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.quantization.fp8 import BlockFp8

EXPERTS, HIDDEN, WIDE = 3, 64, 96
SHAPES = {"gate_up_proj": (2 * WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
"""[out, in] of an expert's matrices"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=40, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=EXPERTS, num_experts_per_tok=2, dtype="bfloat16",
    )  # fmt: skip
    model = GptOssForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory) -> Path:
    """The same with random experts in MXFP4, of all codes and of scales that bfloat16 holds."""
    path = tmp_path_factory.mktemp("packed")
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in list(tensors):
        if (kind := name.rpartition(".")[2]) in SHAPES:
            del tensors[name]
            rows, columns = SHAPES[kind]
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator)
            scales = torch.randint(100, 140, (EXPERTS, rows, columns // 32), generator=generator)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks.to(torch.uint8), scales.to(torch.uint8)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def expected(path: Path) -> dict[str, torch.Tensor]:
    """By slimrl's names, from the files and transformers' conversion."""
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stack = name.removesuffix("_blocks")
        tensors[stack] = convert_moe_packed_tensors(tensors.pop(name), tensors.pop(f"{stack}_scales"))
    apart = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?", name):
            kind = "bias" if match[3] else "weight"
            for expert, value in enumerate(tensor):
                apart[f"{match[1]}.{expert}.{match[2]}.{kind}"] = value.T if value.ndim == 2 else value
        else:
            apart[name] = tensor
    return apart


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_every_expert_reads_as_transformers_reads_it_whole_and_in_parts(kind, request):
    path = request.getfixturevalue(kind)
    assert not check_checkpoint(path)
    assert not is_block_fp8(path)
    due = expected(path)
    with open_hf_checkpoint(path) as reader:
        assert reader.specs.keys() == due.keys()
        for name, tensor in due.items():
            spec = reader.specs[name]
            assert (spec.name, spec.shape, spec.dtype) == (name, tuple(tensor.shape), "bfloat16")
            assert torch.equal(read_whole(reader, name), tensor), name
            if tensor.ndim == 2 and ".experts." in name:
                # Within a block of MXFP4 and across two.
                part = (slice(5, 31), slice(30, 37))
                assert torch.equal(reader.read(name, part), tensor[part]), name


def test_mxfp4_reads_as_float32_too(packed):
    due = expected(packed)
    with open_hf_checkpoint(packed, "float32") as reader:
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        assert reader.specs[name].dtype == "float32"
        assert torch.equal(read_whole(reader, name), due[name].float())


def test_experts_are_stacked_again_bit_for_bit(plain):
    config = read_hf_config(plain)
    weight_map = family_of(config).weight_map(config)
    stored = load_file(plain / "model.safetensors")
    with open_hf_checkpoint(plain) as reader:
        specs = [reader.specs[name] for name in weight_map.hf_tensors]
        whole = stacks_of(weight_map).stored_specs(specs)
        assert {spec.name: spec.shape for spec in whole} == {n: tuple(t.shape) for n, t in stored.items()}
        tensors = ((spec.name, read_whole(reader, spec.name)) for spec in specs)
        back = list(stacks_of(weight_map).stored_tensors(specs, tensors))
        assert [name for name, _ in back] == [spec.name for spec in whole]
        assert all(torch.equal(tensor, stored[name]) for name, tensor in back)
        again, produce = restacked(weight_map, specs, lambda group: read_each(reader, group))
        assert again == whole
        again = dict(produce(whole[3:40]))
        assert again.keys() == {spec.name for spec in whole[3:40]}
        assert all(torch.equal(tensor, stored[name]) for name, tensor in again.items())


def test_the_tool_writes_mxfp4_as_transformers_reads_it(packed, tmp_path):
    with open_stored(packed) as folder:
        write_checkpoint(dequantization(folder, "bfloat16"), tmp_path / "out", say=lambda line: None)
    assert "quantization_config" not in read_hf_config(tmp_path / "out")
    assert check_checkpoint(tmp_path / "out") is False
    due, found = expected(packed), expected(tmp_path / "out")
    assert due.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in due.items())


def test_what_is_no_such_checkpoint_is_refused(plain, packed, tmp_path):
    with pytest.raises(ValueError, match=r"MXFP4, to which no resync and no export rounds. `slimrl-tools dequantize`"):
        BlockFp8.of_config(read_hf_config(packed))
    with open_stored(plain) as folder, pytest.raises(ValueError, match="block FP8 is not supported for a model whose"):
        quantization(folder, (128, 128), ())
    tensors, name = load_file(packed / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    scales = tensors[f"{name}_scales"]
    for wrong, message in ((None, "scales are none"), (scales[:, :-1].contiguous(), "scales are [3, 191, 2]")):
        left = {key: value for key, value in tensors.items() if key != f"{name}_scales"}
        save_file(left if wrong is None else {**left, f"{name}_scales": wrong}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=re.escape(f"{name}: blocks [3, 192, 2, 16] of MXFP4 need 16")) as error:
            open_hf_checkpoint(tmp_path)
        assert message in str(error.value)
    bias = tensors[f"{name}_bias"]
    save_file({**tensors, f"{name}_bias": bias[:2].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"{name}_bias holds 2 experts, the model of config.json has 3")):
        open_hf_checkpoint(tmp_path)
