"""`agent.tool_prompt`: the policy is told its tools, also where the chat template does not show them."""

import json
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from test_left_out import ANSWER, CALCULATOR, USER, template
from typer.testing import CliRunner

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.chat.tool_prompts import PUBLISHED, tool_prompt
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.parsers import make_parser
from slimrl.cli import app
from slimrl.config.agent_rules import TOOL_PROMPTS
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.runtime.sft import read_examples

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = RECIPES / "tiny_moe" / "gspo_calculator.yaml"
SYSTEM = {"role": "system", "content": "Be brief."}
QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
SILENT = template(tools="", calls=QWEN_CALLS)
"""Writes calls, but does not show tools, as DeepSeek's templates."""

TWO = [
    {"type": "function", "function": {"name": "get_time", "description": "The time in «Köln».", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip

V31_CARD = """## Tools
You have access to the following tools:

### get_time
Description: The time in «Köln».

Parameters: {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}

### stop
Description: 

Parameters: {}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""

V25_CARD = """## Tools

### Function

You have the following functions available:

- `get_time`:
```json
{
    "name": "get_time",
    "description": "The time in «Köln».",
    "parameters": {
        "type": "object",
        "properties": {
            "zone": {
                "type": "string"
            }
        },
        "required": [
            "zone"
        ]
    }
}
```

- `stop`:
```json
{
    "name": "stop"
}
```"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with such a template."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SILENT)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "eos_token_id": tokenizer.eos_token_id})
    )
    return tmp_path


def chat_with(setting: str) -> ChatFormat:
    tokenizer = build_tokenizer()
    return ChatFormat(ChatTemplate(tokenizer, SILENT, None, tool_prompt(setting)), [tokenizer.eos_token_id])


def rendered(setting: str, messages, tools=TWO) -> str:
    chat = chat_with(setting)
    return chat.template.decode(chat.prompt(messages, tools, whole=True).tokens)


@pytest.mark.parametrize(("name", "card"), [("deepseek_v31", V31_CARD), ("deepseek_v3", V25_CARD)])
def test_a_published_prompt_is_that_of_the_models_card_at_the_end_of_the_system_message(name, card):
    asked = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(name, [SYSTEM, USER]) == f"<|im_start|>system\nBe brief.\n\n{card}<|im_end|>\n{asked}"
    assert rendered(name, [USER]) == f"<|im_start|>system\n{card}<|im_end|>\n{asked}"
    assert rendered(name, [USER], None) == asked


def test_a_text_of_ones_own_has_the_schemas_one_a_line():
    shown = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in TWO)
    assert f"<|im_start|>system\nCall <{shown}>, {{}}.<|im_end|>" in rendered("Call <{tools}>, {}.", [USER])


def test_what_follows_a_turn_is_the_same_with_a_prompt_of_tools():
    chat = chat_with("deepseek_v31")
    (end,) = chat.stop_token_ids
    told = {"role": "user", "content": "And?"}
    assert chat.join(end, [], [told], TWO) == chat.join(end, [], [told], None)


def test_the_recipes_names_are_those_of_the_published_prompts():
    assert set(TOOL_PROMPTS) == set(PUBLISHED)


@pytest.mark.parametrize("setting", ["deepseek", "Call one of {tool}"])
def test_a_setting_that_shows_no_tools_is_refused_by_config_check(setting):
    result = CliRunner().invoke(app, ["config", "check", str(TINY), f"agent.tool_prompt={setting}"])
    assert result.exit_code == 1
    assert (
        f"agent.tool_prompt: {setting!r} is neither deepseek_v3, deepseek_v31, deepseek_v32, nor a text with {{tools}}"
        in (result.output.replace("\n", " "))
    )


def inspected(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["inspect-chat", str(TINY), f"model.path={folder}", *arguments])


def test_inspect_chat_refuses_a_template_that_does_not_show_the_tools_and_shows_them_with_a_prompt(folder):
    result = inspected(folder)
    assert result.exit_code == 2
    assert "the chat template leaves out the tool calculator" in result.output
    assert "Set agent.tool_prompt" in result.output
    result = inspected(folder, "agent.tool_prompt=deepseek_v3")
    assert result.exit_code == 0, result.output
    assert "You have the following functions available:" in result.output
    assert CALCULATOR["function"]["description"].splitlines()[0] in result.output


def test_supervised_training_refuses_tools_that_are_not_shown_by_line_and_shows_them_with_a_prompt(folder, tmp_path):
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": [CALCULATOR]}]
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model.path={folder}", f"data.train={data}"]
    recipe = RECIPES / "tiny_moe" / "sft.yaml"
    with pytest.raises(RecipeError, match=rf"{data}:2: the chat template leaves out the tool calculator"):
        read_examples(load_recipe(recipe, given, "sft"))
    examples = read_examples(load_recipe(recipe, [*given, "agent.tool_prompt=deepseek_v3"], "sft"))
    lengths = [len(example.segment.tokens) for example in examples["train"]]
    assert lengths[1] > lengths[0] + 100


def test_supervised_training_refuses_calls_that_the_tools_of_their_row_refuse_by_line(folder, tmp_path):
    calls = [{"expression": "1 + 1"}, {"expresion": "1 + 1"}, {"expression": 2}]
    data = tmp_path / "sft.jsonl"
    rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": arguments}}]}], "tools": [CALCULATOR]}
        for arguments in calls]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model.path={folder}", f"data.train={data}", "agent.tool_prompt=deepseek_v3"]
    with pytest.raises(RecipeError) as caught:
        read_examples(load_recipe(RECIPES / "tiny_moe" / "sft.yaml", given, "sft"))
    said = str(caught.value)
    assert f"{data}:1:" not in said
    assert f"{data}:2: messages[1].tool_calls[0] of calculator: malformed tool call" in said
    assert f"{data}:3: messages[1].tool_calls[0] of calculator: malformed tool call: expression: 2 is not of" in said


def test_no_dialogue_has_tools_that_are_not_shown():
    """Whoever brings them: an environment, an agent behind the gateway, a sub-agent."""
    dialogues = Dialogues(chat_with(""), lambda schemas: make_parser("qwen25", schemas), stop_at_call=True)
    with pytest.raises(ValueError, match="the chat template leaves out the tool calculator"):
        dialogues.of([CALCULATOR])
    assert dialogues.of([]).schemas == []
    shown = Dialogues(chat_with("deepseek_v3"), lambda schemas: make_parser("qwen25", schemas), stop_at_call=True)
    assert shown.of([CALCULATOR]).call_ends
