"""A page of runs opened in chromium, and all of its controls used; for scripts in miniwob's virtual environment."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import sync_playwright

PARTS = ("overview", "curves", "time", "trajectories", "experts")
CONTROLS = "button, select, input, summary"


@contextmanager
def opened(url: str, width: int, scheme: str, seen: dict) -> Iterator:
    """The page; `seen` gets its `errors`, warnings and errors of the console among them, and its `requests`."""
    seen |= {"errors": [], "requests": []}
    with sync_playwright() as playwright:
        # It may reach no other host, so that a request fails even if it is not seen.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        page = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme).new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: seen["errors"].append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: seen["errors"].append(str(error)))
        page.on("request", lambda asked: seen["requests"].append(asked.url[:200]))
        page.goto(url)
        yield page
        browser.close()


def wait_until(page, expression: str, timeout_s: float = 60.0) -> None:
    """Wait for the page's own words to be true; playwright's wait needs `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {expression}")
        page.wait_for_timeout(50)


def use(page, control) -> None:
    """Use a control as its kind is used, if it is there and seen."""
    if not control.is_visible():
        return
    kind = control.evaluate("one => one.type || one.tagName")
    if kind == "select-one":
        for value in control.evaluate("one => [...one.options].map((option) => option.value)"):
            control.select_option(value)
        control.select_option(index=0)
    elif kind == "range":
        for name in ("max", "min"):
            control.evaluate(f"one => {{ one.value = one.{name}; one.dispatchEvent(new Event('input')); }}")
    elif kind == "search":
        control.fill("play")
        page.wait_for_timeout(350)
        control.fill("")
        page.wait_for_timeout(350)
    else:
        control.click()


def use_all(page, within: str) -> int:
    """Use the controls of a part, also those that appear meanwhile; returns how many there were."""
    used = 0
    while used < len(controls := page.query_selector_all(f"{within} :is({CONTROLS})")) and used < 80:
        if controls[used].evaluate("one => one.isConnected"):
            use(page, controls[used])
        used += 1
    return used


def too_wide(page) -> int:
    """How many points the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
