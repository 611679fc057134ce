"""INT4 as compressed-tensors packs it (`pack-quantized`), the format of Kimi-K2-Thinking and Kimi-K2.5: reading alone.

    weight[m, n] = (nibble[m, n] - 8) * scale[m, n // group]

Eight columns are in an int32, the first in its lowest bits. The matrix `X.weight` is stored as `X.weight_packed`,
`X.weight_scale` and `X.weight_shape`.

Dimensions: M rows and N columns of a matrix, W words and G groups of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimrl.models.hf_config import INT4_PER_WORD

_ZERO = 8
"""Nibble of the value 0."""

_KNOWN: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}


@dataclass(frozen=True, kw_only=True)
class PackedInt4:
    """The `quantization_config` of a config.json for this format."""

    group: int
    """Number of columns with a common scale."""

    @classmethod
    def of_config(cls, hf_config: dict[str, Any]) -> "PackedInt4 | None":
        """The `quantization_config` of a config; None without one, or for one of another package.

        Raises:
            ValueError: another format of compressed-tensors; names what is not supported.
        """
        raw = hf_config.get("quantization_config") or {}
        if raw.get("quant_method") != "compressed-tensors":
            return None
        groups = list((raw.get("config_groups") or {}).values())
        weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
        problems = [f"{name} {weights.get(name)!r}" for name, known in _KNOWN.items() if weights.get(name) != known]
        if raw.get("format") != "pack-quantized":
            problems.insert(0, f"format {raw.get('format')!r}")
        group = weights.get("group_size")
        if not isinstance(group, int) or group < 1 or group % INT4_PER_WORD:
            problems.append(f"group_size {group!r}")
        if len(groups) != 1:
            problems = [f"{len(groups)} config_groups"]
        if problems:
            raise ValueError(
                f"config.json: quantization_config of compressed-tensors: {', '.join(problems)}: only pack-quantized "
                "weights of 4 bits, symmetric and in groups, are supported"
            )
        return cls(group=int(weights["group_size"]))


def dequantize(packed_MW: Tensor, scale_MG: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """The matrix [M, N], computed in float32 and rounded to `dtype`. Its first column begins a word and a group."""
    shifts = torch.arange(0, 4 * INT4_PER_WORD, 4, dtype=torch.int32)
    nibbles_MN = (packed_MW[..., None] >> shifts).bitwise_and_(15).flatten(1)
    scale_MN = scale_MG.float().repeat_interleave(group, dim=1)[:, : nibbles_MN.shape[1]]
    return (nibbles_MN - _ZERO).float().mul_(scale_MN).to(dtype)
