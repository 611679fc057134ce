"""Random weights of a model, tensor by tensor by the family's weight map."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slimrl.base.seeds import derive_seed
from slimrl.models.family import family_of
from slimrl.models.weight_map import WeightMap

EXPERT_BIAS_STD = 0.01
"""Standard deviation of the expert bias; small, so that all experts are chosen."""

DELTA_NET_NORM = ".linear_attn.norm.weight"
"""End of the name of a norm that multiplies by its weight whatever a model's other norms do"""


def random_tensors(
    hf_config: dict[str, Any], weight_map: WeightMap, std: float, seed: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model in the order of the map's specs, each from its own seed. Norms multiply by 1."""
    zero_centred = family_of(hf_config).megatron_config(hf_config).zero_centred_norms
    for tensor in weight_map.hf_tensors.values():
        if _is_norm(tensor.name):
            zero = zero_centred and not tensor.name.endswith(DELTA_NET_NORM)
            value = torch.full(tensor.shape, 0.0 if zero else 1.0, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(derive_seed(seed, tensor.name))
            spread = EXPERT_BIAS_STD if tensor.name.endswith("e_score_correction_bias") else std
            value = torch.empty(tensor.shape, dtype=dtype).normal_(0.0, spread, generator=generator)
        yield from ((name, value) for name in tensor.names)


def _is_norm(name: str) -> bool:
    return name.endswith(("norm.weight", ".pre_fc_norm_embedding.weight", ".pre_fc_norm_hidden.weight"))
