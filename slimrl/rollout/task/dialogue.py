"""How the policy of a recipe talks: chat format, tools, and the parser of its calls, from the files of its model."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from slimrl.agent.bounded_parser import BoundedParser
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.stop_tokens import checked_stop_tokens, stop_token_ids
from slimrl.agent.chat.template import PROBE_TOOL, ChatTemplate, Schemas
from slimrl.agent.chat.tokenizer import load_tokenizer
from slimrl.agent.chat.tool_prompts import tool_prompt
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.parsers import NoCalls, Parser, make_parser, marker_tokens
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import ToolCall
from slimrl.agent.tools import ToolBox
from slimrl.config.load import LoadedRecipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.problems import RecipeError
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.rollout.task.tools import load_tools


def load_dialogues(loaded: LoadedRecipe, sandbox: SandboxPool) -> tuple[Dialogues, ToolBox]:
    """Resolve the tools, and read the tokenizer and the chat template.

    Args:
        sandbox: for the tools that ask for it.

    Raises:
        RecipeError: names the keys that do not fit the files.
    """
    recipe = loaded.recipe
    collector = ProblemCollector(loaded)
    chat = collector.get("model.path", lambda: load_chat_format(loaded))
    tools = load_tools(recipe.agent, collector, sandbox)
    if chat is None or tools is None:
        raise RecipeError(collector.problems)
    make_parser = partial(load_parser, recipe.agent.parser, Path(recipe.model.path), chat)
    if collector.get("agent.parser", lambda: make_parser(tools.schemas)) is None:
        raise RecipeError(collector.problems)
    dialogues = Dialogues(chat, make_parser, stop_at_call=recipe.rollout.stop_at_tool_call)
    if collector.get("agent.tools", lambda: dialogues.of(tools.schemas)) is None:
        raise RecipeError(collector.problems)
    if recipe.agent.uses_gateway:
        # Loads the parser, which takes seconds, before an agent waits. One whose model has no words for tools may have
        # none; others are told so.
        with suppress(ValueError):
            dialogues.of([PROBE_TOOL])
    return dialogues, tools


def load_chat_format(loaded: LoadedRecipe) -> ChatFormat:
    """The tokenizer, the chat template and the tokens that end a turn.

    Raises:
        RecipeError: names the key that does not fit the files.
    """
    recipe = loaded.recipe
    folder = Path(recipe.model.path)
    key = "model.path"
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code=recipe.model.trust_remote_code)
        key = source = "model.chat_template" if recipe.model.chat_template else "model.path"
        text = Path(recipe.model.chat_template).read_text() if recipe.model.chat_template else None
        shown = tool_prompt(recipe.agent.tool_prompt)
        template = ChatTemplate(tokenizer, text, recipe.agent.chat_template_kwargs, shown)
        key = "agent.chat_template_kwargs"
        template.require_read()
        key = source
        template.require_words()
        given = recipe.agent.stop_token_ids
        key = "model.path" if given is None else "agent.stop_token_ids"
        if given is None:
            stops = stop_token_ids(folder, tokenizer, template.reserved)
        else:
            stops = checked_stop_tokens(given, tokenizer, template.reserved)
        chat = ChatFormat(template, stops)
        chat.require_ends()
    except OSError as error:
        raise RecipeError([loaded.problem(key, f"{error.filename}: {error.strerror}")]) from error
    except ValueError as error:
        raise RecipeError([loaded.problem(key, str(error))]) from error
    return chat


def load_parser(name: str, folder: Path, chat: ChatFormat, schemas: Schemas) -> Parser:
    """The parser of that name; if it is empty, the one of the model's family that reads what the template writes.

    Raises:
        ValueError: there is no such parser, or it does not read the calls that the template writes.
    """
    if ":" in name:
        return BoundedParser(name, schemas or [])
    if not schemas:
        return BoundedParser(name, []) if name else NoCalls()
    written = _written_call(chat)
    if PROBE_TOOL["function"]["name"] not in written:
        raise ValueError("the chat template writes no tool calls; name another in model.chat_template, or no tools")
    candidates = (name,) if name else _family_parsers(folder)
    tokens = marker_tokens(chat.template.reserved)
    for candidate in candidates:
        calls = make_parser(candidate, [PROBE_TOOL], tokens).parse(written).calls
        if len(calls) == 1 and isinstance(calls[0], ToolCall):
            return BoundedParser(candidate, schemas, tokens)
    tried = ", ".join(candidates)
    raise ValueError(f"{tried}: does not read the calls that the chat template writes, such as {written!r}")


def _family_parsers(folder: Path) -> tuple[str, ...]:
    try:
        family = family_of(read_hf_config(folder))
    except ValueError as error:
        raise ValueError(f"no parser can be chosen for this model; name one: {error}") from error
    if not family.call_parsers:
        raise ValueError(f"no parser is known for models of {family.name}; name that of the template's calls")
    return family.call_parsers


def _written_call(chat: ChatFormat) -> str:
    """A call as the template writes it."""
    question = {"role": "user", "content": "q"}
    call = {"name": PROBE_TOOL["function"]["name"], "arguments": {"probed_parameter": "text"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "functions.probed_tool:0", "type": "function", "function": call}],
    }
    after = chat.template.render([question, turn], [PROBE_TOOL], generate=False)
    # Without the header of the turn, where the header is part of it: some formats begin a turn with their call.
    for generate in (True, False):
        before = chat.template.render([question], [PROBE_TOOL], generate=generate)
        if after.startswith(before):
            return after[len(before) :]
    return after
