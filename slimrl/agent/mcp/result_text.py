"""The answer of an MCP tool as the text that the policy reads."""

import json

from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from slimrl.agent.tools import ToolError


def result_text(result: CallToolResult) -> str:
    """Texts line by line, or the structured result as JSON where there are none.

    Raises:
        ToolError: the server says that the call failed, or the answer has nothing but images, sounds or other bytes.
    """
    texts = [text for block in result.content if (text := _text(block)) is not None]
    others = [_kind(block) for block in result.content if _text(block) is None]
    if not texts and result.structuredContent is not None:
        texts = [json.dumps(result.structuredContent, ensure_ascii=False)]
    if result.isError:
        raise ToolError("\n".join(texts) or "the tool failed without a message")
    if others and not texts:
        raise ToolError(f"the tool answered with {', '.join(others)}; only text can be read")
    return "\n".join([*texts, *(f"({kind} left out; only text can be read)" for kind in others)])


def _text(block: TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource) -> str | None:
    match block:
        case TextContent():
            return block.text
        case ResourceLink():
            return f"{block.name}: {block.uri}"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case _:
            return None


def _kind(block: TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource) -> str:
    media = block.resource.mimeType if isinstance(block, EmbeddedResource) else getattr(block, "mimeType", None)
    return media or "bytes of an unknown kind"
