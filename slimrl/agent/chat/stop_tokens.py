"""The tokens that end a turn of a model, from the files of its checkpoint folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from slimrl.config.wrapper import text_config


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, reserved: Mapping[str, int]) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json, else the tokenizer's.

    Args:
        reserved: text and id of the tokenizer's reserved tokens.

    Raises:
        ValueError: none of them names one, or one is no token of the tokenizer.
    """
    for name, ids in (
        ("generation_config.json", _eos(folder / "generation_config.json")),
        ("config.json", _eos(folder / "config.json")),
        ("the tokenizer", tokenizer.eos_token_id),
    ):
        if ids is not None:
            try:
                return checked_stop_tokens(ids, tokenizer, reserved)
            except ValueError as error:
                raise ValueError(f"eos_token_id of {name}: {error}") from error
    raise ValueError("neither generation_config.json, config.json nor the tokenizer has an eos_token_id")


def checked_stop_tokens(ids: Any, tokenizer: PreTrainedTokenizerBase, reserved: Mapping[str, int]) -> tuple[int, ...]:
    """The ids of one token or a list of them.

    Args:
        reserved: text and id of the tokenizer's reserved tokens.

    Raises:
        ValueError: there are none, or one is no reserved token of the tokenizer.
    """
    listed = ids if isinstance(ids, list) else [ids]
    wrong = [one for one in listed if not isinstance(one, int) or not 0 <= one < len(tokenizer)]
    if wrong or not listed:
        raise ValueError(f"{wrong or ids!r}: names no token; the tokenizer's ids are 0 to {len(tokenizer) - 1}")
    known = {*tokenizer.added_tokens_decoder, *reserved.values()}
    if unreserved := [one for one in listed if one not in known]:
        # Others are split and merged with what stands around them.
        text = tokenizer.decode(unreserved[:1])
        raise ValueError(f"{unreserved[0]}: is {text!r}, ordinary text that an answer may hold, no reserved token")
    return tuple(dict.fromkeys(listed))


def _eos(path: Path) -> Any:
    """`eos_token_id` of a JSON file; None if there is no file, or it says nothing."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return text_config(value).get("eos_token_id") if isinstance(value, dict) else None
