"""Whether the sandbox of a recipe runs here, if something of the task asks for it."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slimrl.agent.gateway.command_sandbox import hidden_program, sandboxed
from slimrl.agent.gateway.workspace import Workspace
from slimrl.agent.sandbox.interface import Ended, Program, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.agent_rules import command_words
from slimrl.config.import_path import parameters_of_type, resolve
from slimrl.config.reward_rules import reward_parts
from slimrl.config.schema.agent import IN_PROCESS, AgentConfig, SandboxBackend, SandboxConfig
from slimrl.config.schema.recipe import Recipe

START_S = 60.0


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
        runs = f"{user} runs code in the sandbox {config.backend.value}"
        raise ValueError(f"{runs}, and {problem} (docs/gateway.md#sandbox)")


def check_command_sandbox(agent: AgentConfig) -> None:
    """Run an empty command in the sandbox of `agent.command`, if it has one.

    Raises:
        ValueError: the sandbox does not run here, or does not show the command's program.
    """
    config = agent.command_sandbox
    if not agent.command or not config.enabled:
        return
    word = command_words(agent.command)[0]
    program = shutil.which(word, path=agent.command_env.get("PATH"))
    assert program is not None  # the recipe's rules have looked for it
    if hidden := hidden_program(program, config.paths):
        base = Path(sys.base_prefix, "bin", "python3")
        python = f" For the Python that slimrl runs on, without packages, write {base}." if "python" in word else ""
        raise ValueError(f"{word} needs {hidden}, which the sandbox does not show. Add its folder to `paths`.{python}")
    with tempfile.TemporaryDirectory(prefix="slimrl-agent-") as folder:
        place = Workspace(root=Path(folder))
        place.make()
        try:
            subprocess.run(sandboxed(["true"], place, config, None), capture_output=True, check=True, timeout=START_S)
        except OSError as error:
            raise ValueError(f"bwrap cannot be started, install bubblewrap: {error}") from error
        except subprocess.TimeoutExpired:
            raise ValueError(f"an empty command in bwrap does not end within {START_S:g} s") from None
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip()
            raise ValueError(f"bwrap does not run here: {said} (docs/gateway.md#sandbox)") from error


def _users(recipe: Recipe) -> Iterator[str]:
    """Import paths of tools, environment, command's task and rewards with a parameter annotated with SandboxPool.

    An environment in another process has none, and may need packages that are not here.
    """
    environment = recipe.agent.environment if recipe.agent.environment_isolation in IN_PROCESS else ""
    rewards = [recipe.reward.function, *(part.function for _, part in reward_parts(recipe.reward))]
    for path in (*recipe.agent.tools, environment, recipe.agent.command_task, *rewards):
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
