"""Recipes with one thing or another wrong, by seed: what users and editors do to YAML, settings that do not fit."""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any, Union, get_args, get_origin

import yaml

from slimrl.config.keys import KEY_TYPES, NAME
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.sglang_verdicts import SGLANG_VERDICTS

FREE = {"eval", "more", "weights", "parts", "tool_args", "environment_args", "chat_template_kwargs", "roles"}
"""Last names of sections below which a recipe chooses names, so that a misspelt one may be another"""

SCALARS = (
    "[1, 2]", "{a: 1}", "some words", "true", "no", "1.5", "-1", "0", "1e30", "-0.0", "~", "", "''", "0x10", "1_000",
    "'12'", "\uff11\uff12", "9" * 25, "-" + "9" * 400, "1e999", ".nan", "-.inf", "!!python/object:os.system x", "*a",
    "!!binary aGk=", "${steps}", "${nope}", "${oc.env:SLIMRL_NOT_SET}", "${run.name}${run.name}", "${", "2020-01-01",
    '"\\ud800"', '"\\0"', "'a\nb'", "../..", "/", ".", "a.b:c", "x" * 5000, "???", "[" * 60 + "]" * 60, "{? [a]: b}",
    "{1: 2}", "{a: {b: [c]}}", "[null]", "[[1]]", "&x [*x]", "| \n  text", "18446744073709551615", "-1e-320", "\u200b",
    "\u202eabc", "\ufeff1", "NaN", "Infinity", "0o17", "1e6", "+5", "5.", ".5", "true ", "True", "yes", "null",
)  # fmt: skip
LETTERS = {"a": "\u0430", "e": "\u0435", "o": "\u043e", "p": "\u0440", "c": "\u0441", "i": "\u0456", " ": "\u00a0"}
"""Latin letters -> Cyrillic ones that look alike; and a space that does not break"""
BYTES = (
    b"\xff",
    b"\xfe\xff",
    b"\x80",
    b"\xc3",
    b"\x00",
    b"\x1b",
    b"\t",
    b"\r",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x85",
)
SIGNS = "[]{}\"':,#&*!|>%@`-?~$\\"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    kind: str
    content: bytes
    key: str = ""
    """Dotted key that was changed; empty if another thing was"""
    refused: bool = False
    """Whether no recipe may read so, whatever the rules"""


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A key of a recipe's text with its value's place."""

    key: str
    start: int
    """Place of the key's first letter"""
    end: int
    """Place behind the key's last letter"""
    value: tuple[int, int]
    scalar: bool


def _leaves(node: yaml.Node | None, prefix: str = "") -> Iterator[_Leaf]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        dotted = f"{prefix}.{key.value}".lstrip(".")
        place = value.start_mark.index, value.end_mark.index
        scalar = isinstance(value, yaml.ScalarNode)
        yield _Leaf(key=dotted, start=key.start_mark.index, end=key.end_mark.index, value=place, scalar=scalar)
        yield from _leaves(value, dotted)


def _is_free(leaf: _Leaf) -> bool:
    return bool(FREE & set(leaf.key.split(".")[:-1]))


def _misspelt(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    name = text[leaf.start : leaf.end]
    place = rng.randrange(len(name))
    wrong = rng.choice(
        [name[:place] + name[place + 1 :], name[:place] + name[place] * 2 + name[place + 1 :], name + "s",
         name[:place] + rng.choice("abcxyz_-.") + name[place:], name.upper(), name.replace("_", "-") + "x"]
    )  # fmt: skip
    content = text[: leaf.start] + wrong + text[leaf.end :]
    return Mutant(kind="misspelt", content=content.encode(), key=leaf.key, refused=wrong != name and not _is_free(leaf))


def _looks_alike(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    letters = [place for place in range(leaf.start, leaf.value[1]) if text[place] in LETTERS]
    if not letters:
        return _misspelt(rng, text, leaf)
    place = rng.choice(letters)
    content = text[:place] + LETTERS[text[place]] + text[place + 1 :]
    return Mutant(
        kind="looks alike", content=content.encode(), key=leaf.key, refused=place < leaf.end and not _is_free(leaf)
    )


def _other_value(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    start, end = leaf.value
    content = f"{text[:start].rstrip(' ')} {rng.choice(SCALARS)}\n{text[end:]}"
    return Mutant(kind="other value", content=content.encode("utf-8", "surrogatepass"), key=leaf.key)


def _nested(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    start, end = leaf.value
    inside = rng.choice(["{value: %s}", "[%s]", "{a: {b: %s}}", "[{a: %s}]"]) % "1"
    content = f"{text[:start].rstrip()} {inside}\n{text[end:]}"
    return Mutant(kind="nested", content=content.encode(), key=leaf.key)


def _dropped(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    return Mutant(kind="dropped", content=(text[: leaf.start] + text[leaf.value[1] :]).encode(), key=leaf.key)


def _twice(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    line = text.rfind("\n", 0, leaf.start) + 1
    content = f"{text[:line]}{' ' * (leaf.start - line)}{text[leaf.start : leaf.end]}: 1\n{text[line:]}"
    return Mutant(kind="twice", content=content.encode(), key=leaf.key, refused=True)


def _moved(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    """A line indented otherwise, taken out, or exchanged for another."""
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines[one] = " " * rng.choice([1, 2, 3]) + lines[one]
        case 1:
            lines[one] = lines[one].removeprefix(" ")
        case 2:
            del lines[one]
        case _:
            lines[one], lines[other] = lines[other], lines[one]
    return Mutant(kind="moved", content="".join(lines).encode())


def _strange_bytes(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    raw, place = text.encode(), rng.randrange(len(text.encode()))
    return Mutant(kind="bytes", content=raw[:place] + rng.choice(BYTES) + raw[place:])


def _signs(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    place = rng.randrange(len(text))
    content = text[:place] + rng.choice(SIGNS) * rng.choice([1, 2, 5000]) + text[place + rng.randrange(2) :]
    return Mutant(kind="signs", content=content.encode())


def _cut(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    return Mutant(kind="cut", content=text.encode()[: rng.randrange(len(text.encode()))])


def _wrong_base(rng: Random, text: str, leaf: _Leaf) -> Mutant:
    bases = ["mutant.yaml", "[mutant.yaml]", "absent.yaml", "..", "1", "null", "[[a]]", "{a: b}", "[null]", "''",
             "/dev/zero", "../../mutant.yaml/", "'\\0'", "x" * 5000, '"\\ud800"', "[absent.yaml, ..]"]  # fmt: skip
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("extends:", "  - ../base"))]
    content = f"extends: {rng.choice(bases)}\n{''.join(lines)}"
    return Mutant(kind="wrong base", content=content.encode(), refused=True)


_OF_TEXT: tuple[Callable[[Random, str, _Leaf], Mutant], ...] = (
    _misspelt, _looks_alike, _other_value, _other_value, _other_value, _nested, _dropped, _twice, _moved,
    _strange_bytes, _signs, _cut, _wrong_base,
)  # fmt: skip


def mutant_of_text(rng: Random, text: str) -> Mutant:
    """A recipe's text with one thing changed."""
    return rng.choice(_OF_TEXT)(rng, text, rng.choice(list(_leaves(yaml.compose(text)))))


def mutant_of_settings(rng: Random, base: str) -> Mutant:
    """A recipe that extends another one and gives one to six settings of the schema values of their types.

    Args:
        base: name of the other one's file, in the same folder.
    """
    tree: dict[str, Any] = {"extends": base}
    for _ in range(rng.randint(1, 6)):
        key, value = _setting(rng)
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                break
        else:
            section[name] = value
    return Mutant(kind="settings", content=yaml.safe_dump(tree, sort_keys=False).encode())


_PLAIN = (str, Enum, int, float)
_LEAVES = [key for key, kind in KEY_TYPES.items() if not isinstance(kind, type) or issubclass(kind, _PLAIN)]
"""Settings; the other keys are sections"""
TEXTS = (
    "", "x", "a.b:c", "slimrl.rewards.math:boxed_exact", "/absent", "a b", "\u0430", "-", "name.yaml",
    "slimrl.agent.calculator:calculator", "http://[::1", "file:///x", "%s", "{x}", "\x7f", "[bold]",
)  # fmt: skip
_FIELDS = {"trainer.megatron": MEGATRON_VERDICTS, "rollout.sglang": SGLANG_VERDICTS}


def _setting(rng: Random) -> tuple[str, Any]:
    if rng.random() < 0.2:
        section, fields = rng.choice(list(_FIELDS.items()))
        return f"{section}.{rng.choice(sorted(fields))}", rng.choice(
            [True, False, 0, 1, 2, -1, 0.5, "x", None, [1], 2**62]
        )
    key = rng.choice(_LEAVES)
    return key.replace(NAME, rng.choice(["a", "math", "heldout"])), _value(rng, KEY_TYPES[key])


def _value(rng: Random, kind: Any) -> Any:
    """A value of a type, at times far from what is usual."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is type(None):
        return None
    if origin in (Union, types.UnionType):
        return _value(rng, rng.choice(arguments))
    if hasattr(kind, "__metadata__"):
        return _value(rng, arguments[0])
    if origin is list:
        return [_value(rng, arguments[0]) for _ in range(rng.randint(0, 3))]
    if origin is dict:
        return {rng.choice(["a", "b", "heldout", "math"]): _value(rng, arguments[1]) for _ in range(rng.randint(0, 2))}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice(list(kind)).value
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice([-1, 0, 1, 1, 2, 2, 3, 4, 8, 16, 1000, 2**31, 2**62])
    if kind is float:
        return rng.choice([-1.0, 0.0, 1e-300, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e30, 1e300, 3])
    return rng.choice(TEXTS)
