"""Games of TextArena as an environment of roles, in its own virtual environment."""

import json

import pytest
from venvs import run_in

PRELUDE = """
import json, random, sys
from slimrl.agent.environment import Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textarena.environment import TextArena
from slimrl.environments.textarena.games import NAMES
from slimrl.environments.textarena.opponents import legal_moves, random_move

def prompt_of(game, **metadata):
    messages = [{"role": "user", "content": "Play."}]
    return Prompt(prompt_id="p", messages=messages, label=None, metadata={"game": game, **metadata})

def started(game, seed=0, measure=False, **metadata):
    environment = TextArena(measure_optimal=measure)
    return environment, [environment.start(prompt_of(game, **metadata), seed=seed, scratch={})]

def go_on(environment, seen, chance, limit=1000):
    texts = []
    while not seen[-1].done and len(texts) < limit:
        texts.append(random_move(environment.game, chance))
        seen.append(environment.step(Turn(index=len(texts), text=texts[-1])))
    return texts

def said(game, *texts, **metadata):
    environment, seen = started(game, **metadata)
    seen += [environment.step(Turn(index=number, text=text)) for number, text in enumerate(texts)]
    return seen
"""


def ask(code: str):
    return json.loads(run_in("textarena", PRELUDE + code))


def test_games_are_told_and_paid_as_textarena_alone_does_with_the_same_seed_and_texts():
    games = ask("""
found = {}
for name in NAMES:
    game = name + ("-v0-tiny" if name in ("Breakthrough", "Othello") else "-v0")
    environment, seen = started(game, seed=5)
    texts = go_on(environment, seen, random.Random(1), limit=30 if name in ("Checkers", "Alquerque") else 1000)
    alone = sys.modules["textarena"].make(game)
    alone.reset(num_players=2, seed=5)
    heard = {}
    for observation, text in zip(seen, texts):
        player, shown = alone.get_observation()
        assert observation.role == f"player_{player}", name
        heard[player] = [*heard.get(player, []), observation.messages[-1]["content"].removeprefix("Play.\\n")]
        # Newlines at the ends of messages are left out.
        assert "".join(heard[player]).replace("\\n", "") == shown.replace("\\n", ""), name
        done, _ = alone.step(text)
    rewards = alone.close()[0] if done else {}
    assert seen[-1].role_rewards == {f"player_{player}": reward for player, reward in (rewards or {}).items()}, name
    assert seen[-1].metrics["illegal"] == 0 and seen[-1].metrics["moves"] == len(texts), name
    found[name] = [done, sorted(heard), sorted(rewards.values())]
print(json.dumps(found))
""")
    assert len(games) == 25
    assert {name for name, (done, *_) in games.items() if not done} <= {"Checkers", "Alquerque"}
    assert all(players == [0, 1] for _, players, _ in games.values())
    assert all(sum(paid) == 0 for _, _, paid in games.values())


def test_a_copy_goes_on_as_the_game_would_have_and_changes_nothing_of_it():
    found = ask("""
found = {}
for game in ("PigDice-v0-short", "LiarsDice-v0", "KuhnPoker-v0", "Nim-v0-large"):
    metadata = {"opponents": {"player_0": "random"}} if game == "Nim-v0-large" else {}
    environment, seen = started(game, seed=2, **metadata)
    go_on(environment, seen, random.Random(3), limit=1)
    first, second = environment.copy(scratch={}), environment.copy(scratch={})
    random.seed(99)
    other, wild = [seen[-1]], [seen[-1]]
    go_on(second, wild, random.Random(5))
    texts = go_on(environment, seen, random.Random(4))
    assert texts == go_on(first, other, random.Random(4)), game
    assert other == seen[-len(other):], game
    found[game] = [len(texts), wild != other]
print(json.dumps(found))
""")
    assert all(num > 0 for num, _ in found.values())
    assert all(differs for _, differs in found.values())


def test_illegal_moves_draws_and_tricks_earn_what_textarena_says():
    seen = ask("""
def end(*texts, game="TicTacToe-v0", **metadata):
    seen = said(game, *texts, **metadata)
    told, last = [one.messages[-1]["content"] if one.messages else "" for one in (seen[1], seen[-1])]
    return {"role": seen[-1].role, "done": seen[-1].done, "paid": dict(seen[-1].role_rewards), "told": told,
            "board": last.rpartition("Available")[2], **seen[-1].metrics}
print(json.dumps({
    "once": end("[9]"), "twice": end("[9]", "I win"), "forgiven": end("[9]", "[0]", "[0]", "[1]", "[1]"),
    "draw": end(*(f"[{cell}]" for cell in (0, 1, 2, 4, 3, 5, 7, 6, 8))),
    "two moves": end("[0] and [1]"), "as the other": end("[0]\\n[Player 1] [4]"), "no bracket": end("4"),
    "a crash": end("[" + "9" * 5000 + "]"), "two cards": end("[check] [bet]", game="KuhnPoker-v0")["told"],
    "bids": end("[2] [3]", game="GameOfPureStrategy-v0"), "against": end("[9]", "[9]", opponents={"player_1": "first"}),
}))
""")
    once, draw, crash = seen["once"], seen["draw"], seen["a crash"]
    assert (once["role"], once["done"], once["illegal"]) == ("player_0", False, 1)
    assert "attempted an invalid move" in once["told"]
    assert (seen["twice"]["paid"], seen["twice"]["illegal"]) == ({"player_0": -1, "player_1": 1}, 2)
    # A legal move in between, of either, begins the count anew.
    assert (seen["forgiven"]["done"], seen["forgiven"]["illegal"], seen["forgiven"]["moves"]) == (False, 3, 5)
    assert (draw["done"], draw["draw"], draw["player_0_won"]) == (True, 1, 0)
    assert draw["paid"] == {"player_0": 0, "player_1": 0}
    # The first move counts, whoever is said to make it; the other one has its turn.
    for name in ("two moves", "as the other"):
        assert seen[name]["role"] == "player_1", name
        assert "'[0]'" not in seen[name]["board"], name
        assert "'[1]'" in seen[name]["board"], name
        assert "'[4]'" in seen[name]["board"], name
    assert (seen["no bracket"]["illegal"], "'[4]'" in seen["no bracket"]["board"]) == (0, False)
    assert (crash["paid"], crash["crashed"]) == ({"player_0": -1, "player_1": 0}, 1)
    assert "submitted move: '[check]'" in seen["two cards"]
    assert seen["bids"]["illegal"] == 1
    assert seen["against"]["paid"] == {"player_0": -1}


def test_opponents_play_in_the_environment_and_the_best_one_wins_at_nim():
    found = ask("""
def against(kind, seat, games=12, game="Nim-v0"):
    paid, shares = [], []
    for seed in range(games):
        opponents = {f"player_{1 - seat}": kind}
        environment, seen = started(game, seed=seed, measure=game == "Nim-v0", opponents=opponents)
        go_on(environment, seen, random.Random(seed))
        assert all(observation.role == f"player_{seat}" for observation in seen)
        assert seen[-1].reward == seen[-1].role_rewards[f"player_{seat}"]
        paid.append(seen[-1].reward)
        shares.append(seen[-1].metrics.get("optimal_fraction", 0))
    return paid, shares
def win(*texts):
    environment, seen = started("Nim-v0", measure=True)
    return [environment.step(Turn(index=0, text=text)).metrics["optimal_fraction"] for text in texts]
lists = [said(game, move + " Available moves: [9 9]", opponents={"player_1": "random"})[-1].done
         for game, move in (("Nim-v0", "[0 1]"), ("TicTacToe-v0", "[4]"))]
print(json.dumps({"lists": lists, "optimal": against("optimal", 1), "random": against("random", 1),
                  "kuhn": against("first", 0, 40, "KuhnPoker-v0"), "shares": win("I say [0 2].", "[0 1]", "[2 5]")}))
""")
    # A list of moves that the policy writes does not leave the other one without a move.
    assert found["lists"] == [False, False]
    assert set(found["optimal"][0]) == {-1}
    # 3, 4 and 5 are a win for who begins, so all moves of the other are as good as any.
    assert set(found["optimal"][1]) == {1}
    assert 1 in found["random"][0]
    assert len(set(found["kuhn"][0])) > 1
    # After 1, 4 and 5 no move is right or wrong; after 0, 4 and 5 one of the last pile is right, and all of it is not.
    assert found["shares"] == [1, 1, pytest.approx(2 / 3)]


def test_what_cannot_be_played_is_said_and_data_has_games_and_seats_in_turns(tmp_path):
    problems = ask(f"""
from pathlib import Path
from slimrl.environments.textarena.data import write
def problem(call):
    try:
        call()
    except ValueError as error:
        return str(error)
both = {{"player_0": "random", "player_1": "random"}}
cases = [("TicTacToe", {{}}), ("DontSayIt-v0", {{}}), ("Nim-v0-raw", {{}}), ("Nim-v0", {{"opponents": both}}),
         ("Nim-v0", {{"opponents": {{"player_2": "random"}}}}), ("Nim-v0", {{"opponents": {{"player_0": "best"}}}}),
         ("KuhnPoker-v0", {{"opponents": {{"player_0": "optimal"}}}}), ("Nim-v0", {{"seed": "a"}})]
found = [problem(lambda: started(game, **metadata)) for game, metadata in cases]
out = Path({str(tmp_path)!r})
found.append(problem(lambda: write(out, num=1, heldout=1, seed=0, opponents="best")))
write(out, num=8, heldout=4, seed=1, games="KuhnPoker-v0, Nim-v0", opponents="self,player:frozen",
      heldout_opponents="random", demonstrations=6)
print(json.dumps(found))
""")
    for problem, said in zip(
        problems,
        (
            "Did you mean TicTacToe-v0", "none of TextArena's games", "Did you mean Nim-v0", "none is left",
            "roles are", "random, first or optimal", "those of Nim are", "no integer", "player:NAME",
        ),
        strict=True,
    ):  # fmt: skip
        assert said in problem
    train = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["metadata"]["game"] for line in train] == ["KuhnPoker-v0", "Nim-v0"] * 4
    assert [line["metadata"].get("players") for line in train] == [
        None, None, {"player_1": "frozen"}, {"player_1": "frozen"},
        None, None, {"player_0": "frozen"}, {"player_0": "frozen"},
    ]  # fmt: skip
    heldout = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [list(line["metadata"]["opponents"].items()) for line in heldout] == [
        [("player_1", "random")], [("player_1", "random")], [("player_0", "random")], [("player_0", "random")],
    ]  # fmt: skip
    assert len({line["metadata"]["seed"] for line in [*train, *heldout]}) == 12
    conversations = [json.loads(row)["messages"] for row in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(conversations) == 12
    assert all(messages[0]["content"].startswith("Play the game.\n[GAME]") for messages in conversations)
    assert not any("invalid move" in message["content"] for messages in conversations for message in messages)
