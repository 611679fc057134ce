"""The offloaded optimizer: its state and its update are on the host, with copies of the GPU's parameters."""

from typing import Any

import torch

from megatron_patches.patching import patch_attr, patch_source


def start_offloaded_state_at_zero() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py creates its state by an update with random gradients.

    Loading does so before the first update (distrib_optimizer.py), and the update changes the model's weights. Zero
    moments are the right state before the first update, and can be saved. On any device.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def dummy_step(self: Any) -> None:
        for optimizer in self.sub_optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                # Torch's Adam counts steps per parameter, others per group.
                if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                    state.setdefault("step", torch.tensor(0.0))
        self._sync_sub_optimizers_state_to_hdo()

    patch_attr(HybridDeviceOptimizer, "dummy_step", dummy_step)


def keep_classes_out_of_offloaded_state() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py keeps optimizer classes in its parameter groups.

    A checkpoint with them cannot be loaded: dist_checkpointing/serialization.py reads plain values only. Nothing reads
    the classes. On any device.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def state_dict(self: Any) -> dict[str, Any]:
        state = torch.optim.Optimizer.state_dict(self)
        groups = state["param_groups"]
        plain = [{name: value for name, value in group.items() if not isinstance(value, type)} for group in groups]
        return {**state, "param_groups": plain}

    owner: Any = HybridDeviceOptimizer
    owner.state_dict = state_dict


def offload_cpu_parameters() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py offloads only parameters of a GPU, to pinned memory.

    Without a GPU it offloads the fraction of all parameters into plain copies, so that the same code computes the
    update. optimizer/optimizer_config.py checks the version of Transformer Engine, which is absent.
    """
    module = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    patch_source(
        module,
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        ("for param in params if param.is_cuda])", "for param in params])", 1),
        (" and param.is_cuda:", ":", 1),
        (".cpu().pin_memory()", "", 1),
        ("if param.is_cuda:\n", "if not cpu_copy:\n", 1),
    )
    pinned = ("pin_memory=self.pin_cpu_grads, ", "", 1)
    patch_source(module, "HybridDeviceOptimizer._set_sub_optimizer_grads", pinned)
    version = ('not is_te_min_version("2.1.0")', "True", 1)
    patch_source("megatron.core.optimizer.optimizer_config", "OptimizerConfig.__post_init__", version)
