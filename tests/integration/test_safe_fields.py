"""Fields of megatron-core that a recipe may set leave the update of a rank as it is, where they are said to."""

import pytest
from ranks import run_ranks
from trainer_cases import Run, in_layouts

from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.verdicts import Verdict

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

GATHERS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "align_param_gather": True}
NO_AUX_LOSS = {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.0]}
ONE_RANK = [
    {"deterministic_mode": True},
    {"bias_activation_fusion": True, "bias_dropout_fusion": True},
    {"bucket_size": 1000, "pad_buckets_for_high_nccl_busbw": True},
    {"grad_reduce_in_fp32": False},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"moe_token_dispatcher_type": "allgather"},
    {"moe_router_dtype": None},
    {"moe_z_loss_coeff": 0.0, **NO_AUX_LOSS},
    GATHERS,
]
TWO_RANKS = [
    ({"pipeline": 2}, {"deallocate_pipeline_outputs": True}),
    ({"pipeline": 2}, {"pipeline_model_parallel_layout": "Et|tttL"}),
    ({"pipeline": 2}, {"num_layers_in_first_pipeline_stage": 1}),
    ({"pipeline": 2}, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    ({"pipeline": 2}, GATHERS),
    ({"pipeline": 2, "virtual_pipeline": 2}, {"overlap_p2p_comm_warmup_flush": True}),
    ({"tensor": 2, "sequence": True, "expert": 2}, {"clone_scatter_output_in_embedding": False}),
    ({"expert": 2}, NO_AUX_LOSS),
]
NEUTRAL = {name for settings in (*ONE_RANK, *(fields for _, fields in TWO_RANKS)) for name in settings}

CHANGING = {
    "apply_wd_to_qk_layernorm": True,
    "decoupled_weight_decay": False,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.01,
    "attention_dropout": 0.5,
    "hidden_dropout": 0.5,
}


def two_updates(run: Run) -> list[float]:
    return [figure for step in range(2) for figure in _figures(run.update(step))]


def _figures(result) -> tuple[float, float]:
    return result.grad_norm, result.sums["loss"] / result.sums["tokens"]


def updates_in(rank, num_ranks, port, weights, cases):
    return [two_updates(run) for run in in_layouts(rank, num_ranks, port, cases, weights)]


@pytest.fixture(scope="module")
def reference(weights):
    return run_ranks(updates_in, 1, weights, [{}])[0][0]


def test_settings_of_speed_and_memory_change_no_update_of_one_rank(weights, reference):
    found = run_ranks(updates_in, 1, weights, [{"megatron": fields} for fields in ONE_RANK], timeout_s=200)[0]
    for fields, figures in zip(ONE_RANK, found, strict=True):
        assert figures == pytest.approx(reference, rel=1e-5), fields


def test_settings_of_layouts_change_no_update_of_two_ranks(weights, reference):
    cases = [{**layout, "megatron": fields} for layout, fields in TWO_RANKS]
    for found in run_ranks(updates_in, 2, weights, cases, timeout_s=200):
        for case, figures in zip(cases, found, strict=True):
            assert figures == pytest.approx(reference, rel=1e-5), case


def test_settings_of_training_change_what_they_name(weights, reference):
    """What is taken off weights, and losses that are added, show at the second update."""
    cases = [
        {"megatron": {name: value, "moe_router_load_balancing_type": "aux_loss"}} for name, value in CHANGING.items()
    ]
    found = run_ranks(updates_in, 1, weights, cases, timeout_s=200)[0]
    for name, figures in zip(CHANGING, found, strict=True):
        assert figures != pytest.approx(reference, rel=1e-6), name


def test_these_are_safe_and_others_are_of_a_gpu_or_in_other_tests():
    safe = {name for name, judgement in MEGATRON_VERDICTS.items() if judgement.verdict is Verdict.safe}
    assert safe >= NEUTRAL | CHANGING.keys()
    elsewhere = {"num_layers_in_last_pipeline_stage", "distribute_saved_activations", "moe_shared_expert_overlap",
                 "moe_router_bias_update_rate"}  # fmt: skip
    left = [judgement for name, judgement in MEGATRON_VERDICTS.items() if name in safe - NEUTRAL - elsewhere]
    reasons = {one.reason for one in left if not one.transformer_engine} - {
        MEGATRON_VERDICTS[name].reason for name in CHANGING
    }
    of_gpus = {
        "rounding of a GPU's matrix products",
        "a kernel of apex, chosen by slimrl where it exists",
        "the embedding's gradient at the end of a pipeline, a kernel of apex",
    }
    of_others = {"the loss that trains indexers of sparse attention", "the same of the chosen keys alone"}
    of_others |= {"the optimizer's precision", "the optimizer on the host", "FP8 training (docs/algorithms.md#fp8)"}
    assert reasons == of_gpus | of_others
