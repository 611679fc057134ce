"""Tasks of MiniWoB++ as an environment of slimrl (docs/environments.md).

1. `share` starts one chromium in the process that forks the instances, with a network of their own.
2. `start` opens the task's page in a browser context of its own. The prompt's metadata has `task` and `seed`.
3. `step` does the one action that the turn names and shows the page, once the timers that are due have run.
4. The page says when the episode is over. The reward is 1 if its verdict, without its penalty for time, is positive.
"""

import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from browsergym.miniwob import ALL_MINIWOB_TASKS
from browsergym.miniwob.base import AbstractMiniwobTask
from playwright.sync_api import Browser, BrowserContext, Error, Locator, Playwright, sync_playwright
from playwright.sync_api import TimeoutError as TooLate

from slimrl.agent.environment import Observation, Turn, error_text
from slimrl.config.problems import suggestion
from slimrl.data.prompt import Prompt
from slimrl.environments.miniwob.actions import Action, parse_action
from slimrl.environments.miniwob.chromium import Chromium, find_chromium
from slimrl.environments.miniwob.own_network import leave_network
from slimrl.environments.miniwob.page_script import (
    COUNT_TIMERS,
    IS_FIELD,
    IS_SETTLED,
    OPTIONS,
    SCROLL,
    STATE,
    STOP_ANIMATIONS,
)
from slimrl.environments.miniwob.page_view import PageView, View, read_page

VIEWPORT = {"width": 332, "height": 214}
"""In pixels, as BrowserGym has it"""
EPISODE_MS = 24 * 3600 * 1000
"""The page's own deadline: far off, since it would count the time that the policy waits for its turn"""
BROWSER_MS = 60_000
ACTION_MS = 3_000
"""Time within which an element must take an action; one that is covered does not"""
SETTLE_MS = 2_000
"""Longest wait for the page's timers"""


class MiniwobEnvironment:
    """
    Args:
        view: `axtree` or `set_of_marks`, see View.
        screenshots: show each state as an image to those who read the conversations.
    """

    _shared: ClassVar[Chromium | None] = None
    """The chromium of all instances of this process and its children"""

    def __init__(self, view: str = "axtree", screenshots: bool = False) -> None:
        self._view, self._screenshots = View(view), screenshots
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._context: BrowserContext | None = None
        self._shown = PageView(text="", elements=frozenset())
        self._invalid_actions = 0

    @classmethod
    def check(cls, view: str = "axtree", screenshots: bool = False) -> None:
        """Raises ValueError: an argument is of another kind, or there is no chromium."""
        if view not in list(View):
            raise ValueError(f"view: {view!r} is neither axtree nor set_of_marks")
        if not isinstance(screenshots, bool):
            raise ValueError(f"screenshots: {screenshots!r} is not a bool")
        find_chromium()

    @classmethod
    def share(cls, view: str = "axtree", screenshots: bool = False) -> None:
        """Start the chromium that all instances use, out of reach of all other processes; it ends with this one."""
        leave_network()
        cls._shared = Chromium()

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: the prompt's metadata has no task that there is, or no seed."""
        task = make_task(prompt)
        assert self._shared is not None, "share was not called"
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.connect_over_cdp(self._shared.endpoint, timeout=BROWSER_MS)
        self._context = self._browser.new_context(viewport=VIEWPORT)
        self._context.set_default_timeout(BROWSER_MS)
        self._context.add_init_script(COUNT_TIMERS)
        self._task, self._page = task, self._context.new_page()
        self._goal = " ".join(task.setup(self._page)[0].split())
        self._page.evaluate(STOP_ANIMATIONS)
        *others, last = prompt.messages
        self._look()
        said = f"{last['content']}\n\nGoal: {self._goal}\n{self._shown.text}".strip()
        return Observation(messages=[*others, {**last, "content": said}], state_id=self._state(), image=self._image())

    def step(self, turn: Turn) -> Observation:
        problem = ""
        try:
            if turn.calls:
                raise ValueError("there are no tools; write the action as text")
            self._do(parse_action(turn.text))
        except ValueError as error:
            problem = error_text(str(error))
            self._invalid_actions += 1
        reward, done = self._verdict()
        if not done:
            self._look()
        said = f"{problem}\n{self._shown.text}" if problem else self._shown.text
        return Observation(
            messages=[] if done else [{"role": "user", "content": said}],
            reward=reward,
            done=done,
            state_id=self._state(),
            image=self._image(),
            metrics={"success": reward, "invalid_actions": self._invalid_actions},
        )

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        if self._browser is not None:
            self._browser.close()
        if self._playwright is not None:
            self._playwright.stop()

    def _do(self, action: Action) -> None:
        """Do an action and wait for what it led to.

        Raises:
            ValueError: the page does not take it; the message is for the policy.
        """
        if action.element is not None:
            if action.element not in self._shown.elements:
                raise ValueError(f"the page shows no element {action.element}")
            element = self._page.locator(f'[bid="{action.element}"]')
            try:
                _act(element, action)
            except TooLate as error:
                raise ValueError(f"element {action.element} takes no {action.name} now") from error
            except Error as error:
                if self._page.is_closed():
                    raise
                raise ValueError(f"element {action.element} does not take this {action.name}") from error
        self._settle()

    def _settle(self) -> None:
        try:
            self._page.wait_for_function(IS_SETTLED, timeout=SETTLE_MS)
        except TooLate:
            return  # timers that start each other, such as that of a cursor that blinks

    def _look(self) -> None:
        self._shown = read_page(self._page, self._view)

    def _verdict(self) -> tuple[float, bool]:
        """The reward, and whether the episode is over: so says the page, or it was left."""
        if self._page.url.partition("#")[0] != self._task.url:
            return 0.0, True
        facts = self._task._get_info()
        done = bool(facts["DONE_GLOBAL"])
        return float(done and facts["RAW_REWARD_GLOBAL"] > 0), done

    def _image(self) -> bytes | None:
        return self._page.screenshot(timeout=BROWSER_MS) if self._screenshots else None

    def _state(self) -> str:
        said = f"{self._goal}\n{self._page.evaluate(STATE)}"
        return hashlib.sha256(said.encode(errors="replace")).hexdigest()


def _act(element: Locator, action: Action) -> None:
    """Raises ValueError: it is no element for this action; playwright's errors if the page does not let it."""
    match action.name:
        case "click":
            element.click(timeout=ACTION_MS)
        case "fill":
            if not element.evaluate(IS_FIELD, timeout=ACTION_MS):
                raise ValueError(f"element {action.element} is no field for text")
            element.fill(action.text, timeout=ACTION_MS)
        case "select":
            options = element.evaluate(OPTIONS, timeout=ACTION_MS)
            if options is None:
                raise ValueError(f"element {action.element} is no list of options")
            if action.text not in options:
                raise ValueError(f"element {action.element} has the options {', '.join(map(repr, options))}")
            element.select_option(label=action.text, timeout=ACTION_MS)
        case "press":
            element.press(action.text, timeout=ACTION_MS)
        case "scroll":
            element.evaluate(SCROLL, action.pixels, timeout=ACTION_MS)


@cache
def tasks() -> dict[str, type[AbstractMiniwobTask]]:
    """The tasks that there are, by name such as `click-test`."""
    return {task.subdomain: task for task in ALL_MINIWOB_TASKS}


def no_task(name: str) -> str:
    """What is said of a name that no task has."""
    known = sorted(tasks())
    return f"there is no task {name}.{suggestion(name, known) or f' There are {", ".join(known)}.'}"


def make_task(prompt: Prompt) -> AbstractMiniwobTask:
    """Raises ValueError: the prompt's metadata names no task that there is, or no seed."""
    name, seed = prompt.metadata.get("task"), prompt.metadata.get("seed")
    if not isinstance(name, str) or not isinstance(seed, int):
        raise ValueError(
            f"{prompt.prompt_id}: metadata needs task, a name such as click-test, and seed, a whole number"
        )
    if name not in tasks():
        raise ValueError(f"{prompt.prompt_id}: {no_task(name)}")
    return tasks()[name](seed=seed, base_url=f"{_pages().as_uri()}/", episode_max_time=EPISODE_MS)


def _pages() -> Path:
    """Folder of the package's pages, without importing the package, which would need selenium."""
    spec = importlib.util.find_spec("miniwob")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "html" / "miniwob"
