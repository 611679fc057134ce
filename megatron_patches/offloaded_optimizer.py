"""The optimizer whose state and update are on the host, of which parameters of a GPU have copies there."""

from typing import Any

import torch

from megatron_patches.respell import rebind, respell


def start_offloaded_state_at_zero() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py:453 makes its state by an update with random gradients.

    Loading calls it for an optimizer that made no update (distrib_optimizer.py:730), and it moves the model's weights.
    Zero moments, from which the first update starts, serve as well, and let such an optimizer be saved. On any device.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def dummy_step(self: Any) -> None:
        for optimizer in self.sub_optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                # Torch's Adam counts its steps with each parameter, others with a group.
                if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
                    state.setdefault("step", torch.tensor(0.0))
        self._sync_sub_optimizers_state_to_hdo()

    rebind(HybridDeviceOptimizer, "dummy_step", dummy_step)


def keep_classes_out_of_offloaded_state() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py:58 has its optimizers' classes among the values of each group.

    A checkpoint of it can then not be loaded: dist_checkpointing/strategies/common.py:89 reads plain values alone.
    Nothing takes the classes from there. On any device.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def state_dict(self: Any) -> dict[str, Any]:
        state = torch.optim.Optimizer.state_dict(self)
        groups = state["param_groups"]
        plain = [{name: value for name, value in group.items() if not isinstance(value, type)} for group in groups]
        return {**state, "param_groups": plain}

    owner: Any = HybridDeviceOptimizer
    owner.state_dict = state_dict


def respell_offloading() -> None:
    """optimizer/cpu_offloading/hybrid_optimizer.py:92-99 and 251-284 copy parameters of a GPU to pinned memory alone.

    Without a GPU the fraction that is offloaded is that of all parameters, and copies are copies, so that the same code
    computes the update. optimizer/optimizer_config.py:382 asks for the version of a Transformer Engine that is absent.
    """
    module = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    respell(
        module,
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        ("for param in params if param.is_cuda])", "for param in params])", 1),
        (" and param.is_cuda:", ":", 1),
        (".cpu().pin_memory()", "", 1),
        ("if param.is_cuda:\n", "if not cpu_copy:\n", 1),
    )
    pinned = ("pin_memory=self.pin_cpu_grads, ", "", 1)
    respell(module, "HybridDeviceOptimizer._set_sub_optimizer_grads", pinned)
    version = ('not is_te_min_version("2.1.0")', "True", 1)
    respell("megatron.core.optimizer.optimizer_config", "OptimizerConfig.__post_init__", version)
