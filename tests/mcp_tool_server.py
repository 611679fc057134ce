"""An MCP server written with the official SDK, for tests: `python mcp_tool_server.py stdio`, or `http PORT`."""

import asyncio
import json
import os
import sys

from mcp.server.fastmcp import FastMCP, Image
from pydantic import BaseModel

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001"
    "00e221bc330000000049454e44ae426082"
)

server = FastMCP("tests", port=int(sys.argv[2]) if len(sys.argv) > 2 else 0, log_level="WARNING")
counts = {"count": 0}


class Weather(BaseModel):
    town: str
    degrees: float


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@server.tool()
def count() -> str:
    """Count the calls of this process."""
    counts["count"] += 1
    return str(counts["count"])


@server.tool()
def weather(town: str) -> Weather:
    """Say the weather."""
    return Weather(town=town, degrees=21.5)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


@server.tool()
def picture(words: str = "") -> list:
    """Draw."""
    image = Image(data=PIXEL, format="png")
    return [words, image] if words else [image]


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def pid() -> str:
    """Say the process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """Say a variable of the environment, or a header of the request."""
    request = server.get_context().request_context.request
    return json.dumps(os.environ.get(name) if request is None else request.headers.get(name))


if __name__ == "__main__":
    server.run("stdio" if sys.argv[1] == "stdio" else "streamable-http")
