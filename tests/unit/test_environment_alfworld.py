"""Household tasks in ALFWorld's domain: how they are drawn, solved and paid."""

import json
import re

import pytest
from venvs import run_in

SCRIPT = """
import contextlib, json, random, sys, tempfile
from pathlib import Path
from slimrl.agent.environment import Turn
from slimrl.environments.alfworld import data
from slimrl.environments.alfworld.environment import AlfWorld
from slimrl.environments.alfworld.problems import KINDS, draw_problem
from slimrl.environments.data_files import prompt_of

def play(line, commands):
    with contextlib.closing(AlfWorld()) as environment:
        told = [environment.start(prompt_of(line), seed=0, scratch={})]
        told += [environment.step(Turn(index=index, text=text)) for index, text in enumerate(commands)]
        facts = sorted(map(str, environment._state.facts))
    return [
        {"text": one.messages[-1]["content"] if one.messages else "", "reward": one.reward, "done": one.done,
         "state": one.state_id, **one.metrics}
        for one in told
    ], facts

with tempfile.TemporaryDirectory() as folder:
    data.write(Path(folder), num=6, heldout=1, seed=3, receptacles=5, objects=2)
    lines = [json.loads(line) for name in ("train", "heldout") for line in Path(folder, f"{name}.jsonl").open()]
by_kind = {line["metadata"]["kind"]: line for line in lines[:6]}
plans = {kind: line["metadata"]["walkthrough"] for kind, line in by_kind.items()}
lit, two, heat = (
    next(kind for kind in KINDS if word in kind) for word in ("light", "two", "heat")
)
without_light = [command for command in plans[lit] if not command.startswith("take")]
unheated = [command for command in plans[heat] if not command.startswith("heat")]
place, back = plans[two][-1], plans[two][-1].split()
again = f"take {back[1]} {back[2]} from {back[4]} {back[5]}"
drawn = [draw_problem(kind, random.Random(seed), receptacles=8, objects=10) for kind in KINDS for seed in range(20)]
print(json.dumps({
    "lines": lines,
    "plans": {kind: play(line, plans[kind]) for kind, line in by_kind.items()},
    "lamp alone": play(by_kind[lit], [*without_light, *without_light])[0],
    "one object twice": play(by_kind[two], [*plans[two][: len(plans[two]) // 2 + 1], "look", "help"])[0],
    "not heated": play(by_kind[heat], [*unheated, "heat it", "You heat it. The task is done."])[0],
    "capitals": play(by_kind[lit], [plans[lit][0].upper()])[0],
    "drawn": [{"kind": one.kind, "task": one.task, "pddl": one.pddl} for one in drawn],
    "again": [draw_problem(kind, random.Random(0), receptacles=8, objects=10).pddl for kind in KINDS],
}))
"""
CHANGED = {"clean": "isclean", "heat": "ishot", "cool": "iscool"}
"""Word of a kind's name -> predicate that its object must have at the end"""


@pytest.fixture(scope="module")
def played():
    return json.loads(run_in("alfworld", SCRIPT, timeout_s=280).splitlines()[-1])


def test_the_planners_plan_of_each_kind_earns_the_reward_with_its_last_command(played):
    assert len(played["plans"]) == 6
    for episode, _ in played["plans"].values():
        assert [one["reward"] for one in episode[1:]] == [0.0] * (len(episode) - 2) + [1.0]
        assert [one["done"] for one in episode] == [False] * (len(episode) - 1) + [True]
        assert episode[-1]["success"] == 1.0


def test_at_the_end_the_facts_are_what_the_task_asks_for(played):
    for kind, (_, facts) in played["plans"].items():
        task = next(line["metadata"]["task"] for line in played["lines"] if line["metadata"]["kind"] == kind)
        if kind == "look_at_obj_in_light":
            wanted = re.fullmatch(r"(?:look at|examine the) (\w+) (?:under|with) the desklamp", task)[1]
            assert any(re.match(rf"holds\(agent1: agent, {wanted} \d+: object\)", fact) for fact in facts)
            assert any(fact.startswith("istoggled(desklamp 1") for fact in facts)
            continue
        words = task.replace("some ", "a ").replace("two ", "a ").replace("find a", "put a").split()
        target = words[-1]
        wanted = next(word for word in words if any(fact.startswith(f"objecttype({word} ") for fact in facts))
        inside = [fact for fact in facts if re.match(rf"inreceptacle\({wanted} \d+: object, {target} \d+: ", fact)]
        assert len(inside) >= (2 if "two" in kind else 1), (task, facts)
        for word, predicate in CHANGED.items():
            if f"pick_{word}_" in kind:
                thing = re.match(r"inreceptacle\(([^:]+):", inside[0])[1]
                assert f"{predicate}({thing}: object)" in facts


def test_the_texts_are_alfworlds(played):
    text = played["plans"]["pick_and_place_simple"][0][0]["text"]
    task = played["lines"][0]["metadata"]["task"]
    assert "-= Welcome to TextWorld, ALFRED! =-" in text
    assert "You are in the middle of a room. Looking quickly around you, you see a " in text
    assert f"Your task is to: {task}." in text
    assert re.search(r"^Commands: .*go to \w+ 1; .*; look", text, re.MULTILINE)


def test_a_lamp_without_the_object_is_not_paid(played):
    episode = played["lamp alone"]
    assert any("desklamp 1" in one["text"] for one in episode)
    assert {one["reward"] for one in episode[1:]} == {0.0}


def test_one_of_two_objects_is_not_paid(played):
    assert {one["reward"] for one in played["one object twice"][1:]} == {0.0}


def test_an_object_that_was_not_heated_is_not_paid_nor_is_the_claim(played):
    episode = played["not heated"]
    assert {one["reward"] for one in episode[1:]} == {0.0}
    assert episode[-1]["text"].startswith("Nothing happens.")
    assert episode[-1]["state"] == episode[-2]["state"]


def test_looking_around_changes_no_state(played):
    placed, looked, helped = played["one object twice"][-3:]
    assert placed["state"] == looked["state"] == helped["state"]


def test_capitals_are_read(played):
    assert not played["capitals"][-1]["text"].startswith("Nothing happens.")


def test_problems_are_those_of_the_seed_and_none_is_twice(played):
    problems = [line["metadata"]["problem"] for line in played["lines"]]
    assert len(set(problems)) == 7
    assert played["again"] == [one["pddl"] for one in played["drawn"][::20]]


def test_nothing_of_the_wanted_type_lies_where_it_is_to_be_put(played):
    for one in played["drawn"]:
        init, goal = one["pddl"].split("(:goal")
        target = re.search(r"receptacleType \?r (\w+)Type", goal)
        wanted = {name for name in re.findall(r"objectType \?\w+ (\w+)Type", goal) if name != "DeskLamp"}
        assert len(wanted) == 1
        (name,) = wanted
        lies_in = re.findall(rf"\(inReceptacle {name}_\d+ (\w+)_\d+\)", init)
        assert len(lies_in) == (2 if "two" in one["kind"] else 1)
        assert target is None or target[1] not in lies_in
        assert name.lower() in one["task"]


def test_difficulties_without_meaning_are_refused(tmp_path):
    refused = {
        "seed=0, kinds='pick,look_at_obj_in_light'": "kinds: pick; there are pick_and_place_simple, ",
        "seed=0, receptacles=4": "receptacles: 4 is less than 5.",
        "seed=0, objects=-1": "objects: -1 is less than 0.",
    }
    code = f"""
from pathlib import Path
from slimrl.environments.alfworld import data
for options in {list(refused)!r}:
    try:
        eval(f"data.write(Path({str(tmp_path)!r}), num=1, heldout=1, {{options}})")
    except ValueError as error:
        print(error)
"""
    said = run_in("alfworld", code).splitlines()
    assert all(text.startswith(start) for text, start in zip(said, refused.values(), strict=True))
    assert not list(tmp_path.iterdir())
