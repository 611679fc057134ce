r"""What kind of thing an answer is, and what it says, exactly.

`read` tries the kinds in this order. docs/rewards.md has a table of them with examples.

1. A choice: `A`, `(A)`, `\text{Option A}`, `(A) 12`.
2. Several answers: a union of intervals (`x < 1 or x > 2` is one), a list (`1, 2`; `1 or 2`; `x=1, x=2`; `\pm 2`), a
   ratio.
3. A number, digits in a base, the empty set.
4. An equation whose left side is a name, such as `x = 4`; other equations and inequalities. Approximations and
   congruences are words: each of their sides could be right alone.
5. Brackets: a tuple or an open interval, other intervals, a set; one thing in brackets is that thing.
6. A number or an expression with a unit.
7. Words, of which the letters and their order count.
8. What is left is an expression, whose value only symbolic comparison can tell.

An answer is read as one thing alone. It can be right for two labels that differ only where docs/rewards.md says so: a
unit that one side leaves out, percent, and the tolerance of symbolic comparison.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from slimrl.rewards.latex import squeezed
from slimrl.rewards.numerals import in_base, number
from slimrl.rewards.units import split_unit

MAX_CHARACTERS = 1000
"""Longest answer that is read in full; a longer one is only a number or words."""
MAX_DEPTH = 20
"""Deepest nesting of brackets that is read in full; reading is recursive."""


@dataclass(frozen=True)
class Quantity:
    """A number, or an expression, with a unit."""

    text: str
    """The expression without its unit, in LaTeX"""
    value: Fraction | None = None
    """Value of a number; None for an expression"""
    unit: str = ""


@dataclass(frozen=True)
class Numeral:
    """A number in a base that is named: the digits are what was asked for."""

    digits: str
    base: int


@dataclass(frozen=True)
class Words:
    """Letters, in lower case and without spaces."""

    letters: str


@dataclass(frozen=True)
class Choice:
    letter: str
    said: str = ""
    """What stands behind the letter, as in `(A) 12` and `A. Paris`, or in a name with an initial"""
    in_brackets: bool = False


@dataclass(frozen=True)
class Named:
    """An equation with a name on the left; of `x = 10/2 = 5` both values."""

    name: str
    values: tuple["Answer", ...]
    text: str


@dataclass(frozen=True)
class Relation:
    """An equation without a name on its left, or an inequality; LaTeX."""

    text: str


@dataclass(frozen=True)
class Group:
    """Several answers. `brackets` are `()`, `[]`, `[)`, `(]`, `{}`, nothing for a list, `U` for a union, `:` for a
    ratio."""

    brackets: str
    items: tuple["Answer", ...]
    text: str


Answer = Quantity | Numeral | Words | Choice | Named | Relation | Group

_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_BRACED = re.compile(r"\{([^{}]*)\}")
_CHOICE = re.compile(
    r"""(?:(?i:option|choice|answer)\ (?:is\ )?)?
        (?: \((?P<round>[A-Za-j])\) | \[(?P<square>[A-Z])\] | (?P<bare>[A-Z])[.):]? )""",
    re.VERBOSE | re.ASCII,
)
_CHOICE_AND_TEXT = re.compile(
    r"""(?: \((?P<round>[A-Z])\) (?: \ ? (?=[A-Za-z0-9]) | \ (?=\\(?:frac|sqrt|pi|\$)|\$) ) | (?P<bare>[A-Z])[.):]\  )
        (?P<said>.+)""",
    re.VERBOSE | re.ASCII,
)
_ANOTHER_CHOICE = re.compile(r"\([A-Z]\)|\b[A-Z][.):]", re.ASCII)
_SEPARATORS = re.compile(r"[,;]? ?(?:\\text ?\{ ?,? ?(?:or|and) ?\}|(?<!\\)\b(?:or|and)\b)|[,;]")
_OR = re.compile(r"[,;]? ?(?:\\text ?\{ ?,? ?or ?\}|\\(?:lor|vee)(?![A-Za-z])|(?<!\\)\bor\b)")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_RATIO = re.compile(r":|\\text ?\{ to \}")
_EQUALS = re.compile(r"(?<![<>!])=")
_ORDERED = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])|=")
_LOOSE = re.compile(r"\\(?:approx|equiv|simeq|sim|cong|propto|doteq|asymp)(?![A-Za-z])")
"""Relations that say less than that both sides are equal, and of which math-verify reads one side alone"""
_NAME = re.compile(
    r"""(?:\\angle\ ?)? (?: [A-Za-z] | \\[A-Za-z]+ | [A-Z]{2,3} | \\text\ ?\{[A-Za-z\ ]+\}      # x, \theta, AB
            | [A-Z][a-z]{2,} (?: \ [a-z]+ )* )                                                 # Area
        (?: _ (?: \w | \{\w+\} ) )? '* (?: \( [\w,\ ]+ \) )?                                    # x_1, f(x)
      | \| [A-Za-z]{1,3} \| | \\overline\ ?\{[A-Z]{2}\}                                        # |A|, \overline{AB}
      | \\(?:sin|cos|tan)\ ? (?: [A-Za-z] | \\[a-z]+ | \( [A-Za-z] \) )                         # \cos\theta
      | \( (?: [A-Za-z] ,\ ? )+ [A-Za-z] \)                                                     # (x, y)""",
    re.VERBOSE | re.ASCII,
)
_ROW = re.compile(r"(?<![_^\d])\d+ \d", re.ASCII)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")
_OPEN, _CLOSED = "([{", ")]}"


def read(text: str) -> Answer:
    """What an answer says, of its text in plain spelling (latex.py)."""
    if len(text) > MAX_CHARACTERS or max(_depths(text) or [0]) > MAX_DEPTH:
        value = number(text)
        return _words(text) if value is None else Quantity(text, value)
    worded = False
    while found := _TEXT.fullmatch(text) or _BRACED.fullmatch(text):
        worded = worded or text.startswith(r"\text")
        text = found[1].strip()
    return _choice(text) or _several(text) or _single(text, worded)


def _words(text: str) -> Words:
    bare = _TEXT.sub(r"\1", text).lower().strip()
    bare = re.sub(r"^(an?|the) (?=\w)", "", bare).rstrip(".!")
    return Words(squeezed(re.sub(r"(?<=[a-z]) (?=[a-z])", "", bare)))


def _choice(text: str) -> Choice | None:
    bare = " ".join(_TEXT.sub(r"\1", text).strip(" *").split())
    if found := _CHOICE.fullmatch(bare):
        return Choice((found["round"] or found["square"] or found["bare"]).upper())
    if (found := _CHOICE_AND_TEXT.fullmatch(bare)) and not _ANOTHER_CHOICE.search(found["said"]):
        said = squeezed(found["said"].lower().strip(".$"))
        return Choice(found["round"] or found["bare"], said, in_brackets=bool(found["round"]))
    return None


def _several(text: str) -> Group | Words | None:
    """A union, a list or a ratio; None if it is one answer."""
    if number(split_unit(text)[0]) is not None:
        return None  # 1,000 km
    if len(parts := _split(text, _UNION)) > 1:
        return Group("U", tuple(map(read, parts)), text)
    if len(parts := _split(text, _OR)) > 1 and _are_ranges(items := tuple(map(read, parts))):
        return Group("U", items, text)
    if len(parts := _both_signs(_split(text, _SEPARATORS))) > 1:
        return _list([read(part) for part in parts], text)
    if len(parts := _split(text, _RATIO)) > 1:
        return Group(":", tuple(map(read, parts)), text)
    return None


def _are_ranges(items: tuple[Answer, ...]) -> bool:
    """Whether all are inequalities of one letter, so that one or the other holding is a union of intervals."""
    texts = [_COMMAND.sub("", item.text) for item in items if isinstance(item, Relation) and "=" not in item.text]
    return len(texts) == len(items) and len({letter for text in texts for letter in _LETTER.findall(text)}) == 1


def _list(items: list[Answer], text: str) -> Group | Words:
    if all(isinstance(item, Choice) and not item.said for item in items):
        # An order, or a selection: A, C is AC.
        return Words("".join(item.letter.lower() for item in items if isinstance(item, Choice)))
    named = [item for item in items if isinstance(item, Named)]
    if len({item.name for item in named}) == 1 and all(len(item.values) == 1 for item in named):
        # x = 1, x = 2 are two values of one name.
        items = [item.values[0] if isinstance(item, Named) else item for item in items]
    return Group("", tuple(items), text)


def _both_signs(parts: list[str]) -> list[str]:
    """`1 \\pm 2` as `1 + 2` and `1 - 2`."""
    signed: list[str] = []
    for part in parts:
        is_two = part.count(r"\pm") == 1 and "," not in part and not part.startswith(r"\{")
        signed += [part.replace(r"\pm", sign).strip() for sign in "+-"] if is_two else [part]
    return signed


def _single(text: str, worded: bool) -> Answer:
    if (value := number(text)) is not None:
        return Quantity(text, value)
    if numeral := in_base(text):
        digits, base = numeral
        return Quantity(digits, Fraction(digits)) if base == 10 else Numeral(digits, base)
    if text == r"\emptyset" or squeezed(text) == r"\{\}":
        return Group("{}", (), r"\emptyset")
    if related := _relation(text):
        return related
    if bracketed := _bracketed(text):
        return bracketed
    if split_unit(text)[0] != text:
        return _with_unit(text) or _words(text)
    if (worded and len(text) > 1) or r"\text" in text or _is_words(text):
        return _words(text)
    return Quantity(text)


def _relation(text: str) -> Answer | None:
    """What equations and inequalities say, and memberships such as `x \\in [1, 2]`."""
    if _LOOSE.search(text):
        return _words(text)
    member = re.split(r"\\in(?![A-Za-z])", text)
    if len(member) == 2 and _NAME.fullmatch(member[0].strip()):
        return read(member[1].strip())
    name, *values = _split(text, _EQUALS)
    if values and _NAME.fullmatch(name) and not _ORDERED.search("".join(values)):
        return Named(squeezed(name), tuple(map(read, values)), text)
    parts = _split(text, _ORDERED)
    if len(parts) == 1:
        return None
    if r"\text" in text:
        return _words(text)
    if all(map(_NAME.fullmatch, parts)):
        # An order: C > B > A is A < B < C.
        falls = set(_ORDERED.findall(text)) == {">"}
        return Words(squeezed("<".join(reversed(parts)) if falls else text))
    return Relation(text) if _LETTER.search(_COMMAND.sub("", text)) else _words(text)


def _bracketed(text: str) -> Answer | None:
    """What stands in brackets that enclose all of the text."""
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    if not is_set and (text[:1] not in "([" or text[-1:] not in ")]"):
        return None
    depths = _depths(text)
    if len(text) < 3 or depths is None or 0 in depths[1 + is_set : -1]:
        return None
    inner = text[2:-2] if is_set else text[1:-1]
    parts = _both_signs(_split(inner, _SEPARATORS))
    items = tuple(read(part) for part in parts)
    brackets = "{}" if is_set else text[0] + text[-1]
    if len(items) == 1 and (brackets == "()" or (is_set and isinstance(items[0], Quantity))):
        return items[0]
    return Group(brackets, items, text)


def _with_unit(text: str) -> Quantity | None:
    """A number or an expression with a unit, or with two, as in 20° C; None if the rest is something else."""
    body, unit, factor = split_unit(text)
    rest = split_unit(body)[0]
    if split_unit(rest)[0] != rest:
        return None
    inner = read(body)
    if not isinstance(inner, Quantity) or (factor != 1 and inner.value is None):
        return None
    unit = inner.unit if unit in ("", inner.unit) else inner.unit + unit
    if inner.value is None or factor == 1:
        return Quantity(inner.text, inner.value, unit)
    return Quantity(str(inner.value * factor), inner.value * factor, unit)


def _is_words(text: str) -> bool:
    """Whether it has a word of three letters, or two capitals, and nothing of formulas; or numbers in a row, which are
    no product; or no letter and no digit."""
    if _ROW.search(text):
        return True
    if re.search(r"[\\^_+*/=()\[\]{}|]", text):
        return False
    return bool(re.search(r"[A-Za-z]{3}|[A-Z]{2}|^[Nn]o$", text)) or not re.search(r"\w", text, re.ASCII)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts of a text between separators that are in no brackets; the whole if brackets do not match."""
    depths = _depths(text)
    if depths is None:
        return [text]
    parts, begin = [], 0
    for found in separator.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[begin : found.start()].strip())
            begin = found.end()
    return [*parts, text[begin:].strip()]


def _depths(text: str) -> list[int] | None:
    """Depth of brackets at each character, of any form, since intervals mix them; None if they do not match."""
    depths, depth = [], 0
    for character in text:
        depth -= character in _CLOSED
        if depth < 0:
            return None
        depths.append(depth)
        depth += character in _OPEN
    return None if depth else depths
