"""Passages by the words that they share with a query: BM25 in Lucene's variant (bm25s, arXiv:2407.03618)."""

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import bm25s

from slimrl.agent.retrieval.corpus_index import folder_of, index_problem, locked, write_index
from slimrl.agent.retrieval.passages import KeptTexts, Passage, read_corpus

log = logging.getLogger(__name__)

KIND = "bm25"
MADE_WITH = {"format": 1, "bm25s": version("bm25s")}


class Bm25Index:
    """What finds passages by words.

    Args:
        shown: what is told of each passage.
        scores: bm25s's index of the same passages, in the same order.
    """

    def __init__(self, shown: Sequence[str], scores: bm25s.BM25) -> None:
        self._shown, self._scores = shown, scores

    @classmethod
    def build(cls, passages: Sequence[Passage]) -> "Bm25Index":
        """An index in memory; of one passage at least."""
        return cls([one.shown for one in passages], _scores(passages))

    @classmethod
    def load(cls, folder: Path) -> "Bm25Index":
        """An index whose arrays and texts are mapped into memory, so that all processes share them."""
        return cls(KeptTexts(folder), bm25s.BM25.load(folder, mmap=True, show_progress=False))

    def find(self, query: str, num_results: int) -> list[str]:
        """What is told of passages that share a word with the query, the best first."""
        words = bm25s.tokenize([query], show_progress=False, return_ids=False)
        count = min(num_results, len(self._shown))
        places, scores = self._scores.retrieve(words, k=count, show_progress=False)
        return [self._shown[int(place)] for place, score in zip(places[0], scores[0], strict=True) if score > 0]


def open_bm25(corpus: Path) -> Bm25Index:
    """The index that is kept beside a corpus, made before if it is missing, damaged or of another corpus.

    Where the folder of the corpus cannot be written, the index is made in memory, and a warning says so.

    Raises:
        ForeignFolder: something else lies in the index's place.
        ValueError: the corpus is missing or broken.
    """
    if not corpus.is_file():
        raise ValueError(f"{corpus}: no such file")
    folder = folder_of(corpus, KIND)
    if (problem := index_problem(folder, corpus, MADE_WITH)) is not None:
        above = next(one for one in (folder.parent, corpus.absolute().parent) if one.is_dir())
        if not os.access(above, os.W_OK):
            log.warning("%s: %s, and none can be written. Each process makes its own in memory", folder, problem)
            return Bm25Index.build(read_corpus(corpus))
        write_bm25(corpus)
    return Bm25Index.load(folder)


def write_bm25(corpus: Path, *, show_progress: bool = False) -> None:
    """Make the index beside a corpus, unless it is there; raises as `open_bm25` does.

    Args:
        show_progress: with bm25s's own bars, on stderr.
    """
    folder = folder_of(corpus, KIND)
    with locked(folder):
        problem = index_problem(folder, corpus, MADE_WITH)
        if problem is None:
            return
        log.warning("%s: %s; it is made now", folder, problem)
        passages = read_corpus(corpus)

        def write(partial: Path) -> None:
            _scores(passages, show_progress=show_progress).save(partial, show_progress=False)
            KeptTexts.write(partial, (one.shown for one in passages))

        write_index(folder, corpus, MADE_WITH, write)


def _scores(passages: Sequence[Passage], *, show_progress: bool = False) -> bm25s.BM25:
    scores = bm25s.BM25()
    tokens = bm25s.tokenize([one.text for one in passages], show_progress=show_progress)
    scores.index(tokens, show_progress=show_progress)
    return scores
