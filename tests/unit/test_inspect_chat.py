"""`slimrl inspect-chat`: the tokens of a conversation, for every kind of model and for each recipe that is shipped."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from chat_templates import MODELS
from chat_texts import PLAYED
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.load import intended_command, load_recipe
from slimrl.models.hf_config import config_for_planning

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = RECIPES / "tiny_moe" / "gspo_calculator.yaml"
CALCULATOR = "agent.tools=[slimrl.agent.calculator:calculator]"

KIND_OF_MODEL = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "glm4_moe": "glm45", "glm4_moe_lite": "glm47_flash",
                 "glm_moe_dsa": "glm52", "deepseek_v3": "deepseek_v3", "deepseek_v32": "deepseek_v32",
                 "kimi_k2": "kimi_k2", "hy_v3": "hy3", "minimax_m2": "minimax_m2", "olmoe": "olmoe",
                 "gpt_oss": "gpt_oss",
                 "qwen3_next": "qwen3_instruct", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35"}  # fmt: skip
"""`model_type` -> the template that its recipe's model has."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def made(key: str) -> Path:
        """A model's folder without weights, as it is downloaded."""
        model, folder = MODELS[key], tmp_path_factory.mktemp(key)
        model.tokenizer().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model.model_type}))
        stops = model.tokenizer().convert_tokens_to_ids(list(model.stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return folder

    return made


def inspected(recipe: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect-chat", str(recipe), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def shipped() -> list[Path]:
    return [path for path in sorted(RECIPES.rglob("*.yaml")) if path.parent.name != "base"]


@pytest.mark.parametrize("recipe", shipped(), ids=lambda path: path.stem)
def test_each_shipped_recipe_is_shown_with_its_models_template(recipe, folder_of, tmp_path):
    key = "smollm2" if recipe.parent.name == "smollm2" else "qwen3_instruct"
    if key != "smollm2" and "tiny_moe" not in str(recipe):
        loaded = load_recipe(recipe, [], intended_command(recipe, []))
        model_type = config_for_planning(Path(loaded.recipe.model.path))[0]["model_type"]
        key = KIND_OF_MODEL[model_type]
    conversation = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}],
    }
    # The folders have a tokenizer.json, unlike those of Kimi-K2 and Moonlight.
    arguments = [f"model.path={folder_of(key)}", "model.trust_remote_code=false", "--json"]
    if "environment:" in recipe.read_text() or recipe.stem in ("gspo_textworld_gigpo", "gspo_tic_tac_toe"):
        # What an environment tells first is in its data.
        arguments += ["agent.environment=''", "agent.environment_args={}", "agent.environment_venv=''"]
        arguments += ["agent.environment_isolation=loop", "algorithm.credit.name=trajectory"]
    if intended_command(recipe, []) == "sft":
        (tmp_path / "sft.jsonl").write_text(json.dumps(conversation))
        arguments.append(f"data.train={tmp_path}/sft.jsonl")
    shown = json.loads(inspected(recipe, *arguments))
    stops = MODELS[key].tokenizer().convert_tokens_to_ids(list(MODELS[key].stops))
    assert set(stops) <= set(shown["stop_token_ids"])
    trained = [token for token in shown["tokens"] if token["trained"]]
    assert trained
    assert trained[-1]["id"] in stops
    assert all(token["source"] == "policy" for token in trained)


@pytest.mark.parametrize("key", PLAYED)
def test_an_episode_with_a_tool_has_all_four_sources(key, folder_of):
    kwargs = ",".join(f"{name}: {json.dumps(value)}" for name, value in MODELS[key].kwargs.items())
    settings = [f"model.path={folder_of(key)}", f"agent.chat_template_kwargs={{{kwargs}}}", CALCULATOR]
    if MODELS[key].tool_prompt:
        settings.append(f"agent.tool_prompt={MODELS[key].tool_prompt}")
    shown = json.loads(inspected(TINY, *settings, "--json"))
    tokens = shown["tokens"]
    assert {token["source"] for token in tokens} == {"prompt", "policy", "tool", "template"}
    decoded = MODELS[key].tokenizer().decode([t["id"] for t in tokens if t["source"] == "tool"])
    assert "(the tool's answer)" in decoded
    assert len(decoded) < len("(the tool's answer)") + 8
    said = MODELS[key].tokenizer().decode([t["id"] for t in tokens if t["trained"]])
    # Kimi-K2-Thinking's writes none of an answer.
    once = MODELS[key].thought_after_results == "" or key == "kimi_k2_thinking"
    assert said.count("(thinking)") == bool(MODELS[key].thought) * (1 if once else 2)
    assert "calculator" in said
    assert "(the answer)" in said
    assert sum(t["trained"] and t["id"] in shown["stop_token_ids"] for t in tokens) == 2


def test_on_the_terminal_each_run_has_its_source_and_ends_are_marked(folder_of):
    output = inspected(TINY, f"model.path={folder_of('qwen3')}")
    assert "[tool, " in output
    end = MODELS["qwen3"].tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert f"(the answer)<|im_end|> ■{end}" in output
    assert "trained on. A turn ends at " in output
    assert "Once a turn is over" not in output


def test_what_the_template_leaves_out_of_turns_that_are_over_is_said(folder_of):
    arguments = (TINY, f"model.path={folder_of('llama31')}")
    said = " ".join(inspected(*arguments).split())
    assert "Once a turn is over, the chat template leaves out its thinking, its words: see agent.history." in said
    assert json.loads(inspected(*arguments, "--json"))["not_repeated"] == ["its thinking", "its words"]


@pytest.mark.parametrize(
    ("key", "rewrites"),
    [("deepseek_v3", True), ("deepseek_r1", True), ("hermes3", True), ("deepseek_v31", False), ("kimi_k2", False)],
)
def test_a_template_that_writes_results_anew_once_a_later_call_follows_is_said_to(key, rewrites, folder_of):
    settings = [f"model.path={folder_of(key)}", f"agent.tool_prompt={MODELS[key].tool_prompt}", CALCULATOR]
    said = " ".join(inspected(TINY, *settings).split())
    assert ("the chat template writes calls or results differently: see agent.history." in said) == rewrites
    assert json.loads(inspected(TINY, *settings, "--json"))["rewrites_results"] == rewrites


def test_a_rewritten_history_is_shown_segment_by_segment(folder_of):
    settings = (
        "agent.history=template",
        "agent.chat_template_kwargs={thinking: true}",
        "agent.tool_prompt=deepseek_v31",
    )
    arguments = (TINY, f"model.path={folder_of('deepseek_v31')}", *settings)
    assert "Segment 1 of 2, a sequence of its own:" in inspected(*arguments)
    shown = json.loads(inspected(*arguments, "--json"))
    first, second = shown["segment_lengths"]
    assert first + second == len(shown["tokens"])
    assert shown["tokens"][first]["id"] == shown["tokens"][0]["id"]


def test_a_first_prompt_of_the_data_is_shown_where_there_is_one(folder_of, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "How much is 7 * 6?", "label": 42}))
    output = inspected(TINY, f"model.path={folder_of('qwen3')}", f"data.train={tmp_path}/train.jsonl")
    assert "How much is 7 * 6?" in output


EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("\n{% for m in messages %}", "model.chat_template: line 2 of the chat template: Unexpected end of template."),
        ("{{ raise_exception('no') }}", "model.chat_template: the chat template refuses it: no"),
        ("nothing", "model.chat_template: the chat template does not write what the user says"),
        (
            EACH,
            "agent.parser: the chat template writes no tool calls; name another in model.chat_template, or no tools",
        ),
        (None, "model.chat_template: TEMPLATE: No such file or directory"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(folder_of, tmp_path, template, problem):
    path = tmp_path / "given.jinja"
    if template is not None:
        path.write_text(template)
    arguments = [str(TINY), f"model.path={folder_of('qwen3')}", f"model.chat_template={path}"]
    result = CliRunner().invoke(app, ["inspect-chat", *arguments])
    assert result.exit_code == 2
    assert problem.replace("TEMPLATE", str(path)) in result.output


class Away:
    """An environment that does not start."""

    async def start(self, prompt, *, seed, scratch):
        raise OSError("the game is away")

    async def step(self, turn): ...

    async def close(self): ...


def test_an_environment_that_does_not_start_is_named_by_its_key(folder_of):
    arguments = [str(TINY), f"model.path={folder_of('qwen3')}", "agent.tools=[]", "agent.system_prompt=null"]
    result = CliRunner().invoke(
        app, ["inspect-chat", *arguments, f"agent.environment={__name__}:Away", "agent.start_retries=0"]
    )
    assert result.exit_code == 2
    assert f"agent.environment: {__name__}:Away: start raised OSError('the game is away')" in result.output


def test_a_template_may_need_a_variable_of_the_recipe(folder_of, tmp_path):
    (tmp_path / "given.jinja").write_text("{% if not mood %}{{ raise_exception('which mood') }}{% endif %}" + EACH)
    arguments = (TINY, f"model.path={folder_of('qwen3')}", f"model.chat_template={tmp_path}/given.jinja")
    assert "(the answer)" in inspected(*arguments, "agent.tools=[]", "agent.chat_template_kwargs={mood: good}")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (
            "{enable_thinkng: false}",
            "enable_thinkng: the chat template does not read it. Did you mean enable_thinking?",
        ),
        ("{colour: red}", "colour: the chat template does not read it\\.\\s"),
        ("{tools: []}", "tools: slimrl sets it"),
        ("{add_generation_prompt: false}", "add_generation_prompt: slimrl sets it"),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(folder_of, variables, problem):
    arguments = [str(TINY), f"model.path={folder_of('qwen3')}", f"agent.chat_template_kwargs={variables}"]
    result = CliRunner().invoke(app, ["inspect-chat", *arguments])
    assert result.exit_code == 2
    assert re.search(rf"agent\.chat_template_kwargs: {problem}", result.output)
