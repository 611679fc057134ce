"""config.json of a toy for the command line; errors name its options."""

from typing import Any

from slimrl.models.families.mtp import MTP_KEYS
from slimrl.toys.toy_configs import TOYS as TOYS
from slimrl.toys.toy_configs import ToySize as ToySize
from slimrl.toys.wrapped_toys import WRAPPED_TOYS

ALL_TOYS = {**TOYS, **WRAPPED_TOYS}
"""Function that makes the config of each family's and each wrapped model's toy."""


def toy_config(family: str, size: ToySize) -> dict[str, Any]:
    """config.json of a toy, without `vocab_size` and the special tokens.

    Raises:
        ValueError: an unknown family, or sizes that do not fit together.
    """
    if family not in ALL_TOYS:
        raise ValueError(f"no toy of family {family!r}; known: {', '.join(ALL_TOYS)}")
    config = ALL_TOYS[family](size)
    if "head_dim" not in config and "kv_lora_rank" not in config and size.hidden % (2 * size.heads):
        raise ValueError(
            f"--hidden {size.hidden} does not divide into {size.heads} heads of an even size, for {family}"
        )
    if size.heads % size.kv_heads:
        raise ValueError(f"--kv-heads {size.kv_heads} does not divide --heads {size.heads}")
    if size.experts_per_token > size.experts:
        raise ValueError(f"--experts-per-token {size.experts_per_token} is more than --experts {size.experts}")
    if size.head_dim % 2:
        raise ValueError(f"--head-dim {size.head_dim} is odd; rotary embeddings need pairs")
    if not config.keys() & {*MTP_KEYS} and size.mtp_layers:
        raise ValueError(f"--mtp-layers {size.mtp_layers}: {family} has no layers for multi-token prediction")
    if family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k25") and size.head_dim % 4:
        raise ValueError(f"--head-dim {size.head_dim}: {family} rotates half of them, in pairs; use a multiple of 4")
    if family in ("deepseek_v3", "gpt_oss", "kimi_k25") and size.max_position % 4:
        raise ValueError(
            f"--max-position {size.max_position}: {family} extends a quarter of it by yarn; use a multiple of 4"
        )
    return config
