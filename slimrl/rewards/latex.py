r"""The text of an answer without what only concerns its look: one spelling for each thing that LaTeX says in several.

`plain` takes these steps, in this order:

1. Characters that have a command get it: `½` is `\frac{1}{2}`, `√` is `\sqrt`, `x²` is `x^{2}`, `π` is `\pi`.
2. Signs of mathematics around the answer, Markdown's stars and the full stop go: `$4$`, `**A**`, `4.`.
3. Commands for sizes go, and separators of thousands that are only that, as in `1{,}000` and `1\,000`.
4. Spaces of any width are one space.
5. Each command has one name: `\dfrac` is `\frac`, `\mbox` and `\textbf` are `\text`, `\varnothing` is `\emptyset`.
   Letters and functions that are upright or bold are plain ones: `\mathrm{e}` is `e`, `\operatorname{arctan}` is
   `\arctan`; but `\mathrm{m}` may be meters.
6. Arguments have braces: `\frac12` is `\frac{1}{2}`.
7. Names without backslash get it: `pi/2` is `\pi/2`, `sqrt(2)` is `\sqrt{2}`.
"""

import re
import unicodedata
from collections.abc import Iterator

_CHARACTERS = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "÷": "/", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\N{UNION}": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "∞": r"\infty ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta ", "°": r"^\circ ",
    "º": r"^\circ ", "≈": r"\approx ", "≡": r"\equiv ", "≅": r"\cong ", "\N{TILDE OPERATOR}": r"\sim ",
    "…": r"\ldots ", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip
_AROUND = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]
_THOUSANDS = re.compile(r"(?<=\d)(\{,\}|,\\!|\\,|\\ |~)(?=\d{3}(?!\d))", re.ASCII)
_SIZES = re.compile(r"\\(left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?")
_SPACES = re.compile(r"(?<!\\)(\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s)+|\\!")
_SAME_COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}",
    "geq": "ge", "geqslant": "ge", "leq": "le", "leqslant": "le", "gt": ">", "lt": "<", "neq": "ne",
    "langle": "(", "rangle": ")", "infin": "infty",
    **dict.fromkeys(["mbox", "textbf", "textit", "textrm", "textsf", "textnormal", "operatorname"], "text"),
    **dict.fromkeys(["mathrm", "mathbf", "mathit", "mathsf"], "text"),
}  # fmt: skip
_UPRIGHT = re.compile(
    r"""\\(?: (?:mathrm|mathbf|mathit|boldsymbol) \ ?\{\ ? (?P<command>\\[A-Za-z]+) \ ?\}   # \mathrm{\pi}
        | mathrm \ ?\{\ ? (?P<constant>[ei]) \ ?\}                                       # not m, which is meters
        | (?:mathbf|mathit|boldsymbol) \ ?\{\ ? (?P<letter>[A-Za-z]) \ ?\}
        | operatorname \ ?\{\ ? (?P<function>(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp) \ ?\} )""",
    re.VERBOSE,
)
"""Letters, commands and functions in a typeface, which says nothing"""
_COMMAND = re.compile(r"(?P<end>\\\\)|\\(?P<name>[A-Za-z]+) *(?=(?P<next>.?))", re.DOTALL)
"""The end of a line of a matrix, or a command with the character after it"""
_PERCENT = re.compile(r"\\text ?\{ ?\\% ?\}|\\%")
_REALS = re.compile(r"\\(?:mathbb ?R|R|Reals)(?![A-Za-z])|\\mathbb ?\{ ?R ?\}")
_DEGREES = re.compile(r" ?(\^ ?(\{ ?\\circ ?\}|\\circ ?)|\\degree ?)")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_ARGUMENT = r"(\{[^{}]*\}|\d|[A-Za-z]|\\pi)"
_FRACTION = re.compile(rf"\\frac ?{_ARGUMENT} ?{_ARGUMENT}")
_ROOT = re.compile(r"\\sqrt ?(?:(\d+|[A-Za-z]|\\pi)|\(([^()]*)\))", re.ASCII)
_FULL_STOP = re.compile(r"(?<!\.) *\.$")
"""A full stop at the end, which is not the end of an ellipsis"""
_BARE_NAME = re.compile(r"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|log|ln|exp|infty|infinity)(?![A-Za-z])")


def plain(answer: str) -> str:
    """An answer in the spelling that kinds.py reads; takes time linear in its length."""
    text = "".join(_with_commands(answer)).strip()
    text = _without_surroundings(text)
    text = _THOUSANDS.sub("", _SIZES.sub("", text))
    text = _SPACES.sub(lambda space: "" if space[0] == r"\!" else " ", text)
    text = (
        _PERCENT.sub("%", _REALS.sub(r"\\mathbb{R}", text))
        .replace(">=", r"\ge ")
        .replace("<=", r"\le ")
        .replace("!=", r"\ne ")
    )
    text = _COMMAND.sub(_one_name, _UPRIGHT.sub(_unwrapped, text))
    text = _DEGREES.sub("°", text)
    text = _FRACTION.sub(_braced, _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _BARE_NAME.sub(_named, text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    return _FULL_STOP.sub("", text.strip())


def squeezed(text: str) -> str:
    """A text without its spaces, except those between two letters or digits, which separate them."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _with_commands(answer: str) -> Iterator[str]:
    """The answer's characters, or what they are called; a row of superscripts is one exponent."""
    raised = ""
    for character in answer:
        known = character.isascii() or character in _CHARACTERS
        form = "" if known else unicodedata.decomposition(character)
        kind, _, codes = form.partition("> ")
        letters = "".join(chr(int(code, 16)) for code in codes.split())
        if kind == "<super":
            raised += letters.replace("\N{MINUS SIGN}", "-")
            continue
        if raised:
            yield f"^{{{raised}}}"
            raised = ""
        if kind == "<fraction":
            top, _, bottom = letters.partition("\N{FRACTION SLASH}")
            yield rf"\frac{{{top}}}{{{bottom}}}"
        elif kind == "<wide":
            yield letters
        else:
            yield _CHARACTERS.get(character, character)
    if raised:
        yield f"^{{{raised}}}"


def _without_surroundings(text: str) -> str:
    text = _FULL_STOP.sub("", text)
    for opening, closing in _AROUND:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner.replace(r"\$", ""):
            text = inner.strip()
    return text


def _unwrapped(upright: re.Match[str]) -> str:
    if upright["function"]:
        return f"\\{upright['function']} "
    if upright["command"]:
        return f"{upright['command']} "
    # A letter behind a command such as \pi must not lengthen its name.
    behind_letter = upright.string[: upright.start()][-1:].isalpha()
    return " " * behind_letter + (upright["constant"] or upright["letter"])


def _one_name(command: re.Match[str]) -> str:
    if command["end"]:
        return command[0]
    name = _SAME_COMMANDS.get(command["name"], command["name"])
    if name in ("(", ")", "<", ">"):
        return name
    return f"\\{name} " if command["next"].isalpha() and name not in "{}" else f"\\{name}"


def _braced(fraction: re.Match[str]) -> str:
    top, bottom = (part.strip("{} ") if part[0] == "{" else part for part in fraction.groups())
    return rf"\frac{{{top}}}{{{bottom}}}"


def _named(bare: re.Match[str]) -> str:
    return "\\" + {"infinity": "infty"}.get(bare[0], bare[0])
