"""Every shipped recipe passes `slimrl config check` on a machine that has neither its model nor its data."""

import re
from pathlib import Path

import pytest
from cpu_seconds import takes_less
from published_sizes import PUBLISHED_SIZES
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.load import intended_command, read_recipe
from slimrl.config.show import resolved_dict
from slimrl.models.hf_config import FP8_SUFFIX, PLAIN_SUFFIX, published_config, published_names
from slimrl.models.offline_recipe import read_offline

RECIPES = Path(__file__).parents[2] / "recipes"
PATHS = [path for path in sorted(RECIPES.glob("*/*.yaml")) if path.parent.name != "base"]
FILES = {str(path.relative_to(RECIPES)): path for path in PATHS}
TINY = {name: path for name, path in FILES.items() if "tiny_moe" in name}
REAL = {name: path for name, path in FILES.items() if name.startswith("smollm2/")}
"""For CPUs, with a model and tasks that a target of the Makefile fetches or makes."""
LARGE = {
    "qwen3/qwen3_4b": "Qwen3-4B",
    "qwen3/qwen3_8b": "Qwen3-8B",
    "qwen3_moe/qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_moe/qwen3_235b_a22b": "Qwen3-235B-A22B",
    "qwen3_vl_moe/qwen3_vl_30b_a3b": "Qwen3-VL-30B-A3B",
    "qwen3_next/qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B",
    "qwen3_5/qwen3_5_27b": "Qwen3.5-27B",
    "qwen3_5_moe/qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
    "qwen3_5_moe/qwen3_5_397b_a17b": "Qwen3.5-397B-A17B",
    "deepseek_v3/moonlight_16b_a3b": "Moonlight-16B-A3B",
    "deepseek_v3/deepseek_v3": "DeepSeek-V3",
    "deepseek_v3/kimi_k2": "Kimi-K2",
    "kimi_k25/kimi_k2_5": "Kimi-K2.5",
    "glm4_moe/glm_4_5_air": "GLM-4.5-Air",
    "glm4_moe/glm_4_5": "GLM-4.5",
    "glm4_moe_lite/glm_4_7_flash": "GLM-4.7-Flash",
    "deepseek_v32/deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa/glm_5": "GLM-5",
    "hy_v3/hy3": "Hy3",
    "minimax_m2/minimax_m2": "MiniMax-M2",
    "gpt_oss/gpt_oss_20b": "gpt-oss-20b",
    "gpt_oss/gpt_oss_120b": "gpt-oss-120b",
    "olmoe/olmoe_1b_7b": "OLMoE-1B-7B-0924",
}
"""Start of the recipe's name -> the published model."""

BFCL = ("base", "miss_func", "miss_param", "long_context")
"""Evaluation sets of its recipe"""


def check(*arguments: str):
    return CliRunner().invoke(app, ["config", "check", *arguments])


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_recipe_is_refused_by_no_rule(name):
    path = FILES[name]
    planned = read_offline(path, [], intended_command(path), model_needed=name not in TINY | REAL)
    # What is noted is what is not on this machine, and nothing that is probably not meant.
    evaluated = {f"data.eval.{name}" for name in ("heldout", "aime_2024", "aime_2025", "gsm8k_test", *BFCL)}
    if name in REAL:
        evaluated |= {f"data.{part}.{task}" for part in ("eval", "more") for task in ("chain_sum", "products", "gcd")}
    known = {
        "agent.command",
        "agent.command_sandbox.paths",
        "data.train",
        "data.more.deepscaler",
        "data.more.level_1",
        "data.more.level_2",
        *evaluated,
        "trainer.fp8",
        "trainer.megatron.dsa_kernel_backend",
    }
    assert {note.key for note in planned.notes} <= known
    assert ("trainer.fp8" in {note.key for note in planned.notes}) == ("fp8_training" in name)


@pytest.mark.parametrize("name", sorted(name for name in FILES if re.search("_(gspo|ppo|distillation)", name)))
def test_a_recipe_names_its_data_and_evaluates(name):
    loaded, problems = read_recipe(FILES[name], [], "train")
    assert loaded is not None, problems
    recipe = loaded.recipe
    assert 0 < recipe.eval.every_steps < recipe.steps
    assert recipe.eval.at_start
    assert recipe.eval.at_end
    files = [*recipe.data.train_files.values(), *recipe.data.eval.values()]
    assert len(recipe.data.eval) >= 1
    assert len(set(files)) == len(files)
    assert all(file.endswith(".jsonl") for file in files)
    assert recipe.agent.environment or recipe.agent.command_task or "\\boxed{}" in (recipe.agent.system_prompt or "")


@pytest.mark.parametrize(("start", "model"), LARGE.items())
def test_the_page_says_what_a_checkpoint_takes_and_few_large_ones_are_kept(start, model):
    """14 bytes of each parameter, of as many as the model's authors count."""
    page = (RECIPES.parent / "docs" / "recipes.md").read_text()
    stated = set(re.findall(rf"^\| `{start}_(?:gspo|sft)\w*`.* \|(?: ([\d.]+) ([GT])B)? \|$", page, re.MULTILINE))
    ((number, unit),) = stated
    nbytes = float(number) * {"G": 1e9, "T": 1e12}[unit]
    assert nbytes == pytest.approx(14e9 * PUBLISHED_SIZES[model].total_b, rel=0.03)
    loaded, _ = read_recipe(FILES[f"{start}_gspo.yaml"], [], "train")
    assert loaded is not None
    # One more than is kept, while it is written.
    assert (loaded.recipe.checkpoint.keep + 1) * nbytes < 30e12


@pytest.mark.parametrize(("start", "model"), LARGE.items())
def test_every_model_has_a_colocated_and_a_disaggregated_recipe(start, model):
    shared, apart = (FILES[f"{start}_gspo{variant}.yaml"] for variant in ("", "_disaggregated"))
    command = ["config", "show"]
    for path, colocated in ((shared, True), (apart, False)):
        output = CliRunner().invoke(app, [*command, str(path)]).output
        assert re.search(rf"rollout.colocated +{str(colocated).lower()} ", output), output
        assert re.search(rf"model.path +models/{model}({FP8_SUFFIX}|{PLAIN_SUFFIX})? ", output)
    assert model in published_names()


def test_files_are_named_by_model_algorithm_and_variant_and_say_how_many_gpus_they_take():
    for name, path in FILES.items():
        if name in TINY | REAL or name.startswith("single_gpu/"):
            continue
        assert re.fullmatch(r"[a-z0-9_]+_(gspo|ppo|distillation|sft)(_[a-z0-9_]+)?\.yaml", path.name)
        comment = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
        assert re.search(r"\d+ (GPUs|H200|B200)|nodes? of 8", comment), name
        assert "Layout" in comment or "layout" in comment, name


def test_the_page_of_recipes_lists_each_of_them():
    page = (RECIPES.parent / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9_]+/[a-z0-9_]+)`", page, re.MULTILINE)) == {
        name.removesuffix(".yaml") for name in FILES
    }
    bases = page.partition("| base | settings |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `([a-z_]+\.yaml)`", bases, re.MULTILINE))
    assert listed == {path.name for path in (RECIPES / "base").iterdir()}


def test_no_recipe_repeats_a_number_of_its_model():
    """Sizes of a model are those of its config.json; the rule against fields of the model covers trainer.megatron."""
    facts = set(published_config("Qwen3-30B-A3B")) - {"model_type"}
    for path in FILES.values():
        keys = set(re.findall(r"^ *([a-z_]+):", path.read_text(), re.MULTILINE))
        assert not keys & facts, path


def test_several_recipes_are_checked_with_one_exit_code(tmp_path):
    good, bad = str(FILES["qwen3/qwen3_4b_gspo.yaml"]), tmp_path / "bad.yaml"
    bad.write_text(f"extends: [{good}]\nsteps: -1\n")
    result = check(good, str(FILES["qwen3_moe/qwen3_30b_a3b_sft.yaml"]))
    assert result.exit_code == 0, result.output
    assert "qwen3_30b_a3b_sft.yaml: ok for slimrl sft" in result.output
    result = check(good, str(bad))
    assert result.exit_code == 1
    assert "2 recipes, 1 refused." in result.output
    assert check(good, "rollout.samples_per_prompt=1").exit_code == 1
    assert check(good, "--command", "eval").exit_code == 0
    assert check(good, "data.eval.aime_2024=null", "--command", "eval").exit_code == 1
    assert check("seed=1").exit_code == 2


def test_a_warning_that_recipes_share_is_printed_once():
    shared = "data/dapo-math-17k.jsonl: no such file."
    recipes = [str(FILES[f"qwen3/qwen3_4b_gspo{variant}.yaml"]) for variant in ("", "_disaggregated")]
    assert [check(recipe).output.count(shared) for recipe in recipes] == [1, 1]
    together = check(*recipes).output
    assert together.count(shared) == 1
    assert together.count(": ok for slimrl train") == 2


def test_what_is_not_here_is_an_error_when_it_is_asked_for():
    recipe = str(FILES["qwen3/qwen3_4b_gspo.yaml"])
    assert "data.train: warning: data/dapo-math-17k.jsonl: no such file." in check(recipe).output
    result = check(recipe, "--files")
    assert result.exit_code == 1
    assert "data.train: data/dapo-math-17k.jsonl: no such file." in result.output
    assert "model.path: models/Qwen3-4B: no such folder." in result.output


def test_a_recipe_is_checked_without_torch_in_half_the_time_that_its_import_takes():
    recipe = str(FILES["deepseek_v3/kimi_k2_gspo_disaggregated.yaml"])
    check = (
        "import sys\n"
        "from slimrl.cli import app\n"
        f"app(['config', 'check', {recipe!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert takes_less(check, 1 / 2, "import torch\n", rounds=8)


@pytest.mark.parametrize("name", ["Kimi-K2-FP8", "Kimi-K2.5-BF16", "Moonlight-16B-A3B"])
def test_recipes_of_models_whose_tokenizer_is_code_trust_it(name):
    """Their folders have a tiktoken.model and tokenization_*.py, and no tokenizer.json."""
    loaded = [
        read_recipe(path, [], "train")[0].recipe.model
        for path in PATHS
        if path.parent.name in ("deepseek_v3", "kimi_k25")
    ]
    models = [model for model in loaded if model.path == f"models/{name}"]
    assert len(models) == 2
    assert all(model.trust_remote_code for model in models)


def test_the_variants_for_a_real_model_differ_from_the_plain_recipe_in_few_settings():
    def settings(name: str) -> dict[str, object]:
        loaded, problems = read_recipe(FILES[f"smollm2/{name}.yaml"], [], "train")
        assert loaded is not None, problems
        return resolved_dict(loaded)

    plain = settings("reasoning")
    sections = {
        "grpo": {"algorithm"},
        "lora": {"trainer"},
        "async": {"algorithm", "trainer", "rollout"},
        "bf16": {"algorithm", "trainer"},
    }
    for variant, changed in sections.items():
        other = settings(f"reasoning_{variant}")
        assert other["run"]["name"] == f"reasoning_{variant}"
        differ = {key for key in plain if plain[key] != other[key]} - {"run"}
        assert differ == changed
