"""Regular expressions on texts of the policy, with a deadline.

A pattern that backtracks may take exponential time on a text made for it. Python's `re` would hold up the whole process
meanwhile; the package `regex` releases it and stops.
"""

import regex

DEADLINE_S = 1.0
"""Deadline of one match."""


def compiled(pattern: str, name: str) -> "regex.Pattern[str]":
    """Raises ValueError, with the setting's name, for a text that is no regular expression."""
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{name}: {pattern!r} is no regular expression: {error}") from error


def matches(pattern: "regex.Pattern[str]", text: str) -> bool:
    """Whether the whole text matches, in time."""
    try:
        return pattern.fullmatch(text, concurrent=True, timeout=DEADLINE_S) is not None
    except TimeoutError:
        return False


def occurs(pattern: "regex.Pattern[str]", text: str) -> bool:
    """Whether a part of the text matches. Raises TimeoutError if that takes longer than the deadline."""
    return pattern.search(text, concurrent=True, timeout=DEADLINE_S) is not None
