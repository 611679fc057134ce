"""Environments of Gymnasium, the real ones, played by policies that are lists of texts."""

import asyncio
import io
import sys
import threading
from functools import partial
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from PIL import Image
from scripted_episode import END, PROMPT, played, runner_of, told

from slimrl.agent.adapters.gymnasium import GymnasiumEnvironment
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox
from slimrl.config.check import check_loaded
from slimrl.config.load import load_recipe
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.rewards.environment import environment_return
from slimrl.rollout.task.environment import load_environment

pytestmark = pytest.mark.integration

LAKE = {
    "id": "FrozenLake-v1", "make": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}  # fmt: skip
PATH = ("down", "down", "right", "right", "down", "right")


def turns(*words: str) -> list[str]:
    return [f"I go {word}.{END}" for word in words]


def episode(arguments: dict, *texts: str, prompt: Prompt = PROMPT):
    agent = AgentConfig(environment="slimrl.agent.adapters.gymnasium:GymnasiumEnvironment", environment_args=arguments)
    make = partial(GymnasiumEnvironment, **arguments)
    return asyncio.run(played(runner_of(*texts, environment=make, agent=agent), prompt))


def test_a_lake_is_crossed():
    trajectory = episode(LAKE, *turns(*PATH))
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_turns"] == 6
    assert trajectory.metadata["environment"]["rewards"] == [0.0] * 5 + [1.0]
    assert environment_return(trajectory, PROMPT) == 1.0
    first, *later = told(trajectory, "user")
    assert first == "Begin.\n\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    assert later[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert len(set(trajectory.metadata["environment"]["states"])) == 6


class Colours(gymnasium.Env):
    """Draws a number of its steps as the red of all pixels."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.steps += 1
        return 0, 0.0, self.steps == 2, False, {}

    def render(self):
        return np.full((3, 4, 3), (50 * self.steps, 0, 0), np.uint8)


def test_what_an_environment_draws_is_kept_for_each_turn_and_not_shown_to_the_policy():
    gymnasium.register("Colours-v0", Colours)
    trajectory = episode({"id": "Colours-v0", "make": {"render_mode": "rgb_array"}}, *turns("1", "1"))
    images = {turn: Image.open(io.BytesIO(image)) for turn, image in trajectory.images.items()}
    assert {turn: (image.size, image.getpixel((3, 2))) for turn, image in images.items()} == {
        turn: ((4, 3), (50 * turn, 0, 0)) for turn in range(3)
    }
    assert told(trajectory, "user") == ["Begin.\n\n0", "0"]


def test_an_action_that_is_none_is_answered_and_takes_no_step():
    trajectory = episode(LAKE, f"Hm.{END}", f"Not left, but RIGHT{END}", *turns("down"))
    assert trajectory.status is Status.completed  # in a hole
    said = told(trajectory, "user")
    assert said[1] == "Invalid action: name one of left, down, right, up"
    assert said[2].startswith("  (Right)")
    assert trajectory.metadata["environment"]["metrics"] == {"steps": 2.0, "invalid_actions": 1.0}
    assert environment_return(trajectory, PROMPT) == 0.0


def test_a_limit_of_steps_truncates():
    limited = {**LAKE, "make": {**LAKE["make"], "max_episode_steps": 2}}
    assert episode(limited, *turns("up", "up", "up")).status is Status.truncated


def test_it_does_what_gymnasium_does_with_the_same_seed():
    """Slippery ice: all chance comes from the seed, the prompt's where it has one."""
    slippery = {**LAKE, "make": {"render_mode": "ansi", "is_slippery": True, "max_episode_steps": 4}}
    prompt = Prompt(prompt_id="p", messages=PROMPT.messages, label=None, metadata={"seed": 5})
    alone = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    alone.reset(seed=5)
    expected = []
    for _ in range(4):
        _, _, over, *_ = alone.step(3)
        assert not over
        expected.append(alone.render().replace("\x1b[41m", "[").replace("\x1b[0m", "]"))
    trajectory = episode(slippery, *turns(*["up"] * 4), prompt=prompt)
    assert trajectory.metadata["environment"]["states"][1:] == expected[:3]
    assert len(set(expected)) > 1


def taxi_text(observation: int, env: gymnasium.Env) -> str:
    row, column, passenger, destination = env.unwrapped.decode(observation)
    return f"taxi {row},{column} passenger {passenger} to {destination}"


def by_number(text: str, env: gymnasium.Env) -> int:
    if not text.strip().isdigit():
        raise ValueError("write a number")
    return int(text)


def test_a_taxi_with_texts_and_actions_of_ones_own():
    arguments = {
        "id": "Taxi-v4",
        "make": {"max_episode_steps": 2},
        "render": f"{__name__}:taxi_text",
        "parse": f"{__name__}:by_number",
    }
    prompt = Prompt(prompt_id="p", messages=PROMPT.messages, label=None, metadata={"seed": 11})
    alone = gymnasium.make("Taxi-v4")
    start, _ = alone.reset(seed=11)
    after, reward, *_ = alone.step(4)
    trajectory = episode(arguments, f"4{END}", f"9{END}", f"nine{END}", f"0{END}", prompt=prompt)
    assert trajectory.status is Status.truncated
    said = told(trajectory, "user")
    assert said[0].endswith(taxi_text(start, alone))
    assert said[1] == taxi_text(after, alone)
    assert said[2:4] == ["Invalid action: 9 is no action", "Invalid action: write a number"]
    assert trajectory.metadata["environment"]["rewards"][0] == reward


class Guess(gymnasium.Env):
    """Both spaces are texts."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(3, charset="0123456789")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = options["number"]
        return "Guess", {}

    def step(self, action):
        right = int(action) == self.number
        return "Yes" if right else "No", float(right), right, False, {}


def test_texts_pass_as_they_are_and_a_prompt_has_options():
    gymnasium.register(id="tests/Guess-v0", entry_point=Guess)
    prompt = Prompt(prompt_id="p", messages=PROMPT.messages, label=None, metadata={"reset_options": {"number": 42}})
    trajectory = episode({"id": "tests/Guess-v0"}, f"7{END}", f"forty{END}", f" 42\n{END}", prompt=prompt)
    assert trajectory.status is Status.completed
    assert told(trajectory, "user") == ["Begin.\n\nGuess", "No", "Invalid action: 'forty' is no action"]
    assert trajectory.metadata["environment"]["rewards"] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"id": "Nope-v0"}, "Environment `Nope` doesn't exist"),
        ({"id": "Pendulum-v1"}, r"actions of Box.* need `parse`"),
        ({**LAKE, "actions": ["up"]}, "has 4 actions, and `actions` names 1"),
        ({**LAKE, "render": "nowhere:text"}, "no module nowhere"),
        ({**LAKE, "colour": "red"}, "cannot be made with id, make, actions, colour"),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_start(arguments, said):
    recipe = Recipe()
    recipe.agent = AgentConfig(
        environment="slimrl.agent.adapters.gymnasium:GymnasiumEnvironment", environment_args=arguments
    )
    with pytest.raises(ValueError, match=said):
        load_environment(recipe, ToolBox([]), SandboxPool(recipe.agent.sandbox))


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"pip install -c requirements/lock.txt -e '\.\[gymnasium\]'"):
        GymnasiumEnvironment.check(id="FrozenLake-v1")


def test_the_pages_recipe_makes_its_environment(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    block = (root / "docs" / "agents.md").read_text().split("`lake.yaml`")[1].split("```yaml\n")[1].split("```")[0]
    (tmp_path / "lake.yaml").write_text(block)
    (tmp_path / "recipes").symlink_to(root / "recipes")
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("lake.yaml", ["model.path=absent"], "train")
    keys = {problem.key for problem in check_loaded(loaded) if not problem.warning}
    assert keys == {"model.path", "data.train", "data.eval.heldout"}
    first = asyncio.run(
        load_environment(loaded.recipe, ToolBox([]), SandboxPool(loaded.recipe.agent.sandbox))().start(
            PROMPT, seed=1, scratch={}
        )
    )
    assert "[S]FFF" in first.messages[0]["content"]


def place(observation, env) -> str:
    """The tile and the thread that looks at it."""
    return f"{observation} {threading.get_ident()}"


def test_the_recipe_says_what_the_state_is_and_one_thread_makes_all_calls():
    trajectory = episode({**LAKE, "state": f"{__name__}:place"}, *turns("left", "down", "right", "up"))
    tiles, threads = zip(*(state.split() for state in trajectory.metadata["environment"]["states"]), strict=True)
    assert tiles == ("0", "0", "4")  # then it falls into a hole
    assert len(set(threads)) == 1
    assert threads[0] != str(threading.get_ident())
