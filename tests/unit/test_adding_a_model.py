"""The page on adding a model is followed to the letter: its code makes a family that is compared with transformers."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from slimrl.models import families
from slimrl.models import family as family_table
from slimrl.models.families.rules import decoder
from slimrl.models.family import FAMILIES, family_of
from slimrl.models.hf_config import published_config
from slimrl.models.weight_map import WeightMap

DOCS = Path(__file__).parents[2] / "docs"
NEW = "qwen2_by_the_page"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / "adding_a_model.md").read_text(), re.DOTALL | re.MULTILINE)


def run_block(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "adding_a_model.md", "exec"), names)
    return names


@pytest.fixture
def row(tmp_path, monkeypatch):
    """The page's row of the page's file, which lies in the folder of families under a name of its own."""
    file_block, row_block, _ = python_blocks()
    (tmp_path / f"{NEW}.py").write_text(file_block)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    row = run_block(re.sub(r"\bqwen2\b", NEW, row_block))["row"]
    assert row.module.__file__ == str(tmp_path / f"{NEW}.py")
    monkeypatch.setattr(family_table, "FAMILIES", (*FAMILIES, row))
    yield row
    del sys.modules[row.module.__name__]
    delattr(families, NEW)


def test_the_page_s_code_runs_as_it_stands_and_its_row_is_the_shipped_one():
    _, row, _ = map(run_block, python_blocks())
    assert row["row"] in FAMILIES


@pytest.mark.parametrize("tied", [False, True])
def test_the_page_s_family_has_every_parameter_of_transformers_model_once(row, tied):
    hf_config = {**published_config("Qwen2.5-7B"), "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**hf_config))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    specs = family_of({**hf_config, "model_type": NEW}).hf_tensor_specs(hf_config)
    assert len(specs) == len(expected)
    assert {spec.name: spec.shape for spec in specs} == expected


def test_the_page_s_family_is_the_shipped_one(row):
    hf_config = published_config("Qwen2.5-7B")
    shipped = family_of(hf_config)
    assert family_of({**hf_config, "model_type": NEW}) is row
    assert row.megatron_config(hf_config) == shipped.megatron_config(hf_config)
    assert row.weight_map(hf_config, 152_576).entries == shipped.weight_map(hf_config, 152_576).entries


def test_the_page_s_own_rule_fits_what_transformers_writes():
    config = Phi3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    written = Phi3ForCausalLM(config).state_dict()
    rules = WeightMap([run_block(python_blocks()[2])["phi3_gate_up"](16, 24, decoder((0, 1)))])
    covered = {name: tensor.shape for name, tensor in rules.hf_tensors.items()}
    assert covered == {name: tuple(value.shape) for name, value in written.items() if "gate_up" in name}
    index = rules.index_of("decoder.layers.1.mlp.linear_fc1.weight")
    assert index is not None
    entry = rules.entries[index]
    shards = [entry.to_megatron(lambda name, slices: written[name][slices], rank, 2) for rank in range(2)]
    gate_FH, up_FH = written["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
    for shard, gate, up in zip(shards, gate_FH.chunk(2), up_FH.chunk(2), strict=True):
        assert torch.equal(shard, torch.cat([gate, up]))
    (back,) = entry.to_hf(shards)
    assert torch.equal(back, torch.cat([gate_FH, up_FH]))


def test_the_table_of_models_has_a_row_for_every_family():
    _, *rows = re.findall(r"^\| (\w+) \| ((?:`\w+`(?:, )?)+) \|", (DOCS / "models.md").read_text(), re.MULTILINE)
    written = {name: tuple(re.findall(r"`(\w+)`", types)) for name, types in rows}
    assert written == {family.name: family.model_types for family in FAMILIES}
