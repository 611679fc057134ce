"""Verdicts of a judge behind an OpenAI-compatible endpoint (POST /chat/completions), each asked for once.

The verdict is the last line of the answer, alone (verdict_line.py): what the judge quotes or thinks before it does not
count. Verdicts are kept by a hash of the whole request, in memory or in a file of SQLite that several runs may share.
"""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from slimrl.rewards.http import EndpointError, JsonEndpoint
from slimrl.rewards.judge_text import INSTRUCTIONS
from slimrl.rewards.verdict_line import VerdictForm, last_line

COMPLETIONS = "/chat/completions"
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

    async def start[V: float | str](self, example: str, form: VerdictForm[V]) -> str:
        """Ask for the verdict on an example, which is not kept; returns its line.

        Raises:
            EndpointError, TimeoutError, ConnectionError: the endpoint does not have the model.
            NoVerdict: the model does not give verdicts of this form.
        """
        await self._endpoint.start()
        line, _ = await self._ask({**self._request, "messages": _messages(example)}, form)
        verdicts = sqlite3.connect(self._cache, timeout=BUSY_S, isolation_level=None)
        self._verdicts = self._held.enter_context(closing(verdicts))
        verdicts.execute("CREATE TABLE IF NOT EXISTS verdicts (request TEXT PRIMARY KEY, verdict TEXT)")
        return line

    async def close(self) -> None:
        self._held.close()
        await self._endpoint.close()

    async def verdict[V: float | str](self, text: str, form: VerdictForm[V]) -> V:
        """What the last line of the judge's answer says.

        Raises:
            NoVerdict: it has another form.
            EndpointError, TimeoutError, ConnectionError: as of JsonEndpoint.post.
        """
        request = {**self._request, "messages": _messages(text)}
        key = hashlib.sha256(json.dumps([self._endpoint.url, request], sort_keys=True).encode()).hexdigest()
        with closing(self._verdicts.execute("SELECT verdict FROM verdicts WHERE request = ?", (key,))) as found:
            known = found.fetchone()
        if known is not None and (verdict := form.read(known[0])) is not None:
            return verdict
        line, verdict = await self._ask(request, form)
        self._verdicts.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, line))
        return verdict

    async def _ask[V: float | str](self, request: Mapping[str, Any], form: VerdictForm[V]) -> tuple[str, V]:
        """The last line of the judge's answer, and the verdict that it is."""
        line = last_line(_content(await self._endpoint.post(COMPLETIONS, request)))
        verdict = form.read(line)
        if verdict is None:
            ends = f"ends with {line[:200]!r}" if line else "is empty"
            raise NoVerdict(f"the judge's answer {ends}, which is no verdict: its last line has to be {form.wanted}")
        return line, verdict


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]


def _content(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        content = str(choice["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"the judge's answer is no chat completion: {str(answer)[:200]}") from error
    if not choice.get("finish_reason"):
        raise EndpointError(
            "the judge's answer has no finish_reason, which says whether it ends where the judge ended it or at "
            "max_tokens; let the server send one, as OpenAI's API does"
        )
    if choice["finish_reason"] == "length":
        raise NoVerdict("the judge ran out of max_tokens before its verdict; give more in options: {max_tokens: N}")
    return content
