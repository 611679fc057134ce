"""What `slimrl inspect-chat` shows of a recipe."""

from pathlib import Path

from slimrl.agent.call_schemas import refuse_wrong_calls
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.preview import preview_episode, preview_example
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolsUnavailable
from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import RecipeError
from slimrl.data.preview import Preview
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_conversations, read_prompts
from slimrl.rollout.task.dialogue import load_chat_format, load_dialogues
from slimrl.rollout.task.environment import load_environment
from slimrl.runtime.checks.fetched_model import with_tokenizer

QUESTION = Prompt(prompt_id="preview", messages=[{"role": "user", "content": "(the question)"}], label=None)


async def preview(loaded: LoadedRecipe) -> Preview:
    """One conversation of the recipe. Where data.train is not here, a made-up question begins it.

    Raises:
        RecipeError: names the key that does not fit the files.
    """
    loaded = with_tokenizer(loaded)
    recipe = loaded.recipe
    data, key = Path(recipe.data.train), "data.train"
    sandbox = SandboxPool(recipe.agent.sandbox)
    try:
        if loaded.command == "sft":
            chat = load_chat_format(loaded)
            conversation = read_conversations(data, recipe.data.keys)[0]
            refuse_wrong_calls(conversation.messages, conversation.tools)
            sequences = chat.training_sequences(conversation.messages, conversation.tools)
            return Preview(
                stop_token_ids=chat.stop_token_ids,
                segments=[preview_example(tokens, mask, chat) for tokens, mask in sequences],
            )
        dialogues, tools = load_dialogues(loaded, sandbox)
        prompt = read_prompts(data, recipe.data.keys)[0] if loaded.command == "train" and data.is_file() else QUESTION
        key = "agent.environment" if recipe.agent.environment else key
        environment = load_environment(recipe, tools, sandbox)
        tools.open()
        try:
            return await preview_episode(dialogues, environment, recipe.rollout, recipe.agent, prompt)
        finally:
            tools.close()
            if isinstance(environment, EnvironmentServer):
                await environment.aclose()
    except RecipeError:
        raise
    except ToolsUnavailable as error:
        raise RecipeError([loaded.problem("agent.mcp", str(error))]) from error
    except ValueError as error:
        raise RecipeError([loaded.problem(key, str(error))]) from error
    finally:
        await sandbox.close()
