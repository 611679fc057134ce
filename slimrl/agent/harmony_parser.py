"""Tool calls of gpt-oss: messages of OpenAI's harmony format with a recipient, `to=functions.NAME`.

The recipient stands behind the channel, as the model writes it, or before it, as its chat template does. SGLang's
parser `gpt-oss` reads the first way alone, and only behind another message.
"""

from collections.abc import Sequence
from typing import Any

from slimrl.agent.call_schemas import CallSchemas
from slimrl.agent.chat.channels import CALL, Message, messages_of
from slimrl.agent.judged_call import UNREADABLE, judged_call
from slimrl.agent.parsers import ParsedTurn
from slimrl.agent.tool_call import MalformedCall, ToolCall

_NAMESPACE = "functions."


class HarmonyParser:
    """
    Args:
        schemas: of the tools.

    Raises:
        ValueError: the parameters of one are no JSON schema.
    """

    close_marker = CALL
    all_markers = ("to=",)
    """A text without it has no call."""

    def __init__(self, schemas: Sequence[dict[str, Any]]) -> None:
        self._schemas = CallSchemas(schemas)

    def parse(self, text: str) -> ParsedTurn:
        messages = messages_of(text)
        words = [message.text for message in messages if message.recipient is None]
        calls = [self._call(message) for message in messages if message.recipient is not None]
        return ParsedTurn(content="\n".join(words).strip(), calls=calls)

    def _call(self, message: Message) -> ToolCall | MalformedCall:
        assert message.recipient is not None
        name = message.recipient.removeprefix(_NAMESPACE)
        if not message.begun:
            return MalformedCall(problem=UNREADABLE)
        return judged_call(self._schemas, name, message.text.strip() or "{}")
