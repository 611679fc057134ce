"""The layers of a model in which some layers are gated delta nets, built of local or of Transformer Engine's layers."""

import copy
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from megatron.core.jit import jit_fuser
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor


class DeltaNet(GatedDeltaNet):
    """A gated delta net as published models have it.

    1. The norm of the result is not zero-centred, though the model's other norms may be.
    2. The decay is computed in float32 from its bfloat16 parameter, as SGLang and transformers do.
    """

    def __init__(self, config: Any, submodules: GatedDeltaNetSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        self.out_norm = build_module(
            submodules.out_norm, config=plain, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )

    @jit_fuser
    def _compute_g_and_beta(self, A_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return -A_log.float().exp() * F.softplus(alpha.float() + dt_bias), beta.sigmoid()


def with_delta_nets(layers: list[ModuleSpec], config: Any, backend: BackendSpecProvider) -> list[ModuleSpec]:
    """The specs of a model's layers, with delta nets in place of attention where the config has them."""
    pattern = get_linear_attention_pattern(config)
    return [
        _delta_net_layer(layer, backend) if linear else layer for layer, linear in zip(layers, pattern, strict=True)
    ]


def _delta_net_layer(layer: ModuleSpec, backend: BackendSpecProvider) -> ModuleSpec:
    """The spec of a layer with a delta net. The input norm keeps the key in checkpoints that Transformer Engine's fused
    layer gives it."""
    fused: Any = backend.column_parallel_layer_norm_linear()
    norm: Any = backend.layer_norm(rms_norm=True, for_qk=False)
    attention = ModuleSpec(
        module=DeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=fused or backend.column_parallel_linear(), out_norm=norm, out_proj=backend.row_parallel_linear()
        ),
    )
    keys = {} if fused else {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    submodules = replace(
        layer.submodules,
        self_attention=attention,
        input_layernorm=IdentityOp if fused else norm,
        sharded_state_dict_keys_map={**layer.submodules.sharded_state_dict_keys_map, **keys},
    )
    return ModuleSpec(module=layer.module, params=layer.params, submodules=submodules)
