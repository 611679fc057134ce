"""Speculative decoding: SGLang's own parser reads our arguments, and its answers say how many drafts were accepted."""

import argparse
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl import device
from slimrl.agent.episode_end import COUNTS
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.speculative import DraftMode, SpeculativeConfig
from slimrl.data.engine import GenerateRequest
from slimrl.data.trajectory import Status, Trajectory
from slimrl.engines.client import parse_answer
from slimrl.engines.servers.server import engine_arguments
from slimrl.engines.servers.speculation import speculative_arguments
from slimrl.rollout.statistics import rollout_metrics
from slimrl.runtime.checks.model_check import model_problems


def parsed(mode: DraftMode, draft_model: str = "", **sglang) -> ServerArgs:
    """What SGLang's command line makes of our words."""
    rollout = RolloutConfig(
        max_trajectory_tokens=100,
        max_concurrency_per_engine=77,
        speculative=SpeculativeConfig(mode=mode, draft_model=draft_model, num_draft_tokens=5),
        sglang=sglang,
    )
    how = {"host": "h", "port": 7, "precision": Precision.bf16, "cuda": True, "seed": 5}
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(engine_arguments(rollout, "the/model", **how))


@pytest.mark.parametrize(
    ("mode", "algorithm", "draft"),
    [
        (DraftMode.mtp, "NEXTN", "the/model"),
        (DraftMode.eagle, "EAGLE", "the/draft"),
        (DraftMode.eagle3, "EAGLE3", "the/draft"),
    ],
)
def test_a_draft_model_proposes_a_chain(mode, algorithm, draft):
    words = parsed(mode, "" if mode is DraftMode.mtp else "the/draft")
    assert (words.speculative_algorithm, words.speculative_draft_model_path) == (algorithm, draft)
    # SGLang takes a chain of one token less than it verifies, or says that it adjusts the number.
    assert words.speculative_num_draft_tokens == words.speculative_num_steps + 1 == 5
    assert words.speculative_eagle_topk == 1
    assert words.max_running_requests == 77


@pytest.mark.parametrize("colocated", [False, True])
def test_a_draft_model_outlives_the_release_of_an_engine_s_memory(colocated):
    """Not all of it is sent again."""
    rollout = RolloutConfig(colocated=colocated, speculative=SpeculativeConfig(mode=DraftMode.mtp))
    assert speculative_arguments(rollout, "m")["enable_draft_weights_cpu_backup"] is colocated


def test_text_proposes_as_many_tokens_without_a_draft_model():
    words = parsed(DraftMode.ngram)
    assert (words.speculative_algorithm, words.speculative_num_draft_tokens) == ("NGRAM", 5)
    assert (words.speculative_draft_model_path, words.speculative_num_steps) == (None, None)
    assert words.max_running_requests == 77


def test_without_it_sglang_is_told_nothing_and_a_recipe_may_change_the_rest():
    assert (parsed(DraftMode.off).speculative_algorithm, parsed(DraftMode.off).max_running_requests) == (None, None)
    words = parsed(DraftMode.ngram, max_running_requests=9, speculative_ngram_max_bfs_breadth=3)
    assert (words.max_running_requests, words.speculative_ngram_max_bfs_breadth) == (9, 3)


def test_the_thresholds_of_acceptance_are_1_by_default():
    words = parsed(DraftMode.ngram)
    assert words.speculative_accept_threshold_single == words.speculative_accept_threshold_acc == 1.0


def problems(model: Path, mode: DraftMode, *, command: str = "rollout", devices: bool = True) -> list[tuple[str, str]]:
    recipe = Recipe()
    recipe.model.path, recipe.rollout.speculative.mode = str(model), mode
    loaded = LoadedRecipe(recipe=recipe, provenance={}, path="r.yaml", command=command)
    return [(one.key, one.message) for one in model_problems(loaded, devices=devices)]


def test_drafts_need_a_gpu_on_this_machine_and_the_models_own_layers_in_its_checkpoint(tmp_path, monkeypatch):
    size = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "experts": 2, "moe_intermediate": 16}
    for name, layers in (("without", 0), ("with", 1)):
        write_toy("deepseek_v3", tmp_path / name, ToySize(**size, mtp_layers=layers), 0)
    key = "rollout.speculative.mode"
    lacks = f"mtp: {tmp_path}/without has no layers for multi-token prediction. Use another mode."
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    assert problems(tmp_path / "with", DraftMode.mtp) == []
    write_toy("deepseek_v3", tmp_path / "two", ToySize(**size, mtp_layers=2), 0)
    one = "mtp: SGLang drafts with one layer for multi-token prediction, and config.json has 2. Use another mode."
    assert problems(tmp_path / "two", DraftMode.mtp) == [(key, one)]
    assert problems(tmp_path / "without", DraftMode.mtp) == [(key, lacks)]
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    without_gpu = "without a GPU SGLang takes the likeliest tokens instead of sampling. Use off."
    assert problems(tmp_path / "without", DraftMode.ngram) == [(key, f"ngram: {without_gpu}")]
    assert problems(tmp_path / "without", DraftMode.ngram, devices=False) == []
    assert problems(tmp_path / "without", DraftMode.ngram, command="sft") == []
    assert problems(tmp_path / "without", DraftMode.off) == []


def test_an_answer_says_how_many_drafts_were_accepted():
    request = GenerateRequest(
        session_id="s", input_ids=[1], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=2, stop_token_ids=(),
        timeout_s=1.0,
    )  # fmt: skip
    meta = {
        "output_token_logprobs": [[-0.5, 7, None]],
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
        "cached_tokens": 0,
    }
    assert parse_answer({"meta_info": meta}, request, None).counts == {}
    said = meta | {"spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 3, "spec_accept_rate": 0.375}
    assert parse_answer({"meta_info": said}, request, None).counts == {
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 3,
    }


def trajectory(**counts: int) -> Trajectory:
    metadata = {**dict.fromkeys(COUNTS, 0), **counts}
    return Trajectory(
        group_id="p", trajectory_id="t", segments=[], status=Status.completed, reward=1.0, metadata=metadata
    )


def test_the_rate_is_that_of_all_tokens_of_a_step():
    trajectories = [
        trajectory(num_draft_tokens=8, num_accepted_draft_tokens=3),
        trajectory(num_draft_tokens=2, num_accepted_draft_tokens=2),
        trajectory(),
    ]
    assert rollout_metrics(trajectories, 1.0)["rollout/draft_accept_rate"] == 0.5
    assert "rollout/draft_accept_rate" not in rollout_metrics(trajectories[2:], 1.0)
