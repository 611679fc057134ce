"""Parameters of models as their authors give them."""

from typing import NamedTuple


class PublishedSize(NamedTuple):
    """In billions, rounded."""

    total_b: float
    active_b: float
    """Parameters that a token passes through; all of a dense model's."""


PUBLISHED_SIZES = {
    "DeepSeek-V3": PublishedSize(671, 37),
    "DeepSeek-V3.2": PublishedSize(671, 37),
    "GLM-4.5": PublishedSize(355, 32),
    "GLM-4.5-Air": PublishedSize(106, 12),
    "GLM-4.7-Flash": PublishedSize(30, 3),
    "gpt-oss-20b": PublishedSize(20.91, 3.61),
    "gpt-oss-120b": PublishedSize(116.83, 5.13),
    "GLM-5": PublishedSize(744, 40),
    "Hy3": PublishedSize(295, 21),
    "Kimi-K2": PublishedSize(1000, 32),
    "Kimi-K2.5": PublishedSize(1000, 32),
    "Llama-3-8B": PublishedSize(8.03, 8.03),
    "Llama-3.1-8B": PublishedSize(8.03, 8.03),
    "Llama-3.2-1B": PublishedSize(1.23, 1.23),
    "Llama-3.2-3B": PublishedSize(3.21, 3.21),
    "MiniMax-M2": PublishedSize(230, 10),
    "Moonlight-16B-A3B": PublishedSize(16, 3),
    "OLMoE-1B-7B-0924": PublishedSize(6.9, 1.3),
    "Qwen2.5-0.5B": PublishedSize(0.49, 0.49),
    "Qwen2.5-7B": PublishedSize(7.61, 7.61),
    "Qwen3-0.6B": PublishedSize(0.6, 0.6),
    "Qwen3-1.7B": PublishedSize(1.7, 1.7),
    "Qwen3-14B": PublishedSize(14.8, 14.8),
    "Qwen3-235B-A22B": PublishedSize(235, 22),
    "Qwen3-30B-A3B": PublishedSize(30.5, 3.3),
    "Qwen3-32B": PublishedSize(32.8, 32.8),
    "Qwen3-4B": PublishedSize(4.0, 4.0),
    "Qwen3-8B": PublishedSize(8.2, 8.2),
    "Qwen3-Next-80B-A3B": PublishedSize(80, 3),
    "Qwen3-VL-30B-A3B": PublishedSize(30.5, 3.3),
    "Qwen3-VL-8B": PublishedSize(8.2, 8.2),
    "Qwen3.5-27B": PublishedSize(27, 27),
    "Qwen3.5-35B-A3B": PublishedSize(35, 3),
    "Qwen3.5-397B-A17B": PublishedSize(397, 17),
}
"""By the names of their configs in `slimrl/models/hf_configs`."""
