"""Megatron's optimizers on CPU parameters, and over torch's Adam where Transformer Engine and Apex are absent."""

from megatron_patches.respell import respell


def respell_mixed_precision() -> None:
    """optimizer/optimizer.py:473-485, 671-699, 907: scalars on "cuda", parameter dtypes told by type strings."""
    module = "megatron.core.optimizer.optimizer"
    respell(module, "MixedPrecisionOptimizer.__init__", ("device='cuda'", "device='cpu'", 3))
    respell(module, "Float16OptimizerWithFloat16Params.__init__", ("torch.cuda.", "torch.", 6))
    respell(module, "FP32Optimizer.__init__", ("device='cuda'", "device='cpu'", 1))


def respell_distributed() -> None:
    """optimizer/distrib_optimizer.py: type strings at 361, 420 and 582, and torch's Adam, which keeps a step tensor.

    Line 641 asserts that there is a step, though loading calls `state_dict()` on an optimizer that has taken none.
    Line 825 gives all parameters one step tensor, which torch then increments once per parameter. Line 940 copies
    every key of torch's state, the step included, from tensors that lack it.
    """
    module = "megatron.core.optimizer.distrib_optimizer"
    respell(module, "DistributedOptimizer._build_model_and_main_param_groups", ("torch.cuda.", "torch.", 6))
    respell(module, "DistributedOptimizer.__init__", ("'torch.cuda.", "'torch.", 2))
    values = 'inner_state_dict["state"].values()]))'
    respell(module, "DistributedOptimizer.state_dict", (values, values[:-1] + " or [0.0])", 1))
    respell(module, "DistributedOptimizer.load_state_dict", ('s["step"] = step\n', 's["step"] = step.clone()\n', 1))
    keys = ("for key in dst_tensors:", "for key in dst_tensors.keys() & tensors.keys():", 1)
    respell(module, "DistributedOptimizer._set_main_param_and_optimizer_states", keys)
