"""The verdict on each field of SGLang's ServerArgs that `rollout.sglang` could name.

An engine of slimrl serves text models in bfloat16, float32 or block FP8 on one or more nodes to `/generate` with token
ids, answers with log-probs of what it sampled, and is resynced while it runs. Fields that round otherwise (the KV
cache, the output layer) are safe: engines return the log-probs of the distribution that they sampled from, so
`mismatch/*` measures what they change. tests/unit/test_verdicts.py compares the table with the installed version.
"""

from dataclasses import replace

from slimrl.config.verdicts import Judgement, Verdict, judged, table

_SAFE, _SLIMRL, _LAYOUT = Verdict.safe, Verdict.slimrl, Verdict.layout
_SAMPLING, _SECURITY, _NONE = Verdict.sampling, Verdict.security, Verdict.no_effect

_UNTRIED = "is not supported: slimrl has not been tried with it. Leave it out."
_NO_PLACE = "a resync cannot place weights in such an engine."

SAFE = table(
    judged(
        _SAFE,
        "memory of an engine",
        "mem_fraction_static max_total_tokens page_size max_mamba_cache_size mamba_full_memory_ratio "
        "mamba_radix_cache_strategy mamba_track_interval",
    ),
    judged(_SAFE, "memory of an engine", "context_length"),
    judged(
        _SAFE,
        "batches and their order",
        "max_running_requests chunked_prefill_size max_prefill_tokens prefill_max_requests prefill_decode_interval "
        "prefill_decode_interval_min_bs schedule_policy schedule_conservativeness retraction_policy "
        "disable_chunked_prefix_cache disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval "
        "min_free_slots_delay load_balance_method enable_prefill_delayer",
    ),
    judged(
        _SAFE,
        "batches and their order",
        "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
        "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms",
        needs="enable_prefill_delayer",
    ),
    judged(_SAFE, "the prefix cache", "disable_radix_cache radix_eviction_policy radix_eviction_policy_config"),
    judged(
        _SAFE,
        "kernels",
        "attention_backend decode_attention_backend prefill_attention_backend sampling_backend bf16_gemm_backend "
        "linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
        "mamba_backend triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged "
        "disable_flashinfer_autotune flashinfer_autotune_skip_ops enable_fused_qk_norm_rope "
        "enable_fused_moe_sum_all_reduce enable_torch_compile torch_compile_max_bs",
    ),
    judged(
        _SAFE,
        "kernels of experts and of FP8",
        "moe_runner_backend fp8_gemm_runner_backend",
        values=("auto", "triton", "deep_gemm"),
        instead=_NO_PLACE.removesuffix("."),
    ),
    judged(
        _SAFE,
        "how weights are first read",
        "load_format",
        values=("auto", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "dummy"),
        instead=_NO_PLACE.removesuffix("."),
    ),
    judged(
        _SAFE,
        "how weights are first read",
        "model_loader_extra_config startup_weight_load_mode weight_loader_disable_mmap "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load",
    ),
    judged(
        _SAFE,
        "SGLang's own models",
        "model_impl",
        values=("auto", "sglang"),
        instead=_NO_PLACE.removesuffix("."),
    ),
    judged(
        _SAFE,
        "rounding, which mismatch/* measures",
        "kv_cache_dtype quantization_param_path mamba_ssm_dtype enable_fp32_lm_head enable_tf32_matmul "
        "triton_attention_reduce_in_fp32",
    ),
    judged(_SAFE, "results that do not depend on the batch", "enable_deterministic_inference"),
    judged(
        _SAFE,
        "CUDA graphs",
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
        "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding "
        "enable_cudagraph_gc",
    ),
    judged(
        _SAFE,
        "messages between the ranks of an engine",
        "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce pre_warm_nccl dist_timeout enable_p2p_check "
        "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
        "flashinfer_allreduce_fusion_backend",
    ),
    judged(
        _SAFE,
        "drafts, with rollout.speculative",
        "speculative_attention_mode speculative_draft_attention_backend speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth "
        "speculative_ngram_capacity",
    ),
    judged(_SAFE, "processes", "watchdog_timeout soft_watchdog_timeout sleep_on_idle gc_threshold"),
    judged(
        _SAFE,
        "logs and metrics",
        "log_level log_level_http show_time_cost decode_log_interval gc_warning_threshold_secs served_model_name "
        "uvicorn_access_log_exclude_prefixes enable_request_time_stats_logging enable_metrics log_requests",
    ),
    judged(_SAFE, "logs and metrics", "log_requests_level log_requests_format", needs="log_requests"),
    judged(
        _SAFE,
        "logs and metrics",
        "enable_mfu_metrics enable_metrics_for_all_schedulers extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets",
        needs="enable_metrics",
    ),
)
"""What a recipe may set. `reason` says what it is for; docs/configuration.md lists them."""

OF_SLIMRL = table(
    *(
        judged(_SLIMRL, f"is set by {owner}.", fields)
        for owner, fields in {
            "model.path": "model_path tokenizer_path tokenizer_mode tokenizer_backend",
            "model.trust_remote_code": "trust_remote_code",
            "rollout.engine_tp": "tp_size",
            "rollout.engine_ep": "ep_size",
            "rollout.engine_attention_dp": "attn_dp_size",
            "rollout.engine_nodes": "nnodes",
            "rollout.colocated": "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup",
            "rollout.routed_experts": "enable_return_routed_experts",
            "rollout.max_concurrency_per_engine": "max_queued_requests",
            "trainer.precision": "dtype",
            "seed": "random_seed",
            "the config.json of model.path": "json_model_override_args is_embedding model_config_parser",
            "the config.json of model.path. `slimrl-tools quantize` writes a model for engines in FP8 "
            "(docs/algorithms.md#fp8)": "quantization",
            "rollout.speculative.mode": "speculative_algorithm",
            "rollout.speculative.draft_model": "speculative_draft_model_path",
            "rollout.speculative.num_draft_tokens": (
                "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens"
            ),
            "slimrl, for each node of an engine": "node_rank",
            "slimrl, for each engine": "dist_init_addr nccl_port",
            "slimrl, by what the machine has": "device base_gpu_id gpu_id_step use_ray numa_node",
            "slimrl, at each resync": "weight_version",
            "slimrl: a resync places shared experts apart from the routed ones": "disable_shared_experts_fusion",
            "slimrl, which waits for engines itself": "skip_server_warmup warmups",
            "slimrl, which asks for answers by path": "fastapi_root_path",
            "slimrl, which ends processes itself": "custom_sigquit_handler",
            "slimrl: engines read the texts at which a turn stops": "skip_tokenizer_init "
            "disable_tokenizer_batch_decode",
            "slimrl, for each request": "stream_interval incremental_streaming_output",
        }.items()
    ),
    judged(
        _SLIMRL,
        "deletes the checkpoint of model.path, which other engines read too. Leave it out.",
        "delete_ckpt_after_loading",
    ),
    judged(
        _SLIMRL,
        "engines of a rollout prefill and decode. Leave it out.",
        "disaggregation_mode prefill_only_disable_kv_cache enable_pd_role_switch enable_pdmux encoder_only "
        "decoupled_spec_role",
    ),
    judged(
        _SLIMRL,
        "is for debugging SGLang itself. Leave it out.",
        "debug_tensor_dump_output_folder debug_tensor_dump_layers kv_canary kv_canary_real_data "
        "kv_canary_sweep_interval msprobe_dump_config enable_profile_cuda_graph debug_cuda_graph "
        "enable_torch_compile_debug_mode crash_dump_folder enable_layerwise_nvtx_marker spec_trace_dir "
        "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode "
        "log_requests_target "
        "export_metrics_to_file export_metrics_to_file_dir",
    ),
    judged(
        _SLIMRL,
        _UNTRIED,
        "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction "
        "hicache_write_policy hicache_io_backend hicache_mem_layout strip_thinking_cache "
        "tokenizer_worker_num detokenizer_worker_num batch_notify_size enable_streaming_session "
        "load_snapshot_publish_interval "
        "enable_mscclpp enable_torch_symm_mem enable_scattered_sconv boundary_reduction enable_quant_communications "
        "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
        "enable_dp_attention_local_control_broadcast enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered "
        "enable_layernorm_sp disable_attn_tp_gather enable_kv_cache_sharding enable_dsa_cache_layer_split "
        "enable_page_major_kv_layout enable_unified_memory mamba_max_states_per_path enable_linear_replayssm "
        "linear_replayssm_cache_len enable_linear_replayssm_spec enable_int8_mamba_checkpoint int8_mamba_ckpt_size "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds speculative_adaptive "
        "speculative_adaptive_config speculative_boundary_reduction speculative_use_rejection_sampling "
        "speculative_use_block_verification speculative_ngram_external_corpus_path "
        "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens "
        "flashinfer_mxfp4_moe_precision prefill_kv_cache_dequant_dtype enable_lean_attention "
        "speculative_draft_kv_cache_dtype decrypted_config_file decrypted_draft_config_file",
    ),
)
"""Fields that slimrl sets, or does not work with."""

OF_THE_LAYOUT = table(
    *(
        judged(_LAYOUT, f"{_NO_PLACE} {instead}", fields)
        for instead, fields in {
            "Use rollout.num_engines for replicas.": "dp_size moe_dp_size",
            "Use rollout.engine_attention_dp.": "enable_dp_attention",
            "Use rollout.engine_tp and engine_ep.": (
                "pp_size attn_cp_size dcp_size enable_prefill_cp moe_dense_tp_size moe_a2a_backend"
            ),
            "Leave it out.": (
                "dwdp_size dcp_replicate_q_proj enable_cp_decode_attn_tp enable_dp_lm_head "
                "enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp "
                "enable_megamoe_for_layernorm_sp ep_join_rank_offset elastic_ep_initial_size max_ep_size "
                "ep_num_redundant_experts init_expert_location enable_eplb elastic_ep_backend "
                "enable_elastic_expert_backup ep_join_mode enable_waterfill enforce_shared_experts_fusion "
                "enable_paged_experts kt_weight_path kt_num_gpu_experts cpu_offload_gb offload_group_size "
                "modelopt_quant modelopt_checkpoint_restore_path quantize_and_serve rl_quant_profile "
                "custom_weight_loader checkpoint_engine_wait_weights_before_ready weight_cache_mode "
                "enable_nvidia_megakernel enable_amd_monokernel enable_lora lora_paths uno_lora_path "
                "speculative_token_map speculative_draft_model_quantization speculative_draft_load_format "
                "speculative_moe_runner_backend speculative_moe_a2a_backend enable_multi_layer_eagle"
            ),
        }.items()
    ),
)
"""Fields that lay out weights in ways that models/engine_rules.py and the families do not describe."""

OF_SAMPLING = table(
    judged(
        _SAMPLING,
        "is merged under the settings of each request, and the log-probs that come back are those without. Use "
        "rollout.sampling.",
        "preferred_sampling_params",
    ),
    judged(
        _SAMPLING,
        "changes which tokens are drawn, and not the log-probs that come back. Leave it out.",
        "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all",
    ),
    judged(
        _SAMPLING,
        "below 1 engines accept tokens that the policy would not sample. Leave it out.",
        "speculative_accept_threshold_single speculative_accept_threshold_acc",
    ),
    judged(
        _SAMPLING,
        "rounds as another trainer does, whose layers Megatron's are not. deterministic: true repeats a run.",
        "rl_on_policy_target",
    ),
    judged(
        _SAMPLING,
        "cuts off prompts that are too long, of which the trainer gets the whole. Leave it out.",
        "allow_auto_truncate",
    ),
    judged(_SAMPLING, "constrains what is sampled. Leave it out.", "enable_strict_thinking"),
    judged(_SAMPLING, "replaces the tokens of requests. Leave it out.", "debug_tensor_dump_input_file"),
    judged(
        _SAMPLING,
        "attends to a part of the context alone. Leave it out.",
        "enable_hisparse hisparse_config speculative_draft_window_size speculative_draft_sink_size",
    ),
    judged(
        _SAMPLING,
        "keeps KV caches where a resync may leave those of earlier weights. Leave it out.",
        "hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
        "enable_unified_cache_external_linker unified_cache_external_linker_backend "
        "unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv "
        "flexkv_config_file radix_cache_backend enable_session_radix_cache",
    ),
)
"""What engines would sample from another distribution, or of other inputs, than trainer and log-probs say."""

OF_SECURITY = table(
    judged(_SECURITY, "is set by slimrl, for each engine.", "host port"),
    judged(_SECURITY, "is set by slimrl, which gives each run its own keys.", "api_key admin_api_key"),
    judged(
        _SECURITY,
        "slimrl asks its engines over HTTP alone. Leave it out.",
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh enable_http2 "
        "http2_max_concurrent_streams http2_initial_connection_window_size enable_http_worker_reuseport",
    ),
    judged(
        _SECURITY,
        "opens a port that no key of the run protects. Leave it out.",
        "smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads smg_http_sidecar_port "
        "gated_launch_port engine_info_bootstrap_port kv_events_config load_publish_endpoint "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank",
    ),
    judged(
        _SECURITY,
        "sends what engines do to another server. Leave it out.",
        "enable_trace trace_modules otlp_traces_endpoint otlp_service_name",
    ),
    judged(
        _SECURITY,
        "runs code of others in the engine. Leave it out.",
        "enable_custom_logit_processor forward_hooks sidecar sidecar_args stat_loggers tool_server",
    ),
)
"""What opens ports, sets secrets, or runs code."""

WITHOUT_EFFECT = table(
    *(
        judged(_NONE, f"has no effect: {why}.", fields)
        for why, fields in {
            "model.path is a folder": "revision download_dir model_checksum speculative_draft_model_revision",
            "SGLang works it out itself": (
                "uses_mamba_radix_cache aux_hidden_state_capture enable_cp_tp_group_sharing"
            ),
            "slimrl's requests are token ids with settings of their own": (
                "chat_template trust_request_chat_template hf_chat_template_name completion_template reasoning_parser "
                "default_chat_template_kwargs tool_call_parser sampling_defaults enable_response_store "
                "file_storage_path enable_cache_report return_input_ids return_output_ids "
                "stream_response_default_include_usage enable_dynamic_batch_tokenizer "
                "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
                "enable_tokenizer_batch_encode "
                "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels"
            ),
            "SGLang mixes no batches whose requests ask for log-probs": "enable_mixed_chunk",
            "slimrl's requests have no grammar": (
                "grammar_backend disable_outlines_disk_cache constrained_json_whitespace_pattern "
                "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt"
            ),
            "slimrl's requests have no priority": (
                "enable_priority_scheduling disable_priority_preemption default_priority_value "
                "abort_on_priority_when_disabled schedule_low_priority_values_first "
                "priority_scheduling_preemption_threshold"
            ),
            "slimrl asks for tokens, log-probs and routed experts alone": (
                "enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states "
                "return_aux_hidden_state_layer_ids enable_return_indexer_topk sampling_mask_max_tokens enable_mis"
            ),
            "engines of a rollout prefill and decode": (
                "disaggregation_decode_allocation_policy disaggregation_transfer_backend "
                "disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device "
                "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
                "disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots "
                "disaggregation_decode_polling_interval optimistic_prefill_attempts "
                "disaggregation_decode_host_receive_threshold pdmux_config_path sm_group_num"
            ),
            "the models are of text": (
                "language_only language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port "
                "encoder_register_urls enable_adaptive_dispatch_to_encoder enable_multimodal mm_attention_backend "
                "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config "
                "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
                "mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache "
                "image_processor_backend mm_global_cache_backend disable_fast_image_processor mm_feature_transport "
                "asr_max_buffer_seconds asr_max_concurrent_sessions enable_precise_embedding_interpolation"
            ),
            "the models have no sparse attention, no windows and no diffusion": (
                "dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsv4_attn_backend "
                "dsa_paged_mqa_logits_backend dsa_topk_backend enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer "
                "speculative_dsa_topk_backend qsa_indexer_dtype enable_encoder_swa_bounded_replay "
                "enable_decoder_swa_bounded_replay c128_page_size swa_full_tokens_ratio swa_prefix_tails "
                "disable_hybrid_swa_memory cuda_graph_prefill_max_context dllm_algorithm dllm_algorithm_config "
                "dllm_fdfo ple_offload_embedding ple_offload_backend ple_offload_dir"
            ),
            "the models are not in FP4": (
                "fp4_gemm_runner_backend disable_flashinfer_cutlass_moe_fp4_allgather enable_w4a4_mxfp4_megamoe "
                "speculative_enable_w4a4_mxfp4_megamoe"
            ),
            "engines run on NVIDIA's GPUs and on CPUs": (
                "mlx_enable_sampling enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
                "disable_aiter_allreduce_fusion_in_decode fuseep_mode"
            ),
            "it belongs to a field that is refused": (
                "pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking cp_strategy dcp_comm_backend "
                "deepep_v2_mode deepep_mode deepep_dispatcher_output_dtype deepep_config flashinfer_a2a_dispatch_type "
                "mooncake_ib_device ep_dispatch_algorithm eplb_algorithm eplb_rebalance_num_iterations "
                "eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold elastic_ep_scale_timeout "
                "paged_experts_num_resident kt_method kt_cpuinfer kt_threadpool_count "
                "kt_max_deferred_experts_per_token offload_num_in_group offload_prefetch_step offload_mode "
                "modelopt_checkpoint_save_path modelopt_export_path modelexpress_config weight_cache_socket "
                "weight_cache_timeout "
                "remote_instance_weight_loader_seed_instance_ip "
                "remote_instance_weight_loader_seed_instance_service_port "
                "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
                "remote_instance_weight_loader_start_seed_via_transfer_engine enable_lora_overlap_loading "
                "max_lora_rank "
                "lora_target_modules max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend "
                "max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
                "lora_drain_wait_threshold"
            ),
            "rollout.speculative has no such drafts": (
                "speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size "
                "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
                "speculative_dspark_align_verify_tokens_to_graph_tier"
            ),
        }.items()
    ),
)
"""Fields that no engine of slimrl reads."""

SGLANG_VERDICTS = table(SAFE, OF_SLIMRL, OF_THE_LAYOUT, OF_SAMPLING, OF_SECURITY, WITHOUT_EFFECT)
"""The verdict on each field, by its name."""


_ONLY_SCORES = "slimrl: a teacher keeps its memory and its weights, and only scores"

_OWNERS = {
    "teacher.path": "model_path",
    "teacher.engine_tp": "tp_size",
    "teacher.engine_ep": "ep_size",
    "teacher.num_engines": "dp_size attn_dp_size",
    "teacher.engine_tp and teacher.engine_nodes": "pp_size",
    "teacher.engine_nodes": "nnodes",
    "teacher.max_concurrency_per_engine": "max_queued_requests",
    _ONLY_SCORES: (
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_return_routed_experts "
        "disaggregation_mode weight_version"
    ),
}


def _of_teacher(name: str, judgement: Judgement) -> Judgement:
    """The verdict on a field for a teacher: no resync reaches it, so it may hold its weights as it likes, and it drafts
    nothing."""
    if name.startswith("speculative_"):
        return Judgement(verdict=Verdict.no_effect, reason="has no effect: a teacher only scores.")
    if judgement.verdict is Verdict.layout or name in ("quantization", "json_model_override_args"):
        return Judgement(verdict=Verdict.safe, reason="the layout of a teacher's weights")
    return replace(judgement, values=(), instead="")


TEACHER_VERDICTS = {name: _of_teacher(name, judgement) for name, judgement in SGLANG_VERDICTS.items()} | table(
    *(judged(Verdict.slimrl, f"is set by {owner}.", fields) for owner, fields in _OWNERS.items())
)
"""The verdict on each field, by its name."""
