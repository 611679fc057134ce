"""Published models by the tensors of their files: each is a weight, or is left out for a reason that is named.

The indices in `slimrl/models/hf_indices` say what each of them rests on.
"""

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from slimrl_tools.cli import app
from typer.testing import CliRunner

from slimrl.checkpoints.hf_check import check_checkpoint, check_tensors
from slimrl.checkpoints.hf_checkpoint import DequantizingReader, left_out_note, open_hf_checkpoint
from slimrl.checkpoints.int4_reader import Int4Reader
from slimrl.checkpoints.stacked_experts import StackedFolder
from slimrl.config.problems import RecipeError
from slimrl.config.wrapper import wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models import offline_recipe
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import (
    BLOCK_FP8,
    FP8_SUFFIX,
    MXFP4,
    PACKED_INT4,
    PLAIN_SUFFIX,
    SCALE_SUFFIX,
    config_for_planning,
    is_mxfp4,
    nearest_published,
    published_config,
    unpacked_shapes,
)
from slimrl.models.offline_recipe import read_offline
from slimrl.models.published_index import PublishedTensor, index_names, published_tensors
from slimrl.models.tensor_names import EMBEDDING, HEAD, experts_apart, find_mismatches, left_out
from slimrl.models.wrapped_layout import WrappedLayout
from slimrl.quantization.fp8 import BlockFp8
from slimrl.quantization.fp8_tensors import quantized_names
from slimrl.quantization.int4 import PackedInt4

ROOT = Path(__file__).parents[2]
DTYPES = {
    "BF16": "bfloat16",
    "U8": "uint8",
    "I32": "int32",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    None: "bfloat16",
}

BEGINNERS = [
    *(f"Qwen3-{size}" for size in ("0.6B", "0.6B-Base", "1.7B", "1.7B-Base", "4B", "8B", "14B", "32B")),
    *(f"Llama-{size}" for size in ("3.2-1B", "3.2-3B", "3.1-8B")),
]
"""Small dense models that people begin with; other -Base models store what their namesakes do."""

COUNTED = {
    "Qwen3-0.6B": 311,
    "Qwen3-4B": 398,
    "Qwen3-8B": 399,
    "Qwen3-14B": 443,
    "Qwen3-32B": 707,
    "Qwen3-30B-A3B": 18_867,
    "DeepSeek-V3": 91_991,
    "Kimi-K2": 139_644,
    "Kimi-K2.5": 208_550,
    "GLM-4.7-Flash": 9_703,
    "Hy3": 47_138,
    "Moonlight-16B-A3B": 5_317 + 27,
    "Llama-3-8B": 291,
    "OLMoE-1B-7B-0924": 3_219,
    "Qwen3-VL-30B-A3B": 882,
    "Qwen3-VL-8B": 750,
}
"""Tensors in all, as the sources of these indices count them."""

BIG = ("Kimi-K2", "Kimi-K2.5", "Kimi-K2.5-BF16", "GLM-4.5", "Qwen3-235B-A22B", "Qwen3-Next-80B-A3B")
"""Whose experts are compared one by one only in the full matrix, and by their range always."""

WHOLE_QWEN3_NEXT_FP8 = 151_479
"""Tensors of Qwen3-Next-80B-A3B in block FP8, scales included, in the report from which its index is."""


COUNTED_ELEMENTS = {
    "MiniMax-M2": 228_703_644_928,
    "GLM-4.7-Flash": 31_221_488_576,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "gpt-oss-20b": 21_511_953_984,
    "gpt-oss-120b": 120_412_337_472,
    "gpt-oss-20b-BF16": 20_914_757_184,
    "gpt-oss-120b-BF16": 116_829_156_672,
    "Kimi-K2.5": 170_738_182_128,
}
"""Elements of all tensors, scales included, as the Hub counts them; of MXFP4 it counts the two in a byte. Those of
Kimi-K2.5 are counted in the report of its files, words of eight INT4 as one."""

VISION_OF_KIMI = 335
"""Tensors of the tower and the projector of Kimi-K2.7-Code, as who extracted them counts."""

KIMI_IN_BILLIONS = 1026.9
"""Parameters of Kimi-K2.6 and of K2.7-Code, tower included, as the Hub counts them."""


def config_of(name: str) -> dict:
    plain = published_config(name.removesuffix(FP8_SUFFIX).removesuffix("-Base").removesuffix(PLAIN_SUFFIX))
    stored = published_tensors(name, expert_ranges=True).values()
    if any(tensor.dtype == "U8" for tensor in stored):
        return {**plain, "quantization_config": MXFP4}
    if any(tensor.dtype == "I32" for tensor in stored):
        return {**plain, "quantization_config": PACKED_INT4}
    in_fp8 = any(tensor.dtype == "F8_E4M3" for tensor in stored)
    return {**plain, "quantization_config": BLOCK_FP8} if in_fp8 else plain


def folder_of(name: str, config: dict) -> SimpleNamespace:
    """What SafetensorsFolder says of a folder with these tensors, after the names that are left out."""
    tensors = published_tensors(name)
    aside = left_out(tensors, config)
    specs = {
        tensor: TensorSpec(name=tensor, shape=given.shape, dtype=DTYPES[given.dtype])
        for tensor, given in tensors.items()
        if tensor not in aside
    }
    if wrapper_of(config):
        specs = WrappedLayout(config, specs).specs
    return SimpleNamespace(path=Path(name), specs=specs, left_out=aside)


def test_every_model_of_a_recipe_and_those_that_people_begin_with_have_an_index():
    named = set(BEGINNERS)
    # `make real-model` makes it of a GGUF file, whose tensors tests/integration/test_real_model.py compares.
    made_here = "SmolLM2-135M-Instruct"
    for recipe in ROOT.glob("recipes/*/*.yaml"):
        sections = yaml.safe_load(recipe.read_text())
        for section in ("model", "teacher"):
            path = (sections.get(section) or {}).get("path", "")
            if path and not path.startswith("runs/"):
                named.add(Path(path).name)
    named.remove(made_here)
    in_fp8 = {name for name in named if name.removesuffix(FP8_SUFFIX) in ("DeepSeek-V3", "Kimi-K2")}
    assert named - in_fp8 | {name.removesuffix(FP8_SUFFIX) for name in in_fp8} <= set(index_names())
    assert len(named) >= 20


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in BIG else name for name in index_names()]
)
def test_published_tensors_are_those_of_the_weight_map_in_name_shape_and_dtype(name):
    config = config_of(name)
    folder, weight_map = folder_of(name, config), family_of(config).weight_map(config, mtp=True)
    reader = folder
    if weight_map.stacked:
        reader = StackedFolder(folder, weight_map, "bfloat16")
        matrices = {tensor for tensor in weight_map.stacked if tensor.endswith(".weight")}
        assert reader.quantized == (matrices if is_mxfp4(config) else set())
    elif int4 := PackedInt4.of_config(config):
        reader = Int4Reader(folder, int4, "bfloat16")
        # `ignore` of its quantization_config leaves out everything but the experts.
        assert reader.packed == {each for each in reader.specs if ".experts." in each}
    elif "quantization_config" in config:
        fp8 = BlockFp8.of_config(config)
        reader = DequantizingReader(folder, fp8, "bfloat16")
        # What engines and resyncs quantise is what is float8 in the files.
        assert reader.quantized == quantized_names(weight_map, fp8) & reader.specs.keys()
    has_mtp = check_tensors(reader, family_of(config), config)
    assert has_mtp == bool(num_mtp_layers(config, default=int(name.startswith("Qwen3-Next"))))
    expected = {
        each: (tensor.shape, tensor.dtype or "bfloat16")
        for tensor in weight_map.hf_tensors.values()
        for each in tensor.names
    }
    assert {each: (spec.shape, spec.dtype) for each, spec in reader.specs.items()} == expected
    # Among what is left out is no weight.
    assert not folder.left_out.keys() & expected.keys()
    if name in COUNTED:
        assert len(published_tensors(name)) == COUNTED[name]
    if name in COUNTED_ELEMENTS:
        counted = {each: prod(tensor.shape) for each, tensor in published_tensors(name).items()}
        assert sum(size * (1 + each.endswith("_blocks")) for each, size in counted.items()) == COUNTED_ELEMENTS[name]


def test_what_is_left_out_of_published_models_is_the_head_of_two_and_the_frequencies_of_two():
    found = {name: left_out(published_tensors(name, expert_ranges=True), config_of(name)) for name in index_names()}
    heads = {name for name, aside in found.items() if HEAD in aside}
    rotary = {name: len(aside) for name, aside in found.items() if any("rotary_emb" in each for each in aside)}
    assert heads == {"Qwen3-0.6B", "Qwen3-1.7B"}
    assert rotary == {"Moonlight-16B-A3B": 27, "Kimi-K2": 61}
    assert {reason for aside in found.values() for reason in aside.values()} == {
        f"repeats {EMBEDDING}", "computed from config.json",
    }  # fmt: skip
    # Kimi's have 56 numbers (of 7168 / 64 dimensions), where its attention rotates 64 dimensions in pairs.
    assert published_tensors("Kimi-K2")["model.layers.0.self_attn.rotary_emb.inv_freq"].shape == (56,)


def test_scales_of_qwen3_next_make_up_the_rest_of_its_files_in_block_fp8():
    config = {**config_of("Qwen3-Next-80B-A3B"), "quantization_config": BLOCK_FP8}
    weight_map = family_of(config).weight_map(config, mtp=True)
    scales = len(quantized_names(weight_map, BlockFp8.of_config(config)))
    assert len(published_tensors("Qwen3-Next-80B-A3B")) + scales == WHOLE_QWEN3_NEXT_FP8


def test_ranges_stand_for_every_layer_and_expert():
    whole = published_tensors("Qwen3-Next-80B-A3B")
    in_ranges = published_tensors("Qwen3-Next-80B-A3B", expert_ranges=True)
    attention = [layer for layer in range(48) if f"model.layers.{layer}.self_attn.q_proj.weight" in whole]
    assert attention == list(range(3, 48, 4))
    assert "model.layers.47.mlp.experts.511.up_proj.weight" in whole
    assert "model.layers.47.mlp.experts.{0..511}.up_proj.weight" in in_ranges
    assert len(whole) - len(in_ranges) == 49 * 3 * 511


@pytest.mark.parametrize("name", [name for name in index_names() if not wrapper_of(config_of(name))])
def test_experts_by_their_range_compare_as_experts_one_by_one_do(name):
    config = config_of(name)
    weight_map = family_of(config).weight_map(config, mtp=True)
    aside = left_out(published_tensors(name, expert_ranges=True), config)
    shapes = {
        each: tensor.shape
        for each, tensor in published_tensors(name, expert_ranges=True).items()
        if each not in aside and not each.endswith(SCALE_SUFFIX)
    }
    shapes = experts_apart(weight_map, shapes, expert_ranges=True)
    found = find_mismatches(weight_map, shapes, expert_ranges=True)
    assert (found.lines(), found.misshaped) == ([], {})
    fewer = {each.replace("{0..127}", "{0..126}"): shape for each, shape in shapes.items()}
    assert bool(find_mismatches(weight_map, fewer, expert_ranges=True).lines()) == (fewer != shapes)


def checked(model: str, command: str = "train") -> str:
    read_offline("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", [f"model.path={model}"], command)
    return "ok"


def test_config_check_compares_the_index_of_a_model_that_is_not_here(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert checked("Qwen/Qwen3-30B-A3B") == "ok"
    known = published_tensors("Qwen3-30B-A3B", expert_ranges=True)
    gate, experts = "model.layers.7.mlp.gate.weight", "model.layers.7.mlp.experts.{0..127}.up_proj.weight"
    changed = {name: tensor for name, tensor in known.items() if name != gate}
    changed["model.layers.7.odd"] = known[gate]
    changed[experts] = PublishedTensor(shape=(768, 2047), dtype="BF16", evidence="published")
    monkeypatch.setattr(offline_recipe, "published_tensors", lambda name, expert_ranges: changed)
    with pytest.raises(RecipeError) as caught:
        checked("Qwen/Qwen3-30B-A3B")
    (line, _) = str(caught.value).splitlines()
    assert line == (
        "command line: model.path: Qwen/Qwen3-30B-A3B: the published Qwen3-30B-A3B does not fit its config: "
        f"{gate}: missing; model.layers.7.odd: not part of this model; {experts}: of another shape."
    )


@pytest.mark.parametrize(
    ("model", "in_fp8"),
    [
        ("deepseek-ai/DeepSeek-V3", True),
        ("moonshotai/Kimi-K2", True),
        ("models/DeepSeek-V3-FP8", True),
        ("models/DeepSeek-V3", True),
        ("/shared/models/DeepSeek-R1", True),
        ("deepseek-ai/DeepSeek-V3-0324", True),
        ("deepseek-ai/DeepSeek-V3.1", True),
        ("models/DeepSeek-V3-BF16", False),
        ("unsloth/DeepSeek-R1-bf16", False),
        ("models/Qwen3-30B-A3B-FP8", True),
        ("models/Qwen3-30B-A3B", False),
        ("Qwen/Qwen3-30B-A3B", False),
    ],
)
def test_a_model_of_the_hub_is_planned_in_the_format_in_which_it_is_stored(monkeypatch, tmp_path, model, in_fp8):
    monkeypatch.chdir(tmp_path)
    config, words = config_for_planning(Path(model))
    assert ("quantization_config" in config, "in block FP8" in words) == (in_fp8, in_fp8)
    assert ("in bfloat16" in words) != in_fp8


def test_gpt_oss_is_planned_in_bfloat16_and_refused_in_mxfp4_as_it_is_published(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for model in ("openai/gpt-oss-20b", "models/gpt-oss-120b"):
        config, words = config_for_planning(Path(model))
        assert is_mxfp4(config)
        assert "as published, in MXFP4, for" in words
    for model in ("unsloth/gpt-oss-20b-BF16", "lmsys/gpt-oss-120b-bf16"):
        config, words = config_for_planning(Path(model))
        assert not is_mxfp4(config)
        assert "as published, in bfloat16, for" in words
    monkeypatch.chdir(ROOT)
    recipe = "recipes/gpt_oss/gpt_oss_20b_gspo.yaml"
    with pytest.raises(RecipeError, match=r"model.path: openai/gpt-oss-20b: .* MXFP4, .*`slimrl-tools dequantize`"):
        read_offline(recipe, ["model.path=openai/gpt-oss-20b"], "train")


def test_kimi_k2_5_is_planned_in_bfloat16_and_refused_in_int4_as_it_is_published(monkeypatch, tmp_path):
    recipe = ROOT / "recipes" / "kimi_k25" / "kimi_k2_5_gspo.yaml"
    for model, words in (
        ("moonshotai/Kimi-K2.5", "Kimi-K2.5 as published, in INT4, for"),
        ("models/Kimi-K2.6", "Kimi-K2.5 as published, whose sizes Kimi-K2.6 has, in INT4, for"),
    ):
        config, found = config_for_planning(Path(model))
        assert (config["quantization_config"], found.startswith(words)) == (PACKED_INT4, True)
        with pytest.raises(RecipeError, match=rf"model.path: {model}: .* in INT4, .*`slimrl-tools dequantize`"):
            read_offline(recipe, [f"model.path={model}"], "train")
        assert read_offline(recipe, [f"model.path={model}"], "rollout").model == found
    # A folder is read by its config.json.
    (tmp_path / "config.json").write_text(
        json.dumps({**published_config("Kimi-K2"), "quantization_config": PACKED_INT4})
    )
    with pytest.raises(RecipeError, match=r"model.path: .* in INT4, "):
        read_offline(recipe, [f"model.path={tmp_path}"], "train")
    assert "in bfloat16, for" in read_offline(recipe, ["model.path=unsloth/Kimi-K2.6-BF16"], "train").model


def test_the_plain_tensors_of_kimi_k2_5_are_those_that_its_files_pack():
    packed, plain = (
        {name: tensor.shape for name, tensor in published_tensors(model, expert_ranges=True).items()}
        for model in ("Kimi-K2.5", "Kimi-K2.5-BF16")
    )
    assert unpacked_shapes(packed) == plain
    whole = published_tensors("Kimi-K2.5-BF16")
    assert sum(name.startswith(("vision_tower.", "mm_projector.")) for name in whole) == VISION_OF_KIMI
    assert sum(prod(tensor.shape) for tensor in whole.values()) / 1e9 == pytest.approx(KIMI_IN_BILLIONS, abs=0.05)


def test_models_of_the_same_sizes_are_planned_and_checked_as_the_one_whose_files_are_known(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("DeepSeek-R1", "DeepSeek-V3-0324", "DeepSeek-V3.1"):
        config, words = config_for_planning(Path("deepseek-ai") / name)
        assert {key: value for key, value in config.items() if key != "quantization_config"} == published_config(
            "DeepSeek-V3"
        )
        assert words.startswith(f"DeepSeek-V3 as published, whose sizes {name} has, in block FP8, for")
    assert nearest_published(Path("models/DeepSeek-r1")) == "DeepSeek-R1"
    with pytest.raises(ValueError, match=r"DeepSeek-R1-Distill-Qwen-7B' is none of the published models DeepSeek-R1, "):
        config_for_planning(Path("models/DeepSeek-R1-Distill-Qwen-7B"))


def write_sparse(folder: Path, name: str) -> Path:
    """The published files as one, with zeros that take no room on the disk."""
    folder.mkdir()
    header, end = {}, 0
    sizes = {"BF16": 2, "F32": 4}
    for tensor, given in published_tensors(name).items():
        dtype = given.dtype or "F32"
        nbytes = sizes[dtype]
        for size in given.shape:
            nbytes *= size
        header[tensor] = {"dtype": dtype, "shape": given.shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(published_config(name)))
    return folder


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("Qwen3-0.6B", 1, "lm_head.weight"),
        ("Moonlight-16B-A3B", 27, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_every_command_takes_the_published_files_and_says_what_is_left_out(tmp_path, name, count, first):
    folder = write_sparse(tmp_path / name, name)
    assert check_checkpoint(folder) is False
    with open_hf_checkpoint(folder) as reader:
        note = left_out_note(reader)
        assert (len(reader.left_out), first in reader.specs) == (count, False)
    assert note.startswith(f"{folder}: {first}")
    commands = {
        "convert hf-to-megatron": [note],
        "quantize": [note],
        "slice-layers": [note],
        "inspect": [f"{count} tensors are left out: {first}"],
    }
    for command, lines in commands.items():
        arguments = [*command.split(), str(folder)]
        if command != "inspect":
            arguments += [str(tmp_path / "out"), "--dry-run"]
        result = CliRunner().invoke(app, arguments + (["--layers", "2"] if command == "slice-layers" else []))
        assert result.exit_code == 0, (command, result.output)
        said = " ".join(result.output.split())
        assert all(line in said for line in lines), (command, result.output)
        assert "missing" not in said
        assert "unknown" not in said
