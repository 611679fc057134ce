r"""Units at the end of an answer: `5 \text{ cm}`, `18 dollars`, `45°`, `10%`, `\$5`, and words such as million."""

import re

PERCENT, DEGREE, DOLLAR = "%", "°", "$"

_CURRENCY = re.compile(r"(?P<sign>[+-]?) ?(?:\\?\$|£|€|¥|₹) ?(?P<body>.+)")
_SIGN = re.compile(r"(?P<body>.+?) ?(?P<unit>[%°]|\\\$)")
_POWER = r"(?:\^\{?(?P<power>\d)\}?)?"
_TEXT = re.compile(rf"(?P<body>.+?) ?\\text ?\{{(?P<unit>[^{{}}]*)\}}{_POWER}")
_PLAIN = re.compile(
    rf"""(?P<body>.*[\d)}}]) \ (?P<unit> [A-Za-z]{{3}}[A-Za-z\ /]* | sq\.?\ [a-z]+
         | [ckm]m | kg | ft | mi | in | lb | oz | ml | (?i:am|pm) ){_POWER}""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z]+|/")
MAX_WORDS = 4
_NO_UNITS = {
    "or", "and", "not", "no", "none", "to", "from", "more", "less", "fewer", "than", "least", "most", "about", "if",
    "is", "are", "at", "by",
}  # fmt: skip
"""Words behind a number that change its meaning, so that they are no units"""
_FACTORS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SHORT = {
    "centimeter": "cm", "millimeter": "mm", "meter": "m", "kilometer": "km", "gram": "g", "kilogram": "kg",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "inche": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "mile": "mi", "dollar": DOLLAR, "degree": DEGREE, "deg": DEGREE, "percent": PERCENT,
    "percentage": PERCENT, "pct": PERCENT, "per": "/", "unit": "", "square": "", "sq": "", "cubic": "",
}  # fmt: skip
_POWERS = {"square": "2", "sq": "2", "cubic": "3"}


def split_unit(text: str) -> tuple[str, str, int]:
    """What stands before the unit, the unit in one spelling, and the number that a word such as million stands for.

    The unit is empty and the text whole if there is none that could be one: `8 or more` is no 8.
    """
    if found := _CURRENCY.fullmatch(text):
        return found["sign"] + found["body"], DOLLAR, 1
    if found := _SIGN.fullmatch(text):
        return found["body"], found["unit"].removeprefix("\\"), 1
    found = _TEXT.fullmatch(text) or _PLAIN.fullmatch(text)
    names = [name.lower() for name in _NAME.findall(found["unit"])] if found else []
    if found is None or r"\text" in found["body"] or not 0 < len(names) <= MAX_WORDS or _NO_UNITS & set(names):
        return text, "", 1
    factor = _FACTORS.get(names[0], 1)
    named = names if factor == 1 else names[1:]
    power = found["power"] or "".join(_POWERS.get(name, "") for name in named)
    return found["body"], "".join(map(_short, named)) + power, factor


def _short(name: str) -> str:
    single = name.removesuffix("s") if len(name) > 3 else name
    return _SHORT.get(single, single)
