"""Names that settings have elsewhere -> ours, for the hints of unknown keys.

They are arguments of slime (slime/utils/arguments.py), keys of verl (verl/trainer/config/ppo_trainer.yaml), those of
Megatron-LM and SGLang that these take too, and a few that everybody says. A name of several parts is the end of a key.
What stands behind a colon is the value that has the effect.
"""

UPDATES = "trainer.updates_per_rollout (updates of a step; its trajectories are divided among them)"
RANKS = "trainer.num_ranks (GPUs of the trainer on all nodes together)"
TOKENS = "trainer.max_tokens_per_rank (micro-batches are packed by tokens)"
DATA = "trainer.num_ranks (data-parallel is what the other sizes of trainer.parallel leave of them)"
ENGINE_COUNT = "rollout.num_engines (each has rollout.engine_tp GPUs)"
RECOMPUTE = "trainer.megatron.recompute_granularity (full needs recompute_method and recompute_num_layers)"

TENSOR = ("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size")
EXPERT = ("ep", "ep_size", "expert_parallel_size", "expert_model_parallel_size")
ENGINES = ("rollout", "rollout.sglang", "teacher", "teacher.sglang")

ALIASES: dict[str, str] = {
    # the algorithm
    **dict.fromkeys(("advantage_estimator", "adv_estimator"), "algorithm.name"),
    **dict.fromkeys(("eps_clip", "clip_ratio", "clip_ratio_low", "clip_eps", "cliprange"), "algorithm.clip_low"),
    "algorithm.epsilon": "algorithm.clip_low",
    **dict.fromkeys(("eps_clip_high", "clip_ratio_high"), "algorithm.clip_high"),
    **dict.fromkeys(("eps_clip_c", "clip_ratio_c"), "algorithm.dual_clip"),
    **dict.fromkeys(("kl_loss_coef", "use_kl_loss", "kl_beta", "algorithm.beta"), "algorithm.kl_coef"),
    **dict.fromkeys(("kl_loss_type", "kl_penalty"), "algorithm.kl_estimator"),
    "use_kl_in_reward": "algorithm.kl_place: reward",
    "entropy_coeff": "algorithm.entropy_coef",
    "loss_agg_mode": "algorithm.aggregation",
    **dict.fromkeys(("norm_adv_by_std_in_grpo", "disable_grpo_std_normalization"), "algorithm.advantage: dr_grpo"),
    "normalize_advantages": "algorithm.whiten",
    "use_tis": "algorithm.correction.level: token",
    "tis_clip": "algorithm.correction.high",
    "tis_clip_low": "algorithm.correction.low",
    "use_rollout_logprobs": "algorithm.old_policy: rollout",
    "use_routing_replay": "algorithm.routing_replay: train",
    "use_rollout_routing_replay": "algorithm.routing_replay: rollout",
    "over_sampling_batch_size": "algorithm.dynamic_sampling.oversampling (a multiple of rollout.prompts_per_step)",
    "dynamic_sampling_filter_path": "algorithm.dynamic_sampling.refill: order",
    "gamma": "critic.discount",
    **dict.fromkeys(("lambd", "lam"), "critic.gae_lambda"),
    "cliprange_value": "critic.value_clip",
    **dict.fromkeys(("critic_warmup", "num_critic_only_steps"), "critic.warmup_steps"),
    # the rollout
    **dict.fromkeys(
        ("rollout_batch_size", "train_batch_size", "rollout.batch_size", "num_prompts"), "rollout.prompts_per_step"
    ),
    **dict.fromkeys(
        ("n_samples_per_prompt", "rollout.n", "sampling.n", "num_generations", "group_size"),
        "rollout.samples_per_prompt",
    ),
    **dict.fromkeys(
        ("max_response_len", "max_response_length", "rollout_max_response_len", "response_length"),
        "rollout.sampling.max_new_tokens (of a turn)",
    ),
    **dict.fromkeys(("rollout_max_context_len", "max_model_len"), "rollout.max_trajectory_tokens"),
    **dict.fromkeys(("rollout_max_prompt_len", "max_prompt_len", "max_prompt_length"), "data.max_prompt_tokens"),
    "rollout_temperature": "rollout.sampling.temperature",
    "rollout_top_p": "rollout.sampling.top_p",
    "rollout_top_k": "rollout.sampling.top_k",
    **dict.fromkeys(("num_gpus_per_engine", "rollout_num_gpus_per_engine"), "rollout.engine_tp"),
    **{f"{engine}.{name}": f"{engine.partition('.')[0]}.engine_tp" for engine in ENGINES for name in TENSOR},
    **{f"{engine}.{name}": f"{engine.partition('.')[0]}.engine_ep" for engine in ENGINES for name in EXPERT},
    **dict.fromkeys(("rollout_num_gpus", "rollout.num_gpus", "rollout.dp", "rollout.dp_size"), ENGINE_COUNT),
    "rollout.data_parallel_size": ENGINE_COUNT,
    **dict.fromkeys(("colocate", "hybrid_engine"), "rollout.colocated"),
    **dict.fromkeys(("gpu_memory_utilization", "sglang_mem_fraction_static"), "rollout.sglang.mem_fraction_static"),
    **dict.fromkeys(("agent.max_steps", "rollout.max_steps", "max_assistant_turns"), "rollout.max_turns"),
    "partial_rollout": "rollout.oversample (above 1: groups that have not ended go on in the next step)",
    "custom_generate_function_path": "agent.episode",
    "apply_chat_template_kwargs": "agent.chat_template_kwargs",
    **dict.fromkeys(("custom_rm_path", "rm_type", "custom_reward_function"), "reward.function"),
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"), "reward.function (written module:function)"
    ),
    "update_weight_buffer_size": "resync.bucket_bytes",
    "update_weight_transport": "resync.transport",
    "update_weight_disk_dir": "resync.dir",
    # the trainer
    **dict.fromkeys(("global_batch_size", "ppo_mini_batch_size", "mini_batch_size", "num_steps_per_rollout"), UPDATES),
    **dict.fromkeys(
        ("ppo_epochs", "num_iterations"),
        "trainer.updates_per_rollout (updates of a step; each trajectory is in one of them)",
    ),
    **dict.fromkeys(
        ("max_tokens_per_gpu", "ppo_max_token_len_per_gpu", "micro_batch_size", "ppo_micro_batch_size_per_gpu"), TOKENS
    ),
    **dict.fromkeys(
        ("micro_batch_size_per_gpu", "use_dynamic_batch_size", "use_dynamic_bsz", "gradient_accumulation_steps"), TOKENS
    ),
    **dict.fromkeys(("actor_num_nodes", "actor_num_gpus_per_node", "num_nodes", "nnodes", "n_gpus_per_node"), RANKS),
    **dict.fromkeys(("num_gpus", "num_gpus_per_node", "world_size"), RANKS),
    **dict.fromkeys(TENSOR, "trainer.parallel.tensor"),
    **dict.fromkeys(("pp", "pp_size", "pipeline_model_parallel_size"), "trainer.parallel.pipeline"),
    **dict.fromkeys(EXPERT, "trainer.parallel.expert"),
    **dict.fromkeys(("etp", "expert_tensor_parallel_size"), "trainer.parallel.expert_tensor"),
    **dict.fromkeys(("cp", "context_parallel_size", "ulysses_sequence_parallel_size"), "trainer.parallel.context"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size", "parallel.data"), DATA),
    **dict.fromkeys(("sequence_parallel", "sp"), "trainer.parallel.sequence"),
    **dict.fromkeys(("vpp", "vpp_size"), "trainer.parallel.virtual_pipeline"),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing", "recompute"), RECOMPUTE),
    "megatron.seq_length": "rollout.max_trajectory_tokens",
    "learning_rate": "trainer.optimizer.lr",
    "betas": "trainer.optimizer.beta1 (and beta2)",
    "grad_clip": "trainer.optimizer.clip_grad",
    **dict.fromkeys(
        ("lr_warmup_steps", "lr_warmup_iters", "optimizer.warmup_steps"), "trainer.optimizer.warmup_updates"
    ),
    **dict.fromkeys(("lr_decay_style", "warmup_style"), "trainer.optimizer.schedule"),
    "adam_beta1": "trainer.optimizer.beta1",
    "adam_beta2": "trainer.optimizer.beta2",
    "log_probs_chunk_size": "trainer.logprob_chunk_tokens",
    # the run
    **dict.fromkeys(
        (
            *("num_rollout", "num_epoch", "num_epochs", "epochs", "total_epochs"),
            *("total_training_steps", "train_iters", "max_steps"),
        ),
        "steps (each takes rollout.prompts_per_step prompts)",
    ),
    **dict.fromkeys(("save_interval", "save_freq", "save_steps", "checkpoint.steps"), "checkpoint.every_steps"),
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    **dict.fromkeys(("default_local_dir", "output_dir", "save", "save_dir"), "run.dir"),
    "checkpoint.dir": "run.dir (a run's folder there holds its checkpoints)",
    "experiment_name": "run.name",
    **dict.fromkeys(("use_wandb", "wandb_mode"), "tracking.wandb"),
    **dict.fromkeys(("project_name", "tracking.project"), "tracking.wandb_project"),
    **dict.fromkeys(("eval_interval", "test_freq", "eval.steps", "eval.interval"), "eval.every_steps"),
    "val_before_train": "eval.at_start",
    "skip_eval_before_train": "eval.at_start: false",
    **dict.fromkeys(
        ("n_samples_per_eval_prompt", "eval.n_samples_per_prompt", "eval.n", "eval.num_samples"),
        "eval.samples_per_prompt",
    ),
    "eval_temperature": "rollout.eval_sampling.temperature",
    "eval_max_response_len": "rollout.eval_sampling.max_new_tokens",
    **dict.fromkeys(("hf_checkpoint", "model_name_or_path", "name_or_path", "model.name", "model.load"), "model.path"),
    **dict.fromkeys(("prompt_data", "train_files", "train_file"), "data.train"),
    **dict.fromkeys(("eval_prompt_data", "val_files", "val_file"), "data.eval (a section of names and files)"),
    **dict.fromkeys(("input_key", "prompt_key", "data.prompt"), "data.keys.prompt"),
    **dict.fromkeys(("label_key", "data.label"), "data.keys.label"),
}

WITHOUT_SECTION = {"max_tokens": "rollout.sampling.max_new_tokens (of a turn; of an example, sft.max_tokens)"}
"""Names that mean another setting than the one of this name where they stand without a section"""

NO_SETTINGS = {
    "resume": "It is an option of the command: --resume.",
    "optimizer.name": "The optimizer is Adam.",
    "optimizer.type": "The optimizer is Adam.",
    "teacher.temperature": (
        "A teacher scores tokens at temperature 1; rollout.sampling.temperature, the policy's, must be 1 too."
    ),
    # The config.yaml of older runs has it.
    "teacher.threads_per_engine": (
        "A teacher's engines have the threads of rollout.threads_per_engine. Leave the line out."
    ),
}
"""What has such a name elsewhere and is no setting of a recipe -> what to do."""


def no_setting(key: str) -> str | None:
    """What is said of a key that ends in a name of `NO_SETTINGS`."""
    return next((said for end, said in NO_SETTINGS.items() if f".{key}".endswith(f".{end}")), None)


def alias_of(key: str) -> str | None:
    """Our setting for a key that ends in a name of the table; the longest one counts."""
    parts = key.replace("-", "_").lower().split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ALIASES[end] for end in ends if end in ALIASES), None)
