"""DeepSeek's sparse attention, of which SGLang has kernels of a GPU alone, where it is dense.

An indexer that chooses `index_topk` keys chooses all of a context that is not longer, so attention is that of
DeepSeek-V3. The indexers' weights are held all the same, so that a resync brings them and their fingerprints are
those of the trainer. Longer contexts are refused before an engine starts (runtime/checks/sparse_attention_check.py).
"""

from typing import Any

import torch
from torch import nn


class HeldIndexer(nn.Module):
    """The weights of an indexer, which is not computed."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        # In float32 whatever the model, as SGLang's.
        self.k_norm = nn.LayerNorm(dim, dtype=torch.float32)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)


def is_deepseek_dsa(config: Any) -> bool:
    """Replaces is_deepseek_dsa: no model is served by the kernels of sparse attention."""
    return False


def after_init(result: None, attention: Any, config: Any, *args: Any, is_nextn: bool = False, **kwargs: Any) -> None:
    """Hook of DeepseekV2AttentionMLA.__init__: give the layers that have an indexer its weights."""
    from slimrl.models.families.deepseek_v32 import indexed_layers

    if getattr(config, "index_topk", None) is None:
        return
    if is_nextn or attention.layer_id in indexed_layers(config.to_dict()):
        attention.indexer = HeldIndexer(config)
