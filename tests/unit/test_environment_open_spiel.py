"""Games of OpenSpiel as an environment of roles, in its own virtual environment."""

import json

import pytest
from venvs import run_in

PRELUDE = """
import json, random
import pyspiel
from slimrl.agent.environment import Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.open_spiel.environment import OpenSpiel
from slimrl.environments.open_spiel.games import RULES, load, moves
from slimrl.environments.open_spiel.players import RandomPlayer, shown_moves

def prompt_of(game, **metadata):
    messages = [{"role": "user", "content": "Play."}]
    return Prompt(prompt_id="p", messages=messages, label=None, metadata={"game": game, **metadata})

def played(game, seed=0, say=None, **metadata):
    arguments = metadata.pop("arguments", {})
    if "deals" in metadata:
        metadata["seed"] = metadata.pop("deals")
    environment, prompt = OpenSpiel(**arguments), prompt_of(game, **metadata)
    player = RandomPlayer(prompt, seed)
    seen = [environment.start(prompt, seed=seed, scratch={})]
    turns = []
    while not (seen[-1].done or seen[-1].truncated):
        turn = player.turn(seen[-1]) if say is None else Turn(index=len(turns), text=say(seen[-1], len(turns)))
        turns.append((seen[-1].role, turn.text))
        seen.append(environment.step(turn))
    return environment, seen, turns
"""


def ask(code: str) -> dict:
    return json.loads(run_in("open_spiel", PRELUDE + code))


def test_fifteen_games_are_played_by_both_roles_and_pay_what_open_spiel_pays():
    games = ask("""
sizes = {"breakthrough": "(rows=4,columns=4)", "hex": "(board_size=3)", "goofspiel": "(num_cards=4)",
         "dots_and_boxes": "(num_rows=1,num_cols=2)", "pig": "(winscore=15)"}
found = {}
for name in RULES:
    environment, seen, turns = played(name + sizes.get(name, ""), seed=3)
    state = environment._state
    assert state.is_terminal(), name
    # The history, played again by OpenSpiel alone.
    again = state.get_game().new_initial_state()
    for action in state.history():
        again.apply_action(action)
    most = max(abs(state.get_game().min_utility()), abs(state.get_game().max_utility()))
    last = seen[-1]
    assert [last.role_rewards[f"player_{n}"] for n in (0, 1)] == [value / most for value in again.returns()], name
    assert last.metrics["illegal"] == 0 and last.metrics["moves"] == len(turns)
    assert all(observation.state_id for observation in seen)
    found[name] = sorted({role for role, _ in turns})
print(json.dumps(found))
""")
    assert len(games) == 15
    assert all(roles == ["player_0", "player_1"] for roles in games.values())


def test_no_player_is_told_what_the_other_holds():
    told = ask("""
said = {}
for seed in range(40):
    _, seen, turns = played("kuhn_poker", seed=seed)
    for observation in seen[:-1]:
        said.setdefault(observation.state_id, set()).add(observation.messages[-1]["content"])
print(json.dumps({state: sorted(texts) for state, texts in said.items()}))
""")
    # The card and what was done are all that differs, and equal states are told alike.
    assert set(told) == {f"0 {card}" for card in "012"} | {f"0 {card}pb" for card in "012"} | {
        f"1 {card}{done}" for card in "012" for done in "pb"
    }
    assert all(len(texts) == 1 for texts in told.values())


def test_cards_are_alike_in_all_trajectories_of_a_prompt_with_a_seed():
    cards = ask("""
def deal(prompt_seed, seed):
    environment, _, _ = played("kuhn_poker", seed=seed, **({"deals": prompt_seed} if prompt_seed else {}))
    return environment._state.history()[:2]
print(json.dumps({"same": [deal("a", seed) for seed in range(8)], "other": [deal("b", seed) for seed in range(8)],
                  "free": [deal(None, seed) for seed in range(8)]}))
""")
    assert all(len({tuple(one) for one in cards[name]}) == 1 for name in ("same", "other"))
    assert len({tuple(one) for one in cards["free"]}) > 1


def test_a_move_that_is_none_loses_and_pays_nobody():
    seen = ask("""
def last(text, **arguments):
    _, seen, turns = played("tic_tac_toe", say=lambda observation, n: text(n), arguments=arguments)
    return {"paid": dict(seen[-1].role_rewards), "turns": len(turns), "said": seen[1].messages[-1]["content"] if
            seen[1].messages else "", "illegal": seen[-1].metrics["illegal"]}
print(json.dumps({
    "nonsense": last(lambda n: "I win"),
    "the other's mark": last(lambda n: "o(0,0)"),
    "a place that is taken": last(lambda n: ["x(0,0)", "o(0,0)"][n]),
    "all of the list": last(lambda n: "x(0,0) | x(0,1)"),
    "an empty turn": last(lambda n: " "),
    "patience": last(lambda n: "no" if n != 1 else "X (0, 0).", illegal_moves=1),
}))
""")
    for name in ("nonsense", "the other's mark", "all of the list", "an empty turn"):
        assert seen[name]["paid"] == {"player_0": -1.0, "player_1": 0.0}, name
        assert seen[name]["turns"] == 1
    assert seen["a place that is taken"]["paid"] == {"player_0": 0.0, "player_1": -1.0}
    patient = seen["patience"]
    assert patient["said"].startswith("That is none of the moves.\n")
    assert (patient["paid"], patient["turns"], patient["illegal"]) == ({"player_0": 0.0, "player_1": -1.0}, 4, 3)


def test_opponents_play_in_the_environment_and_the_best_one_never_loses():
    results = ask("""
def against(kind, seat, games=30, game="tic_tac_toe"):
    opponents = {f"player_{1 - seat}": kind}
    payoffs = [played(game, seed=seed, opponents=opponents) for seed in range(games)]
    assert all(role == f"player_{seat}" for _, _, turns in payoffs for role, _ in turns)
    assert all(set(seen[-1].role_rewards) == {f"player_{seat}"} for _, seen, _ in payoffs)
    assert all(seen[-1].reward == seen[-1].role_rewards[f"player_{seat}"] for _, seen, _ in payoffs)
    return [seen[-1].reward for _, seen, _ in payoffs]
best = [played("tic_tac_toe", seed=seed, opponents={"player_0": "optimal"}, arguments={"measure_optimal": True})
        for seed in range(5)]
print(json.dumps({"optimal": [against("optimal", seat) for seat in (0, 1)], "random": against("random", 0),
                  "mcts": against("mcts:50", 1), "kuhn": against("optimal", 0, 300, "kuhn_poker"),
                  "share": [seen[-1].metrics["optimal_fraction"] for _, seen, _ in best]}))
""")
    assert max(map(max, results["optimal"])) <= 0
    assert sum(results["random"]) > sum(results["optimal"][0])
    assert sum(results["mcts"]) < 0
    # Kuhn poker is worth -1/18 to who moves first in an equilibrium, and less to one who plays at random; a share of 2.
    assert sum(results["kuhn"]) / 300 < 0.05
    assert all(0 <= share <= 1 for share in results["share"])
    assert min(results["share"]) < 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"game": "chess_with_dice"}, "OpenSpiel has no game"),
        ({"game": "tic_tac_toe", "opponents": {"player_2": "random"}}, "roles are player_0, player_1"),
        ({"game": "tic_tac_toe", "opponents": {"player_0": "random", "player_1": "random"}}, "none is left"),
        ({"game": "tic_tac_toe", "opponents": {"player_0": "best"}}, "random, first, optimal or mcts:N"),
        ({"game": "liars_dice", "opponents": {"player_0": "optimal"}}, "too large"),
        ({"game": "kuhn_poker", "opponents": {"player_0": "mcts:9"}}, "hides something"),
    ],
)
def test_what_cannot_be_played_is_said(metadata, said):
    code = f"""
metadata = {metadata!r}
try:
    OpenSpiel().start(prompt_of(metadata.pop("game"), **metadata), seed=0, scratch={{}})
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert said in str(ask(code))


def test_exploitability_is_that_of_known_policies():
    found = ask("""
from slimrl.environments.open_spiel.exploitability import exploitability, situations
from slimrl.environments.open_spiel.opponents import _average_policy
asked = situations("kuhn_poker")
uniform = {one["state"]: {name: 0.5 for name in one["moves"]} for one in asked}
game, solved = load("kuhn_poker"), {}
policy = _average_policy(str(game))
def visit(state):
    if state.is_terminal():
        return
    if not state.is_chance_node():
        chances = policy.action_probabilities(state)
        solved[state.information_state_string()] = {name: chances[action] for name, action in moves(state).items()}
    for action in state.legal_actions():
        visit(state.child(action))
visit(game.new_initial_state())
environment, seen, turns = played("kuhn_poker", say=lambda observation, n: ["Pass", "Bet", "Pass"][n], seed=1)
own = [observation for observation in seen[:-1] if observation.role == "player_0"]
print(json.dumps({"states": len(asked), "uniform": exploitability("kuhn_poker", uniform),
                  "solved": exploitability("kuhn_poker", solved),
                  "told": own[1].messages[-1]["content"], "state": own[1].state_id.removeprefix("0 "),
                  "asked": {one["state"]: one["messages"][-1]["content"] for one in asked},
                  "before": {one["state"]: [m["role"] for m in one["messages"]] for one in asked}}))
""")
    # 12 information states (Kuhn, 1950); 11/24 is what OpenSpiel's own tests have for the uniform policy.
    assert found["states"] == 12
    assert found["uniform"] == pytest.approx(11 / 24)
    assert found["solved"] < 0.002
    assert found["asked"][found["state"]] == found["told"], "as the environment tells it"
    assert found["before"][found["state"]] == ["user", "assistant", "user"]


def test_data_has_games_and_seats_in_turns_and_a_cold_start_of_legal_moves(tmp_path):
    run_in(
        "open_spiel",
        f"""
from pathlib import Path
from slimrl.environments.open_spiel.data import write
write(Path({str(tmp_path)!r}), num=8, heldout=4, seed=1, games="kuhn_poker; tic_tac_toe", opponents="self,random",
      heldout_opponents="first" if False else "optimal", demonstrations=6)
""",
    )
    train = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["metadata"]["game"] for line in train] == ["kuhn_poker", "tic_tac_toe"] * 4
    assert [line["metadata"].get("opponents") for line in train] == [
        None, None, {"player_1": "random"}, {"player_1": "random"},
        None, None, {"player_0": "random"}, {"player_0": "random"},
    ]  # fmt: skip
    heldout = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert all("optimal" in line["metadata"]["opponents"].values() for line in heldout)
    assert not {line["id"] for line in train} & {line["id"] for line in heldout}
    assert len({line["metadata"]["seed"] for line in [*train, *heldout]}) == 12
    for row in (tmp_path / "sft.jsonl").read_text().splitlines():
        messages = json.loads(row)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for asked, answer in zip(messages[::2], messages[1::2], strict=True):
            assert answer["content"] in asked["content"].rpartition("Moves: ")[2].split(" | ")
