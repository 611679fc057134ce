"""The verdict on each field of megatron-core's TransformerConfig, MLATransformerConfig, OptimizerConfig and
DistributedDataParallelConfig that `trainer.megatron` could name.

slimrl builds a GPTModel, wraps it in DistributedDataParallel, runs packed micro-batches of any length through
megatron-core's schedules, computes log-probs and losses itself, and steps Adam itself (trainer/optimizer.py). What only
megatron.training, inference, other models or FSDP read has no effect. tests/unit/test_verdicts.py compares the table
with the installed version.
"""

from slimrl.config.verdicts import Verdict, judged, table

_SAFE, _MODEL, _SLIMRL, _NONE = Verdict.safe, Verdict.model, Verdict.slimrl, Verdict.no_effect

_FROM_CONFIG = "is the model's: trainer and engines take their layers from the config.json of model.path. Leave it out."
_PACKED = "slimrl packs sequences of any length into its micro-batches, which it does not go with. Leave it out."
_UNTRIED = "is not supported: slimrl has not been tried with it. Leave it out."

SAFE = table(
    judged(
        _SAFE,
        "layers of each pipeline stage",
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
    judged(_SAFE, "memory of a stage's outputs", "deallocate_pipeline_outputs"),
    judged(_SAFE, "messages of virtual pipeline stages", "overlap_p2p_comm_warmup_flush"),
    judged(_SAFE, "activations that are computed again", "recompute_granularity recompute_method"),
    judged(
        _SAFE,
        "activations that are computed again",
        "recompute_num_layers recompute_modules distribute_saved_activations",
        needs="recompute_granularity",
    ),
    judged(_SAFE, "memory of the embedding's output", "clone_scatter_output_in_embedding"),
    judged(_SAFE, "results that do not depend on timing", "deterministic_mode"),
    judged(_SAFE, "rounding", "moe_router_dtype"),
    judged(_SAFE, "rounding of a GPU's matrix products", "disable_bf16_reduced_precision_matmul"),
    judged(_SAFE, "dropout in training", "hidden_dropout attention_dropout"),
    judged(
        _SAFE,
        "fused kernels, chosen by slimrl where they exist",
        "bias_activation_fusion bias_dropout_fusion",
    ),
    judged(
        _SAFE,
        "fused kernels of a GPU, most of them chosen by slimrl where they exist",
        "apply_rope_fusion moe_permute_fusion moe_router_fusion fused_residual_rmsnorm "
        "disable_parameter_transpose_cache",
        transformer_engine=True,
    ),
    judged(_SAFE, "a kernel of apex, chosen by slimrl where it exists", "gradient_accumulation_fusion"),
    judged(_SAFE, "experts of a rank in one kernel", "moe_grouped_gemm", transformer_engine=True),
    judged(
        _SAFE, "kernels of attention", "attention_backend flash_attention_version cp_comm_type", transformer_engine=True
    ),
    judged(
        _SAFE,
        "the embedding's gradient at the end of a pipeline, a kernel of apex",
        "defer_embedding_wgrad_compute",
    ),
    judged(
        _SAFE,
        "the embedding's gradient at the end of a pipeline, a kernel of apex",
        "wgrad_deferral_limit",
        needs="defer_embedding_wgrad_compute",
    ),
    judged(
        _SAFE,
        "messages between expert-parallel ranks",
        "moe_token_dispatcher_type",
        values=("alltoall", "allgather"),
        instead="needs DeepEP, HybridEP or NCCL's, which slimrl does not install",
    ),
    judged(_SAFE, "messages between expert-parallel ranks", "moe_shared_expert_overlap"),
    judged(
        _SAFE,
        "losses that balance the experts",
        "moe_router_load_balancing_type",
        values=("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        instead="chooses experts itself, so engines would compute another model",
    ),
    judged(_SAFE, "losses that balance the experts", "moe_aux_loss_coeff", needs="moe_router_load_balancing_type"),
    judged(_SAFE, "the loss that trains indexers of sparse attention", "dsa_indexer_loss_coeff"),
    judged(_SAFE, "the same of the chosen keys alone", "dsa_indexer_use_sparse_loss", needs="dsa_indexer_loss_coeff"),
    judged(
        _SAFE,
        "kernels of sparse attention on a GPU",
        "dsa_kernel_backend",
        transformer_engine=True,
    ),
    judged(_SAFE, "losses of the routers", "moe_z_loss_coeff moe_router_bias_update_rate"),
    judged(
        _SAFE,
        "FP8 training (docs/algorithms.md#fp8)",
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention "
        "fp8_multi_head_attention first_last_layers_bf16 tp_only_amax_red",
    ),
    judged(
        _SAFE,
        "FP8 training (docs/algorithms.md#fp8)",
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        needs="first_last_layers_bf16",
    ),
    judged(_SAFE, "Adam's rule", "decoupled_weight_decay apply_wd_to_qk_layernorm"),
    judged(_SAFE, "the optimizer's precision", "use_precision_aware_optimizer"),
    judged(
        _SAFE,
        "the optimizer's precision",
        "main_params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        needs="use_precision_aware_optimizer",
    ),
    judged(_SAFE, "the optimizer on the host", "optimizer_cpu_offload"),
    judged(
        _SAFE,
        "the optimizer on the host",
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "pin_cpu_params",
        needs="optimizer_cpu_offload",
    ),
    judged(
        _SAFE,
        "messages between data-parallel ranks",
        "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather bucket_size pad_buckets_for_high_nccl_busbw",
    ),
    judged(_SAFE, "messages between data-parallel ranks", "align_param_gather", needs="overlap_param_gather"),
)
"""What a recipe may set. `reason` says what it is for; docs/configuration.md lists them."""

OF_THE_MODEL = table(
    judged(
        _MODEL,
        _FROM_CONFIG,
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
        "layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit "
        "activation_func "
        "glu_linear_offset activation_func_clamp_value qk_layernorm qk_l2_norm attention_output_gate softmax_scale "
        "softmax_type window_size window_attn_skip_freq rotary_interleaved no_rope_freq mrope_section "
        "apply_query_key_layer_scaling heterogeneous_block_specs mtp_use_repeated_layer",
    ),
    judged(
        _MODEL,
        _FROM_CONFIG,
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim",
    ),
    judged(
        _MODEL,
        _FROM_CONFIG,
        "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads dsa_indexer_n_heads dsa_indexer_head_dim "
        "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved "
        "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32",
    ),
    judged(
        _MODEL,
        _FROM_CONFIG,
        "num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
        "moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax "
        "moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias moe_latent_size "
        "moe_apply_probs_on_input",
    ),
    judged(
        _MODEL,
        "sends tokens to other experts than the model's routers choose, which engines do not. Leave it out.",
        "moe_router_force_load_balancing moe_router_force_biased",
    ),
    judged(
        _MODEL,
        "adds noise to what experts compute, in passes without gradient too, which engines do not. Leave it out.",
        "moe_input_jitter_eps",
    ),
    judged(
        _MODEL,
        "leaves tokens out of experts, which engines do not. Leave it out.",
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
        "moe_expert_rank_capacity_factor",
    ),
    judged(
        _MODEL,
        "is for models that are trained from random weights at several widths: it scales embeddings, attention, logits "
        "and learning rates. Leave it out.",
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
        "mup_attn_scale_power",
    ),
)
"""Fields that decide the function which the weights compute."""

OF_SLIMRL = table(
    *(
        judged(_SLIMRL, f"is set by {owner}.", fields)
        for owner, fields in {
            "trainer.parallel.tensor": "tensor_model_parallel_size",
            "trainer.parallel.pipeline": "pipeline_model_parallel_size",
            "trainer.parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size overlap_p2p_comm batch_p2p_comm",
            "trainer.parallel.expert": "expert_model_parallel_size",
            "trainer.parallel.expert_tensor": "expert_tensor_parallel_size",
            "trainer.parallel.context": "context_parallel_size",
            "trainer.parallel.sequence": "sequence_parallel",
            "trainer.optimizer.lr": "lr",
            "trainer.optimizer.min_lr": "min_lr",
            "trainer.optimizer.weight_decay": "weight_decay",
            "trainer.optimizer.beta1": "adam_beta1",
            "trainer.optimizer.beta2": "adam_beta2",
            "trainer.optimizer.eps": "adam_eps",
            "trainer.optimizer.clip_grad": "clip_grad",
            "trainer.optimizer.distributed": "use_distributed_optimizer",
            "trainer.precision": "bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
            "trainer.fp8": "fp8 fp8_recipe",
            "trainer.megatron.grad_reduce_in_fp32": "main_grads_dtype",
            "trainer.mtp.train and the config.json of model.path": "mtp_num_layers",
            "trainer.mtp.loss_weight": "mtp_loss_scaling_factor",
            "slimrl: the loss of these layers reaches no other weights": "mtp_detach_heads mtp_grad_scale_func",
            "slimrl, by the layout of the pipeline": "variable_seq_lengths mtp_standalone",
            "slimrl, by what the machine has": "transformer_impl",
            "slimrl: the loss is a sum over tokens, divided by the denominator of the update": (
                "calculate_per_token_loss"
            ),
            "algorithm.routing_replay": "moe_enable_routing_replay",
            "slimrl, whose update skips a gradient that is not finite": "check_for_nan_in_grad check_for_large_grads",
            "slimrl, in the model's and the optimizer's passes": (
                "timers finalize_model_grads_func grad_scale_func moe_grad_scale_func no_sync_func grad_sync_func "
                "param_sync_func experimental_attention_variant_loss_scale_func"
            ),
        }.items()
    ),
    judged(
        _SLIMRL,
        "would give the embedding and the output layer a learning rate of their own, and slimrl has one for all "
        "weights. "
        "Use trainer.optimizer.lr and min_lr.",
        "decoupled_lr decoupled_min_lr",
    ),
    judged(_SLIMRL, "slimrl trains with Adam. Leave it out.", "optimizer use_layer_wise_distributed_optimizer"),
    judged(
        _SLIMRL,
        "keeps weights in FP8, which a resync and memory that is released cannot read. Leave it out.",
        "fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
    ),
    judged(_SLIMRL, "belongs to no value of trainer.fp8. Leave it out.", "fp8_quantizer_factory"),
    judged(
        _SLIMRL,
        "FP4 is not supported. trainer.fp8 is the lowest precision.",
        "fp4 fp4_recipe fp4_param fp4_quantizer_factory fp4_param_gather",
    ),
    judged(
        _SLIMRL,
        "stores weights in a form that slimrl's weight maps do not know. Leave it out.",
        "moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size "
        "moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp "
        "mla_down_proj_fusion "
        "use_transformer_engine_op_fuser hetereogenous_dist_checkpoint use_te_activation_func use_kitchen "
        "use_kitchen_attention kitchen_attention_backend quant_recipe",
    ),
    judged(
        _SLIMRL,
        f"is for micro-batches of one shape. {_PACKED[0].upper()}{_PACKED[1:]}",
        "cuda_graph_impl cuda_graph_modules cuda_graph_scope cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph "
        "optimizer_cuda_graph delay_offload_until_cuda_graph mlp_chunks_for_training fused_single_qkv_rope",
    ),
    judged(
        _SLIMRL,
        "needs a forward pass in parts, and slimrl's is one call of the model. Leave it out.",
        "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
        "high_priority_a2a_comm_stream num_microbatches_with_partial_activation_checkpoints",
    ),
    judged(
        _SLIMRL,
        "needs process groups that slimrl does not make. Use trainer.parallel.",
        "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
        "expert_gtp_weight_remat_size hierarchical_context_parallel_sizes hybrid_context_parallel "
        "max_seqlen_per_dp_cp_rank num_distributed_optimizer_instances pipeline_model_parallel_comm_backend",
    ),
    judged(
        _SLIMRL,
        "slimrl makes the number of micro-batches a multiple of the pipeline's stages, and of nothing else. Leave it "
        "out.",
        "microbatch_group_size_per_vp_stage",
    ),
    judged(
        _SLIMRL,
        "needs communication buffers of Transformer Engine that slimrl does not make. Leave it out.",
        "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
    ),
    judged(
        _SLIMRL,
        "pads the tokens of an expert with tokens that its router did not choose, which slimrl's replay and metrics of "
        "routing would take for chosen ones. Leave it out.",
        "moe_router_padding_for_quantization moe_router_padding_for_fp8",
    ),
    judged(
        _SLIMRL,
        "needs DeepEP, HybridEP or NCCL's, which slimrl does not install. Leave it out.",
        "moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_deepep_num_sms "
        "moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
        "moe_hybridep_num_sms_preprocessing moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs "
        "moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash moe_paged_stash_page_size "
        "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu",
    ),
    judged(_SLIMRL, "is set by recompute_granularity: selective and recompute_modules: [moe].", "moe_layer_recompute"),
    judged(
        _SLIMRL,
        "divides by the number of data-parallel ranks, and slimrl by the tokens of the update. Leave it out.",
        "average_in_collective",
    ),
    judged(
        _SLIMRL,
        f"{_UNTRIED} recompute_granularity saves memory of activations.",
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers fine_grained_activation_offloading "
        "offload_modules min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks activation_offload_fraction "
        "fine_grained_offloading_max_inflight_offloads activation_func_fp8_input_store",
    ),
    judged(
        _SLIMRL,
        _UNTRIED,
        "use_te_rng_tracker batch_invariant_mode symmetric_ar_type nccl_ub disable_symmetric_registration "
        "use_ring_exchange_p2p batch_p2p_sync overlap_dispatch_backward_with_experts_wgrad "
        "overlap_param_gather_with_optimizer_step reduce_scatter_with_fp32_accumulation "
        "param_name_patterns_for_fp32_local_accumulation test_mode fp32_residual_connection",
    ),
    judged(
        _SLIMRL,
        "FSDP is not supported: trainer.optimizer.distributed spreads the optimizer. Leave it out.",
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion "
        "suggested_communication_unit_size keep_fp8_transpose_cache fsdp_double_buffer "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy "
        "fsdp_manual_registration megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
        "megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer num_buckets "
        "init_model_with_meta_device",
    ),
)
"""Fields that slimrl sets, or does not work with."""

WITHOUT_EFFECT = table(
    *(
        judged(_NONE, f"has no effect: {why}.", fields)
        for why, fields in {
            "the weights come from model.path": (
                "perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std "
                "embedding_init_method embedding_init_method_std"
            ),
            "slimrl computes log-probs and losses itself": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
            "slimrl's update decides by trainer.optimizer.clip_grad and stop.grad_norm": "grad_norm_skip_threshold",
            "slimrl's update counts no zeros": "log_num_zeros_in_grad",
            "only megatron.training clips attention logits": (
                "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit"
            ),
            "only megatron.training logs this": "moe_per_layer_logging barrier_with_L1_time",
            "the run folder has the settings of a run": "config_logger_dir",
            "attention is Transformer Engine's, or slimrl's on a CPU, with a softmax in float32": (
                "attention_softmax_in_fp32 masked_softmax_fusion"
            ),
            "the models' norms are RMSNorm": "persist_layer_norm memory_efficient_layer_norm",
            "the models' activation is SiLU": "use_fused_weighted_squared_relu",
            "megatron-core reads it nowhere": (
                "moe_token_dropping moe_router_topk_limited_devices apply_residual_connection_post_layernorm "
                "fp8_interval mtp_hybrid_override_pattern"
            ),
            "no value of moe_router_load_balancing_type that slimrl allows reads it": (
                "moe_router_quantile_balancing_ema"
            ),
            "gradients in bf16 and fp32 need no scale": (
                "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
            ),
            "slimrl trains with Adam": (
                "sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec "
                "muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer "
                "lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo "
                "adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps"
            ),
            "the models have no layers of Mamba": (
                "is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads "
                "mamba_training_ssm_states_dtype use_mamba_mem_eff_path"
            ),
            "engines generate, and not megatron-core": (
                "cache_mla_latents flash_decode inference_rng_tracker inference_sampling_seed "
                "nccl_all_reduce_for_prefill "
                "use_inference_optimized_layers inference_fuse_tp_communication inference_disable_triton_nvls_kernels "
                "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
                "inference_moe_token_dispatcher_type inference_cuda_graph_scope mlp_chunks_for_prefill "
                "moe_pad_experts_for_cuda_graph_inference"
            ),
        }.items()
    ),
)
"""Fields that nothing in a run of slimrl reads."""

MEGATRON_VERDICTS = table(SAFE, OF_THE_MODEL, OF_SLIMRL, WITHOUT_EFFECT)
"""The verdict on each field, by its name."""
