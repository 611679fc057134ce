"""The page of runs in chromium: every control, no error, no request, and a policy's texts are shown as texts."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from page_run import HOSTILE, WORDS, make_run, make_trajectory
from venvs import environment_python

from slimrl.observability.page.document import write_page

pytestmark = pytest.mark.browser
DRIVER = Path(__file__).parents[1] / "drive_page.py"


def driven(folder: Path, *arguments: str) -> dict:
    runs = [make_run(folder / f"seed_{seed}" / "gspo", seed=seed).path for seed in (0, 1)]
    write_page(runs, folder / "page.html", "Runs <b>")
    command = [str(environment_python("miniwob")), str(DRIVER), str(folder / "page.html"), *arguments]
    without_path = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=without_path)
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
    assert seen["step"] == seen["first_step"] == "2", "a click on a point opens its step"
