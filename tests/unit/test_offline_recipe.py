"""What can be known of a recipe on a machine where its model and its data are not."""

import importlib
import json
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.speculative import DraftMode
from slimrl.config.schema.trainer import MtpConfig, ParallelConfig, TrainerConfig
from slimrl.models import offline_recipe
from slimrl.models.family import family_of
from slimrl.models.hf_config import nearest_published
from slimrl.models.offline_recipe import OfflineRecipe, read_offline

ROOT = Path(__file__).parents[2]
A3B = "recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(*overrides: str) -> OfflineRecipe:
    return read_offline(A3B, overrides, "train", model_needed=False)


def refused(*overrides: str, files: bool = False) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_offline(A3B, overrides, "train", files=files)
    return str(caught.value).splitlines()[:-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.function=slimrl.rewards.math:nope", "slimrl.rewards.math:nope: slimrl.rewards.math has no nope."),
        ("reward.function=slimrl.rewards.math:boxed_exct",
         "slimrl.rewards.math:boxed_exct: slimrl.rewards.math has no boxed_exct. Did you mean boxed_exact?"),
        ("agent.tools=[slimrl.agent.calculator:calculater]",
         "slimrl.agent.calculator:calculater: slimrl.agent.calculator has no calculater. Did you mean calculator?"),
        ("agent.tools=[slimrl.agent.parsers:NoCalls]",
         "slimrl.agent.parsers:NoCalls: NoCalls is a class. A tool is a function."),
        ("reward.function=slimrl.agent.parsers:NoCalls",
         "slimrl.agent.parsers:NoCalls: NoCalls is a class without __call__. "
         "A reward is a function, an object that can be called, or a class of such objects."),
        ("agent.parser=slimrl.agent.parsers:NoCallz",
         "slimrl.agent.parsers:NoCallz: slimrl.agent.parsers has no NoCallz. Did you mean NoCalls?"),
        ("resync.bucket_bytes=1",
         "1 bytes are too few: one row of model.embed_tokens.weight needs 4096, and other tensors may be wider. "
         "The default is 268435456."),
    ],
)  # fmt: skip
def test_what_a_start_would_not_find_is_refused_from_sources_and_the_config_alone(override, message):
    assert refused(override) == [f"command line: {override.partition('=')[0]}: {message}"]


@pytest.mark.parametrize(("model", "refused"), [("OLMoE-1B-7B-0924", True), ("GLM-4.7-Flash", False)])
def test_groups_of_ranks_are_refused_where_sglang_shards_attention_over_all_of_them(model, refused):
    positions = ("rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=256", "steps=0")
    grouped = (f"model.path=models/{model}", "rollout.engine_tp=2", "rollout.engine_attention_dp=2", *positions)
    with pytest.raises(RecipeError) as caught:
        read_offline(A3B, grouped, "eval")
    said = "rollout.engine_attention_dp: 2: SGLang shards attention of olmoe over all ranks of an engine. Use 1."
    assert (said in str(caught.value)) == refused


def test_modules_that_are_not_here_are_noted_and_refused_with_the_files_alone():
    away = ["reward.function=somewhere.else:reward", "agent.tools=[nowhere:f]"]
    said = {
        "reward.function": "somewhere.else:reward: no module somewhere.else.",
        "agent.tools": "nowhere:f: no module nowhere.",
    }
    noted = [str(note) for note in planned(*away).notes]
    assert {f"command line: {key}: warning: {message}" for key, message in said.items()} <= set(noted)
    lines = refused(*away, files=True)
    assert {f"command line: {key}: {message}" for key, message in said.items()} <= set(lines)


def test_a_module_of_slimrl_that_is_not_there_is_refused_at_once():
    assert refused("agent.tools=[slimrl.agent.nowhere:f]") == [
        "command line: agent.tools: slimrl.agent.nowhere:f: no module slimrl.agent.nowhere."
    ]


def test_functions_are_found_wherever_a_module_may_define_them_and_nothing_of_it_runs(tmp_path, monkeypatch):
    (tmp_path / "own_rewards").mkdir()
    (tmp_path / "own_rewards" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "own_rewards" / "some.py").write_text(
        "from math import floor as down\nif True:\n    def inner():\n        'Go in.'\n        deeper = 1\n"
        "try:\n    one = two = print\nexcept ValueError:\n    pass\nraise RuntimeError\n"
    )
    (tmp_path / "own_stars.py").write_text("from os import *\n")
    (tmp_path / "own_made.py").write_text("for name in 'ab':\n    globals()[name] = print\n")
    (tmp_path / "own_latin.py").write_bytes("# -*- coding: latin-1 -*-\nabout = str.upper('für')\n".encode("latin-1"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    names = [f"own_rewards.some:{name}" for name in ("down", "inner", "one", "two")]
    names += ["own_stars:getcwd", "own_made:a", "own_latin:about", "math:floor"]
    planned(f"agent.tools=[{', '.join(names)}]")
    (tmp_path / "own_class.py").write_text("class Both: pass\ndef Both():\n    'Do both.'\nclass Made: pass\n")
    planned("agent.tools=[own_class:Both]", "agent.parser=own_class:Made")
    (line,) = refused("agent.tools=[own_rewards.some:deeper]")
    assert line.endswith("own_rewards.some has no deeper.")


@pytest.mark.parametrize(
    ("folder", "meant"),
    [
        ("models/Qwen3-30B-A3b", "Qwen3-30B-A3B"), ("models/qwen3-30-a3b", "Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B-fp8", "Qwen3-30B-A3B-FP8"), ("models/Qwen3-15B", ""), ("models/toy", ""),
    ],
)  # fmt: skip
def test_a_model_of_the_same_sizes_and_nearly_the_same_name_was_meant(folder, meant):
    assert nearest_published(Path(folder)) == meant


def test_a_misspelt_model_is_noted_where_it_need_not_be_here_and_refused_where_it_must():
    notes = [str(note) for note in planned("model.path=models/Qwen3-30B-A3b").notes]
    told = "models/Qwen3-30B-A3b: no such folder. Did you mean models/Qwen3-30B-A3B?"
    assert f"command line: model.path: warning: {told}" in notes
    assert refused("model.path=models/Qwen3-30B-A3b")[0].endswith("; Qwen3-30B-A3B is nearest.")


@pytest.mark.parametrize(("precision", "row"), [("bf16", 4096), ("fp32", 8192)])
def test_a_bucket_takes_at_least_a_row_of_the_embedding_in_the_precision_of_the_weights(precision, row):
    for nbytes, too_few in ((row, False), (row - 1, True)):
        told = refused(
            f"trainer.precision={precision}",
            f"resync.bucket_bytes={nbytes}",
            "reward.function=slimrl.rewards.math:nope",
        )
        assert any(f"{nbytes} bytes are too few: one row" in line for line in told) is too_few


def test_layers_for_multi_token_prediction_are_trained_where_the_model_has_them():
    found = refused("trainer.mtp.train=true")
    assert len(found) == 1
    assert found[0].endswith("true, but the model has no layers for multi-token prediction. Use false.")
    read_offline("recipes/glm4_moe/glm_4_5_air_gspo.yaml", ["trainer.mtp.train=true"], "train")


SERVED_APART = "recipes/qwen3_moe/qwen3_30b_a3b_gspo_async.yaml"


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_a_model_without_layers_for_multi_token_prediction_cannot_draft_with_them(command, tmp_path):
    lacks = "has no layers for multi-token prediction. Use another mode."
    toy = tmp_path / "toy"
    toy.mkdir()
    (toy / "config.json").write_text(json.dumps(toy_config("qwen3_moe", ToySize()) | {"vocab_size": 128}))
    for override, model in (("seed=1", "models/Qwen3-30B-A3B"), (f"model.path={toy}", toy)):
        with pytest.raises(RecipeError) as caught:
            read_offline(SERVED_APART, [override, "rollout.speculative.mode=mtp"], command)
        assert f"command line: rollout.speculative.mode: mtp: {model} {lacks}" in str(caught.value).splitlines()


def test_a_model_with_one_layer_for_multi_token_prediction_drafts_with_it():
    overrides = ["model.path=models/GLM-4.5-Air", "rollout.speculative.mode=mtp", "trainer.mtp.train=true"]
    read_offline(SERVED_APART, overrides, "train")


def test_a_command_without_engines_needs_no_drafts():
    estimated = read_offline(SERVED_APART, ["rollout.speculative.mode=mtp"], "resync estimate")
    assert estimated.recipe.rollout.speculative.mode is DraftMode.mtp


def test_layers_for_multi_token_prediction_with_a_tied_output_layer_need_one_pipeline_stage(tmp_path):
    config = toy_config("glm4_moe", ToySize(mtp_layers=1)) | {"vocab_size": 128, "tie_word_embeddings": True}
    architecture = family_of(config).megatron_config(config)
    recipe = Recipe(trainer=TrainerConfig(mtp=MtpConfig(train=True), parallel=ParallelConfig(pipeline=2)))
    ((key, message),) = offline_recipe._mtp_violations(recipe, architecture)
    assert key == "trainer.mtp.train"
    assert "needs trainer.parallel.pipeline 1" in message
    recipe.trainer.parallel.pipeline = 1
    assert not list(offline_recipe._mtp_violations(recipe, architecture))


def test_of_a_model_of_no_family_nothing_else_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax_m3", "hidden_size": 64}))
    lines = refused(f"model.path={tmp_path}")
    (line,) = (line for line in lines if "is not supported" in line)
    assert not any("the model has no experts" in line for line in lines)
    assert "model_type 'minimax_m3' is not supported; known: " in line
    assert "qwen3_vl_moe" in line
    assert "docs/adding_a_model.md" in line
