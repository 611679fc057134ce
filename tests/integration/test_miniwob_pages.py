"""Tasks of MiniWoB++ in chromium: verdicts, what the policy cannot do, and what is left behind."""

import asyncio
import io
import json
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image
from venvs import environment_python, run_in

from slimrl.agent.environment import EnvironmentFailure, Turn
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.data.prompt import Prompt
from slimrl.environments.catalogue import entry_of
from slimrl.environments.miniwob.players import RandomPlayer, Solver
from slimrl.environments.play import PlayedEpisode, play

SOLVED = {
    "axtree": ("click-tab-2", "email-inbox-reply", "use-autocomplete"),
    "set_of_marks": ("choose-list", "login-user"),
}
"""Tasks that scripts solve here, by view"""
IN_THE_PAGE = """
import json
from slimrl.agent.environment import Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.miniwob.actions import KEYS
from slimrl.environments.miniwob.environment import MiniwobEnvironment

MiniwobEnvironment.share()
def started(task, seed=3):
    environment = MiniwobEnvironment("set_of_marks")
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": "Act."}], label=None,
                    metadata={"task": task, "seed": seed})
    return environment, environment.start(prompt, seed=0, scratch={})
def step(environment, text):
    seen = environment.step(Turn(index=0, text=text))
    said = seen.messages[0]["content"] if seen.messages else ""
    return {"said": said, "done": seen.done, "reward": seen.reward, "state": seen.state_id}

found = {}
environment, first = started("enter-text")
found["first"] = {"said": first.messages[-1]["content"], "state": first.state_id}
number = first.messages[-1]["content"].rpartition("textbox")[0].rpartition("[")[2].partition("]")[0]
found["unknown"] = step(environment, "click(999)")
found["not a list"] = step(environment, f'select({number}, "a")')
found["script"] = [step(environment, f'fill({number}, "{text}")') for text in
    ("javascript:core.endEpisode(1)", "<img src=x onerror=core.endEpisode(1)>", "'); core.endEpisode(1); ('")]
found["keys"] = [step(environment, f'press({number}, "{key}")') for key in sorted(KEYS)]
found["pages"] = [page.url.rpartition("/")[2] for page in environment._context.pages]
found["emptied"] = step(environment, f'fill({number}, "")')
found["filled"] = step(environment, f'fill({number}, "a")')
environment._page.goto("about:blank")
found["left"] = step(environment, "noop()")
environment.close()
for name, seed in (("again", 3), ("other", 4)):
    environment, first = started("enter-text", seed)
    found[name] = first.state_id
    environment.close()
print(json.dumps(found))
"""


def prompt(task: str, seed: int) -> Prompt:
    asked = [{"role": "user", "content": "Act."}]
    return Prompt(prompt_id=f"{task}:{seed}", messages=asked, label=None, metadata={"task": task, "seed": seed})


def server(view: str, **arguments) -> EnvironmentServer:
    python = environment_python("miniwob")
    return EnvironmentServer(python, entry_of("miniwob").environment, {"view": view, **arguments}, 10.0)


def test_a_screenshot_of_each_state_is_shown_to_those_who_ask():
    made = server("set_of_marks", screenshots=True)
    asked = prompt("login-user", 0)
    try:
        played = asyncio.run(play(made, asked, Solver(asked, 0), seed=0, max_turns=9))
    finally:
        made.close()
    images = [Image.open(io.BytesIO(observation.image)) for observation in played.observations]
    assert {image.size for image in images} == {(332, 214)}
    assert len({image.tobytes() for image in images}) >= 3, "what is filled in can be seen"


def chromium_of(pid: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        # One may end between the listing and the question.
        with suppress(psutil.NoSuchProcess):
            if "chromium" in one.name():
                found.append(one)
    return found


def folders() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).glob("slimrl-miniwob-*")}


async def until(condition, seconds: float = 10.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to pass")


@pytest.mark.parametrize("view", SOLVED)
async def test_scripts_that_read_the_page_earn_the_reward_and_clicks_at_random_do_not(view):
    made = server(view)
    prompts = [prompt(task, 11) for task in SOLVED[view]]
    try:
        episodes = await asyncio.gather(
            *(play(made, asked, Solver(asked, 0), seed=0, max_turns=20) for asked in prompts),
            play(made, prompts[-1], RandomPlayer(prompts[-1], 0), seed=0, max_turns=4),
        )
    finally:
        made.close()
    *solved, random = [(one.total_reward, one.metrics["success"], one.observations[-1].done) for one in episodes]
    assert solved == [(1.0, 1.0, True)] * len(prompts)
    assert random[:2] == (0.0, 0.0)


@pytest.fixture(scope="module")
def page() -> dict:
    return json.loads(run_in("miniwob", IN_THE_PAGE))


def test_no_action_ends_the_episode_by_itself_leaves_the_page_or_opens_another(page):
    assert not any(one["done"] or one["reward"] for one in [*page["script"], *page["keys"]])
    assert not any(one["said"].startswith("error: ") for one in page["script"])
    assert page["pages"] == ["enter-text.html"]


def test_a_page_that_is_left_ends_the_episode_without_a_reward(page):
    assert (page["left"]["done"], page["left"]["reward"]) == (True, 0.0)


def test_a_wrong_action_is_answered_and_changes_nothing(page):
    said = page["first"]["said"].partition("\n\n")[2].partition("\n")[2]
    assert page["unknown"]["said"] == f"error: the page shows no element 999\n{said}"
    assert page["not a list"]["said"].startswith("error: element ")
    assert page["unknown"]["state"] == page["not a list"]["state"] == page["first"]["state"]


def test_states_are_equal_for_equal_pages_and_not_for_others(page):
    first = page["first"]["state"]
    assert page["again"] == first
    assert len({first, page["other"], page["emptied"]["state"], page["filled"]["state"]}) == 4


async def test_a_killed_instance_takes_its_page_with_it_and_nothing_is_left_at_the_end():
    before, made = folders(), server("set_of_marks")
    try:
        kept, lost = made(), made()
        first = await kept.start(prompt("click-test", 1), seed=0, scratch={})
        process = made._process
        assert process is not None
        (server_process,) = psutil.Process(process.pid).children()
        children = set(server_process.children())
        browser = chromium_of(process.pid)
        await lost.start(prompt("click-test", 2), seed=0, scratch={})
        (child,) = set(server_process.children()) - children
        pages = len(chromium_of(process.pid))
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure):
            await lost.step(Turn(index=0, text="noop()"))
        await lost.close()
        await until(lambda: len(chromium_of(process.pid)) < pages)
        number = re.findall(r"\[(\d+)\] button", str(first.messages[-1]["content"]))[0]
        assert (await kept.step(Turn(index=0, text=f"click({number})"))).reward == 1.0
        await kept.close()
        assert browser[0].is_running()
        # No other process of the machine can reach the port by which chromium is led.
        networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in (browser[0].pid, server_process.pid)}
        assert len(networks) == 1
        assert os.readlink("/proc/self/ns/net") not in networks
        used = folders() - before
        assert len(used) == 1
    finally:
        made.close()
    await until(lambda: not any(one.is_running() for one in browser) and not folders() & used)


async def played_once_it_runs(made: EnvironmentServer, asked: Prompt, seconds: float = 60.0) -> PlayedEpisode:
    """An episode whose start is tried again, as a run does, until there is a browser."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await play(made, asked, Solver(asked, 0), seed=0, max_turns=2)
        except EnvironmentFailure:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


async def test_a_browser_that_ends_is_started_anew():
    made = server("set_of_marks")
    try:
        first = made()
        await first.start(prompt("click-test", 1), seed=0, scratch={})
        process = made._process
        assert process is not None
        oldest = min(chromium_of(process.pid), key=lambda one: one.create_time())
        oldest.kill()
        with pytest.raises(EnvironmentFailure):
            await first.step(Turn(index=0, text="noop()"))
        with suppress(EnvironmentFailure):  # its page is gone
            await first.close()
        asked = prompt("click-test", 2)
        assert (await played_once_it_runs(made, asked)).total_reward == 1.0
    finally:
        made.close()


def test_held_out_pages_are_none_of_the_training_pages_and_the_files_follow_from_the_seed(tmp_path):
    made = f"""
from pathlib import Path
from slimrl.environments.miniwob.data import write
for name, seed in (("one", 5), ("same", 5), ("other", 6)):
    write(Path({str(tmp_path)!r}) / name, num=40, heldout=20, seed=seed, tasks="click-test, click-link")
"""
    run_in("miniwob", made)
    texts = {name: (tmp_path / name / "train.jsonl").read_text() for name in ("one", "same", "other")}
    assert texts["one"] == texts["same"] != texts["other"]
    train, heldout = (
        [json.loads(line)["metadata"] for line in (tmp_path / "one" / f"{stem}.jsonl").read_text().splitlines()]
        for stem in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (40, 20)
    assert sum(one["task"] == "click-link" for one in train) == 20
    assert not {one["seed"] for one in train} & {one["seed"] for one in heldout}


def test_a_task_that_there_is_not_is_answered_with_the_one_that_is_meant():
    made = """
from pathlib import Path
from slimrl.environments.miniwob.data import write
try:
    write(Path("/nowhere"), num=1, heldout=1, seed=0, tasks="click-test,click-buton")
except ValueError as error:
    print(error)
"""
    assert run_in("miniwob", made) == "there is no task click-buton. Did you mean click-button?\n"
