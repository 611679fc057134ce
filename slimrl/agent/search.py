"""The search tool: passages of a local corpus, by BM25 or by the vectors of an encoder.

A corpus is a JSONL file of `{"text": ...}`, with `"id"` or without; an id is shown in brackets before its passage.
The index of BM25 is made at the first search, unless it is kept beside the corpus already; that of vectors is made by
`slimrl-tools search-index`.
"""

from functools import cache
from pathlib import Path
from threading import Lock
from typing import Protocol

from slimrl.agent.retrieval.bm25 import open_bm25
from slimrl.agent.tools import tool

NOTHING = "nothing found"
RETRIEVERS = ("bm25", "dense")
_reading = Lock()
"""Held while an index is opened, so that the first searches of all episodes open it once."""


class Finds(Protocol):
    def find(self, query: str, num_results: int) -> list[str]: ...


@tool(pure=True, recipe_only=("retriever", "encoder"))
def search(query: str, corpus: str, num_results: int = 3, retriever: str = "bm25", encoder: str = "") -> str:
    """Search for passages.

    Args:
        query: Words to look for.
        corpus: File of the passages.
        num_results: Most passages in an answer.
        retriever: bm25 or dense.
        encoder: Folder of the encoder of a dense retriever.
    """
    with _reading:
        index = _open(corpus, retriever, encoder)
    return answer(index, query, num_results)


def answer(index: Finds, query: str, num_results: int) -> str:
    """What the policy is told: a line for each passage, the best first."""
    return "\n".join(index.find(query, num_results)) or NOTHING


@cache
def _open(corpus: str, retriever: str, encoder: str) -> Finds:
    """Raises RuntimeError, which is no answer to the policy: there is no such file or index, or it cannot be used."""
    try:
        if retriever not in RETRIEVERS:
            raise ValueError(f"retriever: {retriever!r} is neither {' nor '.join(RETRIEVERS)}")
        if retriever == "bm25":
            if encoder:
                raise ValueError("encoder: is of the retriever dense, and the retriever is bm25")
            return open_bm25(Path(corpus))
        if not encoder:
            raise ValueError("encoder: is missing; the retriever dense needs the folder of an encoder")
        # It imports torch and transformers, which other retrievers do not need.
        from slimrl.agent.retrieval.dense import open_dense

        return open_dense(Path(corpus), Path(encoder))
    except ValueError as error:
        raise RuntimeError(str(error)) from error
