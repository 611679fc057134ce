"""Rules of the section `agent.mcp`."""

import importlib.util
from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.agent import AgentConfig


def mcp_violations(agent: AgentConfig) -> Iterator[Violation]:
    """Servers without an address or with two, settings of the other kind, and the package that is absent."""
    if agent.mcp and importlib.util.find_spec("mcp") is None:
        yield "agent.mcp", "needs the package mcp. Install it with: pip install -c requirements/lock.txt -e '.[mcp]'"
    for name, server in agent.mcp.items():
        key = f"agent.mcp.{name}"
        if bool(server.command) == bool(server.url):
            yield key, "needs either command or url."
        elif server.url and not server.url.startswith(("http://", "https://")):
            yield f"{key}.url", f"{server.url!r} does not begin with http:// or https://."
        elif server.url and server.env:
            yield f"{key}.env", "has no effect on a server by URL. Give headers, or leave it out."
        elif server.command and server.headers:
            yield f"{key}.headers", "a command has none. Give env, or leave it out."
        for unshown in sorted(set(server.pure) - set(server.tools)) if server.tools else ():
            yield f"{key}.pure", f"{unshown} is not among the tools that {key}.tools shows."
