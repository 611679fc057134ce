"""Each recipe starts on the GPUs that it is for: the libraries' own decisions for them, without one (gpu_rehearsal)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_rehearsal.cards import CARDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
NAMES = sorted(
    str(path.relative_to(RECIPES).with_suffix(""))
    for path in RECIPES.glob("*/*.yaml")
    if path.parent.name not in ("base", "tiny_moe", "smollm2")
)
"""Those for GPUs"""
FP8_ENGINES = "fp8|deepseek_v3_gspo|deepseek_v32|kimi_k2_gspo|glm_5|minimax_m2"
"""What the names of recipes have whose engines serve in FP8"""


def card_of(name: str) -> str:
    """The GPU that docs/recipes.md names for a recipe; without a name it is one of 80 GB."""
    (row,) = re.findall(rf"^\| `{name}`.*$", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    named = re.search("H200|B200", row)
    return named[0] if named else "H100"


def rehearse(card: str, names: list[str], *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "gpu_rehearsal", card, *(str(RECIPES / f"{name}.yaml") for name in names)]
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {str(Path(path).relative_to(RECIPES).with_suffix("")): result for path, result in found.items()}


def raised(found: dict[str, Any]) -> dict[str, str]:
    return {name: result["where"] for name, result in found.items() if "where" in result}


@pytest.mark.parametrize("card", ["H100", pytest.param("H200", marks=pytest.mark.full), "B200"])
def test_every_recipe_starts_on_the_gpu_that_it_is_for(card):
    names = [name for name in NAMES if card_of(name) == card]
    found = rehearse(card, names)
    assert not raised(found)
    for name in names:
        engine = found[name]["engine"]
        assert "TERowParallelLinear" in found[name]["trainer"]["modules"]
        assert (engine is None) == name.endswith("_sft")
        assert all(full > 0 == left for full, left in found[name]["trainer"]["fp8_copies"])
        if engine is not None:
            # A colocated engine has graphs for decoding alone.
            apart = name.endswith(("_disaggregated", "_async"))
            assert engine["graphs"]["decode"] == "FullCudaGraphBackend"
            assert ("prefill" in engine["graphs"]) <= apart, name
            assert bool(engine["fp8"]) == bool(re.search(FP8_ENGINES, name))
            assert len(engine["attention"]) == 2


def test_a_setting_that_only_its_branch_for_gpus_refuses_is_noticed():
    """The graphs that SGLang would choose for a colocated engine's prefills refuse the memory saver."""
    name = "qwen3_moe/qwen3_30b_a3b_gspo"
    found = rehearse("H100", [name], "--without=--disable-prefill-cuda-graph")
    assert found[name]["raised"].startswith("NotImplementedError: Breakable CUDA graph")
    assert "breakable_cuda_graph_backend.py" in found[name]["where"]


@pytest.mark.full
@pytest.mark.parametrize("card", sorted(set(CARDS) - {"A100"}))
def test_every_recipe_starts_on_every_card_but_for_its_memory(card):
    assert not raised(rehearse(card, NAMES))


@pytest.mark.full
def test_a_card_before_hopper_needs_flash_attention_2_and_trains_in_bf16():
    found = rehearse("A100", NAMES)
    assert {result["raised"].partition(":")[0] for result in found.values()} == {"ValueError"}
    assert all("has compute capability 8.0: before 9.0" in result["raised"] for result in found.values())
    found = rehearse("A100", NAMES, "--installed=flash-attn")
    (name,) = raised(found)
    assert name.endswith("fp8_training")
    assert "trainer.fp8: blockwise needs 9.0 or more." in found[name]["raised"]
