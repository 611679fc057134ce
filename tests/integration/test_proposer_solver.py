"""A proposer and its solvers: what each is told and paid, and with whom it is compared."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scripted_episode import END, played, runner_of

from slimrl.agent.environment import Observation
from slimrl.agent.roles.proposer_solver import PROPOSER_TASK, SOLVER_TASK, ProposerSolver
from slimrl.algorithms.selection import select
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory, from_json, to_json
from slimrl.rewards.environment import RoleReturns
from slimrl.rewards.scoring import score

pytestmark = pytest.mark.integration

PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Add."}], label=None)


def episode(*texts: str, name: str = "t", prompt: Prompt = PROMPT, **arguments) -> Trajectory:
    environment = partial(ProposerSolver, **arguments)
    runner = runner_of(*(f"{text}{END}" for text in texts), environment=environment, agent=AgentConfig())
    trajectory = asyncio.run(played(runner, prompt, name))
    asyncio.run(score(trajectory, prompt, RoleReturns(reported="solver_*"), 5.0))
    return trajectory


def solved(task: str, *answers: object, **settings) -> Trajectory:
    given = [f"It is \\boxed{{{answer}}}." for answer in answers]
    return episode(f"So: <task>{task}</task>", *given, num_solvers=len(answers), **settings)


def test_each_solver_gets_the_task_alone_and_all_are_paid_for_what_they_did():
    trajectory = solved("3 + 4 * 2", 11, 14, "22/2", 10)
    assert trajectory.status is Status.completed
    told = {}
    for message in trajectory.messages:
        told.setdefault(message["conversation"], []).append(message["content"])
    asked = f"3 + 4 * 2\n\n{SOLVER_TASK}"
    assert told == {
        "proposer": [f"Add.\n\n{PROPOSER_TASK}", "So: <task>3 + 4 * 2</task>"],
        **{f"solver_{n}": [asked, f"It is \\boxed{{{text}}}."] for n, text in enumerate((11, 14, "22/2", 10), 1)},
    }
    right = {"solver_1": 1.0, "solver_2": 0.0, "solver_3": 1.0, "solver_4": 0.0}
    assert trajectory.role_rewards == {"proposer": 1.0, **right}
    assert trajectory.reward == 0.5
    assert trajectory.metadata["environment"]["metrics"] == {"solved": 0.5, "valid_tasks": 1, "learnable_tasks": 1}
    groups = {role: facts.get("group") for role, facts in trajectory.metadata["roles"].items()}
    assert groups == {"proposer": None, **dict.fromkeys(right, "solvers")}


@pytest.mark.parametrize(
    ("task", "answers", "proposer"),
    [
        ("2 + 2", (4, 4), 0.0),
        ("2 + 2", (3, 3), 0.0),
        ("2 + 2", (4, 3, 3, 3), 0.75),
        ("7 / 2", ("3.5", "7/2", "3", "14/4"), 0.75),
        ("7 / 2", ("1/0", "x"), 0.0),
    ],
)
def test_a_proposer_is_paid_most_for_what_half_of_the_solvers_can(task, answers, proposer):
    assert solved(task, *answers).role_rewards["proposer"] == proposer


@pytest.mark.parametrize(
    "said", ["2 + 2", "<task>two</task>", "<task>4</task>", "<task>1 / 0</task>", "<task>13 + 2</task>"]
)
def test_what_is_no_task_or_lacks_a_number_that_was_asked_for_costs_the_proposer_and_ends_the_episode(said):
    prompt = Prompt(prompt_id="p:1", messages=PROMPT.messages, label=None, metadata={"contains": ["3", "2"]})
    trajectory = episode(said, prompt=prompt)
    assert (trajectory.status, trajectory.role_rewards) == (Status.completed, {"proposer": -1.0})
    assert trajectory.reward == 0
    assert trajectory.metadata["environment"]["metrics"] == {"valid_tasks": 0}
    assert solved("3 - 2", 1, 2, prompt=prompt).role_rewards["proposer"] == 1.0


def test_a_prompt_with_a_task_needs_no_proposer():
    metadata = {"task": "3 - 2"}
    prompt = Prompt(prompt_id="p:1", messages=PROMPT.messages, label="1", metadata=metadata)
    trajectory = episode("\\boxed{1}", "\\boxed{2}", prompt=prompt, num_solvers=2)
    assert trajectory.role_rewards == {"solver_1": 1.0, "solver_2": 0.0}
    assert trajectory.reward == 0.5
    metadata["task"] = "three"
    runner = runner_of(environment=ProposerSolver, agent=AgentConfig())
    assert "metadata.task is no task: 'three'" in asyncio.run(played(runner, prompt)).metadata["error"]


def upper(task: str) -> str | None:
    return task.upper() if task.islower() else None


def test_a_verifier_of_ones_own_says_what_is_a_task_and_its_answer():
    mine = {"verifier": "integration.test_proposer_solver:upper"}
    assert solved("word", "WORD", "word", **mine).role_rewards == {"proposer": 1.0, "solver_1": 1.0, "solver_2": 0.0}
    assert episode("<task>2 + 2</task>", **mine).role_rewards == {"proposer": -1.0}
    for wrong, said in (
        ({"num_solvers": 1}, "num_solvers: 1 is no whole number from 2 to 16"),
        ({"num_solvers": 17}, "num_solvers: 17"),
        ({"verifier": "integration.test_proposer_solver:lower"}, "lower"),
    ):
        with pytest.raises(ValueError, match=said):
            ProposerSolver.check(**wrong)


def batch() -> list[Trajectory]:
    """Two prompts of three episodes; a proposer of the second one writes no task."""
    made = []
    for prompt, games in {
        "a": [("1 + 1", 2, 3, 2), ("2 + 2", 4, 4, 4), ("3 + 3", 6, 0, 0)],
        "b": [("1 * 1", 1, 0, 0), ("2 * 2", 4, 4, 1), ("none",)],
    }.items():
        for number, (task, *answers) in enumerate(games):
            asked = replace(PROMPT, prompt_id=prompt)
            given = [f"\\boxed{{{one}}}" for one in answers]
            made.append(episode(f"<task>{task}</task>", *given, name=f"{prompt}{number}", prompt=asked, num_solvers=3))
    return made


@pytest.mark.parametrize("by_role", [True, False])
def test_solvers_are_compared_within_their_episode_and_proposers_with_those_of_the_prompt(by_role):
    algorithm = AlgorithmConfig(advantage="rloo", baseline_by_role=by_role)
    selection = select(batch(), algorithm, lambda group: True, step=1)
    got = {one.trajectory_id: value for one, value in zip(selection.trajectories, selection.advantages, strict=True)}
    rewards = {
        "a0": [1, 0, 1], "a1": [1, 1, 1], "a2": [1, 0, 0], "b0": [1, 0, 0], "b1": [1, 1, 0],
    }  # fmt: skip
    groups = [{f"{name} solver_{n}": float(one) for n, one in enumerate(own, 1)} for name, own in rewards.items()]
    paid = {name: 4 * np.mean(own) * (1 - np.mean(own)) for name, own in rewards.items()} | {"b2": -1.0}
    groups += [{f"{name} proposer": value for name, value in paid.items() if name[0] == prompt} for prompt in "ab"]
    expected = {}
    for group in groups:
        for name, value in group.items():
            expected[name] = value - np.mean([other for one, other in group.items() if one != name])
    assert got.keys() == expected.keys()
    assert [got[name] for name in expected] == pytest.approx(list(expected.values()), abs=1e-6)
    assert (selection.num_groups, selection.num_zero_variance) == (7, 1)


def test_solvers_are_compared_also_where_no_other_episode_of_the_prompt_is_left():
    first, *others = batch()[:3]
    for failed in others:
        failed.status = Status.failed
    selection = select([first, *others], AlgorithmConfig(advantage="rloo"), lambda group: True, step=1)
    assert [one.trajectory_id for one in selection.trajectories] == [f"a0 solver_{n}" for n in (1, 2, 3)]
    assert selection.advantages.tolist() == [0.5, -1.0, 0.5]


def test_groups_are_in_files_and_others_than_texts_are_refused():
    line = json.loads(json.dumps(to_json(solved("1 + 1", 2, 3))))
    assert to_json(from_json(line)) == line
    line["metadata"]["roles"]["solver_1"]["group"] = 1
    with pytest.raises(ValueError, match="must have a text as its `group`"):
        from_json(line)


class Misnamed(ProposerSolver):
    async def start(self, prompt, *, seed, scratch):
        return Observation(messages=prompt.messages, role="solver_1", group="two words")


def test_a_group_has_a_name_like_a_role():
    failed = asyncio.run(played(runner_of(environment=Misnamed, agent=AgentConfig()), PROMPT))
    assert "start: group must be letters" in failed.metadata["error"]
