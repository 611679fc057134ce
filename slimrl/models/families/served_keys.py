"""Keys of config.json that SGLang reads and transformers does not, and so may not save."""

import json
from collections.abc import Mapping
from typing import Any


def unserved_without(hf_config: dict[str, Any], needed: Mapping[str, Any]) -> str | None:
    """Why SGLang would serve another model than the config describes, and what to add; None if it has all of this."""
    missing = {name: value for name, value in needed.items() if hf_config.get(name) != value}
    if not missing:
        return None
    whose = f"SGLang takes other values than those of this {hf_config['model_type']}."
    return f"{whose} Set {json.dumps(missing)[1:-1]} in config.json too."
