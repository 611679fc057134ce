"""Verdicts of a judge behind an OpenAI-compatible endpoint (POST /chat/completions), each asked for once.

The verdict is the last line of the answer, alone: what the judge quotes or thinks before it does not count. Answers are
kept by a hash of the whole request, in memory or in a file of SQLite that several runs may share.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from slimrl.rewards.http import EndpointError, JsonEndpoint
from slimrl.rewards.judge_text import INSTRUCTIONS

BUSY_S = 30.0
"""How long another run may hold the file of verdicts."""


class NoVerdict(EndpointError):
    """The judge's answer does not end in a verdict."""


class Judges:
    """
    Args:
        model: name of the judge for the endpoint.
        options: further fields of the request, such as `{max_tokens: 4096}`; null leaves one out.
        cache: file of verdicts; empty to keep them in memory.
    """

    def __init__(self, endpoint: JsonEndpoint, *, model: str, options: Mapping[str, Any], cache: str) -> None:
        self._endpoint, self._cache = endpoint, cache or ":memory:"
        request = {"temperature": 0, "max_tokens": 1024, **options, "model": model}
        self._held = ExitStack()
        self._request = {name: value for name, value in request.items() if value is not None}

    async def start(self) -> None:
        """Raises EndpointError, TimeoutError or httpx.TransportError if the endpoint does not have the model."""
        await self._endpoint.start()
        await self._endpoint.post("/chat/completions", {**self._request, "messages": _messages("Say OK.")})
        verdicts = sqlite3.connect(self._cache, timeout=BUSY_S, isolation_level=None)
        self._verdicts = self._held.enter_context(closing(verdicts))
        verdicts.execute("CREATE TABLE IF NOT EXISTS verdicts (request TEXT PRIMARY KEY, verdict TEXT)")

    async def close(self) -> None:
        self._held.close()
        await self._endpoint.close()

    async def verdict(self, text: str, form: re.Pattern[str]) -> str:
        """The last line of the judge's answer, which has this form.

        Raises:
            NoVerdict: it has another form.
            EndpointError, TimeoutError, httpx.TransportError: as of JsonEndpoint.post.
        """
        request = {**self._request, "messages": _messages(text)}
        key = hashlib.sha256(json.dumps([self._endpoint.url, request], sort_keys=True).encode()).hexdigest()
        with closing(self._verdicts.execute("SELECT verdict FROM verdicts WHERE request = ?", (key,))) as found:
            known = found.fetchone()
        if known is not None:
            return known[0]
        line = _last_line(await self._endpoint.post("/chat/completions", request))
        if not form.fullmatch(line):
            raise NoVerdict(f"the judge's answer ends with {line[:200]!r}, which is no verdict")
        self._verdicts.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, line))
        return line


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]


def _last_line(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        lines = (choice["message"]["content"] or "").strip().splitlines()
        finished = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(f"the judge's answer is no chat completion: {str(answer)[:200]}") from error
    if finished == "length":
        raise NoVerdict("the judge ran out of max_tokens")
    return lines[-1].strip(" *`") if lines else ""
