"""A field of SGLang that lays out weights as a resync does not know is refused; each that there is has been judged."""

import ast

from slimrl.config.check import check_recipe
from slimrl.config.load import load_recipe
from slimrl.config.package_fields import package_folder
from slimrl.config.passthrough import OWNED
from slimrl.config.rollout_rules import SGLANG_LAYOUTS

NAMESPACES_OF_LAYOUTS = {"parallel", "exec.moe", "exec.offload"}
OTHER_NAMESPACES = {
    "device", "disagg", "exec.comm", "exec.deterministic", "exec.dllm", "exec.features", "exec.graph", "exec.kernel",
    "exec.mamba", "exec.overlap", "lora", "memory", "mm", "model", "observability", "schedule", "serving", "spec",
}  # fmt: skip

NO_LAYOUT = {
    # Where processes meet, and how they talk.
    "nccl_port", "dist_timeout", "dist_init_addr", "gated_launch_port", "enable_p2p_check",
    "enable_dp_attention_local_control_broadcast", "load_balance_method", "dcp_comm_backend", "mooncake_ib_device",
    "deepep_config",
    # Batches, activations and the KV cache.
    "pp_max_micro_batch_size", "pp_async_batch_depth", "cp_strategy", "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding", "enable_tp_lm_head_all_to_all", "enable_attn_tp_input_scattered",
    "enable_layernorm_sp", "disable_attn_tp_gather",
    # Kernels.
    "enable_fused_moe_sum_all_reduce", "moe_runner_backend", "flashinfer_mxfp4_moe_precision",
    "disable_flashinfer_cutlass_moe_fp4_allgather",
    # Without effect unless a field that is refused is set.
    "deepep_v2_mode", "deepep_mode", "fuseep_mode", "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type",
    "enable_w4a4_mxfp4_megamoe", "ep_dispatch_algorithm", "eplb_algorithm", "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk", "eplb_min_rebalancing_utilization_threshold", "elastic_ep_scale_timeout",
    "paged_experts_num_resident", "kt_method", "kt_cpuinfer", "kt_threadpool_count",
    "kt_max_deferred_experts_per_token", "offload_num_in_group", "offload_prefetch_step", "offload_mode",
    # What is counted.
    "expert_distribution_recorder_mode", "expert_distribution_recorder_buffer_size",
    "expert_balancedness_report_mode",
    # Of a model that slimrl has no family for.
    "ple_offload_embedding", "ple_offload_backend", "ple_offload_dir",
}  # fmt: skip


def namespaces() -> dict[str, dict[str, str]]:
    """The fields of each namespace of SGLang's ServerArgs with their defaults, as its source has them."""
    found: dict[str, dict[str, str]] = {}
    for path in (package_folder("sglang") / "srt" / "arg_groups" / "fields").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                paths = [ast.literal_eval(item.value) for item in node.body if ast.unparse(item).startswith("_NS_PATH")]
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None]
                found |= {name: {ast.unparse(f.target): ast.unparse(f.value) for f in fields} for name in paths}
    return found


def test_every_field_about_layout_is_slimrls_own_or_refused_or_harmless():
    found = namespaces()
    assert set(found) == NAMESPACES_OF_LAYOUTS | OTHER_NAMESPACES
    fields = {name for namespace in NAMESPACES_OF_LAYOUTS for name in found[namespace]}
    refused = SGLANG_LAYOUTS.keys() | {"nnodes"}
    judged = [set(OWNED["rollout.sglang"]) & fields, refused, NO_LAYOUT]
    assert set().union(*judged) == fields
    assert sum(map(len, judged)) == len(fields)


def test_what_is_let_through_is_sglangs_default():
    defaults = {name: value for namespace in namespaces().values() for name, value in namespace.items()}
    no_backend = {"elastic_ep_backend": "none"}  # What SGLang's command line writes for None.
    for name, (default, _) in SGLANG_LAYOUTS.items():
        expected = no_backend.get(name, ast.literal_eval(defaults[name]))
        assert (default, type(default)) == (expected, type(expected)), name


def problems_of(tmp_path, overrides: list[str]) -> list[str]:
    (tmp_path / "recipe.yaml").write_text("")
    given = ["steps=3", "run.name=demo", "model.path=m", "data.train=t.jsonl", "reward.function=a.b:c",
             "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
             "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
             "rollout.eval_sampling.max_new_tokens=64"]  # fmt: skip
    recipe = load_recipe(tmp_path / "recipe.yaml", given + overrides, command="train").recipe
    return [str(problem) for problem in check_recipe(recipe, None, "train") if "rollout.sglang" in problem.key]


def test_layouts_that_a_resync_does_not_know_are_refused_with_what_to_do_instead(tmp_path):
    ranks, replicas = "Use rollout.engine_tensor and engine_expert.", "Use rollout.num_engines for replicas."
    given = {
        "attn_dp_size=2": replicas,
        "moe_dp_size=2": replicas,
        "dp_size=0": replicas,
        "attn_cp_size=2": ranks,
        "dcp_size=2": ranks,
        "moe_dense_tp_size=1": ranks,
        "moe_a2a_backend=deepep": ranks,
        "enable_eplb=true": "Leave it out.",
        "init_expert_location=a.json": "Leave it out.",
        "ep_num_redundant_experts=1": "Leave it out.",
    }
    expected = {
        f"rollout.sglang.{name}: {value.replace('true', 'True')}: a resync cannot place weights in such an engine. {do}"
        for (name, value), do in ((field.split("="), do) for field, do in given.items())
    }
    problems = problems_of(tmp_path, [f"rollout.sglang.{field}" for field in given])
    assert {problem.removeprefix("command line: ") for problem in problems} == expected


def test_defaults_of_sglangs_are_no_problem(tmp_path):
    fields = ["dp_size=1", "moe_dense_tp_size=null", "enable_eplb=false", "moe_a2a_backend=none", "cpu_offload_gb=0"]
    assert problems_of(tmp_path, [f"rollout.sglang.{field}" for field in fields]) == []
