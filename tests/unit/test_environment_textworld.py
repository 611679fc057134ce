"""Games of TextWorld: how they are made, told and paid, and that nothing but playing them is paid."""

import json

import pytest
from venvs import run_in

PRELUDE = """
import contextlib, json, os, sys, tempfile
from pathlib import Path
from slimrl.agent.environment import Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textworld.environment import TextWorld
from slimrl.environments.textworld.text_game import command_of

def play(game, *commands, **arguments):
    prompt = Prompt(prompt_id="g", messages=[{"role": "user", "content": "Play."}], label=None, metadata={"game": game})
    with contextlib.closing(TextWorld(**arguments)) as environment:
        told = [environment.start(prompt, seed=0, scratch={})]
        told += [environment.step(Turn(index=index, text=text)) for index, text in enumerate(commands)]
    return [
        {"text": one.messages[-1]["content"] if one.messages else "", "reward": one.reward, "done": one.done,
         "state": one.state_id, **one.metrics}
        for one in told
    ]
"""
MADE_BY_HAND = """
import textworld
from textworld.generator.game import Event, Quest

maker = textworld.GameMaker()
hall = maker.new_room("hall")
maker.set_player(hall)
key, apple, box = maker.new(type="k", name="key"), maker.new(type="f", name="apple"), maker.new(type="c", name="box")
for thing in (key, apple, box):
    hall.add(thing)
box.add_property("closed")
maker.quests = [
    Quest(win_events=[Event(conditions={maker.new_fact("in", key, maker.inventory)})], reward=1),
    Quest(
        win_events=[Event(conditions={maker.new_fact("open", box)})],
        fail_events=[Event(conditions={maker.new_fact("eaten", apple)})],
        reward=1,
    ),
]
game = maker.compile(sys.argv[1] + "/hall.z8")
os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
META = ["save", "script", "transcript", "restart", "yes", "restore", "undo", "quit", "q", "tw-extra-infos score",
        "tw-trace-actions", "superbrief", "notify off", "again", "g", "*** The End ***", "say <score> 2 </score>"]
SEVERAL = ["take key. open box", "take key then open box", "take key, open box", "take key and apple"]
print(json.dumps({
    "won": play(game, "take key", "look", "open box"),
    "lost": play(game, "take key", "take apple", "eat apple"),
    "again": play(game, "take key", "drop key", "take key", "put key on box", "take key"),
    "meta": play(game, "take key", *META, "look", "open box"),
    "files": os.listdir(),
    "several": play(game, *SEVERAL, "look"),
    "wrong": play(game, "take box", "TAKE KEY", "x box"),
    "brief": play(game, "look", "take key", brief=True),
    "silent": play(game, "look", show_commands=False),
    "commands": [command_of(text) for text in ("I take it.\\n\\n> take key.\\n", "take  key", "", " \\n")],
}))
"""
DRAWN = """
from slimrl.environments.textworld import data
from slimrl.environments.textworld.players import RandomPlayer, Solver

def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]

out, again = Path(sys.argv[1], "drawn"), Path(sys.argv[1], "again")
data.write(out, num=2, heldout=1, seed=5, quests=2, quest=2, objects=4, demonstrations=4)
data.write(again, num=1, heldout=1, seed=5, quests=2, quest=2, objects=4)
drawn = lines(out, "train") + lines(out, "heldout")

def total(line, player):
    prompt = data.prompt_of(line)
    with contextlib.closing(TextWorld()) as environment:
        player, observation, paid = player(prompt, 0), environment.start(prompt, seed=0, scratch={}), 0.0
        for _ in range(30):
            observation = environment.step(player.turn(observation))
            paid += observation.reward
            if observation.done:
                return paid
    return paid

print(json.dumps({
    "walkthroughs": [line["metadata"]["walkthrough"] for line in drawn],
    "again": [line["metadata"]["walkthrough"] for line in lines(again, "train") + lines(again, "heldout")],
    "solver": [total(line, Solver) for line in drawn],
    "random": [total(line, RandomPlayer) for line in drawn],
    "files": sorted(path.suffix for path in (out / "games").iterdir()),
    "sft": lines(out, "sft"),
    "words": (out / "words.txt").read_text(),
}))
"""


@pytest.fixture(scope="module")
def hall(tmp_path_factory):
    """Episodes in a room with a key to be taken and a box to be opened; who eats the apple has lost."""
    return json.loads(run_with(tmp_path_factory.mktemp("hall"), MADE_BY_HAND))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Two games to train on, and a held-out one."""
    return json.loads(run_with(tmp_path_factory.mktemp("drawn"), DRAWN))


def run_with(folder, code):
    return run_in("textworld", f"import sys; sys.argv[1:] = [{str(folder)!r}]\n{PRELUDE}{code}").splitlines()[-1]


def rewards(episode):
    return [one["reward"] for one in episode[1:]]


def test_each_point_is_paid_as_its_share_when_it_is_scored(hall):
    assert rewards(hall["won"]) == [0.5, 0.0, 0.5]
    assert [one["done"] for one in hall["won"]] == [False, False, False, True]
    assert (hall["won"][-1]["success"], hall["won"][-1]["score"]) == (1.0, 1.0)


def test_a_lost_game_is_over_and_keeps_what_it_has(hall):
    assert rewards(hall["lost"]) == [0.5, 0.0, 0.0]
    assert hall["lost"][-1]["done"]
    assert (hall["lost"][-1]["success"], hall["lost"][-1]["score"]) == (0.0, 0.5)


def test_the_state_is_that_of_the_facts_and_the_score_and_not_of_the_text(hall):
    start, taken, looked, opened = (one["state"] for one in hall["won"])
    assert taken == looked
    assert len({start, taken, opened}) == 3
    dropped = hall["again"][2]["state"]
    assert dropped != start  # the key lies there again, but its point is gone
    assert hall["again"][3]["state"] == taken


def test_what_was_paid_is_not_paid_again(hall):
    assert rewards(hall["again"]) == [0.5, 0.0, 0.0, 0.0, 0.0]


def test_words_that_the_interpreter_obeys_do_nothing_and_write_no_file(hall):
    _, taken, *refused, looked, opened = hall["meta"]
    assert {one["text"].partition("\n")[0] for one in refused} == {"That's not a verb I recognise."}
    assert {one["state"] for one in [*refused, looked]} == {taken["state"]}
    assert {one["reward"] for one in [*refused, looked]} == {0.0}
    assert looked["text"] == hall["won"][2]["text"]
    assert (opened["reward"], opened["done"]) == (0.5, True)
    assert hall["files"] == []


def test_a_turn_is_one_command(hall):
    start, *refused, looked = hall["several"]
    assert {one["text"].partition("\n")[0] for one in refused} == {"One command at a time."}
    assert looked["state"] == start["state"]
    assert sum(rewards(hall["several"])) == 0.0


def test_a_command_that_is_not_admissible_has_the_games_own_answer(hall):
    start, fixed, taken, looked = hall["wrong"]
    assert "take box" not in start["text"]
    assert fixed["text"].startswith("That's fixed in place.")
    assert (fixed["reward"], fixed["state"]) == (0.0, start["state"])
    assert taken["reward"] == 0.5  # the interpreter reads capitals
    assert looked["state"] == taken["state"]


def test_the_start_has_the_room_and_all_messages_the_commands(hall):
    start = hall["won"][0]["text"]
    assert start.startswith("Play.\n")
    assert "-= Hall =-" in start
    last = "Commands: examine apple; examine box; examine key; inventory; look; open box; take apple; take key"
    assert start.splitlines()[-1] == last
    assert "Commands: drop key; " in hall["won"][1]["text"]
    assert all("Commands" not in one["text"] for one in hall["silent"])


def test_a_brief_game_says_little_and_takes_all_commands(hall):
    start, looked, taken = (one["text"] for one in hall["brief"])
    assert "-= Hall =-" not in start
    assert start.splitlines()[-1] == "Commands: open box; take apple; take key"
    assert looked.splitlines()[0] == "-= Hall =-"
    assert taken.splitlines()[0] == "You pick up the key from the ground."
    assert len(taken.splitlines()) == 2


def test_the_command_is_the_last_line_without_a_prompt(hall):
    assert hall["commands"] == ["take key", "take key", "", ""]


def test_a_walkthrough_earns_the_full_reward_and_chance_does_not(drawn):
    assert drawn["solver"] == [1.0, 1.0, 1.0]
    assert all(0 <= paid <= 1 for paid in drawn["random"])
    assert sum(drawn["random"]) < 3


def test_games_are_those_of_the_seed_and_no_held_out_one_is_trained_on(drawn):
    assert drawn["again"] == drawn["walkthroughs"][:2]
    assert len(set(map(tuple, drawn["walkthroughs"]))) == 3
    assert drawn["files"] == [".json"] * 3 + [".z8"] * 3  # nothing else is left


def test_demonstrations_are_played_in_the_games_to_train_on(drawn):
    objectives = {conversation["messages"][0]["content"].splitlines()[1] for conversation in drawn["sft"]}
    assert len(drawn["sft"]) == 4
    assert len(objectives) <= 2
    for conversation in drawn["sft"]:
        roles = [message["role"] for message in conversation["messages"]]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert roles[-1] == "assistant"
    assert objectives <= set(drawn["words"].splitlines())


def test_difficulties_without_meaning_are_refused(tmp_path):
    refused = {
        "seed=40000": "seed: 40000 is not between 0 and 39999.",
        "seed=0, quest=1, min_quest=2": "quest: 1 is less than min_quest, 2.",
        "seed=0, rooms=0": "rooms: 0 is less than 1.",
        "seed=0, theme='space'": "theme: 'space' is none of house, basic.",
    }
    code = f"""
from pathlib import Path
from slimrl.environments.textworld import data
for options in {list(refused)!r}:
    try:
        eval(f"data.write(Path({str(tmp_path)!r}), num=1, heldout=1, {{options}})")
    except ValueError as error:
        print(error)
"""
    said = run_in("textworld", code).splitlines()
    assert said == list(refused.values())
    assert not list(tmp_path.iterdir())
