"""Each field of megatron-core and SGLang has one verdict, which a recipe that names the field meets before a start."""

import ast
import dataclasses

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slimrl.config import passthrough
from slimrl.config.load import load_recipe
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.package_fields import megatron_fields, package_folder, sglang_fields
from slimrl.config.passthrough import MEGATRON, VERDICTS, field_problem
from slimrl.config.problems import RecipeError
from slimrl.config.sglang_verdicts import SGLANG_VERDICTS, TEACHER_VERDICTS
from slimrl.config.verdicts import Verdict, judged, table
from slimrl.models.family import FAMILIES, family_of
from slimrl.models.hf_config import published_config, published_names
from slimrl.trainer.yarn import YarnConfig

OF_TRAINING = {
    "hidden_dropout",
    "attention_dropout",
    "moe_router_load_balancing_type",
    "cp_comm_type",
    "bias_dropout_fusion",
}
"""What a family sets, so that a model trains as it is served, and a recipe may set otherwise."""


def sglang_names() -> set[str]:
    """Fields of ServerArgs, of which SGLang has a list beside their declarations."""
    tree = ast.parse((package_folder("sglang") / "srt" / "arg_groups" / "field_order.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    return {name for name in ast.literal_eval(lists[0]) if not name.startswith("_")}


def said(tmp_path, *settings: str, command: str = "train") -> list[str]:
    """What is said of a recipe as it is read."""
    (tmp_path / "recipe.yaml").write_text("")
    given = ["steps=3", "run.name=demo", "model.path=m", "data.train=t.jsonl", "reward.function=a.b:c",
             "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
             "rollout.max_trajectory_tokens=512"]  # fmt: skip
    try:
        load_recipe(tmp_path / "recipe.yaml", [*given, *settings], command=command)
    except RecipeError as error:
        return [f"{problem.key}: {problem.message}" for problem in error.problems]
    return []


def test_every_field_of_the_installed_megatron_core_has_a_verdict_and_no_other_has():
    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    assert {name for name in fields if not name.startswith("_")} == MEGATRON_VERDICTS.keys()
    assert megatron_fields().keys() == MEGATRON_VERDICTS.keys()


def test_every_field_of_the_installed_sglang_has_a_verdict_and_no_other_has():
    assert sglang_names() == SGLANG_VERDICTS.keys() == TEACHER_VERDICTS.keys()
    assert sglang_fields().keys() == SGLANG_VERDICTS.keys()


def test_a_field_in_two_groups_is_a_mistake():
    with pytest.raises(AssertionError, match="judged twice: \\['b'\\]"):
        table(judged(Verdict.safe, "x", "a b"), judged(Verdict.model, "y", "b c"))


@pytest.mark.parametrize("section", VERDICTS)
def test_a_field_that_nobody_has_judged_is_refused_by_name(monkeypatch, section):
    name = "moe_router_dtype" if section in MEGATRON else "page_size"
    fields = passthrough.passthrough_fields(section)
    others = {known: judgement for known, judgement in VERDICTS[section].items() if known != name}
    good = "fp32" if section in MEGATRON else 16
    assert field_problem(section, name, good, fields) is None
    monkeypatch.setitem(VERDICTS, section, others)
    assert "has not judged" in field_problem(section, name, good, fields)


def test_reasons_are_sentences_and_conditions_name_safe_fields():
    for section, verdicts in VERDICTS.items():
        for name, judgement in verdicts.items():
            where = f"{section}.{name}"
            if judgement.verdict is Verdict.safe:
                assert not judgement.needs or verdicts[judgement.needs].verdict is Verdict.safe, where
                assert bool(judgement.values) == bool(judgement.instead), where
            else:
                assert judgement.reason.endswith("."), where
                assert (judgement.needs, judgement.values, judgement.transformer_engine) == ("", (), False), where


def test_what_the_families_set_is_the_model_s():
    model_types = {model_type for family in FAMILIES for model_type in family.model_types}
    configs = [config for config in map(published_config, published_names()) if config["model_type"] in model_types]
    set_by_families = {name for config in configs for name in family_of(config).megatron_config(config).transformer}
    assert len(set_by_families) > 40
    own, megatrons = ({field.name for field in dataclasses.fields(c)} for c in (YarnConfig, TransformerConfig))
    verdicts = {name: MEGATRON_VERDICTS[name].verdict for name in set_by_families - OF_TRAINING - (own - megatrons)}
    assert set(verdicts.values()) == {Verdict.model}, verdicts


def test_no_field_of_latent_attention_alone_is_a_recipe_s():
    latent, plain = ({field.name for field in dataclasses.fields(c)} for c in (MLATransformerConfig, TransformerConfig))
    verdicts = {MEGATRON_VERDICTS[name].verdict for name in latent - plain}
    assert len(latent - plain) > 10
    assert Verdict.safe not in verdicts


ANOTHER_MODEL = {
    "softmax_scale": 0.5, "rotary_interleaved": True, "no_rope_freq": 2, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 1.0, "use_mup": True, "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 1.0, "moe_expert_capacity_factor": 1.0, "moe_input_jitter_eps": 0.03,
    "window_size": [8, 0], "softmax_type": "learnable", "apply_query_key_layer_scaling": True, "num_layers": 3,
    "rotary_base": 1e4, "linear_attention_freq": 2, "moe_router_topk": 4, "heterogeneous_block_specs": True,
    "layernorm_epsilon": 1e-5, "activation_func": "gelu", "qk_layernorm": False,
}  # fmt: skip
"""Settings with which the same weights compute another function than the engines', or train another one."""

NOT_OURS = {
    "calculate_per_token_loss": False, "decoupled_lr": 0.05, "decoupled_min_lr": 0.01,
    "hybrid_context_parallel": True, "use_te_activation_func": True, "mlp_chunks_for_training": 2, "nccl_ub": True,
    "test_mode": True, "use_kitchen": True, "tp_comm_overlap": True, "cuda_graph_impl": "local", "fp4": "e2m1",
    "overlap_moe_expert_parallel_comm": True, "optimizer": "sgd", "check_for_nan_in_grad": True, "batch_p2p_comm": True,
    "overlap_p2p_comm": False, "quant_recipe": "a", "use_megatron_fsdp": True, "average_in_collective": True,
    "fused_single_qkv_rope": True, "num_distributed_optimizer_instances": 2, "moe_enable_deepep": True,
    "num_microbatches_with_partial_activation_checkpoints": 1, "moe_router_padding_for_fp8": True,
}  # fmt: skip
"""Settings that gave wrong gradients, checkpoints that could not be loaded, or errors of megatron-core at a start."""

IGNORED = {
    "grad_norm_skip_threshold": 1.0, "qk_clip": True, "qk_clip_alpha": 0.5, "qk_clip_threshold": 50.0,
    "log_max_attention_logit": True, "log_num_zeros_in_grad": True, "cross_entropy_loss_fusion": True,
    "attention_softmax_in_fp32": False, "moe_token_dropping": True, "init_method_std": 0.1, "loss_scale": 2.0,
    "muon_momentum": 0.9, "flash_decode": True, "mamba_num_heads": 2, "config_logger_dir": "d",
}  # fmt: skip


@pytest.mark.parametrize("section", ["trainer.megatron", "critic.trainer.megatron"])
@pytest.mark.parametrize(
    ("settings", "verdicts"),
    [
        (ANOTHER_MODEL, {Verdict.model}),
        (NOT_OURS, {Verdict.slimrl}),
        (IGNORED, {Verdict.no_effect}),
    ],
)
def test_what_trains_another_model_or_not_at_all_is_refused_before_a_start(tmp_path, section, settings, verdicts):
    given = [f"{section}.{name}={str(value).lower()}" for name, value in settings.items()]
    found = said(tmp_path, "algorithm.name=ppo", *given)
    assert {line.partition(": ")[0] for line in found} == {f"{section}.{name}" for name in settings}
    assert {VERDICTS[section][name].verdict for name in settings} == verdicts


def test_supervised_training_refuses_them_too(tmp_path):
    (found,) = said(tmp_path, "sft.max_tokens=64", "trainer.megatron.softmax_scale=0.5", command="sft")
    assert found == (
        "trainer.megatron.softmax_scale: is the model's: trainer and engines take their layers from the config.json of "
        "model.path. Leave it out."
    )


@pytest.mark.parametrize("value", ["sinkhorn", "quantile_balancing", "[aux_loss, sinkhorn]"])
def test_routers_that_choose_experts_otherwise_than_engines_are_refused(tmp_path, value):
    name = "trainer.megatron.moe_router_load_balancing_type"
    (found,) = said(tmp_path, f"{name}={value}", "trainer.megatron.moe_aux_loss_coeff=[0.1, 0.1]")
    assert "chooses experts itself, so engines would compute another model. Use none or aux_loss" in found
    assert said(tmp_path, f"{name}=[aux_loss, none]", "trainer.megatron.moe_aux_loss_coeff=[0.1, 0.0]") == []


MISSAMPLING = {
    "preferred_sampling_params": "'{\"min_p\": 0.3}'", "enable_watermark": "true", "watermark_config": "{}",
    "rl_on_policy_target": "fsdp", "allow_auto_truncate": "true", "speculative_accept_threshold_acc": "0.9",
    "speculative_accept_threshold_single": "0.9", "hicache_storage_backend": "file", "enable_lmcache": "true",
    "debug_tensor_dump_input_file": "f",
}  # fmt: skip
OPENING = ("host", "port", "api_key", "admin_api_key", "ssl_keyfile", "grpc_port", "enable_trace", "forward_hooks",
           "enable_custom_logit_processor", "sidecar", "kv_events_config")  # fmt: skip


def test_engines_that_sample_otherwise_than_their_logprobs_say_are_refused(tmp_path):
    found = said(tmp_path, *(f"rollout.sglang.{name}={value}" for name, value in MISSAMPLING.items()))
    assert {line.partition(": ")[0] for line in found} == {f"rollout.sglang.{name}" for name in MISSAMPLING}
    assert {SGLANG_VERDICTS[name].verdict for name in MISSAMPLING} == {Verdict.sampling}


@pytest.mark.parametrize("name", ["enable_hierarchical_cache", "strip_thinking_cache"])
def test_caches_that_a_resync_clears_are_refused_as_untried(tmp_path, name):
    (found,) = said(tmp_path, f"rollout.sglang.{name}=true")
    assert "slimrl has not been tried with it" in found


@pytest.mark.parametrize("section", ["rollout.sglang", "teacher.sglang"])
def test_ports_keys_and_code_are_not_a_recipe_s_to_give(section):
    for name in OPENING:
        assert VERDICTS[section][name].verdict is Verdict.security
        assert field_problem(section, name, "x", passthrough.passthrough_fields(section))


def test_rounding_is_let_through_since_the_mismatch_shows_it(tmp_path):
    fields = ("kv_cache_dtype=fp8_e5m2", "enable_fp32_lm_head=true", "enable_tf32_matmul=true")
    assert said(tmp_path, *(f"rollout.sglang.{field}" for field in fields)) == []


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("moe_dp_size=2", "Use rollout.num_engines for replicas."),
        ("dp_size=2", "Use rollout.num_engines for replicas."),
        ("enable_dp_attention=true", "Use rollout.engine_attention_dp."),
        ("moe_a2a_backend=deepep", "Use rollout.engine_tp and engine_ep."),
        ("enable_eplb=true", "Leave it out."),
        ("moe_runner_backend=flashinfer_trtllm", "Use auto or triton or deep_gemm."),
        ("fp8_gemm_runner_backend=cutlass", "Use auto or triton or deep_gemm."),
        ("model_impl=transformers", "Use auto or sglang."),
        ("load_format=flash_rl", ""),
    ],
)
def test_layouts_that_a_resync_does_not_know_are_refused_except_for_a_teacher(tmp_path, field, instead):
    (found,) = said(tmp_path, f"rollout.sglang.{field}")
    assert found.startswith(f"rollout.sglang.{field.partition('=')[0]}: ")
    assert "a resync cannot place weights in such an engine. " + instead in found
    if "dp_size" not in field:
        assert said(tmp_path, "teacher.path=t", f"teacher.sglang.{field}") == []


def test_a_teacher_is_set_by_its_own_keys(tmp_path):
    given = {"tp_size=2": "teacher.engine_tp", "dp_size=2": "teacher.num_engines", "model_path=x": "teacher.path",
             "speculative_num_steps=2": "only scores", "enable_memory_saver=true": "only scores"}  # fmt: skip
    for field, owner in given.items():
        (found,) = said(tmp_path, "teacher.path=t", f"teacher.sglang.{field}")
        assert owner in found
        assert "rollout" not in found
