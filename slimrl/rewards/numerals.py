r"""Numbers in digits: their exact value, from the spelling that latex.py gives.

Integers and decimals, with groups of three digits; `0.\overline{3}`; times a power of ten (`1.2 \times 10^3`, `1.2e3`);
quotients of them (`\frac{1}{2}`, `1/2`); mixed numbers (`1 1/2`). Nothing else is a number here: `2+3` and `2^3` are
expressions.
"""

import re
from fractions import Fraction

MAX_DIGITS = 4000
"""The most digits of a number, and its greatest exponent of ten. Python refuses to convert longer ones."""
BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]

_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}([, ])\d{3}(\1\d{3})*(\.\d+)?", re.ASCII)
_REPEATING = re.compile(r"(?P<begin>[+-]?\d*\.\d*)\\overline\{(?P<cycle>\d+)\}", re.ASCII)
_POWER = re.compile(
    r"""(?: (?P<factor>[^e]+?) \ ? (?: e | (?:\\times|\\cdot|\*) \ ? 10\^ )   # 1.2e or 1.2 \times 10^
        |   (?P<sign>[+-]?) 10\^ )
        (?P<brace>\{)? (?P<exponent>[+-]?\d+) (?(brace)\})""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_QUOTIENT = re.compile(
    r"""(?P<sign>[+-]?) \ ? (?: (?P<whole>\d+) \ ? )??                        # of a mixed number
        (?: \\frac\{(?P<top>[^{}]+)\}\{(?P<bottom>[^{}]+)\} | (?P<over>[^/\ ]+) \ ?/\ ? (?P<under>[^/\ ]+) )""",
    re.ASCII | re.VERBOSE,
)
_IN_BASE = re.compile(r"\(?(?P<digits>[0-9A-Za-z]+)\)?_\{?(?:\\text\{)?(?P<base>\w+)\}*", re.ASCII)


def number(text: str) -> Fraction | None:
    """The value of a number in digits; None for anything else, and for one with too large an exponent."""
    if (value := _decimal(text)) is not None:
        return value
    if power := _POWER.fullmatch(text):
        factor = Fraction(f"{power['sign']}1") if power["factor"] is None else _decimal(power["factor"])
        digits = power["exponent"]
        if factor is None or len(digits) > 6 or abs(int(digits)) > MAX_DIGITS:
            return None
        return factor * Fraction(10) ** int(digits)
    return _quotient(text)


def _decimal(text: str) -> Fraction | None:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if found := _REPEATING.fullmatch(text):
        begin, cycle = found["begin"], found["cycle"]
        value = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(begin.partition(".")[2])
        return Fraction(f"{begin}0") + (-value if begin.startswith("-") else value)
    return None


def _quotient(text: str) -> Fraction | None:
    found = _QUOTIENT.fullmatch(text)
    if found is None:
        return None
    top = _decimal((found["top"] or found["over"]).strip())
    bottom = _decimal((found["bottom"] or found["under"]).strip())
    if top is None or not bottom:
        return None
    value = top / bottom
    if found["whole"]:
        # A mixed number has a proper fraction: 2\frac{3}{2} is a product.
        if not 0 < value < 1:
            return None
        value += int(found["whole"])
    return -value if found["sign"] == "-" else value


def in_base(text: str) -> tuple[str, int] | None:
    """The digits and the base of `52_8` or `2516_{eight}`; None for anything else, such as a variable with an index."""
    found = _IN_BASE.fullmatch(re.sub(r"\\text\{(\w)\}", r"\1", text))
    if found is None:
        return None
    name, digits = found["base"], found["digits"].upper()
    base = BASES.index(name) + 2 if name in BASES else int(name) if name.isdecimal() and len(name) < 3 else 0
    is_number = 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits)
    return (digits.lstrip("0") or "0", base) if is_number and (digits[0].isdecimal() or len(digits) > 1) else None
