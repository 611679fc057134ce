"""config.json of a toy for the command line: sizes that do not fit together are refused by the names of its options."""

from typing import Any

from slimrl.models.toy_configs import TOYS as TOYS
from slimrl.models.toy_configs import ToySize as ToySize


def toy_config(family: str, size: ToySize) -> dict[str, Any]:
    """What config.json of a toy says, `vocab_size` and the special tokens still to be filled in.

    Raises:
        ValueError: an unknown family, or sizes that do not fit together.
    """
    if family not in TOYS:
        raise ValueError(f"no toy of family {family!r}; there is {', '.join(TOYS)}")
    if family == "qwen2" and size.hidden % (2 * size.heads):
        raise ValueError(
            f"--hidden {size.hidden} does not divide into {size.heads} heads of an even size, as qwen2 has"
        )
    config = TOYS[family](size)
    if size.heads % size.kv_heads:
        raise ValueError(f"--kv-heads {size.kv_heads} does not divide --heads {size.heads}")
    if size.experts_per_token > size.experts:
        raise ValueError(f"--experts-per-token {size.experts_per_token} is more than --experts {size.experts}")
    if size.head_dim % 2:
        raise ValueError(f"--head-dim {size.head_dim} is odd; rotary embeddings need pairs")
    if "num_nextn_predict_layers" not in config and size.mtp_layers:
        raise ValueError(f"--mtp-layers {size.mtp_layers}: {family} has no layers for multi-token prediction")
    if family in ("glm4_moe", "deepseek_v3") and size.head_dim % 4:
        raise ValueError(f"--head-dim {size.head_dim}: {family} rotates half as many, in pairs; use a multiple of 4")
    return config
