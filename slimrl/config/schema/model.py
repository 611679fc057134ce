"""The model."""

from dataclasses import dataclass

from slimrl.config.schema.types import MISSING, FilePath, Flag


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
