"""How a policy talks: its chat format, its tools, the parser of its calls, and the tokens at which a turn ends."""

from dataclasses import dataclass
from typing import Any, Protocol

from slimrl.agent.parsers import Parser
from slimrl.chat.chat_format import ChatFormat


class Tools(Protocol):
    """What an episode needs of the tools, as `ToolBox` has it."""

    @property
    def schemas(self) -> list[dict[str, Any]]: ...

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Raises ToolError or ToolCrash."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    chat: ChatFormat
    tools: Tools
    parser: Parser
    stop_token_ids: tuple[int, ...]
    """The engine stops at these."""
    call_ends: frozenset[int]
    """Tools may answer after these; the others end the whole text."""


def make_dialogue(chat: ChatFormat, tools: Tools, parser: Parser, *, stop_at_call: bool) -> Dialogue:
    """A turn ends at the model's own stop tokens and, with tools, at the marker that closes a call if it is one token.

    Args:
        stop_at_call: end a turn at its first closed call.

    Raises:
        ValueError: there are tools, and the chat template writes none of these tokens after a call.
    """
    stops, call_ends = chat.stop_token_ids, frozenset[int]()
    if tools.schemas:
        call_ends = chat.call_ends
        close = chat.token_id(parser.close_marker) if stop_at_call and parser.close_marker else None
        if close is not None and close not in stops:
            stops, call_ends = (*stops, close), call_ends | {close}
        if not call_ends:
            texts = ", ".join(repr(chat.template.decode([token])) for token in stops)
            raise ValueError(f"the chat template writes none of the tokens that end a turn after a tool call: {texts}")
    return Dialogue(chat=chat, tools=tools, parser=parser, stop_token_ids=stops, call_ends=call_ends)
