"""How an agent reaches the policy: addresses and keys of its trajectory alone."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from slimrl.agent.gateway.once_pipe import OncePipe


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How the function of `agent.function` reaches the policy: addresses and keys of its trajectory alone."""

    url: str
    """URL of the trajectory's session, without a slash at the end"""
    api_key: str = field(repr=False)
    """Key for requests of the policy's turns"""
    reward_key: str = field(repr=False)
    """Key for posting the trajectory's reward: not for what the policy may see"""
    post: Callable[[float], None] = field(repr=False)
    """Sets the trajectory's posted reward"""
    serve: Callable[[socket.socket], AbstractAsyncContextManager[None]] = field(repr=False)
    """Lets the gateway accept from a further socket, and closes it at the end"""
    handed: list[OncePipe] = field(default_factory=list, repr=False)
    """Pipes that a command can read until it asks the policy for the first time"""

    @property
    def openai_base_url(self) -> str:
        """Base URL for clients of OpenAI's APIs: chat completions and responses"""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for clients of Anthropic's API: messages"""
        return self.url

    @property
    def reward_url(self) -> str:
        """URL that takes `POST` of {"reward": number} with `reward_key`"""
        return f"{self.url}/reward"

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def at(self, host: str) -> "Connection":
        """The same connection through another address."""
        parts = urlsplit(self.url)
        return replace(self, url=parts._replace(netloc=f"{host}:{self.port}").geturl())

    def take_back(self) -> None:
        """Leave nothing in the pipes: from now on the policy may act."""
        for pipe in self.handed:
            pipe.close()

    def variables(self, host: str) -> dict[str, str]:
        """The environment variables of a command; the host is reached without a proxy."""
        unproxied = {
            name: ",".join(filter(None, [os.environ.get(name, ""), host])) for name in ("no_proxy", "NO_PROXY")
        }
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "SLIMRL_REWARD_URL": self.reward_url,
            **unproxied,
        }
