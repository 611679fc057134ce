"""The config.json of a Hugging Face checkpoint folder, read without torch."""

import json
from pathlib import Path
from typing import Any


def read_hf_config(model_path: Path) -> dict[str, Any]:
    """The checkpoint folder's config.json.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a Hugging Face checkpoint folder is needed") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, not an object")
    return config
