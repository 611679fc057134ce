"""Tools that run code in the sandbox: `agent.tools: ["slimrl.agent.sandbox.tools:python"]`.

`python` runs a whole program. `python_session` and `shell` have one session for each trajectory, which ends with it;
the shell's working directory is a private copy of the folder that the prompt names.
"""

from functools import partial
from pathlib import Path

from slimrl.agent.sandbox.interface import Ended, Language, Program, Result, SessionEnded
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import EpisodeInfo, ToolError

FOLDER = "folder"
"""Key of a prompt's metadata that names the folder in which the shell works, relative to the working directory."""

NUM_ERROR_LINES = 8
"""Number of lines at the end of stderr that the model gets."""
_REASONS = {
    Ended.timeout: "stopped: out of time",
    Ended.memory: "stopped: out of memory",
    Ended.output: "stopped: too much output",
    Ended.killed: "the program crashed",
}


async def python(code: str, sandbox: SandboxPool) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. Nothing of earlier programs remains.
    """
    return answer(await sandbox.run(Program(code=code)))


async def python_session(code: str, episode: EpisodeInfo, sandbox: SandboxPool) -> str:
    """Run Python and return what it prints. Variables and functions remain for the next call.

    Args:
        code: The code.
    """
    return await _in_session(code, Language.python, None, episode, sandbox)


async def shell(command: str, episode: EpisodeInfo, sandbox: SandboxPool) -> str:
    """Run a shell command. Files, variables and the directory remain for the next call.

    Args:
        command: One or more commands of bash.
    """
    folder = episode.prompt.metadata.get(FOLDER)
    return await _in_session(command, Language.shell, None if folder is None else Path(folder), episode, sandbox)


async def _in_session(
    code: str, language: Language, folder: Path | None, episode: EpisodeInfo, sandbox: SandboxPool
) -> str:
    name = f"sandbox {language.value}"
    session = await episode.kept(name, partial(sandbox.session, language, folder=folder))
    try:
        return answer(await session.run(code))
    except SessionEnded as error:
        await session.close()
        episode.forget(name)
        raise ToolError(f"{error}, with all that it kept; the next call begins a new one") from error


def answer(result: Result) -> str:
    """The tool's result for the model: the output, then the last lines of the error or why the program was stopped."""
    parts = [result.stdout.rstrip("\n")]
    if result.ended is not Ended.ok:
        parts += result.stderr.rstrip("\n").split("\n")[-NUM_ERROR_LINES:]
        parts.append(_REASONS.get(result.ended, ""))
        if result.ended is Ended.error and not result.stderr.strip():
            parts.append(f"exit status {result.exit_status}")
    return "\n".join(part for part in parts if part) or "no output"
