"""A field of SGLang that lays out weights as a resync does not know is refused; each that there is has been judged."""

import ast

import pytest

from slimrl.config.check import check_recipe
from slimrl.config.load import load_recipe
from slimrl.config.package_fields import package_folder
from slimrl.config.passthrough import OWNED
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.sglang_layouts import SGLANG_CHOICES, SGLANG_LAYOUTS
from slimrl.rollout.servers import server
from slimrl.rollout.servers.server import FLAGS, engine_arguments

NAMESPACES_OF_LAYOUTS = {"parallel", "exec.moe", "exec.offload", "exec.kernel", "model", "lora"}
OTHER_NAMESPACES = {
    "device", "disagg", "exec.comm", "exec.deterministic", "exec.dllm", "exec.features", "exec.graph", "exec.mamba",
    "exec.overlap", "memory", "mm", "observability", "schedule", "serving", "spec",
}  # fmt: skip

NO_LAYOUT = {
    # Where processes meet, and how they talk.
    "nccl_port", "dist_timeout", "gated_launch_port", "enable_p2p_check",
    "enable_dp_attention_local_control_broadcast", "load_balance_method", "dcp_comm_backend", "mooncake_ib_device",
    "deepep_config",
    # Batches, activations and the KV cache.
    "pp_max_micro_batch_size", "pp_async_batch_depth", "cp_strategy", "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding", "enable_tp_lm_head_all_to_all", "enable_attn_tp_input_scattered",
    "enable_layernorm_sp", "disable_attn_tp_gather",
    # Kernels.
    "enable_fused_moe_sum_all_reduce", "flashinfer_mxfp4_moe_precision",
    "disable_flashinfer_cutlass_moe_fp4_allgather", "attention_backend", "decode_attention_backend",
    "prefill_attention_backend", "enable_lean_attention", "prefill_kv_cache_dequant_dtype", "sampling_backend",
    "grammar_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend", "dsa_prefill_backend", "dsv4_prefill_backend",
    "dsa_triton_union", "dsa_decode_backend", "dsv4_attn_backend", "dsa_paged_mqa_logits_backend", "dsa_topk_backend",
    "disable_flashinfer_autotune", "flashinfer_autotune_skip_ops", "triton_attention_reduce_in_fp32",
    "triton_attention_num_kv_splits", "triton_attention_split_tile_size", "flashinfer_mla_disable_ragged",
    "enable_fused_qk_norm_rope", "enable_precise_embedding_interpolation", "enable_deepseek_v4_fp4_indexer",
    "enable_dsa_fused_indexer",
    # How the first weights are read, and what else is known of a model.
    "model_loader_extra_config", "trust_remote_code", "context_length", "is_embedding", "revision",
    "model_config_parser", "quantization_param_path", "kv_cache_dtype", "qsa_indexer_dtype",
    "modelopt_checkpoint_save_path", "modelopt_export_path", "startup_weight_load_mode", "weight_loader_disable_mmap",
    "weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load",
    "engine_info_bootstrap_port", "modelexpress_config", "download_dir", "model_checksum",
    "delete_ckpt_after_loading", "decrypted_config_file", "decrypted_draft_config_file",
    # Without effect unless a field that is refused is set.
    "deepep_v2_mode", "deepep_mode", "fuseep_mode", "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type",
    "enable_w4a4_mxfp4_megamoe", "ep_dispatch_algorithm", "eplb_algorithm", "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk", "eplb_min_rebalancing_utilization_threshold", "elastic_ep_scale_timeout",
    "paged_experts_num_resident", "kt_method", "kt_cpuinfer", "kt_threadpool_count",
    "kt_max_deferred_experts_per_token", "offload_num_in_group", "offload_prefetch_step", "offload_mode",
    "remote_instance_weight_loader_seed_instance_ip", "remote_instance_weight_loader_seed_instance_service_port",
    "remote_instance_weight_loader_send_weights_group_ports", "remote_instance_weight_loader_backend",
    "remote_instance_weight_loader_start_seed_via_transfer_engine", "weight_cache_socket", "weight_cache_timeout",
    "enable_lora_overlap_loading", "max_lora_rank", "lora_target_modules", "max_loaded_loras", "max_loras_per_batch",
    "lora_eviction_policy", "lora_backend", "max_lora_chunk_size", "experts_shared_outer_loras",
    "lora_use_virtual_experts", "lora_strict_loading", "lora_drain_wait_threshold",
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
    refused = SGLANG_LAYOUTS.keys() | SGLANG_CHOICES.keys()
    judged = [set(OWNED["rollout.sglang"]) & fields, refused, NO_LAYOUT]
    assert set().union(*judged) == fields
    assert sum(map(len, judged)) == len(fields)


def test_what_is_let_through_is_sglangs_default():
    defaults = {name: value for namespace in namespaces().values() for name, value in namespace.items()}
    no_backend = {"elastic_ep_backend": "none"}  # What SGLang's command line writes for None.
    for name, default in SGLANG_LAYOUTS.items():
        expected = no_backend.get(name, ast.literal_eval(defaults[name]))
        assert (default, type(default)) == (expected, type(expected)), name


def test_fields_have_the_flags_that_sglang_gives_them():
    """`cli_name` names a flag otherwise than its field, or repeats the common way of naming it."""
    named: dict[str, str] = {}
    for path in (package_folder("sglang") / "srt" / "arg_groups" / "fields").glob("*.py"):
        for field in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)):
            for call in ast.walk(field.annotation):
                words = call.keywords if isinstance(call, ast.Call) else []
                named |= {ast.unparse(field.target): ast.literal_eval(w.value) for w in words if w.arg == "cli_name"}
    other = {name: flag for name, flag in named.items() if flag != "--" + name.replace("_", "-")}
    aliased = {"tp_size", "ep_size", "dp_size", "pp_size", "attn_cp_size", "dcp_size", "moe_dp_size"}
    assert {name: flag for name, flag in other.items() if name not in aliased | SGLANG_LAYOUTS.keys()} == FLAGS


def problems_of(tmp_path, overrides: list[str]) -> list[str]:
    (tmp_path / "recipe.yaml").write_text("")
    given = ["steps=3", "run.name=demo", "model.path=m", "data.train=t.jsonl", "reward.function=a.b:c",
             "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
             "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
             "rollout.eval_sampling.max_new_tokens=64"]  # fmt: skip
    recipe = load_recipe(tmp_path / "recipe.yaml", given + overrides, command="train").recipe
    return [str(problem) for problem in check_recipe(recipe, None, "train") if "rollout.sglang" in problem.key]


def test_layouts_that_a_resync_does_not_know_are_refused_with_what_to_do_instead(tmp_path):
    ranks, replicas = "Use rollout.engine_tp and engine_ep.", "Use rollout.num_engines for replicas."
    given = {
        "moe_dp_size=2": replicas,
        "dp_size=0": replicas,
        "enable_dp_attention=true": "Use rollout.engine_attention_dp.",
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


def test_an_engine_that_only_prefills_is_refused(tmp_path):
    (problem,) = problems_of(tmp_path, ["rollout.sglang.disaggregation_mode=prefill"])
    assert "disaggregation_mode: prefill: engines of a rollout prefill and decode. Leave it out." in problem


def test_graphs_that_a_colocated_engine_cannot_release_are_refused(tmp_path):
    full = "Leave it out, or set cuda_graph_backend_prefill full."
    given = {
        "cuda_graph_backend_prefill=breakable": "Use full or disabled, or leave it out.",
        "cuda_graph_backend_decode=breakable": "Use full or disabled, or leave it out.",
        "disable_prefill_cuda_graph=false": full,
        "cuda_graph_config={}": "Use cuda_graph_backend_prefill and the other fields of their own.",
    }
    for field, instead in given.items():
        (problem,) = problems_of(tmp_path, ["rollout.colocated=true", f"rollout.sglang.{field}"])
        assert problem.startswith(f"rollout.sglang.{field.split('=')[0]}: ")
        assert problem.endswith(instead)
        assert problems_of(tmp_path, [f"rollout.sglang.{field}"]) == []
    for fine in ("cuda_graph_backend_prefill=full", "disable_cuda_graph=true"):
        fields = ["disable_prefill_cuda_graph=false", fine, "cuda_graph_backend_decode=full"]
        overrides = [f"rollout.sglang.{field}" for field in fields]
        assert problems_of(tmp_path, ["rollout.colocated=true", *overrides]) == []


def test_defaults_of_sglangs_are_no_problem(tmp_path):
    fields = ["dp_size=1", "moe_dense_tp_size=null", "enable_eplb=false", "moe_a2a_backend=none", "cpu_offload_gb=0"]
    assert problems_of(tmp_path, [f"rollout.sglang.{field}" for field in fields]) == []


def test_of_kernels_and_loaders_those_that_leave_weights_as_they_come_are_let_through(tmp_path):
    good = ["moe_runner_backend=triton", "fp8_gemm_runner_backend=deep_gemm", "load_format=dummy", "model_impl=sglang"]
    assert problems_of(tmp_path, [f"rollout.sglang.{field}" for field in good]) == []
    kernels = "Use auto or triton or deep_gemm."
    bad = {"moe_runner_backend=flashinfer_trtllm": kernels, "moe_runner_backend=triton_kernel": kernels,
           "moe_runner_backend=marlin": kernels, "fp8_gemm_runner_backend=flashinfer_trtllm": kernels,
           "fp8_gemm_runner_backend=cutlass": kernels, "model_impl=transformers": "Use auto or sglang.",
           "load_format=flash_rl": ""}  # fmt: skip
    for field, instead in bad.items():
        (problem,) = problems_of(tmp_path, [f"rollout.sglang.{field}"])
        name, value = field.split("=")
        start = f"rollout.sglang.{name}: {value}: a resync cannot place weights in such an engine."
        assert problem.startswith(start), field
        assert problem.endswith(instead)


def test_a_gpu_on_which_sglang_would_pack_weights_gets_kernels_that_do_not():
    def words(plain: bool, **given: str) -> list[str]:
        rollout = RolloutConfig(max_trajectory_tokens=100, sglang=given)
        how = {"host": "h", "port": 7, "precision": Precision.bf16, "cuda": True, "seed": 5}
        return engine_arguments(rollout, "m", **how, plain=plain)

    assert not {"--moe-runner-backend", "--fp8-gemm-backend"} & set(words(False))
    for found in (words(True), words(True, moe_runner_backend="triton")):
        assert found[found.index("--moe-runner-backend") + 1] == "triton"
        assert found[found.index("--fp8-gemm-backend") + 1] == "triton"
        assert found.count("--moe-runner-backend") == 1
    for value in ("auto", "deep_gemm"):
        with pytest.raises(ValueError, match=rf"^rollout.sglang.fp8_gemm_runner_backend: {value} stores weights"):
            words(True, fp8_gemm_runner_backend=value)
    assert "deep_gemm" in words(False, fp8_gemm_runner_backend="deep_gemm")


@pytest.mark.parametrize("packs", [False, True])
def test_an_engine_asks_its_machine_for_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path, packs: bool):
    started = []
    monkeypatch.setattr(server, "ServerProcess", lambda name, command, env, log: started.append(command))
    monkeypatch.setattr(server.device, "packs_engine_weights", lambda: packs)
    monkeypatch.setattr(server, "is_block_fp8", lambda path: False)
    rollout = RolloutConfig(max_trajectory_tokens=100)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    server.EngineServer(0, rollout, tmp_path, tmp_path / "log", precision=Precision.bf16, cuda=True, port=7)
    assert ("--moe-runner-backend" in started[0]) == packs
