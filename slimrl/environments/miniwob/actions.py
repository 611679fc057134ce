"""The action that the policy's text names: one call such as `click(12)`, read by a grammar and never executed.

No action closes a page, leaves it, opens an address or runs a script.
"""

import json
import re
from dataclasses import dataclass

HELP = """Answer with one action, alone on the last line:
click(12): click the element with the number 12.
fill(12, "text"): replace the text of a field.
select(12, "option"): choose an option of a list.
press(12, "Enter"): press a key in an element; Control+a selects its text.
scroll(12, 100): scroll an element down by 100 pixels, up if negative.
noop(): wait."""

PARAMETERS: dict[str, tuple[type, ...]] = {
    "click": (int,), "fill": (int, str), "select": (int, str), "press": (int, str), "scroll": (int, int), "noop": (),
}  # fmt: skip
"""Arguments of each action; the first number is that of an element."""

KEYS = {
    "Enter", "Tab", "Shift+Tab", "Escape", "Backspace", "Delete", "Home", "End", "PageUp", "PageDown", "ArrowUp",
    "ArrowDown", "ArrowLeft", "ArrowRight", "Space", "Control+a",
}  # fmt: skip
"""Keys besides single characters. The clipboard is shared by all pages of a browser, so no key reaches it; none leaves
or closes the page."""
MAX_PIXELS = 10_000

_CALL = re.compile(r"([a-z]+)\((.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(?:(-?[0-9]{1,9})|("(?:[^"\\]|\\.)*"))\s*(,|$)', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Action:
    name: str
    element: int | None = None
    """Its number; None for `noop` alone"""
    text: str = ""
    """Text to fill in, option to choose or key to press"""
    pixels: int = 0


def parse_action(text: str) -> Action:
    """The action on the last line of a text.

    Raises:
        ValueError: there is none, or its arguments are wrong; the message is for the policy.
    """
    lines = text.strip().splitlines()
    call = _CALL.fullmatch(lines[-1].strip()) if lines else None
    if call is None:
        raise ValueError('the last line is no action such as click(12) or fill(12, "text")')
    name, written = call.groups()
    if name not in PARAMETERS:
        raise ValueError(f"there is no action {name!r}; the actions are {', '.join(PARAMETERS)}")
    arguments = _arguments(name, written)
    if tuple(map(type, arguments)) != PARAMETERS[name]:
        words = {int: "a number", str: 'a "text"'}
        wanted = ", ".join(words[one] for one in PARAMETERS[name])
        raise ValueError(f"the arguments of {name} are ({wanted})")
    action = Action(
        name=name,
        element=next((one for one in arguments[:1] if isinstance(one, int)), None),
        text=next((one for one in arguments if isinstance(one, str)), ""),
        pixels=next((one for one in arguments[1:] if isinstance(one, int)), 0),
    )
    if name == "press" and action.text not in KEYS and not (len(action.text) == 1 and action.text.isprintable()):
        raise ValueError(f"{action.text!r} is no key; keys are single characters and {', '.join(sorted(KEYS))}")
    if abs(action.pixels) > MAX_PIXELS:
        raise ValueError(f"scroll takes at most {MAX_PIXELS} pixels")
    return action


def _arguments(name: str, written: str) -> list[int | str]:
    """Raises ValueError: they are no numbers and texts."""
    found: list[int | str] = []
    place, comma = 0, bool(written.strip())
    while comma:
        match = _ARGUMENT.match(written, place)
        if match is None:
            raise ValueError(f'the arguments of {name} are numbers and texts in double quotes, as in fill(12, "text")')
        number, quoted, after = match.groups()
        found.append(int(number) if number is not None else _unquoted(quoted))
        place, comma = match.end(), after == ","
    return found


def _unquoted(quoted: str) -> str:
    """Raises ValueError: a backslash that JSON does not know, or half a surrogate pair."""
    try:
        text: str = json.loads(quoted, strict=False)
        text.encode()
    except ValueError as error:
        raise ValueError(f"{quoted} is no text as JSON writes it") from error
    return text
