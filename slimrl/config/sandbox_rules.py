"""Rules of the sandbox and of the tools that run code in it."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.agent import SandboxBackend
from slimrl.config.schema.recipe import Recipe

SANDBOX_TOOLS = "slimrl.agent.sandbox.tools:"
"""Start of the import paths of tools that run code in the sandbox"""
SESSION_TOOLS = (f"{SANDBOX_TOOLS}python_session", f"{SANDBOX_TOOLS}shell")
"""Import paths of the sandbox tools that keep a session for each trajectory"""
WITHOUT_SESSIONS = (SandboxBackend.subprocess, SandboxBackend.remote)


def sandbox_violations(recipe: Recipe) -> Iterator[Violation]:
    """Tools whose answers come too late, sessions that no backend or no place is for, and an address that is none."""
    sandbox, timeout_s = recipe.agent.sandbox, recipe.rollout.tool_timeout_s
    with_sessions = [path for path in recipe.agent.tools if path in SESSION_TOOLS]
    num_sessions = len(with_sessions) * recipe.rollout.max_concurrency_per_engine * recipe.rollout.most_engines
    if with_sessions and sandbox.backend in WITHOUT_SESSIONS:
        yield "agent.sandbox.backend", f"{sandbox.backend.value} has no sessions, which {with_sessions[0]} needs."
    elif num_sessions > sandbox.max_sessions:
        yield (
            "agent.sandbox.max_sessions",
            f"{sandbox.max_sessions}: trajectories keep their sessions, {num_sessions} at a time with "
            f"rollout.max_concurrency_per_engine, and others would wait in vain. Use {num_sessions}.",
        )
    runs_code = any(path.startswith(SANDBOX_TOOLS) for path in recipe.agent.tools)
    if runs_code and sandbox.limits.wall_s >= timeout_s:
        yield (
            "agent.sandbox.limits.wall_s",
            f"{sandbox.limits.wall_s}: the call ends before, after rollout.tool_timeout_s {timeout_s}, and the policy "
            "does not hear what the program printed. Use less.",
        )
    if sandbox.all_nodes and sandbox.backend is SandboxBackend.remote:
        yield "agent.sandbox.all_nodes", "the remote server runs the code, on no node of the cluster. Use false."
    if sandbox.all_nodes and recipe.agent.workers > 1:
        yield "agent.sandbox.all_nodes", f"agent.workers {recipe.agent.workers} have sandboxes here alone. Use false."
    if sandbox.backend is SandboxBackend.remote and not sandbox.url.startswith(("http://", "https://")):
        yield "agent.sandbox.url", f"{sandbox.url!r} is no URL; write http://HOST:PORT."
