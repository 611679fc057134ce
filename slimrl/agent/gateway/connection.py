"""How an agent reaches the policy: addresses and a key of its trajectory alone."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Connection:
    url: str
    """Of the trajectory's session, without a slash at the end"""
    api_key: str

    @property
    def openai_base_url(self) -> str:
        """For clients of OpenAI's APIs: chat completions and responses"""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For clients of Anthropic's API: messages"""
        return self.url

    @property
    def reward_url(self) -> str:
        """Takes `POST` of {"reward": number} with the key"""
        return f"{self.url}/reward"

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
            "SLIMRL_API_KEY": self.api_key,
            **unproxied,
        }
