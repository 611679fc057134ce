"""Games of TextWorldExpress: how they are told and paid, what nothing but playing them earns, and who reaches Java."""

import itertools
import json

import pytest
from venvs import run_in

PRELUDE = """
import gc, json, os, signal, sys, time
from contextlib import closing
from pathlib import Path
from slimrl.agent.environment import Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textworld_express.environment import TextWorldExpress

def started(game, seed, params="", fold="train", **arguments):
    metadata = {"game": game, "params": params, "fold": fold, "seed": seed}
    messages = [{"role": "user", "content": "Play."}]
    environment = TextWorldExpress(**arguments)
    prompt = Prompt(prompt_id="g", messages=messages, label=None, metadata=metadata)
    return environment, environment.start(prompt, seed=0, scratch={})

def play(game, seed, *commands, **arguments):
    environment, first = started(game, seed, **arguments)
    told = [first] + [environment.step(Turn(index=index, text=text)) for index, text in enumerate(commands)]
    environment.close()
    return [shown(one) for one in told]

def shown(one):
    text = one.messages[-1]["content"] if one.messages else ""
    return {"text": text, "reward": one.reward, "done": one.done, "state": one.state_id, **one.metrics}
"""
PLAYED = """
TextWorldExpress.share()
java = TextWorldExpress.java()

def refused(game, params="", fold="train"):
    try:
        started(game, 3, params, fold)
    except ValueError as error:
        return str(error)

def in_turns():
    first, second = started("coin", 3, "numLocations=4"), started("coin", 4, "numLocations=4")
    told = [[], []]
    for command in DOORS:
        for number, (environment, _) in enumerate((first, second)):
            told[number].append(shown(environment.step(Turn(index=0, text=command))))
    first[0].close()
    second[0].close()
    return told

def held():
    gc.collect()
    return looking.java_gateway_server.getGateway().getBindings().size()

DOORS = ["open door to north", "move north", "take coin"]
READ = ["take math problem", "read math problem"]
META = ["save", "reset", "restart", "quit", "help", "load coin", "getGoldActionSequence", "score 1.0", "",
        "read math problem. take 6 pineapples", "read math problem; inventory", "\\ud800", "x" * 100_000]
looking = java.connect()
before = held()
print(json.dumps({
    "won": play("arithmetic", 3, *READ, "take 6 pineapples", "look around", "put 6 pineapples in box"),
    "lost": play("arithmetic", 3, *READ, "take 216 grapes", "put 216 grapes in box"),
    "meta": play("arithmetic", 3, "take math problem", *META, "inventory"),
    "lines": play("arithmetic", 3, "take math problem\\nread math problem\\ntake 6 pineapples"),
    "again": play("twc", 3, *["take beret", "put beret in laundry basket"] * 3),
    "order": [play("twc", 3, *takes)
              for takes in (["take beret", "take dirty brown blazer"], ["take dirty brown blazer", "take beret"])],
    "capitals": play("twc", 10987, "TAKE wet gray bra", "> Take dirty plaid t-shirt.", fold="dev"),
    "elsewhere": [play("cookingworld", 3, *first, "move west", params="numLocations=2,includeDoors=0")
                  for first in ([], ["open fridge"], ["open fridge", "close fridge"])],
    "brief": play("coin", 3, *DOORS, params="numLocations=4", brief=True),
    "silent": play("coin", 3, "look around", params="numLocations=4", show_commands=False),
    "alone": [play("coin", seed, *DOORS, params="numLocations=4")[1:] for seed in (3, 4)],
    "in turns": in_turns(),
    "held": [before, held()],
    "refused": [refused("coin", "numLocations=99"), refused("coin", "rooms=3"), refused("coin", "numLocations=a"),
                refused("mapreader", "numLocations=3"), refused("chess")],
}))
java.close()
"""
DRAWN = """
from slimrl.environments.data_files import prompt_of
from slimrl.environments.textworld_express import data
from slimrl.environments.textworld_express.players import RandomPlayer, Solver
from slimrl.environments.textworld_express.walkthrough import find_walkthrough

def lines(folder, name):
    return [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]

def total(line, player):
    prompt = prompt_of(line)
    with closing(TextWorldExpress()) as environment:
        player, observation, paid = player(prompt, 0), environment.start(prompt, seed=0, scratch={}), 0.0
        for _ in range(24):
            observation = environment.step(player.turn(observation))
            paid += observation.reward
            if observation.done:
                break
    return paid

def twins(line):
    # What two instances of a game are told that are played in turns.
    told = []
    with closing(TextWorldExpress()) as first, closing(TextWorldExpress()) as second:
        for one in (first, second):
            one.start(prompt_of(line), seed=0, scratch={})
        for command in line["metadata"]["walkthrough"]:
            told.append([shown(one.step(Turn(index=0, text=command))) for one in (first, second)])
    return told

out = sys.argv[1]
for folder in ("drawn", "again", "few"):
    Path(out, folder).mkdir()
KINDS = "twc,mapreader,arithmetic,sorting,simonsays,peckingorder"
data.write(Path(out, "drawn"), num=7, heldout=6, seed=5, game=KINDS, demonstrations=8)
data.write(Path(out, "again"), num=2, heldout=2, seed=5, game=KINDS)
data.FOLDS["train"] = range(60)
try:
    data.write(Path(out, "few"), num=60, heldout=1, seed=0, game="simonsays", params="gameLength=1,numDistractors=0")
except ValueError as error:
    few = str(error)
drawn = lines(f"{out}/drawn", "train") + lines(f"{out}/drawn", "heldout")
TextWorldExpress.share()
print(json.dumps({
    "drawn": drawn,
    "again": lines(f"{out}/again", "train") + lines(f"{out}/again", "heldout"),
    "solver": [total(line, Solver) for line in drawn],
    "twins": [twins(line) for line in drawn[:6]],
    "random": [total(line, RandomPlayer) for line in drawn],
    "wander": find_walkthrough(TextWorldExpress.java(), "coin", "numLocations=9,includeDoors=0", 3, "train"),
    "empty": find_walkthrough(TextWorldExpress.java(), "simonsays", "gameLength=3", 3, "train"),
    "sft": lines(f"{out}/drawn", "sft"),
    "words": Path(out, "drawn", "words.txt").read_text(),
    "few": few,
}))
TextWorldExpress.java().close()
"""
ENDED = """
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError

def denied(**known):
    parameters = GatewayParameters(port=TextWorldExpress.java()._port, **known)
    try:
        return JavaGateway(gateway_parameters=parameters).jvm.System.getProperty("user.name")
    except Py4JError as error:
        return str(error)

read, write = os.pipe()
if os.fork() == 0:
    TextWorldExpress.share()
    said = {"pid": TextWorldExpress.java()._process.pid, "denied": [denied(), denied(auth_token="guess")]}
    os.write(write, json.dumps(said).encode() + b"\\n")
    os.kill(os.getpid(), signal.SIGKILL)
said = json.loads(os.fdopen(read).readline())
deadline = time.monotonic() + 20
command = Path(f"/proc/{said['pid']}/cmdline")
while (runs := command.exists() and b"GatewayServer" in command.read_bytes()) and time.monotonic() < deadline:
    time.sleep(0.05)
said["runs"] = runs
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def played():
    return run_with(PLAYED)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Seven games to train on, of the six kinds that are drawn fastest, and six held-out ones."""
    return run_with(DRAWN, str(tmp_path_factory.mktemp("drawn")))


def run_with(code, *arguments):
    said = run_in("textworld_express", f"import sys; sys.argv[1:] = {list(arguments)!r}\n{PRELUDE}{code}")
    return json.loads(said.splitlines()[-1])


def rewards(episode):
    return [one["reward"] for one in episode[1:]]


def first_lines(episode):
    return [one["text"].partition("\n")[0] for one in episode]


def test_what_is_scored_is_paid_and_the_game_ends_when_it_is_won(played):
    assert rewards(played["won"]) == [0, 0.5, 0, 0, 0.5]
    assert [one["done"] for one in played["won"]] == [False] * 5 + [True]
    assert (played["won"][-1]["success"], played["won"][-1]["score"]) == (1.0, 1.0)


def test_a_game_that_is_lost_takes_back_what_it_paid(played):
    assert rewards(played["lost"]) == [0, 0.5, 0, -0.5]
    assert played["lost"][-1]["done"]
    assert (played["lost"][-1]["success"], played["lost"][-1]["score"]) == (0.0, 0.0)


def test_what_is_undone_and_done_again_is_paid_once(played):
    assert rewards(played["again"]) == [0.125, -0.125] * 3


def test_what_is_no_command_of_the_game_does_nothing(played):
    _, taken, *refused, looked = played["meta"]
    assert {one["text"].partition("\n")[0] for one in refused} == {"Unknown action: I'm not sure what you mean."}
    assert {one["state"] for one in [*refused, looked]} == {taken["state"]}
    assert {one["reward"] for one in [*refused, looked]} == {0}
    assert looked["text"].startswith("Inventory:\na math problem\n")


def test_a_turn_is_one_command_the_last_line(played):
    told = played["lines"][1]
    assert told["text"].startswith("You take the 6 pineapples.")
    assert told["reward"] == 0
    assert "take math problem" in told["text"].splitlines()[-1]


def test_a_command_is_read_in_any_capitals(played):
    assert first_lines(played["capitals"])[1:] == ["You take the wet gray bra.", "You take the dirty plaid T-shirt."]


def test_the_state_is_what_is_where_and_not_in_which_order_it_is_told(played):
    (*_, one), (*_, other) = played["order"]
    assert one["state"] == other["state"]
    assert one["text"] != played["order"][0][0]["text"]


def test_the_state_has_what_is_out_of_sight(played):
    untouched, opened, closed = (episode[-1] for episode in played["elsewhere"])
    assert untouched["text"] == opened["text"] == closed["text"]
    assert untouched["state"] == closed["state"] != opened["state"]


def test_the_start_has_the_task_and_the_room_and_all_messages_the_commands_in_order(played):
    start = played["won"][0]["text"].splitlines()
    assert start[:2] == [
        "Play.",
        "Your first task is to solve the math problem. Then, pick up the item with the same quantity as the math "
        "problem answer, and place it in the box.",
    ]
    assert start[2].startswith("You are in the bathroom. In one part of the room")
    commands = start[-1].removeprefix("Commands: ").split("; ")
    assert commands == sorted(commands)
    assert {"inventory", "take math problem", "take 6 pineapples"} < set(commands)
    assert all("Commands" not in one["text"] for one in played["silent"])


def test_a_brief_game_says_little(played):
    start, opened, *_ = (one["text"] for one in played["brief"])
    assert start.splitlines() == [
        "Play.",
        "Your task is to search the environment and find the coin.",
        "You are in the kitchen.",
        "Commands: close door to north; move north; move south; open door to north",
    ]
    assert opened.splitlines()[0] == "You open the plain door, revealing the pantry."
    assert played["brief"][-1]["success"] == 1.0


def test_games_in_one_java_machine_know_nothing_of_each_other(played, drawn):
    assert played["in turns"] == played["alone"]
    assert played["alone"][0] != played["alone"][1]
    for told in drawn["twins"]:
        assert all(first == second for first, second in told)
        assert all(one["success"] == 1.0 for one in told[-1])


def test_nothing_of_a_closed_game_is_held(played):
    before, after = played["held"]
    assert after == before


def test_games_that_cannot_be_are_refused(played):
    many, unknown, text, apart, kind = played["refused"]
    assert "Number of locations must be less than or equal to 11" in many
    assert "Unrecognized property name (rooms)" in unknown
    assert text == "params: 'numLocations=a' is not like numLocations=5,includeDoors=0"
    assert "No locations could be found that distance apart" in apart
    assert "Unknown game (chess)" in kind


def test_the_packages_agents_earn_the_full_reward_and_chance_does_not(drawn):
    assert [round(paid, 9) for paid in drawn["solver"]] == [1.0] * 13
    assert all(0 <= paid <= 1 for paid in drawn["random"])
    assert sum(drawn["random"]) < 4


def test_a_walkthrough_has_no_detours_and_no_words_that_are_no_commands(drawn):
    *moves, last = drawn["wander"]
    assert last == "take coin"
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    ways = [move.removeprefix("move ") for move in moves]
    assert not [way for way, following in itertools.pairwise(ways) if following == opposite[way]]
    assert drawn["empty"] == ["slice grape", "jump up and down", "touch orange"]


def test_games_are_those_of_the_seed_and_of_the_packages_folds(drawn):
    train, heldout = drawn["drawn"][:7], drawn["drawn"][7:]
    assert drawn["again"] == train[:2] + heldout[:2]
    assert {line["metadata"]["fold"] for line in train} == {"train"}
    assert {line["metadata"]["fold"] for line in heldout} == {"dev"}
    assert all(0 <= line["metadata"]["seed"] < 1000 for line in train)
    assert all(10_000 <= line["metadata"]["seed"] < 11_000 for line in heldout)
    assert len({line["metadata"]["game"] for line in train}) == len({line["metadata"]["game"] for line in heldout}) == 6


def test_the_policy_is_not_told_the_solution(drawn):
    assert {line["prompt"] for line in drawn["drawn"]} == {"Play the game. Answer with one command."}


def test_no_game_is_drawn_twice(drawn):
    said, found = drawn["few"].split(" has but ")
    assert said == "num, heldout: with params 'gameLength=1,numDistractors=0', the fold train of simonsays"
    assert int(found.split()[0]) == 36


def test_demonstrations_are_played_in_the_games_to_train_on(drawn):
    assert len(drawn["sft"]) == 8
    for conversation in drawn["sft"]:
        roles = [message["role"] for message in conversation["messages"]]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert roles[-1] == "assistant"
        assert conversation["messages"][0]["content"].splitlines()[1] in drawn["words"]


def test_java_answers_whoever_knows_its_secret_and_ends_with_the_process_that_started_it():
    said = run_with(ENDED)
    without, guessed = said["denied"]
    assert "Authentication error" in without
    assert "Failed to authenticate" in guessed
    assert not said["runs"]


def test_options_without_meaning_are_refused(tmp_path):
    refused = {
        "game='chess'": "game: chess; there are ",
        "params='numLocations=3'": "params: each kind of game has its own. Name one by game, or leave params out.",
        "heldout_fold='train'": "heldout_fold: 'train' is neither dev nor test.",
    }
    code = f"""
from pathlib import Path
from slimrl.environments.textworld_express import data
for options in {list(refused)!r}:
    try:
        eval(f"data.write(Path({str(tmp_path)!r}), num=1, heldout=1, seed=0, {{options}})")
    except ValueError as error:
        print(error)
"""
    said = run_in("textworld_express", code).splitlines()
    assert all(line.startswith(start) for line, start in zip(said, refused.values(), strict=True))
    assert not list(tmp_path.iterdir())
