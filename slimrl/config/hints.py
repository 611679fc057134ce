"""What was probably meant by a key that no recipe has.

1. A name of slime or verl (elsewhere.py), or another name that other programs give the setting (aliases.py).
2. The same name in another section, unless several sections have a setting of that name.
3. A field of megatron-core or SGLang, which stands below `trainer.megatron` or `rollout.sglang`.
4. A name of the same section that differs by a slip of the keyboard, or by words left out.

Names that are merely similar, such as max_response_len and max_replacements, are no hint.
"""

import re
from collections.abc import Collection
from typing import Any

from slimrl.config.aliases import WITHOUT_SECTION, alias_of, no_setting
from slimrl.config.elsewhere import Elsewhere, row_of
from slimrl.config.keys import EXTENDS, KEY_TYPES, NAME, is_section, keys_with_choice, schema_key
from slimrl.config.passthrough import passthrough_fields, safe_fields
from slimrl.config.problems import closest, near_name

FIELDS_OF = {"rollout.sglang": ("rollout", "sglang"), "trainer.megatron": ("trainer", "megatron", "model")}
"""Passthrough section -> first parts of the keys that may mean one of its fields, besides keys without a section"""
OTHERS = ("critic.", "teacher.")
"""Begin keys of settings that the policy has too, which a key without a section means"""


def unknown_text(key: str, value: Any = None) -> str:
    """What is said of a key that no recipe has: what to do instead, what was meant, or the keys that there are."""
    if said := no_setting(key):
        return f" {said}"
    if (row := row_of(key)) is not None:
        return _counterpart_text(key, value, row)
    section, _, name = key.rpartition(".")
    chosen = keys_with_choice(section, name)
    meant = f"{chosen[0]}: {name}" if chosen else meant_key(key)
    return f" Did you mean {meant}?" if meant else _keys_there(key)


def _counterpart_text(key: str, value: Any, row: Elsewhere) -> str:
    """What a name of slime's or verl's is here, and what differs."""
    if not row.counterparts:
        return f" It is {row.program}'s and has no counterpart. {row.note}".rstrip()
    if isinstance(value, str) and value in row.values:
        return f" Did you mean {row.counterparts[0]}: {row.values[value]}?"
    same = [one for one in row.counterparts if key.replace("-", "_").endswith(one.rpartition(".")[2])]
    meant = meant_key(key) or ""
    if re.split("[: ]", meant)[0] not in row.counterparts:
        meant = " or ".join(same or row.counterparts)
    return f" Did you mean {meant}? {row.note}".rstrip()


def meant_key(key: str) -> str | None:
    """The likely intended setting, with its value if that has the effect; None if there is none."""
    if (schema := schema_key(key)) != key:
        meant = meant_key(schema)
        return meant and meant.replace(NAME, key.split(".")[2])
    alias = WITHOUT_SECTION.get(key, alias_of(key))
    if alias is not None:
        return f"critic.{alias}" if key.startswith("critic.") and alias.startswith("trainer.") else alias
    parent, _, name = key.rpartition(".")
    if same := _of_same_name(key, name):
        return same
    if field := _field(key, name):
        return field
    known = [*KEY_TYPES, EXTENDS]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    if (close := near_name(name, siblings)) is not None:
        return siblings[close]
    if field := _field(key, name, near=True):
        return field
    # The whole key is close to any key of its own section.
    return None if is_section(parent) else near_name(key, known)


def _keys_there(key: str) -> str:
    """` Keys of SECTION: a, b.`, of the innermost section that has a wrong key; empty if the recipe has none."""
    section = key.rpartition(".")[0]
    while section and not is_section(section):
        section = section.rpartition(".")[0]
    schema = schema_key(section)
    names = [name for parent, _, name in (other.rpartition(".") for other in KEY_TYPES) if parent == schema]
    return f" Keys of {section}: {', '.join(names)}." if section and names and NAME not in names else ""


def _of_same_name(key: str, name: str) -> str | None:
    """A setting of this name in the key's own section or below, else in the only section that has one."""
    # What stands below a section is no whole section of the recipe: no `sampling.stop` means `stop`.
    every = [
        other
        for other in KEY_TYPES
        if other.rpartition(".")[2] == name and not ("." in key and "." not in other and is_section(other))
    ]
    same = [other for other in every if f".{NAME}." not in other] or every
    own = [other for other in same if _first(other) == _first(key)]
    if own:
        return closest(key, own, cutoff=0.0)
    # Under `critic.trainer` all of the trainer's stand once more.
    others = ("critic.trainer.",) if is_section(_first(key)) else OTHERS
    same = [other for other in same if not other.startswith(others)] or same
    return closest(key, same, cutoff=0.0) if len(set(map(_first, same))) == 1 else None


def _first(key: str) -> str:
    return key.partition(".")[0]


def _field(key: str, name: str, *, near: bool = False) -> str | None:
    for section, starts in FIELDS_OF.items():
        if _first(key) in starts or ("." not in key and not near):
            fields = _safe(section)
            meant = near_name(name, fields) if near else name
            if meant in fields:
                return f"{section}.{meant}"
    return None


def _safe(section: str) -> Collection[str]:
    """Fields that a recipe may set; none if the package is not installed."""
    try:
        return safe_fields(section, passthrough_fields(section))
    except ValueError:
        return ()
