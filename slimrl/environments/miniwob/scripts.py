"""Scripts that solve tasks by clicking and by filling in forms. Each gets the goal and the first page, yields an action
and is sent the page after it."""

import re
from collections.abc import Callable, Generator

from slimrl.environments.miniwob.page_reader import Page, quoted

Script = Generator[str, Page, None]
MakeScript = Callable[[str, Page], Script]
_WORDS_IN_QUOTES = re.compile(r'"([^"]*)"')
_MAX_SCROLLS = 8


def in_quotes(goal: str) -> list[str]:
    return _WORDS_IN_QUOTES.findall(goal)


def click(page: Page, name: str) -> str:
    return f"click({page.number_of(name)})"


def fill(number: int | None, text: str) -> str:
    return f"fill({number}, {quoted(text)})"


def scrolled_to(page: Page, name: str) -> Generator[str, Page, Page]:
    """Scroll down until the page shows an element."""
    for _ in range(_MAX_SCROLLS):
        if page.find(name) is not None:
            break
        page = yield f"scroll({page.numbers[0]}, 60)"
    return page


def click_only_button(goal: str, page: Page) -> Script:
    yield f"click({page.all('button')[0].number})"


def click_buttons_in_capitals(goal: str, page: Page) -> Script:
    for name in re.findall(r"button ([A-Z]+)", goal):
        page = yield click(page, name)


def click_name_in_quotes(goal: str, page: Page) -> Script:
    name = in_quotes(goal)[0]
    page = yield from scrolled_to(page, name)
    yield click(page, name)


def click_dialog(goal: str, page: Page) -> Script:
    name = in_quotes(goal)[0]
    yield click(page, "Close" if name == "x" else name)


def click_tab(goal: str, page: Page) -> Script:
    number = re.findall(r"#\d+", goal)[0]
    yield f"click({next(line.number for line in page.all('link') if line.name == f'Tab {number}')})"


def search_tabs(goal: str, page: Page) -> Script:
    name = in_quotes(goal)[0]
    for tab in [line.name for line in page.all("link") if line.name.startswith("Tab #")]:
        links = [line.number for line in page.all("link") if line.name == tab]
        page = yield f"click({links[0]})"
        if page.find(name) is not None:
            yield click(page, name)


def search_sections(goal: str, page: Page) -> Script:
    name = in_quotes(goal)[0]
    for section in [line.name for line in page.all("tab")]:
        page = yield click(page, section)
        for _ in range(_MAX_SCROLLS):
            if page.find(name) is not None:
                yield click(page, name)
            before, page = page.text, (yield f"scroll({page.numbers[-1]}, 60)")
            if page.text == before:
                break
        page = yield f"scroll({page.numbers[0]}, -1000)"
        page = yield click(page, section)


def open_section(goal: str, page: Page) -> Script:
    page = yield click(page, page.all("tab")[0].name)
    page = yield from scrolled_to(page, "Submit")
    yield f"click({page.all('button')[0].number})"


def click_choices(goal: str, page: Page) -> Script:
    names = goal.removeprefix("Select ").partition(" and click Submit")[0]
    for name in [] if names == "nothing" else names.split(", "):
        page = yield from scrolled_to(page, name)
        page = yield click(page, name)
    page = yield from scrolled_to(page, "Submit")
    yield click(page, "Submit")


def choose_from_list(goal: str, page: Page) -> Script:
    name = goal.removeprefix("Select ").partition(" from the list")[0]
    page = yield f"select({page.all('combobox')[0].number}, {quoted(name)})"
    yield click(page, "Submit")


def focus(goal: str, page: Page) -> Script:
    place = re.search(r"(\d+)(?:st|nd|rd|th)", goal)
    yield f"click({page.all('textbox')[int(place[1]) - 1 if place else 0].number})"


def enter_text(goal: str, page: Page) -> Script:
    text = in_quotes(goal)[0]
    if "lower case" in goal:
        text = text.lower()
    if "upper case" in goal:
        text = text.upper()
    page = yield fill(page.all("textbox")[0].number, text)
    yield click(page, "Submit")


def enter_texts(goal: str, page: Page) -> Script:
    """Each text in quotes into a field of its own; one alone into all of them."""
    texts, fields = in_quotes(goal), page.all("textbox")
    for number, field in enumerate(fields):
        page = yield fill(field.number, texts[min(number, len(texts) - 1)])
    yield f"click({page.all('button')[0].number})"


def copy_paste(goal: str, page: Page) -> Script:
    shown = next(line for line in page.all("textbox") if line.value)
    page = yield fill(page.number_of("answer-input"), shown.value)
    yield click(page, "Submit")


def read_table(goal: str, page: Page) -> Script:
    cells = [line.name for line in page.all("cell")]
    values = dict(zip(cells[::2], cells[1::2], strict=True))
    asked = re.findall(r"value of (.*) into", goal) or [text.rstrip(":") for text in page.texts]
    for label, field in zip(asked, page.all("textbox"), strict=True):
        page = yield fill(field.number, values[label])
    yield click(page, "Submit")


def find_word(goal: str, page: Page) -> Script:
    place = re.findall(r"(\d+)", goal)[0]
    words = " ".join(page.texts).split()
    page = yield fill(page.number_of("answer-input"), words[int(place) - 1].strip(".,"))
    yield click(page, "Submit")


def solve_equation(goal: str, page: Page) -> Script:
    """`a + b =`, or `a + x = c` and `x + b = c`."""
    said = "".join(page.texts).replace(" ", "")
    left, sign, right, result = re.findall(r"^(x|-?\d+)([-+x*])(x|-?\d+)=(-?\d*)", said)[0]
    operations: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "x": lambda a, b: a * b,
    }
    if not result:
        found = operations[sign](int(left), int(right))
    elif left == "x":
        found = int(result) - int(right) if sign == "+" else int(result) + int(right)
    else:
        found = int(result) - int(left) if sign == "+" else int(left) - int(result)
    page = yield fill(page.number_of("math-answer"), str(found))
    yield click(page, "Submit")


def type_shown_text(goal: str, page: Page) -> Script:
    page = yield fill(page.all("textbox")[0].number, "".join(page.texts))
    yield click(page, "Submit")


def enter_date(goal: str, page: Page) -> Script:
    month, day, year = re.findall(r"\d+", goal)
    page = yield fill(page.numbers[0], f"{year}-{month}-{day}")
    yield click(page, "Submit")


def enter_time(goal: str, page: Page) -> Script:
    hour, minute, half = re.findall(r"(\d+):(\d+) ([AP])M", goal)[0]
    page = yield fill(page.numbers[0], f"{int(hour) % 12 + 12 * (half == 'P'):02d}:{minute}")
    yield click(page, "Submit")


def odd_or_even(goal: str, page: Page) -> Script:
    numbers = [int(text) for text in page.texts if re.fullmatch(r"-?\d+", text)]
    for place, number in enumerate(numbers):
        buttons = [line.number for line in page.all("button") if line.name in ("Odd", "Even")]
        page = yield f"click({buttons[2 * place + (number % 2 == 0)]})"
    yield click(page, "Submit")


SCRIPTS: dict[str, MakeScript] = {
    "click-test": click_only_button, "click-test-2": click_buttons_in_capitals,
    "click-test-transfer": click_buttons_in_capitals, "click-button": click_name_in_quotes,
    "click-button-sequence": click_buttons_in_capitals, "click-link": click_name_in_quotes,
    "click-dialog": click_dialog, "click-dialog-2": click_dialog, "click-tab": click_tab, "click-tab-2": search_tabs,
    "click-collapsible": open_section, "click-collapsible-2": search_sections, "click-option": click_choices,
    "click-checkboxes": click_choices, "click-checkboxes-large": click_choices,
    "click-checkboxes-transfer": click_choices, "choose-list": choose_from_list, "focus-text": focus,
    "focus-text-2": focus, "enter-text": enter_text, "enter-text-2": enter_text, "enter-text-dynamic": enter_text,
    "enter-password": enter_texts, "login-user": enter_texts, "copy-paste": copy_paste, "read-table": read_table,
    "read-table-2": read_table, "find-word": find_word, "simple-arithmetic": solve_equation,
    "simple-algebra": solve_equation, "text-transform": type_shown_text, "enter-date": enter_date,
    "enter-time": enter_time, "odd-or-even": odd_or_even, "unicode-test": click_name_in_quotes,
}  # fmt: skip
"""Task -> its script"""
