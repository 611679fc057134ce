"""`slimrl-tools convert gguf-to-hf` against transformers' own reading of the file, bit for bit."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import HEAD_DIMS, HEADS, KV_HEADS, LAYERS, TOKENS, random_values, write_gguf
from safetensors.torch import load_file
from toy_tools import run
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slimrl.checkpoints.hf_check import check_checkpoint

BLOCKS = [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q4_K, Kind.Q6_K]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("arch", "kinds", "dtype"),
    [
        ("llama", BLOCKS, "fp32"),
        ("llama", [Kind.Q4_1, Kind.Q8_0], "bf16"),
        ("qwen2", BLOCKS, "fp32"),
        ("qwen2", [Kind.F16], "fp16"),
        ("qwen3", BLOCKS[::-1], "fp32"),
        ("qwen3moe", BLOCKS, "fp32"),
        ("qwen3moe", [Kind.Q8_0, Kind.F16, Kind.BF16], "bf16"),
    ],
)
def test_the_weights_are_those_that_transformers_reads_bit_for_bit(tmp_path, arch, kinds, dtype):
    file = write_gguf(tmp_path / "small.gguf", arch, kinds)
    run("convert", "gguf-to-hf", file, tmp_path / "out", "--dtype", dtype, "--shard-gb", 0.002)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=DTYPES[dtype])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == DTYPES[dtype]
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    ids = torch.arange(20)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    # Names and shapes as published checkpoints have them, which the trainer and the engines read.
    check_checkpoint(tmp_path / "out")


def test_a_llama_whose_queries_and_keys_llama_cpp_reordered_comes_back_as_it_was(tmp_path):
    values = random_values("llama")
    stored = dict(values)
    for layer in range(LAYERS):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            # llama.cpp rotates neighbouring rows of a head, transformers those half a head apart.
            halves = values[f"blk.{layer}.{name}.weight"].reshape(heads, 2, HEAD_DIMS["llama"] // 2, -1)
            stored[f"blk.{layer}.{name}.weight"] = halves.swapaxes(1, 2).reshape(heads * HEAD_DIMS["llama"], -1)
    run("convert", "gguf-to-hf", write_gguf(tmp_path / "a.gguf", "llama", [Kind.F32], stored), tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert len(found) == len(values)
    for name, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        for layer in range(LAYERS):
            tensor = found[f"model.layers.{layer}.self_attn.{ours}.weight"]
            assert np.array_equal(tensor.numpy(), values[f"blk.{layer}.{name}.weight"])


def test_keep_leaves_plain_tensors_in_their_dtype_and_gives_float32_to_quantised_ones(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", "qwen2", [Kind.F16, Kind.Q8_0])
    run("convert", "gguf-to-hf", file, tmp_path / "out")
    reader = gguf.GGUFReader(file)
    halves = {t.name: np.array(t.data) for t in reader.tensors if t.tensor_type is Kind.F16}
    found = tensors_of(tmp_path / "out")
    dtypes = {str(tensor.dtype) for tensor in found.values()}
    assert dtypes == {"torch.float16", "torch.float32"}
    assert sum(tensor.dtype == torch.float16 for tensor in found.values()) == len(halves)
    assert np.array_equal(found["model.embed_tokens.weight"].numpy(), halves["token_embd.weight"])


def test_tokenizer_template_and_generation_config_come_along_and_the_card_says_what_the_weights_are(tmp_path):
    file = write_gguf(tmp_path / "small.gguf", "llama", [Kind.Q4_1])
    said = run("convert", "gguf-to-hf", file, tmp_path / "out")
    weights = "the weights are those of the quantised file, dequantised: Q4_1 (15 tensors), F32 (5 tensors)"
    assert weights in " ".join(said.split())
    card = (tmp_path / "out/README.md").read_text()
    assert weights in card
    assert "license: apache-2.0" in card
    assert "small.gguf" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a  12"}], tokenize=False)
    assert text == "<|im_start|>user\na  12<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("split", "tokens", "noted"),
    [
        # Each digit by itself, so that the two spaces before it are one token.
        ("smollm", ["ĠĠ", "1", "2"], False),
        ("gpt-2", ["Ġ", "Ġ1", "2"], False),
        ("poro-chat", ["Ġ", "Ġ1", "2"], True),
    ],
)
def test_text_is_split_as_the_file_says_or_a_note_says_that_it_may_not_be(tmp_path, split, tokens, noted):
    file = write_gguf(tmp_path / "small.gguf", "llama", [Kind.Q4_1], split=split)
    said = run("convert", "gguf-to-hf", file, tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("  12")["input_ids"]
    assert [TOKENS[index] for index in ids] == tokens
    for text in (said, (tmp_path / "out/README.md").read_text()):
        assert ("splits text by rules named" in " ".join(text.split())) is noted


def refused(tmp_path, file) -> str:
    said = " ".join(run("convert", "gguf-to-hf", file, tmp_path / "out", code=2).split())
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("kept", [0, 2, 100, 3000, 9000, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(tmp_path, kept):
    whole = write_gguf(tmp_path / "whole.gguf", "llama", [Kind.Q4_1]).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(kept if kept == 0 or kept > 1 else kept * len(whole))])
    assert f"{tmp_path}/cut.gguf: " in refused(tmp_path, tmp_path / "cut.gguf")


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_header_is_refused_or_read_but_never_followed_out_of_the_file(tmp_path, seed):
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", "llama", [Kind.Q4_1]).read_bytes())
    random = np.random.default_rng(seed)
    for position in random.integers(4, 6000, 40):
        whole[position] = random.integers(0, 256)
    (tmp_path / "bad.gguf").write_bytes(whole)
    assert f"{tmp_path}/bad.gguf: " in refused(tmp_path, tmp_path / "bad.gguf")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    values = random_values("llama")
    values["blk.1.ffn_up.weight"][3, 5] = np.nan
    file = write_gguf(tmp_path / "a.gguf", "llama", [Kind.F32], values)
    assert "blk.1.ffn_up.weight has values that are not finite" in refused(tmp_path, file)


def test_what_transformers_would_read_in_part_is_refused(tmp_path):
    factors = {**random_values("llama"), "rope_freqs.weight": np.ones(32, np.float32)}
    file = write_gguf(tmp_path / "factors.gguf", "llama", [Kind.F32], factors)
    assert "no place for rope_freqs.weight" in refused(tmp_path, file)
    lacking = random_values("llama")
    del lacking["blk.1.ffn_up.weight"]
    file = write_gguf(tmp_path / "lacking.gguf", "llama", [Kind.F32], lacking)
    assert "no tensor of the file makes model.layers.1.mlp.up_proj.weight" in refused(tmp_path, file)
    file = write_gguf(tmp_path / "wide.gguf", "llama", [Kind.F32], keys={"llama.feed_forward_length": 500})
    assert "a size is not among those keys" in refused(tmp_path, file)
    file = write_gguf(tmp_path / "scaled.gguf", "qwen2", [Kind.F32], keys={"qwen2.rope.scaling.type": "yarn"})
    assert "its positions are scaled" in refused(tmp_path, file)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"general.architecture": "zebra"}, "GGUF model with architecture zebra is not supported yet"),
        ({"general.architecture": "qwen35"}, "qwen35"),
        ({"split.count": 3, "split.no": 1}, "part 2 of a model in 3 files"),
        ({"tokenizer.ggml.model": "rwkv"}, "transformers cannot build its tokenizer"),
    ],
)
def test_a_file_that_transformers_cannot_read_is_refused_with_what_it_is(tmp_path, keys, says):
    arch = keys.pop("general.architecture", "llama")
    file = write_gguf(tmp_path / "a.gguf", "llama", [Kind.F32], keys=keys)
    if arch != "llama":
        # The writer adds the key itself.
        name, other = b"\x05\0\0\0\0\0\0\0llama", arch.encode()
        file.write_bytes(file.read_bytes().replace(name, len(other).to_bytes(8, "little") + other, 1))
    assert says in refused(tmp_path, file)


def test_other_files_and_an_output_that_exists_are_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("no model" * 100)
    assert "does not start with the GGUF magic bytes" in refused(tmp_path, tmp_path / "text.gguf")
    assert "no such file" in refused(tmp_path, tmp_path / "absent.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    said = run("convert", "gguf-to-hf", tmp_path / "text.gguf", tmp_path / "out", code=2)
    assert "exists; it is not overwritten" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
