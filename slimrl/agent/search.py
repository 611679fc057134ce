"""The search tool: passages of a local corpus by BM25 (bm25s, the variant of Lucene).

A corpus is a JSONL file of `{"text": ...}`. Its index is built at the first search in a process, and kept.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import bm25s

from slimrl.agent.tools import tool
from slimrl.base.jsonl import read_jsonl

NOTHING = "nothing found"
_reading = Lock()
"""Held while a corpus is read, so that the first searches of all episodes read it once."""


class Index:
    """Passages, and what finds them.

    Args:
        texts: the passages; at least one.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._bm25 = texts, bm25s.BM25()
        self._bm25.index(bm25s.tokenize(list(texts), show_progress=False), show_progress=False)

    def answer(self, query: str, num_results: int) -> str:
        """Passages that share a word with the query, the best first, a line for each."""
        words = bm25s.tokenize([query], show_progress=False, return_ids=False)
        places, scores = self._bm25.retrieve(words, k=min(num_results, len(self._texts)), show_progress=False)
        found = [self._texts[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        return "\n".join(found) or NOTHING


@tool(pure=True)
def search(query: str, corpus: str, num_results: int = 3) -> str:
    """Search for passages.

    Args:
        query: Words to look for.
        corpus: File of the passages.
        num_results: Most passages in an answer.
    """
    with _reading:
        index = _read(corpus)
    return index.answer(query, num_results)


@cache
def _read(corpus: str) -> Index:
    """Raises RuntimeError, which is no answer to the policy: there is no such file, or a line without text."""
    try:
        return Index(read_jsonl(Path(corpus), _text))
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def _text(line: dict[str, Any], number: int) -> str:
    if not isinstance(line.get("text"), str):
        raise ValueError('has no "text"')
    return line["text"]
