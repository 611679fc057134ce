"""The page of runs in chromium: every control, no error, no request, and a policy's texts are shown as texts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_run import HOSTILE, STEPS, WORDS, make_run, make_trajectory, metrics
from venvs import environment_python

from slimrl.base.folder_lock import folder_lock
from slimrl.observability.page.document import write_page
from slimrl.observability.run_folder import RunFolder

pytestmark = pytest.mark.browser
DRIVER = Path(__file__).parents[1] / "drive_page.py"
FOLLOWER = Path(__file__).parents[1] / "drive_followed_page.py"
DEADLINE_S = 240.0


def driven(folder: Path, *arguments: str) -> dict:
    runs = [make_run(folder / f"seed_{seed}" / "gspo", seed=seed).path for seed in (0, 1)]
    write_page(runs, folder / "page.html", "Runs <b>")
    command = [str(environment_python("miniwob")), str(DRIVER), str(folder / "page.html"), *arguments]
    without_path = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=without_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("width", "scheme", "controls"),
    [pytest.param("1300", "light", "all", marks=pytest.mark.full), ("390", "dark", "few")],
)
def test_every_control_works_without_an_error_and_texts_stay_texts(tmp_path, width, scheme, controls):
    seen = driven(tmp_path, width, scheme, controls)
    assert seen["errors"] == []
    assert {url.split(":")[0] for url in seen["requests"]} <= {"file", "data", "blob"}
    assert (seen["harmed"], seen["elements"]) == (0, 0)
    assert set(seen["used"]) == (set(seen["too_wide"]) if controls == "all" else set())
    assert all(used >= 3 for used in seen["used"].values())
    assert max(seen["too_wide"].values()) <= 1, "the page is not wider than the window"
    assert (seen["theme"], seen["theme_after"]) == (scheme, "dark" if scheme == "light" else "light")
    assert seen["row"] == "#trajectories/1"

    trajectory, _ = make_trajectory(1, 0, 1, 60)
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[3]):
        assert text in seen["conversation"]
    assert (
        "\\u202eright to left\\u202c and \\u2028 a line, \\u001b[31m a colour, \\u0000 a null, \\ud800"
        in (seen["conversation"])
    )
    tokens = trajectory.segments[0].tokens
    shown = [WORDS[token].replace("\u202e", "\\u202e").replace("\n", "⏎\n") for token in tokens]
    assert seen["tokens"] == shown
    titles = {"loss mask", "weight version", "turn", "clipped", "log-prob of the engine", "log-prob of the trainer",
              "trainer - engine", "advantage", "importance ratio", "entropy"}  # fmt: skip
    assert seen["tints"].keys() == titles
    assert seen["tints"]["entropy"] > 10, "many shades"
    assert f"id {tokens[30]} · position 30" in seen["token"]
    assert seen["members"] == 4
    assert seen["found"].startswith("48 of 48 "), "each trajectory has these words"
    assert seen["panels"] == 1
    assert any("step 2: 0.3333" in text for text in seen["hover"])
    half = pytest.approx(0.196)
    assert seen["bars"] == [[half, None, half]] * 2, "95% intervals, of each seed its own"
    assert seen["step"] == seen["first_step"] == "2", "a click on a point opens its step"


@contextmanager
def talking(*command: str, **options) -> Iterator[subprocess.Popen]:
    """A process with pipes, ended after DEADLINE_S at the latest."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait(30)


def finish_step(run: RunFolder, whole: Path, step: int) -> None:
    """Write what a run writes of a step, from the folder of one that has it."""
    for name in ("trajectories", "expert_load"):
        shutil.copy2(whole / name / f"step_{step:06d}.parquet", run.path / name)
    with run.metrics.open("a") as file:
        file.write(json.dumps(metrics(step, 0)) + "\n")


def test_a_page_follows_a_run_and_what_the_reader_has_open_stays(tmp_path):
    runs = [make_run(tmp_path / f"seed_{seed}" / "gspo", seed=seed, groups=12) for seed in (0, 1)]
    growing, whole = runs[0], shutil.copytree(runs[0].path, tmp_path / "whole")
    growing.metrics.unlink()
    for folder in (growing.trajectories, growing.expert_load):
        shutil.rmtree(folder)
        folder.mkdir()
    command = [sys.executable, "-m", "slimrl.cli", "report", *(str(run.path) for run in runs), "--follow"]
    without_path = {**os.environ, "PYTHONPATH": ""}
    with folder_lock(growing.path), talking(*command) as server:
        address = server.stdout.readline().removeprefix("page: ").strip()
        assert address.startswith("http://127.0.0.1:"), server.stderr.read()
        with talking(str(environment_python("miniwob")), str(FOLLOWER), address, env=without_path) as browser:

            def asked(ready: str) -> None:
                line = browser.stdout.readline()
                assert line == json.dumps({"ready": ready}) + "\n", line + browser.stderr.read()

            for step, ready in enumerate(("starting", "curves", "trajectories"), 1):
                asked(ready)
                finish_step(growing, whole, step)
                print(step, file=browser.stdin, flush=True)
            asked("ending")
            # As Ctrl-C does.
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            assert server.stderr.read() == ""
            print(file=browser.stdin, flush=True)
            output, errors = browser.communicate(timeout=DEADLINE_S)
    assert browser.returncode == 0, errors
    seen = json.loads(output)

    assert seen["errors_before_end"] == []
    origins = {
        url.split("?")[0].rpartition("/")[0] for url in seen["requests"] if not url.startswith(("data:", "blob:"))
    }
    assert origins == {address.split("/?")[0]}
    starting, curves, curves_after = seen["starting"], seen["curves"], seen["curves_after"]
    assert starting["state"] == "starting"
    kept, overview_after = ("part", "scroll", "open"), seen["overview_after"]
    assert {name: overview_after[name] for name in kept} == {name: starting[name] for name in kept}
    assert (starting["part"], starting["scroll"], True in starting["open"]) == ("part-overview", 120, True)
    assert overview_after["state"] == "running"
    assert "following, data of " in seen["newest"]["status"]

    kept = ("hash", "part", "smoothing", "logs", "scroll")
    assert {name: curves_after[name] for name in kept} == {name: curves[name] for name in kept}
    assert (curves["part"], curves["smoothing"], curves["logs"], curves["scroll"]) == ("part-curves", "0.5", 4, 150)
    assert (curves["state"], max(curves["curve"]), max(curves_after["curve"])) == ("running", 1, 2)

    before, after = seen["trajectories"], seen["trajectories_after"]
    kept = ("chosen", "detail", "view", "filter", "shown", "tableScroll")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert (before["view"], before["filter"], before["tableScroll"]) == ("tokens", ["1", "positive"], 40)
    assert (before["rows"], after["rows"]) == ((2 + STEPS) * 48, 2 * STEPS * 48)
    rows = [int(one["hash"].removeprefix("#trajectories/")) for one in (before, after)]
    assert rows[1] == rows[0] + 48, "the same trajectory has another row"
    assert seen["newest"]["chosen"].startswith("1\n3\n")
    assert seen["search"]["shown"] == 72, "of the run that is chosen those with a reward"
    assert seen["harmed"] == 0
    assert all(used >= 2 for used in seen["used"].values())
    assert "slimrl report --follow has ended" in seen["ended"]["status"]
    assert seen["ended"]["state"] == "running", "what was there is still shown"
