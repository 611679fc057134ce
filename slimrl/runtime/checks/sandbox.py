"""Whether the sandbox of a recipe runs here, if something of the task asks for it."""

import asyncio
import shutil
from collections.abc import Iterator

from slimrl.agent.sandbox.interface import Ended, Program, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.reward_rules import reward_parts
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.import_path import parameters_of_type, resolve


def check_sandbox(recipe: Recipe) -> None:
    """Run an empty program. Of containers only the command is looked for: an image may take minutes to load.

    Raises:
        ValueError: the task asks for the sandbox, and it does not run.
    """
    user = next(_users(recipe), None)
    if user is None:
        return
    config = recipe.agent.sandbox
    if config.backend is SandboxBackend.container:
        problem = "" if shutil.which(config.command) else f"there is no command {config.command}"
    else:
        problem = asyncio.run(_problem(config))
    if problem:
        raise ValueError(f"{user} runs code in the sandbox {config.backend.value}, and {problem} (docs/sandbox.md)")


def _users(recipe: Recipe) -> Iterator[str]:
    """Import paths of tools, environment and rewards with a parameter that is annotated with SandboxPool."""
    rewards = [recipe.reward.function, *(part.function for _, part in reward_parts(recipe.reward))]
    for path in (*recipe.agent.tools, recipe.agent.environment, *rewards):
        if path and parameters_of_type(resolve(path, classes=True), SandboxPool):
            yield path


async def _problem(config: SandboxConfig) -> str:
    """Why no program runs; empty if one does."""
    pool = SandboxPool(config)
    try:
        result = await pool.run(Program(code=""))
    except SandboxError as error:
        return str(error)
    finally:
        await pool.close()
    return "" if result.ended is Ended.ok else f"an empty program ended with {result.ended.value}: {result.stderr}"
