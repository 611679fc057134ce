"""What the bodies of OpenAI's two APIs, chat completions and responses, have in common."""

from typing import Any

from slimrl.agent.chat.template import read_arguments
from slimrl.agent.gateway.body import Loose, Object
from slimrl.agent.gateway.errors import refused


class Called(Loose):
    name: str
    arguments: str

    def parsed(self, where: str) -> Any:
        """The arguments; raises ApiError if they are no JSON."""
        try:
            return read_arguments({"function": {"name": self.name, "arguments": self.arguments}})
        except ValueError as error:
            raise refused(f"{where}: the {error}") from error


class Function(Object):
    """A function that the policy may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
