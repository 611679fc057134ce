"""BFCL's function calling over several turns: the episodes, the verdict, and what earns nothing."""

from pathlib import Path

from bfcl_episodes import say

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.environments.bfcl.players import RandomPlayer, Solver


def test_the_ground_truth_of_every_base_entry_earns_the_full_reward_and_random_calls_earn_none():
    said = say("""
found = entries("base")
said = {"right": [play(entry, Solver)["reward"] for entry in found],
        "random": [play(entry, RandomPlayer)["reward"] for entry in found[::4]]}""")
    assert said["right"] == [1.0] * 200
    assert sum(said["random"]) == 0


def test_the_ground_truth_of_the_other_categories_earns_the_full_reward():
    said = say("""
said = {kind: [play(entry, Solver)["reward"] for entry in entries(kind)[::20]]
        for kind in ("miss_func", "miss_param", "long_context")}""")
    assert said == dict.fromkeys(("miss_func", "miss_param", "long_context"), [1.0] * 10)


def test_an_entry_that_needs_a_function_before_it_is_added_cannot_be_solved():
    assert say('said = play(entries("miss_func")[49], Solver)')["reward"] == 0.0


def test_answering_at_once_is_paid_nothing_with_either_reward():
    said = say("""
found = entries("base")
said = [play(entry, Script(), reward=reward)["reward"]
        for entry in found[::8] for reward in ("outcome", "progress")]""")
    assert set(said) == {0.0}


def test_answering_at_once_is_not_paid_for_requests_that_change_nothing():
    said = say("""said = [play(files(["cat(file_name='a')"], a="x"), Script(), reward=reward)["reward"]
        for reward in ("outcome", "progress")]""")
    assert said == [0.0, 0.0]


def test_making_every_call_that_could_be_meant_is_paid_nothing():
    said = say("""
every = [("mv", {"source": "a", "destination": "b"}), ("cp", {"source": "b", "destination": "c"}),
         ("rm", {"file_name": "a"}), ("touch", {"file_name": "a"}), ("mkdir", {"dir_name": "d"})]
said = play(files(["mv(source='a',destination='b')"], a="x"), Script(every), reward="progress")""")
    assert said["reward"] == 0.0


def test_repeating_the_right_call_is_paid_nothing():
    said = say("""
car = Entry(id="own_0", involved_classes=["VehicleControlAPI"], ground_truth=[["fillFuelTank(fuelAmount=10)"]],
            initial_config={"VehicleControlAPI": {"fuelLevel": 5.0}},
            questions=[[{"role": "user", "content": "Add 10 gallons."}]])
fill = [("fillFuelTank", {"fuelAmount": 10})]
said = [play(car, Script(fill))["reward"], play(car, Script(fill, fill))["reward"]]""")
    assert said == [1.0, 0.0]


def test_deleting_and_restoring_is_paid_nothing_where_something_was_asked_for():
    said = say("""
restored = [("rm", {"file_name": "a"}), ("touch", {"file_name": "a"}), ("echo", {"content": "x", "file_name": "a"})]
said = [play(files([truth], a="x"), Script(restored))["reward"]
        for truth in ("cat(file_name='a')", "cp(source='a',destination='b')")]""")
    assert said == [0.0, 0.0]


def test_private_and_unoffered_methods_and_names_of_python_are_not_called():
    said = say("""
environment = started(files(["ls()"], a="x"))
said = [told(environment, name) for name in ("_load_scenario", "__init__", "print", "root", "find_due_mv")]""")
    assert said == [
        f"Error during execution: name '{name}' is not defined"
        for name in ("_load_scenario", "__init__", "print", "root", "find_due_mv")
    ]


def test_wrong_arguments_are_answered_as_the_package_answers_them():
    said = say("""
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
entry = files(["ls()"], a="x")
calls = ["cat()", "cat(name='a')", "cat(file_name='b')", "cat(file_name='a')", "ls(a=True)", "touch(file_name='n')"]
theirs, _ = execute_multi_turn_func_call(calls, entry.initial_config, entry.involved_classes, "test", entry.id)
from slimrl.environments.bfcl.python_calls import parse_call
environment = started(entry)
said = [theirs, [told(environment, call["name"], **call["arguments"]) for call in map(parse_call, calls)]]""")
    assert said[0] == said[1]
    assert said[0][0].startswith("Error during execution: ")


def test_names_of_arguments_are_never_evaluated(tmp_path: Path):
    mark = tmp_path / "evaluated"
    evil = f"a=open({str(mark)!r}, 'w'), b"
    said = say(f"""
entry = files(["ls()"], a="x")
environment = started(entry)
said = [told(environment, "ls", **{{{evil!r}: 1}}), told(environment, "echo", content="x', open({str(mark)!r}, 'w')"),
        told(environment, "ls"), answer(environment).reward]""")
    assert said[0].startswith("Error during execution: ")
    assert said[3] == 1.0
    assert not mark.exists()


def test_numbers_that_would_take_any_time_are_refused():
    said = say("""
maths = Entry(id="own_0", involved_classes=["MathAPI"], initial_config={}, ground_truth=[["add(a=1,b=2)"]],
              questions=[[{"role": "user", "content": "Add."}]])
environment = started(maths)
said = [told(environment, "power", base=9, exponent=10**9), told(environment, "round_number", number=5,
        decimal_places=-10**9), told(environment, "power", base=2, exponent=10)]""")
    assert [text.startswith("Error during execution: ") for text in said] == [True, True, False]


def test_nothing_of_the_checker_is_left_behind_and_the_same_entry_can_be_played_again():
    said = say("""
import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils as objects
entry = entries("base")[0]
play(entry, Solver)
before = set(vars(objects))
rewards = [play(entry, player, reward="progress")["reward"] for player in (Script(), Solver, Script(), Solver)]
said = [rewards, len(set(vars(objects)) - before), [name for name in before if "slimrl" in name]]""")
    assert said == [[0.0, 1.0, 0.0, 1.0], 0, []]


def test_what_a_tweet_keeps_changes_neither_the_calls_nor_the_next_episode():
    said = say("""
twitter = Entry(id="own_0", involved_classes=["TwitterAPI"], initial_config={"TwitterAPI": {"authenticated": True}},
                questions=[[{"role": "user", "content": "Post."}]],
                ground_truth=[["post_tweet(content='x')", "mention(tweet_id=0,mentioned_usernames=['@a'])"]])
given = {"content": "y", "mentions": ["@b"]}
posts = ("post_tweet", {"content": "x"}), ("mention", {"tweet_id": 0, "mentioned_usernames": ["@a"]})
said = [given]
for _ in range(2):
    environment = started(twitter)
    said.append([told(environment, name, **arguments) for name, arguments in posts][0])
    told(environment, "post_tweet", **given)
    told(environment, "mention", tweet_id=1, mentioned_usernames=["@c"])
    answer(environment)""")
    assert said[0] == {"content": "y", "mentions": ["@b"]}
    assert said[1] == said[2]
    assert '"mentions": []' in said[1]


def test_progress_counts_the_requests_up_to_the_first_one_that_was_not_met():
    said = say("""
touch = lambda name: [("touch", {"file_name": name})]
entry = files(["touch(file_name='a')"], ["touch(file_name='b')"], [], ["touch(file_name='c')"])
players = {"all": Script(touch("a"), (), touch("b"), (), (), touch("c")), "two": Script(touch("a"), (), touch("b"), ()),
           "first missed": Script((), touch("b"), (), (), touch("c")), "last wrong": Script(touch("a"), (), touch("b"),
           (), (), touch("d"))}
said = {name: play(entry, player, reward="progress") for name, player in players.items()}""")
    assert {name: round(each["reward"], 3) for name, each in said.items()} == {
        "all": 1.0,
        "two": 0.667,
        "first missed": 0.0,
        "last wrong": 0.667,
    }
    assert {name: each["success"] for name, each in said.items()} == {
        "all": 1.0,
        "two": 0.0,
        "first missed": 0.0,
        "last wrong": 0.0,
    }


def test_one_step_beyond_the_limit_ends_the_episode_without_a_reward():
    said = say("""
entry = files(["ls()"], ["ls()"], a="x")
steps = [[("ls", {})]] * 3
said = [play(entry, Script(*steps, *more), max_steps=3) for more in (((), *steps), ([("ls", {})],))]""")
    assert said[0]["reward"] == 1.0
    assert said[1] == {"reward": 0.0, "done": False, "success": 0.0, "progress": 0.0}


def test_a_held_out_function_can_be_called_when_the_user_has_added_it():
    said = say("""
from slimrl.environments.bfcl.later import names_added
import dataclasses
entry = dataclasses.replace(files(["touch(file_name='a')"], [], ["mkdir(dir_name='d')"]),
                            questions=[[{"role": "user", "content": "Touch."}], [{"role": "user", "content": "Make."}],
                                       []], missed_function={"2": ["mkdir"]})
environment = BfclEnvironment()
first = environment.start(prompt(entry), seed=0, scratch={})
shown = [tool["function"]["name"] for tool in first.tools]
told(environment, "touch", file_name="a")
make = lambda: told(environment, CALL_LATER, name="mkdir", arguments={"dir_name": "d"})
answer(environment)
early = make()
added = answer(environment).messages[0]["content"]
said = ["mkdir" in shown, CALL_LATER in shown, early, names_added(added), make(), answer(environment).reward]""")
    assert said == [False, True, "Error during execution: name 'mkdir' is not defined", ["mkdir"], "None", 1.0]


def test_no_call_of_a_turn_with_a_malformed_one_is_run():
    said = say("""
environment = started(files(["ls()"], a="x"))
calls = (ToolCall(name="rm", arguments={"file_name": "a"}), MalformedCall(problem="not closed", name="ls"))
seen = environment.step(Turn(index=0, text="", calls=calls))
said = [[message["content"] for message in seen.messages], list(seen.tool_errors), told(environment, "ls")]""")
    assert said[0][1] == "Error during execution: not closed"
    assert said[1] == ["rm", "ls"]
    assert said[2] == '{"current_directory_content": ["a"]}'


def test_equal_states_have_equal_ids_in_every_process_and_others_do_not():
    code = """
def state(environment): return environment._state_id()
def after(*calls):
    environment = started(files(["ls()"], ["ls()"], a="x", b="y"))
    for name, given in calls: told(environment, name, **given)
    return environment
moved = [("mv", {"source": "a", "destination": "c"})]
back = [("mv", {"source": "c", "destination": "a"})]
def inside(top):
    # Two empty folders of one name, in one of them.
    made = [call for d in "pq" for call in (("mkdir", {"dir_name": d}), ("cd", {"folder": d}),
            ("mkdir", {"dir_name": "x"}), ("cd", {"folder": ".."}))]
    return after(*made, ("cd", {"folder": top}), ("cd", {"folder": "x"}))
endless = after(("mkdir", {"dir_name": "d"}), ("cp", {"source": "d", "destination": "d"}))
turned = after()
answer(turned)
said = [state(after()), state(after(("ls", {}))), state(after(*moved, *back)), state(after(*moved)),
        state(after(("mkdir", {"dir_name": "d"}))), state(after(("mkdir", {"dir_name": "d"}), ("cd", {"folder": "d"}))),
        state(turned), state(endless), state(inside("p")), state(inside("q"))]"""
    said = say(code)
    assert said == say(code)
    same, others = said[:3], said[2:]
    assert len(set(same)) == 1
    assert len(set(others)) == len(others)


def test_arguments_that_the_environment_does_not_take_are_refused():
    said = say("""
BfclEnvironment.check(reward="progress", max_steps=5, descriptions="short")
said = []
for arguments in ({"reward": "half"}, {"descriptions": "long"}, {"max_steps": 0}):
    try:
        BfclEnvironment.check(**arguments)
    except ValueError as error:
        said.append(str(error))""")
    assert [text.partition(" is ")[0] for text in said] == ["reward", "descriptions", "max_steps"]


def test_players_need_nothing_but_the_metadata():
    calls = [[{"name": "ls", "arguments": {}}, {"name": "cd", "arguments": {"folder": "a"}}], []]
    asked = Prompt(prompt_id="0", messages=[], label=None, metadata={"solution": calls})
    solver = Solver(asked, 0)
    turns = [solver.turn(Observation()) for _ in range(3)]
    assert [[call.name for call in turn.calls] for turn in turns] == [["ls", "cd"], [], []]
    tool = {"function": {"name": "ls", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}
    random_turns = [RandomPlayer(asked, seed).turn(Observation(tools=[tool])) for seed in range(20)]
    assert {call.name for turn in random_turns for call in turn.calls} == {"ls"}
