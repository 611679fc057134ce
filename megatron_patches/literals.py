"""Text that is replaced in megatron-core: the device "cuda", dtypes of CUDA tensors, assumptions about Adam, an
operation in place."""

from megatron_patches.patching import patch_source

CUDA_TO_CPU = ("device='cuda'", "device='cpu'")
CUDA_TO_CPU_DOUBLE = ('device="cuda"', 'device="cpu"')


def allocate_token_counts_on_cpu() -> None:
    """pipeline_parallel/schedules.py: the token count of a step is allocated on "cuda"."""
    module = "megatron.core.pipeline_parallel.schedules"
    for name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
        patch_source(module, f"forward_backward_{name}", (*CUDA_TO_CPU_DOUBLE, 1))


def return_l2_norm_on_cpu() -> None:
    """utils.py: the norm that gradient clipping uses without Transformer Engine and Apex returns on "cuda"."""
    patch_source("megatron.core.utils", "local_multi_tensor_l2_norm", (*CUDA_TO_CPU_DOUBLE, 1))


def clip_cpu_gradients() -> None:
    """optimizer/clip_grads.py: buffers on "cuda", and a gradient's dtype checked by its type string."""
    module = "megatron.core.optimizer.clip_grads"
    patch_source(module, "get_grad_norm_fp32", (*CUDA_TO_CPU, 3))
    types = ("'torch.cuda.FloatTensor'", "'torch.FloatTensor'", 1)
    patch_source(module, "clip_grad_by_total_norm_fp32", types, (*CUDA_TO_CPU, 1))
    patch_source(module, "count_zeros_fp32", (*CUDA_TO_CPU, 1))


def leave_rope_indices_unpinned() -> None:
    """models/common/embeddings/rope_utils.py: pinning memory raises without a GPU."""
    module = "megatron.core.models.common.embeddings.rope_utils"
    patch_source(module, "get_pos_emb_on_this_cp_rank", (", pin_memory=True", "", 1))


def compare_metadata_on_cpu() -> None:
    """dist_checkpointing/strategies/state_dict_saver.py: a flag that ranks agree on is allocated on "cuda"."""
    module = "megatron.core.dist_checkpointing.strategies.state_dict_saver"
    patch_source(module, "verify_global_md_reuse", (*CUDA_TO_CPU, 1))


def multiply_router_weights_of_another_dtype() -> None:
    """transformer/moe/moe_utils.py: Transformer Engine multiplies no bfloat16 tokens with a router's float32 weights.

    cuBLAS has no such product. Torch converts both and multiplies in float32, as SGLang does. On any device.
    """
    module, given = "megatron.core.transformer.moe.moe_utils", "router_dtype != torch.float64"
    alike = (given, f"{given} and inp.dtype == weight.dtype", 1)
    patch_source(module, "RouterGatingLinearFunction.forward", alike)


def accept_cpu_parameters() -> None:
    """optimizer/optimizer.py: scalars on "cuda", parameter dtypes checked by type strings."""
    module = "megatron.core.optimizer.optimizer"
    patch_source(module, "MixedPrecisionOptimizer.__init__", (*CUDA_TO_CPU, 3))
    patch_source(module, "Float16OptimizerWithFloat16Params.__init__", ("torch.cuda.", "torch.", 6))
    patch_source(module, "FP32Optimizer.__init__", (*CUDA_TO_CPU, 1))


def accept_cpu_shards() -> None:
    """optimizer/distrib_optimizer.py: dtypes of parameters and their shards checked by type strings."""
    module = "megatron.core.optimizer.distrib_optimizer"
    patch_source(module, "DistributedOptimizer._build_model_and_main_param_groups", ("torch.cuda.", "torch.", 6))
    patch_source(module, "DistributedOptimizer.__init__", ("'torch.cuda.", "'torch.", 2))


def add_expert_biases_out_of_place() -> None:
    """transformer/mlp.py: an expert's bias is added in place, to a view of what the linear layer returned.

    Autograd refuses it for Megatron's own layers, so that experts with biases (gpt-oss) could not train.
    """
    added = "output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)"
    patch_source(
        "megatron.core.transformer.mlp", "MLP.forward", (f"output += {added}", f"output = output + {added}", 1)
    )


def keep_steps_of_torch_adam() -> None:
    """optimizer/distrib_optimizer.py: torch's Adam, which replaces Transformer Engine's and apex's, has a step tensor.

    `state_dict` asserts that there is a step, but loading calls it before the first step.
    `load_state_dict` gives all parameters one step tensor, which torch then increments once per parameter.
    `_set_main_param_and_optimizer_states` copies every key of torch's state, but the source has no step.
    """
    module = "megatron.core.optimizer.distrib_optimizer"
    values = 'inner_state_dict["state"].values()]))'
    patch_source(module, "DistributedOptimizer.state_dict", (values, values[:-1] + " or [0.0])", 1))
    patch_source(
        module, "DistributedOptimizer.load_state_dict", ('s["step"] = step\n', 's["step"] = step.clone()\n', 1)
    )
    keys = ("for key in dst_tensors:", "for key in dst_tensors.keys() & tensors.keys():", 1)
    patch_source(module, "DistributedOptimizer._set_main_param_and_optimizer_states", keys)
