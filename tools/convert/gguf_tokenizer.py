"""The tokenizer of a GGUF file, as transformers builds it, and where that differs from llama.cpp's."""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

GPT2_SPLITS = frozenset({"gpt-2", "mpt", "olmo", "jais", "trillion"})
"""Names that llama.cpp gives to splits which are GPT-2's (`llm_tokenizer_bpe` in llama.cpp's src/llama-vocab.cpp)"""

DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Names of splits that set each digit apart and then are GPT-2's, from the same place"""


def gguf_tokenizer(file: Path, metadata: dict[str, Any]) -> tuple[PreTrainedTokenizerFast, str | None]:
    """The tokenizer with its chat template, and a note if it may split text otherwise than the model's own did.

    transformers splits text as GPT-2 does wherever it does not know the file's name of another split; the result reads
    well, but has tokens that the model has not seen there.

    Raises:
        ValueError: a kind of tokenizer that transformers does not build.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{file}: transformers cannot build its tokenizer: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split in GPT2_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys():
        return tokenizer, None
    if split in DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return tokenizer, None
    return tokenizer, (
        f"its tokenizer splits text by rules named {split}, which transformers does not know: GPT-2's take their "
        "place, and some text becomes other tokens than the model has seen"
    )
