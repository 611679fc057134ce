"""BFCL's tools, prompt files and results, against the package's own preparation and scorer."""

import json
from pathlib import Path
from typing import Any

import pytest
from bfcl_episodes import STUBS, read, say


def test_the_tools_are_those_that_the_package_shows_a_model_of_openais_chat_api():
    said = say(f"""
{STUBS}
import bfcl_eval.model_handler.utils as theirs
from bfcl_eval.constants.enums import ModelStyle
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.utils import load_dataset_entry
from slimrl.environments.bfcl.functions import added_functions, first_functions, schemas
def theirs_of(functions):
    return theirs.convert_to_tool(functions, GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
said = []
for kind in ("base", "miss_func"):
    ours = {{entry.id: entry for entry in entries(kind)}}
    for line in load_dataset_entry("multi_turn_" + kind):
        entry = ours[line["id"]]
        added = [each for turn in line.get("missed_function", {{}}) for each in added_functions(entry, int(turn))]
        held = [each for many in line.get("missed_function", {{}}).values() for each in many]
        said.append(schemas(first_functions(entry), "full") == theirs_of(line["function"])
                    and schemas(added, "full") == theirs_of(held))
""")
    assert said == [True] * 400


def test_the_files_are_the_same_for_a_seed_and_no_task_is_in_two_of_them(tmp_path: Path):
    say(f"""
from pathlib import Path
from slimrl.environments.bfcl.data import write
for name in ("once", "again"):
    write(Path({str(tmp_path)!r}) / name, num=120, heldout=40, seed=3)
    write(Path({str(tmp_path)!r}) / f"{{name}}_made", num=60, heldout=20, seed=3, tasks="generated", turns=2,
          demonstrations=200)
said = 0""")
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").iterdir())
    assert [path.name for path in files] == [
        "heldout.jsonl",
        "heldout_long_context.jsonl",
        "heldout_miss_func.jsonl",
        "heldout_miss_param.jsonl",
        "train.jsonl",
    ]
    assert all((tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    train, held_out, missing = (
        [line["id"].rpartition("_")[2] for line in read(tmp_path / "once" / name)]
        for name in ("train.jsonl", "heldout.jsonl", "heldout_miss_func.jsonl")
    )
    assert len(set(train) | set(held_out)) == 160
    assert missing == held_out
    made = tmp_path / "once_made"
    assert (made / "sft.jsonl").read_bytes() == (tmp_path / "again_made" / "sft.jsonl").read_bytes()
    calls = [
        json.dumps(line["metadata"]["solution"])
        for name in ("train", "heldout")
        for line in read(made / f"{name}.jsonl")
    ]
    assert len(set(calls)) == 80


def test_generated_tasks_are_solved_by_their_ground_truth_and_shown_as_in_the_demonstrations(tmp_path: Path):
    said = say(f"""
from pathlib import Path
from slimrl.environments.bfcl.data import write
out = Path({str(tmp_path)!r})
write(out, num=50, heldout=50, seed=1, tasks="generated", turns=2, demonstrations=300)
lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
found = [Entry.from_metadata(line["metadata"]) for line in lines]
tools = []
for entry in found:
    shown = BfclEnvironment(descriptions="short").start(prompt(entry), seed=0, scratch={{}}).tools
    if shown not in tools: tools.append(shown)
rewards = [[play(entry, player)["reward"] for entry in found] for player in (Solver, lambda *_: Script())]
said = [*rewards, tools]""")
    assert said[0] == [1.0] * 50
    assert said[1] == [0.0] * 50
    demonstrations = read(tmp_path / "sft.jsonl")
    assert all(line["tools"] in said[2] for line in demonstrations)
    roles = [message["role"] for line in demonstrations for message in line["messages"]]
    assert roles.count("user") > 1.3 * len(demonstrations)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"num": 150, "heldout": 51}, "BFCL has 200"),
        ({"num": 3, "heldout": 2, "demonstrations": 4}, "tasks=generated"),
        ({"num": 3, "heldout": 2, "tasks": "other"}, "base or generated"),
        ({"num": 3, "heldout": 2, "tasks": "generated", "classes": ["MathAPI"]}, "GorillaFileSystem"),
    ],
)
def test_data_that_cannot_be_written_is_refused(arguments: dict[str, Any], problem: str, tmp_path: Path):
    said = say(f"""
from pathlib import Path
from slimrl.environments.bfcl.data import write
try:
    write(Path({str(tmp_path)!r}), seed=0, **{arguments!r})
    said = "written"
except ValueError as error:
    said = str(error)""")
    assert problem in said


def test_the_packages_own_scorer_agrees_with_the_rewards_when_it_reads_the_results(tmp_path: Path):
    said = say(f"""
{STUBS}
from pathlib import Path
from slimrl.environments.bfcl.results import write_results
out = Path({str(tmp_path)!r})

def line(entry, player, **arguments):
    environment, asked = BfclEnvironment(**arguments), prompt(entry)
    messages, playing, seen = list(asked.messages), player(asked, 0), environment.start(asked, seed=0, scratch={{}})
    while not (seen.done or seen.truncated):
        turn = playing.turn(seen)
        calls = [{{"function": {{"name": call.name, "arguments": call.arguments}}}} for call in turn.calls]
        messages.append({{"role": "assistant", "content": turn.text, **({{"tool_calls": calls}} if calls else {{}})}})
        seen = environment.step(turn)
        messages += seen.messages
    said[entry.id] = seen.metrics["success"]
    return {{"prompt_id": entry.id, "status": "completed" if seen.done else "truncated", "messages": messages}}

said = {{}}
base, missing = entries("base"), entries("miss_func")
lines = [line(entry, Solver) for entry in (*base[::20], *missing[:200:20])]
look = [("ls", {{}})]
# Right up to the last request, which does not end.
endless = [each for calls in base[3].solution() for each in ([(call["name"], call["arguments"]) for call in calls], ())]
endless[-1] = look
lines += [line(base[1], Script()), line(base[2], RandomPlayer), line(base[3], Script(*endless), max_steps=1),
          line(missing[49], Solver)]
evil = [("ls", {{f"a=open({{str(out / 'evaluated')!r}}, 'w'), b": 1}})]
lines.append(line(base[4], Script(evil)))
(out / "items.jsonl").write_text("".join(json.dumps(each) + "\\n" for each in lines))
files = write_results(out / "items.jsonl", out, model="model-FC")

# The handler of a model that takes tools, as far as the scorer uses it.
from bfcl_eval.model_handler.utils import convert_to_function_call
handler = MagicMock()
handler.decode_execute = lambda result, has_tool_call_tag: convert_to_function_call(result)
config = types.ModuleType("bfcl_eval.constants.model_config")
config.MODEL_CONFIG_MAPPING = {{"model-FC": MagicMock(model_handler=lambda **_: handler)}}
sys.modules["bfcl_eval.constants.model_config"] = config
import bfcl_eval.eval_checker.eval_runner as theirs
theirs.tqdm = lambda every, **_: every
theirs.generate_leaderboard_csv = lambda *_: None
theirs.runner(["model-FC"], ["multi_turn_base", "multi_turn_miss_func"], out / "result", out / "score", True)
wrong = [json.loads(row)["id"] for path in sorted((out / "score").rglob("*_score.json"))
         for row in path.read_text().splitlines()[1:]]
said = [str(path.relative_to(out)) for path in files], said, wrong""")
    names, rewards, wrong = said
    assert names == [
        "result/model-FC/multi_turn/BFCL_v4_multi_turn_base_result.json",
        "result/model-FC/multi_turn/BFCL_v4_multi_turn_miss_func_result.json",
    ]
    assert set(wrong) == {entry for entry, success in rewards.items() if not success}
    assert (len(rewards), len(wrong)) == (25, 5)
    assert not (tmp_path / "evaluated").exists()
