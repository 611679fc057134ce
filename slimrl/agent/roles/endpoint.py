"""A player behind an OpenAI-compatible endpoint, such as a frozen model on a server of its own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import openai

from slimrl.agent.environment import EnvironmentFailure, Message
from slimrl.base.environment_key import environment_key


class Endpoint:
    """
    Args:
        url: base of the API, up to `/v1`.
        model: name of the model there.
        api_key_env: environment variable with the key; empty for none.
        options: further fields of each request, such as `{temperature: 0.6, max_tokens: 512}`.
        timeout_s: deadline of an attempt.
        retries: attempts after the first, after errors of transport and statuses that may be gone.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str = "",
        options: dict[str, Any] | None = None,
        timeout_s: float = 120.0,
        retries: int = 3,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} does not begin with http:// or https://")
        key = environment_key(api_key_env) if api_key_env else "none"
        self._model, self._options = model, options or {}
        self._make = partial(openai.AsyncOpenAI, base_url=url, api_key=key, timeout=timeout_s, max_retries=retries)

    async def start(self) -> None:
        """Open the client; raises OpenAIError if the server does not list its models."""
        self._client = self._make()
        await self._client.models.list()

    async def close(self) -> None:
        await self._client.close()

    async def __call__(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]], seed: int) -> Message:
        """Raises EnvironmentFailure: there was no answer."""
        body = {"model": self._model, "messages": list(messages), "seed": seed % 2**31, **self._options}
        if tools:
            body["tools"] = list(tools)
        try:
            answer = await self._client.chat.completions.create(**body)
        except openai.OpenAIError as error:
            raise EnvironmentFailure(f"the player {self._model} does not answer: {error}") from error
        return answer.choices[0].message.model_dump(exclude_none=True)
