"""The model, and the teacher of on-policy distillation."""

from dataclasses import dataclass, field
from typing import Any

from slimrl.config.schema.types import MISSING, FilePath, Flag, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class ModelConfig:
    path: FilePath = MISSING
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer with chat template. Or a model of the Hugging
    Face Hub by its id, such as `Qwen/Qwen3-30B-A3B`, which is fetched once per node (docs/models.md)."""
    megatron: FilePath = ""
    """Checkpoint of the same model in Megatron's format for the trainer, from `slimrl-tools convert` or a run's
    `checkpoints/step_N`; empty to load `path`. Engines load `path` and get the trainer's weights before they first
    generate."""
    chat_template: FilePath = ""
    """File of a chat template in Jinja; empty for the tokenizer's own."""
    trust_remote_code: Flag = False
    """Run the code that the folder of the model brings along, which some tokenizers need (Kimi-K2)."""


@dataclass(kw_only=True)
class TeacherConfig:
    """The model that scores the policy's tokens for on-policy distillation
    (docs/algorithms.md#on-policy-distillation)."""

    path: FilePath = ""
    """Hugging Face checkpoint folder or id on the Hub, as `model.path`; its tokenizer must be the policy's. The run
    serves it on devices of its own. Empty for none."""
    urls: list[str] = field(default_factory=list)
    """SGLang servers of the teacher that somebody else runs, such as `http://node7:30000`, instead of `path`."""
    api_key_env: str = ""
    """Environment variable with the key of these servers, SGLang's `--api-key`. Empty for servers without one."""
    num_engines: PositiveInt = 1
    """Number of SGLang servers, each with a whole teacher."""
    engine_tp: PositiveInt = 1
    """Tensor-parallel size of a teacher's engine, which is its number of ranks."""
    engine_ep: PositiveInt = 1
    """Expert-parallel size of a teacher's engine; it divides `engine_tp`."""
    engine_nodes: PositiveInt = 1
    """Nodes over which each of its engines spreads its ranks evenly."""
    max_concurrency_per_engine: PositiveInt = 32
    """Segments that one engine, or one server of `urls`, scores at a time."""
    request_timeout_s: PositiveFloat = 300.0
    """Deadline for the score of a segment, once it is its turn."""
    startup_timeout_s: PositiveFloat = 600.0
    """Deadline for an engine to start."""
    max_replacements: NonNegativeInt = 3
    """Most of its engines that a run restarts, because they ended, before it stops."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its engines' processes; those that slimrl sets are refused."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Fields of SGLang's ServerArgs for its engines, but for those that slimrl sets."""

    @property
    def is_given(self) -> bool:
        return bool(self.path or self.urls)

    @property
    def engines_to_start(self) -> int:
        """Engines that the run starts itself."""
        return self.num_engines if self.path else 0
