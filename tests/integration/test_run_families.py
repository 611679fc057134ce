"""Families beyond Qwen3-MoE go through a whole run: engines, updates, resyncs with every tensor checked, export."""

import pytest
from cli_runs import RECIPES, make_workspace, succeed
from engine_probes import transformers_class
from safetensors.torch import load_file
from small_models import WITH_EXPERTS

from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.config.hf_config import read_hf_config
from slimrl.config.wrapper import wrapper_of
from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]

RUN_S = 400.0
DENSE = ["trainer.parallel.expert=1", "rollout.routed_experts=false"]
GROUPED = ["rollout.engine_tp=2", "rollout.engine_ep=2", "rollout.engine_attention_dp=2"]
"""Two groups of one rank in an engine, each with requests of its own."""


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, []) for family in WITH_EXPERTS if family not in ("qwen3_next", "qwen3_5_moe")),
        ("glm_moe_dsa", ["trainer.megatron={dsa_indexer_loss_coeff: 0.01}"]),
        ("qwen3_next", ["rollout.routed_experts=true"]),
        ("qwen3_5", DENSE),
        ("qwen3_5_moe", ["rollout.routed_experts=true"]),
        ("deepseek_v3", GROUPED),
        ("qwen2", DENSE),
        ("qwen3", DENSE),
        ("qwen3_vl", DENSE),
        ("qwen3_vl_moe", []),
        ("kimi_k25", []),
        ("qwen3_5_wrapped", DENSE),
        ("qwen3_5_moe_wrapped", []),
        ("llama", [*DENSE, "trainer.parallel.tensor=2"]),
    ],
)
def test_a_run_trains_what_its_engines_serve(tmp_path, family, settings):
    workspace = make_workspace(tmp_path, family)
    recipe = str(RECIPES / "gspo_calculator.yaml")
    # The toys of all families have one tokenizer and chat template.
    common = ["run.name=gspo", "steps=2", "resync.verify=full", "rollout.num_engines=1", "agent.parser=qwen25"]
    overrides = workspace.overrides(*common, *settings)
    succeed("train", recipe, *overrides, timeout_s=RUN_S)
    folder = workspace.run_folder("gspo")
    steps = [line for line in read_metrics(folder.metrics) if "mismatch/logprob_abs_mean" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert line["resync/fingerprint_mismatches"] == 0
        if "rollout.routed_experts=true" in settings:
            # Rounding decides between scores that nearly tie, and nothing else does.
            assert line["mismatch/routing_flips"] == 0 or line["mismatch/flip_margin_max"] < 1e-5
            assert line["mismatch/flip_reached_fraction"] < 0.1
    check_checkpoint(folder.export)
    (before,), (after,) = (list(path.glob("*.safetensors")) for path in (workspace.path / "model", folder.export))
    old, new = load_file(before), load_file(after)
    kept = {name for name in old if old[name].equal(new[name])}
    never_chosen = {name for name in kept if ".experts." in name}
    wrapper = wrapper_of(read_hf_config(folder.export))
    frozen = ("e_score_correction_bias", "expert_bias")
    if not any("dsa_indexer_loss_coeff" in setting for setting in settings):
        frozen += (".indexer.",)
    if wrapper:
        frozen += ("vision_tower.", "mm_projector.", "model.visual.")
        _, loading = transformers_class(folder.export).from_pretrained(folder.export, output_loading_info=True)
        assert not any(loading.values())
    assert kept - never_chosen == {name for name in old if any(part in name for part in frozen)}
