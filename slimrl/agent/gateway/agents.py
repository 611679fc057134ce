"""What runs an agent for a trajectory, and the way that is a function of Python; command_agent.py has the other one."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from slimrl.agent.gateway.connection import Connection
from slimrl.base.threads import in_thread, reportable


class AgentFailed(Exception):
    """The agent raised, or its command ended with another exit code than 0."""


class Agent(Protocol):
    async def run(self, line: Mapping[str, Any], connection: Connection, afterwards: AsyncExitStack) -> str:
        """Act for one trajectory; it is cancelled at the trajectory's deadline.

        Args:
            line: of the data: `id`, `messages`, `label`, `metadata`.
            afterwards: is closed when the session has ended, without the trajectory's deadline: what has to be tidied
                up then.

        Returns:
            How the agent ended and what it last said, for whoever looks why it did nothing.

        Raises:
            AgentFailed: says why.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FunctionAgent:
    """Calls a function with the data line and the connection: an asynchronous one here, another in its own thread."""

    function: Callable[[Mapping[str, Any], Connection], Any]
    path: str
    """Import path of the function"""

    async def run(self, line: Mapping[str, Any], connection: Connection, afterwards: AsyncExitStack) -> str:
        try:
            if inspect.iscoroutinefunction(self.function):
                await _awaited(self.function, line, connection)
            else:
                await in_thread(lambda: self.function(line, connection))
        except Exception as error:
            # A task's own code may raise anything.
            raise AgentFailed(f"{self.path} raised {error!r}") from error
        return f"{self.path} returned"


async def _awaited(function: Callable[..., Any], line: Mapping[str, Any], connection: Connection) -> None:
    try:
        await function(line, connection)
    except SystemExit as error:
        # A SystemExit in a task would end the event loop, and the run with it.
        raise reportable(error) from error
