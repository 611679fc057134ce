"""Questions in other words, by a model behind an OpenAI-compatible endpoint, such as the policy's own.

A question keeps its template's text where the model's says something else, as far as words tell: a name is missing, a
relation of which no word is left, a negation without a word that denies, or something that one has to find is named.
"""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from slimrl_tools.progress import count_progress
from slimrl_tools.synthesis.filters import names_one
from slimrl_tools.synthesis.query import Difference, Projection, constants, whole
from slimrl_tools.synthesis.questions import Question
from slimrl_tools.synthesis.rendering import Phrases

from slimrl.rewards.answers import normal_form
from slimrl.rewards.http import EndpointError
from slimrl.rewards.remote import endpoint
from slimrl.rewards.verdict_line import last_line
from slimrl.rewards.verdicts import COMPLETIONS

TASK = (
    "Say the question below in other words. It must ask for the same thing under the same conditions. Keep every name "
    "as it is written, and do not answer. Write the new question as the last line, and nothing else in it.\n\n"
)
MAX_TOKENS = 2048
MAX_GROWTH = 2
"""Longest text, as a multiple of the template's."""
STEM = 4
"""Letters by which a word is the same word in another form."""
_DENIES = re.compile(r"\b(?:not|never|no|neither|nor|without|except|excluding|other than)\b|n't\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")


class Rewriter:
    """
    Args:
        url: base of the API, up to `/v1`.
        key_env: environment variable with the key; empty for none.
    """

    def __init__(self, url: str, model: str, key_env: str = "") -> None:
        self._endpoint = endpoint(url, {"api_key_env": key_env}, adds=COMPLETIONS)
        self._model = model

    def __call__(self, questions: list[Question], phrases: Phrases) -> list[Question]:
        """The questions, in the model's words where those say the same.

        Raises:
            ValueError: the endpoint refuses, or its answer is no chat completion.
            ConnectionError, TimeoutError: it does not answer.
        """
        try:
            return asyncio.run(self._all(questions, phrases))
        except EndpointError as error:
            raise ValueError(f"--rewrite-url: {error}") from error

    async def _all(self, questions: list[Question], phrases: Phrases) -> list[Question]:
        await self._endpoint.start()
        try:
            with count_progress("in other words", len(questions), "questions") as advance:

                async def reworded(text: str) -> str:
                    said = await self._reworded(text)
                    advance(1)
                    return said

                texts = await asyncio.gather(*(reworded(one.text) for one in questions))
        finally:
            await self._endpoint.close()
        return [
            replace(one, text=text, rewritten=True) if says_the_same(text, one, phrases) else one
            for one, text in zip(questions, texts, strict=True)
        ]

    async def _reworded(self, text: str) -> str:
        messages = [{"role": "user", "content": TASK + text}]
        request = {"model": self._model, "max_tokens": MAX_TOKENS, "messages": messages}
        return last_line(content(await self._endpoint.post(COMPLETIONS, request)))


def says_the_same(text: str, question: Question, phrases: Phrases) -> bool:
    """Whether a text can stand for a question's; decided by its words."""
    words, named = f" {normal_form(text)} ", constants(question.query)
    parts = list(whole(question.query))
    return (
        text.endswith("?")
        and len(text) <= MAX_GROWTH * len(question.text)
        and all(f" {normal_form(name)} " in words for name in named)
        and not names_one(text, question.proof.found)
        and all(is_said(one.relation, text, named, phrases) for one in parts if isinstance(one, Projection))
        and (not any(isinstance(one, Difference) for one in parts) or _DENIES.search(text) is not None)
    )


def is_said(relation: str, text: str, named: Iterable[str], phrases: Phrases) -> bool:
    """Whether a word of a relation's phrase, or of its name, occurs outside of the names."""
    for name in sorted(named, key=len, reverse=True):
        text = text.replace(name, "")
    phrase = phrases[relation]
    return bool(_stems(" ".join((phrase.noun, phrase.subject_is, phrase.object_is, relation))) & _stems(text))


def _stems(text: str) -> set[str]:
    return {word[:STEM].lower() for word in _WORD.findall(text) if len(word) >= STEM}


def content(answer: Any) -> str:
    """The text of a chat completion; raises EndpointError if the answer is none."""
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"the answer is no chat completion: {str(answer)[:200]}") from error
