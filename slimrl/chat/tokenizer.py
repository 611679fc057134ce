"""The tokenizer of a model's folder."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, from its tokenizer.json, or by the model's own code if that is trusted.

    Raises:
        ValueError: there is none, or it needs code that is not trusted.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not trust_remote_code and not (folder / "tokenizer.json").is_file():
        has_code = any(folder.glob("tokenization_*.py"))
        hint = "; it brings code of its own, which model.trust_remote_code=true runs" if has_code else ""
        raise ValueError(f"{folder} has no tokenizer.json{hint}")
    try:
        if trust_remote_code:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
        # By the file alone: the classes of single models would only repeat what it says.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
