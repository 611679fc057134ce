"""What the bodies of OpenAI's two APIs, chat completions and responses, have in common."""

from typing import Any

from slimrl.agent.gateway.body import Loose, Object
from slimrl.agent.gateway.errors import refused
from slimrl.data.strict_json import strict_json


class Called(Loose):
    name: str
    arguments: str

    def parsed(self, where: str) -> Any:
        """The arguments; raises ApiError if they are no JSON."""
        try:
            return strict_json(self.arguments or "{}", finite=False)
        except (ValueError, RecursionError) as error:
            raise refused(f"{where}: the arguments of {self.name} are no JSON: {error}") from error


class Function(Object):
    """A tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
