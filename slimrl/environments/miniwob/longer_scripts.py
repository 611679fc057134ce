"""Scripts for tasks whose pages lead to other pages: mail, searches, trees and posts."""

import re
from collections.abc import Generator

from slimrl.environments.miniwob.page_reader import Page, quoted
from slimrl.environments.miniwob.scripts import MakeScript, Script, click, fill, in_quotes

_MAX_SCROLLS = 8
_SCROLL = 40
"""Pixels at a time: less than a mail or a post, so that none is missed"""


def _row(page: Page, name: str, icon: str) -> int | None:
    """The icon after a name, in the same mail or post."""
    seen = False
    for line in page.lines:
        seen = seen or line.name == name
        if seen and line.name == icon and line.number is not None:
            return line.number
    return None


def _scrolled_to_row(page: Page, name: str, icon: str) -> Generator[str, Page, tuple[Page, int]]:
    """Scroll until the page shows the icon of a name; the page and the icon's number.

    Raises:
        LookupError: it is not there.
    """
    for _ in range(_MAX_SCROLLS):
        number = _row(page, name, icon)
        if number is not None:
            return page, number
        page = yield f"scroll({page.numbers[-1]}, {_SCROLL})"
    raise LookupError(f"no {icon} of {name}:\n{page.text}")


def mail(goal: str, page: Page) -> Script:
    """Delete or mark a mail, answer it, or send it on."""
    sender, text, receiver = _mail_task(goal)
    word = goal.lower()
    if text is None and receiver is None:
        _, number = yield from _scrolled_to_row(
            page, sender, "trash" if "delete" in word or "trash" in word else "star"
        )
        yield f"click({number})"
        return
    page, _ = yield from _scrolled_to_row(page, sender, "star")
    page = yield click(page, sender)
    kind = "reply" if text is not None else "forward"
    for _ in range(_MAX_SCROLLS):
        if (button := _button(page, kind)) is not None:
            break
        page = yield f"scroll({page.numbers[-1]}, {_SCROLL})"
    page = yield f"click({button})"
    field = page.number_of("reply-text") if text is not None else page.number_of("forward-sender")
    page = yield fill(field, text if text is not None else receiver or "")
    yield click(page, f"send-{kind}")


def _button(page: Page, kind: str) -> int | None:
    found = [line.number for line in page.lines if line.number is not None and kind in line.name.lower()]
    return found[-1] if found else None


def _mail_task(goal: str) -> tuple[str, str | None, str | None]:
    """Who wrote the mail, the text to answer with, and whom to send it to."""
    sender = re.search(r"(?:by|from) ([A-Z]\w*)|email ([A-Z]\w*) sent|^([A-Z]\w*) wants his", goal)
    receiver = re.search(r"(?:to|Send|Give) ([A-Z]\w*)|^([A-Z]\w*) (?:wants the|is waiting)", goal)
    if sender is None:
        raise LookupError(f"the goal names no sender: {goal}")
    text = in_quotes(goal)
    return _found(sender), text[0] if text else None, _found(receiver) if receiver and not text else None


def _found(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def navigate_tree(goal: str, page: Page) -> Script:
    """Open folder after folder until the name is seen."""
    name, opened = in_quotes(goal)[0], set[int]()
    while page.find(name) is None:
        signs = [line.number for line in page.lines if line.number is not None and "expandable-" in line.name]
        closed = [number for number in signs if number not in opened]
        if closed:
            opened.add(closed[0])
            page = yield f"click({closed[0]})"
        else:
            page = yield f"scroll({page.numbers[-1]}, {_SCROLL})"
    yield click(page, name)


def autocomplete(goal: str, page: Page) -> Script:
    texts = in_quotes(goal)
    start, end = texts[0], texts[1] if len(texts) > 1 else ""
    field = page.all("textbox")[0].number
    page = yield f"click({field})"
    page = yield fill(field, start)
    for line in page.lines:
        if line.number is not None and line.name.startswith(start) and line.name.endswith(end):
            page = yield f"click({line.number})"
            break
    yield click(page, "Submit")


def search_engine(goal: str, page: Page) -> Script:
    place = int(re.findall(r"the (\d+)", goal)[0])
    page = yield fill(page.number_of("search-text"), in_quotes(goal)[0])
    page = yield click(page, "Search")
    for _ in range((place - 1) // 3):
        page = yield click(page, ">")
    found = [line for line in page.all("link") if not re.fullmatch(r"\d+|[<>]", line.name)]
    yield f"click({found[(place - 1) % 3].number})"


def search_films(goal: str, page: Page) -> Script:
    genre, director, year = re.findall(r"for (\w+) movies directed by (\w+) from year (\d+)", goal)[0]
    values = {"director": director, "year": year, "genre": genre}
    labels = [word for line in page.lines for word in values if word in line.name.lower()]
    for label, field in zip(labels, page.all("textbox"), strict=True):
        page = yield fill(field.number, values[label])
    yield click(page, "Submit")


def guess_number(goal: str, page: Page) -> Script:
    low, high = 0, 9
    field = page.number_of("tt")
    while True:
        guess = (low + high) // 2
        page = yield f"fill({field}, {quoted(str(guess))})"
        page = yield click(page, "Submit")
        said = " ".join(page.texts).lower()
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)


SCRIPTS: dict[str, MakeScript] = {
    "email-inbox": mail, "email-inbox-delete": mail, "email-inbox-important": mail, "email-inbox-reply": mail,
    "email-inbox-forward": mail, "email-inbox-forward-nl": mail, "navigate-tree": navigate_tree,
    "use-autocomplete": autocomplete, "use-autocomplete-nodelay": autocomplete, "search-engine": search_engine,
    "multi-orderings": search_films, "multi-layouts": search_films,
    "guess-number": guess_number,
}  # fmt: skip
"""Task -> its script"""
