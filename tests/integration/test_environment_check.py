"""`slimrl-tools environment check` of a class of one's own: what is shown, and what is refused."""

import re
import sys
from pathlib import Path

import pytest
from slimrl_tools.cli import app
from typer.testing import CliRunner

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

WORLD = """
from slimrl.api import Observation, Turn


class World:
    def __init__(self, steps: int = 2, odd: str = "") -> None:
        self.left, self.odd = steps, odd

    def start(self, prompt, *, seed, scratch):
        return Observation(messages=[*prompt.messages, {"role": "user", "content": f"{self.left} to go, seed {seed}."}])

    def step(self, turn):
        self.left -= 1
        odd = {"messages": "none"} if self.odd == "messages" else {"state_id": 3} if self.odd else {}
        said = [{"role": "user", "content": f"heard {turn.text!r}"}]
        return Observation(**{"messages": said, "reward": 0.5, "done": self.left == 0, **odd})

    def close(self):
        pass


class Player:
    def __init__(self, prompt, seed):
        self.seed, self.turns = seed, 0

    def turn(self, observation):
        self.turns += 1
        return Turn(index=0, text=f"{self.seed} {self.turns}")

class Wordless(Player):
    def turn(self, observation):
        return Turn(text="no number")

class Silent(Player):
    def turn(self, observation):
        return None

def function(messages):
    return "no class of players"
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command where the class lies; its exit code and output."""
    (tmp_path / "own_world.py").write_text(WORLD)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Go.", "label": null}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["environment", "check", *arguments])
        return done.exit_code, done.output

    yield run
    sys.modules.pop("own_world", None)


OWN = ("own_world:World", "--prompts", "prompts.jsonl")


def test_an_episode_is_played_and_shown(check):
    code, output = check(*OWN, "--player", "own_world:Player", "--seed", "4", "--args", "steps=3")
    lines = ["user: Go.", "user: 3 to go, seed 4."]
    for number in (1, 2, 3):
        over = ", the episode is over" if number == 3 else ""
        lines += [f"> 4 {number}", f"user: heard '4 {number}'", f"  reward 0.5{over}"]
    assert (code, output.splitlines()[: len(lines)]) == (0, lines)
    assert re.search(r"own_world:World: return 1.5 in 3 turns and [\d.]+ s\n$", output)


def test_without_a_player_one_turn_says_nothing(check):
    code, output = check(*OWN)
    assert (code, output.splitlines()[2:4]) == (0, ["> ", "user: heard ''"])
    assert "return 0.5 in 1 turns" in output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        ((*OWN, "--args", "odd=messages"), 1, "failed: own_world:World: step: messages must be a list of"),
        ((*OWN, "--args", "odd=state_id"), 1, "failed: state_id is 3, not a text"),
        ((*OWN, "--args", "stepz=3"), 2, "cannot be made with stepz"),
        ((*OWN, "--player", "own_world:Wordless"), 1, "own_world:Wordless: turn raised TypeError"),
        ((*OWN, "--player", "own_world:Silent"), 1, "own_world:Silent: turn gave None, not a Turn"),
        ((*OWN, "--player", "own_world:function"), 2, "cannot be made with the prompt and the seed"),
        ((*OWN, "--player", "random"), 2, "--player random: the player of a class of your own is MODULE:CLASS"),
        (("own_world:World",), 2, "a class of your own needs --prompts FILE"),
        (("bfcl", "--venv", "x"), 2, "are for MODULE:CLASS"),
    ],
)
def test_what_is_no_observation_and_no_class_is_refused(check, arguments, exit_code, said):
    code, output = check(*arguments)
    assert code == exit_code
    assert said in output
