"""Layers: norms, core attention, gated delta nets, and the down projections of multi-latent attention."""

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F

from megatron_patches.patching import patch_attr


def complete_local_norms() -> None:
    """transformer/torch_norm.py refuses sequence parallelism and zero-centred weights.

    For the first it only lacks the `sequence_parallel` attribute on its parameters, by which
    distributed/finalize_model_grads.py finds the gradients to reduce over the tensor-parallel group. The second are
    Qwen3-Next's. With a GPU the tools build such layers to learn their shapes.
    """
    from megatron.core.transformer import torch_norm

    def new(
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> torch.nn.Module:
        refused = ["persist_layer_norm", "memory_efficient_layer_norm"]
        if config.normalization != "RMSNorm":
            refused.append("layernorm_zero_centered_gamma")
        for name in refused:
            if getattr(config, name):
                raise ValueError(f"trainer.megatron.{name} needs Transformer Engine or Apex")
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        kind = ZeroCentredRMSNorm if config.layernorm_zero_centered_gamma else kinds[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    patch_attr(torch_norm.WrappedTorchNorm, "__new__", staticmethod(new))


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """Multiplies by 1 + weight, in float32."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


def offer_delta_nets() -> None:
    """models/gpt/gpt_layer_specs.py refuses gated delta nets.

    Those that experimental_attention_variant_module_specs.py offers exist with Transformer Engine alone, and centre
    around zero a norm that Qwen3-Next centres around one (delta_net.py). On any device.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs

    original = gpt_layer_specs.get_gpt_decoder_layer_specs

    @functools.wraps(original)
    def specs(config: Any, use_transformer_engine: bool, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant != "gated_delta_net":
            return original(config, use_transformer_engine, *args, **kwargs)
        from megatron_patches.delta_net import with_delta_nets

        plain = copy.copy(config)
        plain.experimental_attention_variant = None
        layers = original(plain, use_transformer_engine, *args, **kwargs)
        backend = gpt_layer_specs.TESpecProvider() if use_transformer_engine else LocalSpecProvider()
        return with_delta_nets(layers, config, backend)

    patch_attr(gpt_layer_specs, "get_gpt_decoder_layer_specs", specs)


def offer_sparse_attention() -> None:
    """models/gpt/gpt_layer_specs.py refuses DeepSeek's sparse attention, which other files of it have (DeepSeek-V3.2,
    GLM-5).

    Its specification asks for a linear layer that every rank holds whole, which Megatron's own layers lack, and
    absorbed_mla.py takes down projections of the classes that it knows alone. On any device.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    from megatron_patches.replicated_linear import ReplicatedLinear

    LocalSpecProvider.linear = lambda self: ReplicatedLinear  # type: ignore[attr-defined]
    absorbed_mla.Linear = ReplicatedLinear
    original = gpt_layer_specs.get_gpt_decoder_layer_specs

    @functools.wraps(original)
    def specs(config: Any, use_transformer_engine: bool, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, use_transformer_engine, *args, **kwargs)
        plain = copy.copy(config)
        plain.experimental_attention_variant = None
        backend = gpt_layer_specs.TESpecProvider() if use_transformer_engine else LocalSpecProvider()
        attention = get_dsa_module_spec_for_backend(config, backend)
        layers = original(plain, use_transformer_engine, *args, **kwargs)
        for layer in layers:
            layer.submodules = dataclasses.replace(layer.submodules, self_attention=attention)
        return layers

    patch_attr(gpt_layer_specs, "get_gpt_decoder_layer_specs", specs)


def compute_delta_rule_in_torch() -> None:
    """ssm/gated_delta_net needs the kernels of flash-linear-attention, which need a GPU.

    Without a GPU, or where that package is missing, plain torch computes the same (delta_rule.py). With a GPU a run is
    refused without the package, since training would take many times as long; the tools that only need shapes work.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.ssm.gated_delta_net import common, gdn

    from megatron_patches import delta_rule

    if common.HAVE_FLA and torch.cuda.is_available():
        return
    common.HAVE_FLA = gated_delta_net.HAVE_FLA = True
    for name in ("causal_conv1d", "chunk_gated_delta_rule", "l2norm"):
        # Not patch_attr: the old value may be None, of which everything is a copy.
        for module in (gated_delta_net, common, gdn):
            if hasattr(module, name):
                setattr(module, name, getattr(delta_rule, name))


def offer_core_attention() -> None:
    """models/backends.py offers DotProductAttention, which cannot train here.

    It refuses context parallelism, packed sequences, and the head sizes that multi_latent_attention.py passes.
    """
    from megatron.core.models.backends import LocalSpecProvider

    from megatron_patches.core_attention import CoreAttention

    patch_attr(LocalSpecProvider, "core_attention", lambda self: CoreAttention)


def offer_attention_of_transformer_engine() -> None:
    """models/backends.py offers DotProductAttention, which refuses packed sequences and context parallelism.

    A model with adapters has Megatron's own linear layers also where Transformer Engine is installed. Its attention is
    Transformer Engine's there, as with all other layers.
    """
    from megatron.core.models import backends

    patch_attr(backends.LocalSpecProvider, "core_attention", lambda self: backends.TEDotProductAttention)


def replicate_mla_down_projections() -> None:
    """models/gpt/gpt_layer_specs.py: the local spec of multi-latent attention has wrong gradients under TP.

    It shards the down projections and gathers their output (multi_latent_attention.py) with an operation whose
    backward splits the gradient instead of reducing it, while the positional key feeds only this rank's heads.
    Replicated layers, as in the Transformer Engine spec, give the right gradient and equal parameter shapes. On any
    device.
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

    patch_attr(gpt_layer_specs, "get_gpt_layer_local_spec", spec)


def keep_query_without_norm() -> None:
    """transformer/mla_qk_norm_config.py: an uncompressed query gets a norm that its model lacks.

    With `qk_layernorm` and no `q_lora_rank` (Moonlight, DeepSeek-V2-Lite) only the latent of keys and values has a
    norm. The resolver refuses the local spec, which names a norm for the query, and puts Transformer Engine's fused
    norm before `linear_q_proj`. The patch keeps the projection of the spec. On any device.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    original = QKNormConfigResolver._mla_fused_linear_or_default

    def given_or_default(self: Any, given: Any, name: str) -> Any:
        if name == "linear_q_proj":
            return given or self.linear_impl
        return original(self, given, name)

    patch_attr(QKNormConfigResolver, "_mla_fused_linear_or_default", given_or_default)
    patch_attr(QKNormConfigResolver, "_raise_unused_q_norm", lambda self: None)


def name_replicated_linear() -> None:
    """transformer/multi_latent_attention.py leaves `Linear` empty without Transformer Engine.

    The class is megatron-core's own and needs no Transformer Engine; a down projection must be of a class known there.
    """
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.Linear = multi_latent_attention.Linear or Linear
