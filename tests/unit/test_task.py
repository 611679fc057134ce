"""The task of a recipe: prompts that no episode could begin with are refused by their lines."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.parsers import ParsedTurn
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.config.problems import RecipeError
from slimrl.engines.client import SglangEngine
from slimrl.engines.continued import ContinuedEngine
from slimrl.rollout.task.task import load_task
from slimrl.runtime.sft import read_examples

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Do."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template refuses the word `refuse`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[-1].content == 'refuse' %}{{ raise_exception('this word') }}{% endif %}"
        + tokenizer.chat_template
    )
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "eos_token_id": tokenizer.eos_token_id}))
    return path


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def loaded(model: Path, train: Path, *overrides: str, command="train") -> LoadedRecipe:
    recipe = RECIPES / ("sft.yaml" if command == "sft" else "gspo_calculator.yaml")
    settings = [f"model.path={model}", f"data.train={train}", *overrides]
    return load_recipe(recipe, settings, command)


def num_tokens(model: Path, messages: list[dict], *overrides: str) -> int:
    """Number of tokens of a prompt, with the recipe's tools and a system prompt of the recipe before it."""
    task = load_task(loaded(model, Path("none.jsonl"), *overrides), train=False, evaluate=False)
    return len(build_tokenizer().apply_chat_template(
        messages, tools=task.tools.schemas, add_generation_prompt=True, return_dict=False
    ))  # fmt: skip


@pytest.mark.parametrize("setting", ["rollout.chunk_tokens=8", "resync.pause=abort", "resync.pause=retract"])
@pytest.mark.parametrize("agent", [[], ["agent.function=slimrl.agent.gateway.calculator_agent:solve"]])
def test_episodes_see_whole_turns_whatever_the_requests_are(model, setting, agent):
    """Also an agent's behind the gateway, with a decoder of the recipe's own tokenizer."""
    given = loaded(model, Path("none.jsonl"), setting, *agent, command="rollout")
    engine = SglangEngine("http://nobody")
    runner = load_task(given, train=False, evaluate=False).episode_runner(given.recipe, engine)
    if setting == "resync.pause=retract":
        assert runner.engine is engine
        return
    assert isinstance(runner.engine, ContinuedEngine)
    assert runner.engine._engine is engine
    assert runner.engine._chunk_tokens == given.recipe.rollout.chunk_tokens
    assert (
        runner.engine._decode(build_tokenizer()("</tool_call>", add_special_tokens=False).input_ids) == "</tool_call>"
    )


class WordsParser:
    """Closes a call with what is several tokens."""

    close_marker = "end of call"

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content=text, calls=[])


def test_a_turn_stops_at_a_call_where_its_marker_is_one_token_and_there_are_tools(model, tmp_path):
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2})
    tokenizer = build_tokenizer()
    end, close = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</tool_call>"])

    def stops(*overrides: str) -> tuple[int, ...]:
        task = load_task(loaded(model, train, *overrides), train=True, evaluate=False)
        return task.dialogues.of(task.tools.schemas).stop_token_ids

    assert stops() == (end, close)
    assert stops("rollout.stop_at_tool_call=false") == (end,)
    assert stops(f"agent.parser={__name__}:WordsParser") == (end,)
    assert stops("agent.tools=[]") == (end,)
    assert stops(f"agent.stop_token_ids=[{tokenizer.pad_token_id},{end}]") == (tokenizer.pad_token_id, end, close)


OPEN_CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    '{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% else %}<|im_end|>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes no end of a turn after a call, as DeepSeek-V3's of December 2024"""


def test_stop_tokens_that_the_template_never_writes_after_a_turn_are_refused(model, tmp_path):
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2})
    pad = f"agent.stop_token_ids=[{build_tokenizer().pad_token_id}]"
    with pytest.raises(RecipeError, match=r"agent\.stop_token_ids: the chat template ends an answer with none"):
        load_task(loaded(model, train, pad, "agent.tools=[]"), train=True, evaluate=False)
    (tmp_path / "open.jinja").write_text(OPEN_CALLS)
    template = f"model.chat_template={tmp_path / 'open.jinja'}"
    load_task(loaded(model, train, template), train=True, evaluate=False)
    with pytest.raises(RecipeError, match="writes none of the tokens that end a turn after a tool call: "):
        load_task(loaded(model, train, template, "rollout.stop_at_tool_call=false"), train=True, evaluate=False)
    with pytest.raises(
        RecipeError, match=r"agent\.stop_token_ids: \[999999\]: names no token; the tokenizer's ids are 0 to \d+"
    ):
        load_task(loaded(model, train, "agent.stop_token_ids=[999999]"), train=True, evaluate=False)


def test_a_parser_that_cannot_read_what_the_template_writes_is_refused(model, tmp_path):
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2})
    with pytest.raises(RecipeError, match="glm45: does not read the calls that the chat template writes, such as "):
        load_task(loaded(model, train, "agent.parser=glm45"), train=True, evaluate=False)
    load_task(loaded(model, train, "agent.parser=hermes"), train=True, evaluate=False)


@pytest.mark.parametrize("system", [None, "Do."])
def test_a_prompt_that_leaves_no_room_to_answer_is_refused_by_its_line(model, tmp_path, system):
    long = {"role": "user", "content": "What is 1+1?"}
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2}, {"messages": [long], "label": 2})
    heldout = write(tmp_path / "h.jsonl", {"messages": [long], "label": 2})
    before = [] if system is None else [SYSTEM]
    tokens = num_tokens(model, [*before, long])
    assert tokens > num_tokens(model, [*before, USER])
    settings = [f"data.eval.heldout={heldout}", f"agent.system_prompt={system or 'null'}"]

    fits = loaded(model, train, *settings, f"rollout.max_trajectory_tokens={tokens + 1}")
    assert len(load_task(fits, train=True, evaluate=True).train["train"]) == 2
    with pytest.raises(RecipeError) as caught:
        load_task(loaded(model, train, *settings, f"rollout.max_trajectory_tokens={tokens}"), train=True, evaluate=True)
    said = f"{tokens} tokens leave no room to answer; rollout.max_trajectory_tokens is {tokens}"
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("data.train", f"{train}:2: {said}"),
        ("data.eval.heldout", f"{heldout}:1: {said}"),
    ]


def test_a_line_that_the_chat_template_refuses_is_named(model, tmp_path):
    refused = {"role": "user", "content": "refuse"}
    prompts = write(tmp_path / "p.jsonl", {"messages": [USER], "label": 2}, {"messages": [refused], "label": 2})
    with pytest.raises(RecipeError, match=r"p\.jsonl:2: the chat template refuses it: this word"):
        load_task(loaded(model, prompts), train=True, evaluate=False)
    answer = {"role": "assistant", "content": "refuse"}
    called = {**ANSWER, "tool_calls": [{"function": {"name": "calculator", "arguments": "{"}}]}
    said_before = write(tmp_path / "p.jsonl", {"messages": [USER, called, USER], "label": 2})
    with pytest.raises(RecipeError, match=r"p\.jsonl:1: arguments of calculator are no JSON"):
        load_task(loaded(model, said_before), train=True, evaluate=False)
    conversations = write(tmp_path / "c.jsonl", {"messages": [USER, ANSWER]}, {"messages": [USER, answer]})
    with pytest.raises(RecipeError, match=r"c\.jsonl:2: messages\[1\]: the chat template refuses it: this word"):
        read_examples(loaded(model, conversations, command="sft"))


def test_a_reward_that_a_prompt_names_and_the_recipe_lacks_is_refused_by_its_line(model, tmp_path):
    rows = [{"messages": [USER], "label": 2, "metadata": {"reward": name}} for name in ("math", "mth")]
    train, heldout = write(tmp_path / "t.jsonl", *rows), write(tmp_path / "h.jsonl", rows[1])
    named = 'reward.by_name={math: {function: "slimrl.rewards.math:boxed_exact", args: {}}}'
    given = ['reward.function=""', named, f"data.eval.heldout={heldout}"]
    with pytest.raises(RecipeError) as caught:
        load_task(loaded(model, train, *given), train=True, evaluate=True)
    said = "metadata.reward is 'mth'; reward.by_name has math. Did you mean math?"
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("data.train", f"{train}:2: {said}"),
        ("data.eval.heldout", f"{heldout}:1: {said}"),
    ]
    right = write(tmp_path / "r.jsonl", rows[0])
    task = load_task(loaded(model, right, *given[:2]), train=True, evaluate=False)
    assert [part.name for part in task.rewards.parts] == ["math"]


def test_tests_of_programs_that_check_nothing_are_refused_by_their_line(model, tmp_path):
    labels = (["assert f(1) == 2"], "def check(candidate):\n    assert candidate(1) == 2", '{"inputs": ["3"]}')
    rows = [{"messages": [USER], "label": label} for label in labels]
    train, heldout = write(tmp_path / "t.jsonl", *rows), write(tmp_path / "h.jsonl", rows[1])
    given = ["reward.function=slimrl.rewards.code:CodeTests", f"data.eval.heldout={heldout}"]
    with pytest.raises(RecipeError) as caught:
        load_task(loaded(model, train, *given), train=True, evaluate=True, here=False)
    problems = {problem.key: problem.message for problem in caught.value.problems}
    assert problems.keys() == {"data.train", "data.eval.heldout"}
    lines = problems["data.train"].splitlines()
    assert lines[0] == "2 broken lines:"
    assert lines[1].startswith(f"{train}:2: slimrl.rewards.code:CodeTests: label: line 1: check is never called")
    assert lines[2].startswith(f"{train}:3: slimrl.rewards.code:CodeTests: label: inputs and outputs must be lists")
    assert problems["data.eval.heldout"].startswith(f"{heldout}:1: slimrl.rewards.code:CodeTests: ")


def test_parts_of_the_reward_are_refused_under_their_keys(model, tmp_path):
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2})
    wrong = 'reward.parts={math: {function: "slimrl.rewards.math:boxed_exact", args: {digits: 3}}}'
    with pytest.raises(RecipeError, match=r"reward\.parts\.math\.function: .*unexpected keyword argument 'digits'"):
        load_task(loaded(model, train, 'reward.function=""', wrong), train=True, evaluate=False)


@pytest.mark.parametrize("reward", ["math:boxed_exact", "math:boxed_equivalent", "answers:ExactMatch", "answers:F1"])
@pytest.mark.parametrize(
    ("column", "refused"), [([None, 5.0], [1]), ([5.0, math.nan], [2]), (["", "5", "None"], [1, 3]), ([5, 7], [])]
)
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_labels_that_are_holes_of_a_table_are_refused_by_row_when_read(
    model, tmp_path, reward, column, refused, format
):
    """As pandas, polars and datasets write them: null, NaN, an empty text, the word for null."""
    path = tmp_path / f"t.{format}"
    if format == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["q"] * len(column), "label": column}), path)
    else:
        write(path, *({"prompt": "q", "label": label} for label in column))
    said = ""
    try:
        load_task(loaded(model, path, f"reward.function=slimrl.rewards.{reward}"), train=True, evaluate=False)
    except RecipeError as error:
        said = str(error)
    assert [row for row in range(1, len(column) + 1) if f"{path}:{row}: " in said] == refused


def test_a_task_whose_tool_runs_code_is_refused_without_a_sandbox_unless_it_starts_elsewhere(model, tmp_path):
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2})
    settings = ["agent.tools=[slimrl.agent.sandbox.tools:python]", "agent.sandbox.backend=container"]
    recipe = loaded(model, train, *settings, "agent.sandbox.command=/nowhere/docker")
    with pytest.raises(RecipeError, match="there is no command /nowhere/docker") as caught:
        load_task(recipe, train=True, evaluate=False)
    assert [problem.key for problem in caught.value.problems] == ["agent.sandbox.backend"]
    task = load_task(recipe, train=True, evaluate=False, here=False)
    assert [schema["function"]["name"] for schema in task.tools.schemas] == ["python"]
    load_task(loaded(model, train, *settings[1:]), train=True, evaluate=False)
