"""Layers of the local spec: norms, core attention, and the down projections of multi-latent attention."""

import functools
from typing import Any

import torch

from megatron_patches.respell import rebind


def accept_sequence_parallel_norms() -> None:
    """transformer/torch_norm.py:32 refuses sequence parallelism.

    All it lacks is the `sequence_parallel` mark on its parameters, by which distributed/finalize_model_grads.py:354
    finds the gradients to add up over the tensor-parallel group.
    """
    from megatron.core.transformer import torch_norm

    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

    def new(
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> torch.nn.Module:
        for name in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
            if getattr(config, name):
                raise ValueError(f"trainer.megatron.{name} needs Transformer Engine or Apex")
        norm = norms[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    rebind(torch_norm.WrappedTorchNorm, "__new__", staticmethod(new))


def offer_core_attention() -> None:
    """models/backends.py:103 offers DotProductAttention, which lacks what training needs.

    transformer/dot_product_attention.py:58 refuses context parallelism, line 155 refuses packed sequences, and
    multi_latent_attention.py:148 passes head sizes that it does not take.
    """
    from megatron.core.models.backends import LocalSpecProvider

    from megatron_patches.core_attention import CoreAttention

    rebind(LocalSpecProvider, "core_attention", lambda self: CoreAttention)


def replicate_mla_down_projections() -> None:
    """models/gpt/gpt_layer_specs.py:369: the local spec of multi-latent attention has wrong gradients under TP.

    It shards the down projections and gathers their output (multi_latent_attention.py:634) with an operation whose
    backward splits instead of adding up, while the positional key feeds this rank's heads alone. Replicated layers,
    as the Transformer Engine spec has them, give the right gradient and equal parameter shapes. On any device.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.post_training.modelopt.layers import Linear

    original = gpt_layer_specs.get_gpt_layer_local_spec

    @functools.wraps(original)
    def spec(*args: Any, **kwargs: Any) -> Any:
        layer = original(*args, **kwargs)
        submodules = layer.submodules.self_attention.submodules
        if hasattr(submodules, "linear_kv_down_proj"):
            submodules.linear_q_down_proj = submodules.linear_kv_down_proj = Linear
        return layer

    rebind(gpt_layer_specs, "get_gpt_layer_local_spec", spec)
