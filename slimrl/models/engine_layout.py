"""The place of each Hugging Face tensor in a loaded SGLang model, which fuses parameters.

A family's own rules come first, then those that families share. A parameter that matches none has its Hugging Face
name, and every rank holds it whole.
"""

import re
from dataclasses import replace

from slimrl.models.engine_rules import SHARED_RULES
from slimrl.models.engine_slice import EngineShape, EngineSlice
from slimrl.models.family import engine_rules_of


def engine_slices(engine_name: str, shape: EngineShape) -> list[EngineSlice]:
    """The Hugging Face tensors in the engine's parameter of this name."""
    for rule in (*engine_rules_of(shape.model_type), *SHARED_RULES):
        if match := re.fullmatch(rule.pattern, engine_name):
            groups = shape.attention_data_parallel if rule.attention else 1
            return [replace(piece, groups=groups) for piece in rule.slices(match, shape)]
    return [EngineSlice(hf_name=engine_name)]
