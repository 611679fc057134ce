"""Foreign text for terminals and logs: prompts, what a policy wrote, what an agent printed, values of files."""

import re

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but for tab and newline: ESC, CSI, carriage return, backspace
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions of writing, which change the order of what is shown
    "\u2028\u2029\ud800-\udfff]"  # separators of lines, and surrogates, which cannot be printed
)

_LONG_WORD = re.compile(r"\S{1000,}")
"""What no person wrote; longer than a path may be in practice"""


def short_words(text: str) -> str:
    """The text with the beginning alone of words of a thousand characters and more."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:57]}...", text)


def visible(text: str) -> str:
    """The text with characters that steer a terminal, or are not seen, as `\\uXXXX`. JSON stays the same value."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
