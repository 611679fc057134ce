"""The tokenizer of a model's folder."""

from pathlib import Path

from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slimrl.config.hf_config import read_stored_config


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
    except AttributeError as error:
        # transformers reads config.json before it runs a tokenizer's code, and takes the keys of one that it does not
        # know for those of a general model.
        if reason := _unknown_config(folder):
            raise ValueError(reason) from error
        raise


def _unknown_config(folder: Path) -> str | None:
    """What is wrong with a config.json that names neither a model that transformers knows nor code of its own."""
    config = read_stored_config(folder)
    model_type, auto_map = config.get("model_type"), config.get("auto_map") or {}
    if model_type in CONFIG_MAPPING or "AutoConfig" in auto_map:
        return None
    without = ", or leave model.trust_remote_code out: tokenizer.json needs no code"
    return (
        f"{folder / 'config.json'}: transformers knows no model_type {model_type!r}, and no auto_map names code for it "
        "that model.trust_remote_code could run. Take the published config.json"
        f"{without if (folder / 'tokenizer.json').is_file() else ''}"
    )
