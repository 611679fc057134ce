"""A client of one HTTP endpoint that answers JSON with JSON, for rewards that are computed elsewhere."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypedDict

import aiohttp

from slimrl.base.environment_key import environment_key
from slimrl.rewards.retries import Retries

RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may be gone at the next attempt."""
MAX_CAUSE_CHARACTERS = 300
_JSON = {"Content-Type": "application/json"}


class EndpointSettings(TypedDict, total=False):
    """Arguments of JsonEndpoint, which has their defaults."""

    api_key_env: str
    max_running: int
    timeout_s: float
    retries: int


class EndpointError(Exception):
    """An endpoint refused, or its answer is not what it should be."""


class EndpointBusy(EndpointError):
    """An endpoint said that it cannot answer now."""


class JsonEndpoint:
    """Requests with bounded concurrency, each with a deadline, repeated by the rule of retries.py.

    Args:
        api_key_env: environment variable with the key that is sent as a bearer token; empty for none.
        max_running: requests at the same time; others wait.
        timeout_s: deadline of each attempt.
        retries: attempts after the first one, after an error of transport or a status of RETRIED.

    Raises:
        ValueError: a wrong setting, or a variable that holds no key (environment_key).
    """

    def __init__(
        self, url: str, *, api_key_env: str = "", max_running: int = 16, timeout_s: float = 60.0, retries: int = 3
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} does not begin with http:// or https://")
        for name, value in (("max_running", max_running), ("timeout_s", timeout_s), ("retries", retries + 1)):
            if not value > 0:
                raise ValueError(f"{name}: is out of range")
        try:
            key = environment_key(api_key_env) if api_key_env else ""
        except ValueError as error:
            raise ValueError(f"api_key_env: {error}") from error
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._max_running, self._timeout_s = max_running, timeout_s
        self._retries = Retries(limit=retries, errors=(ConnectionError, EndpointBusy, TimeoutError))

    async def start(self) -> None:
        """Open the client, on the event loop that will use it."""
        self._places = asyncio.Semaphore(self._max_running)
        # The deadline is that of the whole attempt, below.
        self._client = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._client.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a request is answered with.

        Raises:
            EndpointError: a status that is not 2xx, or an answer that is no JSON.
            ConnectionError: no connection, or it broke, in all attempts.
            TimeoutError: no answer in time, in all attempts.
        """
        async with self._places:
            return await self._retries.call(lambda: self._attempt(path, body), self.url + path, lambda: None)

    async def _attempt(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            # In ASCII: half of a surrogate pair, which a policy may write in a call, has no other form.
            data, url = json.dumps(body), self.url + path
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.post(url, data=data, headers=_JSON, allow_redirects=False) as response,
            ):
                content = await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{self.url}{path}: {error}") from error
        except TimeoutError:
            raise TimeoutError(f"{self.url}{path} did not answer within {self._timeout_s:g} s") from None
        said = content.decode(errors="replace")[:MAX_CAUSE_CHARACTERS]
        if not 200 <= response.status < 300:
            kind = EndpointBusy if response.status in RETRIED else EndpointError
            raise kind(f"{self.url}{path}: {response.status}: {said}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise EndpointError(f"{self.url}{path} answered with no JSON: {said}") from error
