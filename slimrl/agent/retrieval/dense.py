"""Passages by meaning: those whose vectors have the largest dot product with the query's.

1. `slimrl-tools search-index` writes a float16 matrix of the passages' vectors once, and it is mapped into memory, so
   that all processes share it.
2. Queries that arrive while others are computed are computed together: the matrix is read once for all of them.
3. A part of its rows at a time is turned into float32 and multiplied, and the best so far are kept. Of equal products
   the passage that comes first in the corpus wins.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from slimrl.agent.retrieval.corpus_index import folder_of, index_problem, locked, write_index
from slimrl.agent.retrieval.encoder import Encoder
from slimrl.agent.retrieval.passages import KeptTexts, read_corpus
from slimrl.base.atomic import write_whole

KIND = "dense"
VECTORS, PROBES = "vectors.npy", "probes.json"
MADE_WITH = {"format": 1, "vectors": "float16"}
ROWS = 1024
"""Rows that are multiplied at a time; few enough that their float32 copy stays in the processor's cache."""
MAX_QUERIES = 64
"""Queries that are computed together."""
NUM_PROBES = 4
"""First passages of the corpus, by whose vectors a search tells that its encoder is the index's."""
TOLERANCE = 2e-3
"""Largest difference of an element of their vectors, by rounding to float16 and by another device; elements are about
0.05."""


@dataclass(eq=False)
class _Waiting:
    query: str
    num_results: int
    places: list[int] | None = None


class DenseIndex:
    """What finds passages by vectors.

    Args:
        shown: what is told of each passage.
        vectors_ND: float16, of length 1.
        encode: queries -> float32 [N, D].
    """

    def __init__(self, shown: Sequence[str], vectors_ND: Tensor, encode: Callable[[Sequence[str]], Tensor]) -> None:
        self._shown, self._vectors_ND, self._encode = shown, vectors_ND, encode
        self._arrived: list[_Waiting] = []
        self._arrivals, self._computing = Lock(), Lock()

    def find(self, query: str, num_results: int) -> list[str]:
        """What is told of the passages, the best first; none for a query without a letter."""
        count = min(num_results, len(self._shown))
        if not query.strip() or count < 1:
            return []
        waiting = _Waiting(query, count)
        with self._arrivals:
            self._arrived.append(waiting)
        try:
            while waiting.places is None:
                with self._computing:
                    if waiting.places is None:
                        self._compute()
        finally:
            with self._arrivals:
                if waiting in self._arrived:
                    self._arrived.remove(waiting)
        return [self._shown[place] for place in waiting.places]

    def _compute(self) -> None:
        """Answer the queries that have arrived. If that fails they stay, and the next thread tries for itself."""
        with self._arrivals:
            batch = self._arrived[:MAX_QUERIES]
        queries_BD = self._encode([one.query for one in batch])
        places_BK = best_rows(self._vectors_ND, queries_BD, max(one.num_results for one in batch))
        for one, places in zip(batch, places_BK.tolist(), strict=True):
            one.places = places[: one.num_results]
        with self._arrivals:
            self._arrived = [one for one in self._arrived if one.places is None]


def best_rows(vectors_ND: Tensor, queries_BD: Tensor, count: int) -> Tensor:
    """int64 [B, count]: the rows with the largest dot products, the largest first.

    Args:
        vectors_ND: float16.
        queries_BD: float32.
        count: at most N.
    """
    num_rows, num_dims = vectors_ND.shape
    rows_RD = torch.empty(min(ROWS, num_rows), num_dims)
    scores_BK = torch.full((len(queries_BD), count), -torch.inf)
    places_BK = torch.zeros(len(queries_BD), count, dtype=torch.int64)
    for start in range(0, num_rows, ROWS):
        part_RD = rows_RD[: min(ROWS, num_rows - start)].copy_(vectors_ND[start : start + ROWS])
        new_BR = queries_BD @ part_RD.T
        # Few parts have a row that is better than the worst of the best so far, so few are sorted.
        for query in (new_BR > scores_BK[:, -1:]).any(1).nonzero().flatten().tolist():
            numbers_R = torch.arange(start, start + len(part_RD))
            scores, order = torch.cat([scores_BK[query], new_BR[query]]).sort(descending=True, stable=True)
            scores_BK[query] = scores[:count]
            places_BK[query] = torch.cat([places_BK[query], numbers_R])[order[:count]]
    return places_BK


def open_dense(corpus: Path, encoder: Path) -> DenseIndex:
    """The index that `slimrl-tools search-index` has made.

    Raises:
        ForeignFolder: something else lies in the index's place.
        ValueError: there is none of this corpus, it is damaged, or another encoder made it; says what to do.
    """
    if not corpus.is_file():
        raise ValueError(f"{corpus}: no such file")
    folder = folder_of(corpus, KIND)
    command = f"Make it: slimrl-tools search-index {corpus} --encoder {encoder}"
    if (problem := index_problem(folder, corpus, MADE_WITH)) is not None:
        raise ValueError(f"{folder}: {problem}. {command}")
    model, vectors_ND = Encoder(encoder), _mapped(folder / VECTORS)
    probes_PD = model.texts(json.loads((folder / PROBES).read_text()))
    kept_PD = vectors_ND[: len(probes_PD)].float()
    if probes_PD.shape != kept_PD.shape or (probes_PD - kept_PD).abs().max() > TOLERANCE:
        raise ValueError(f"{folder}: another encoder made its vectors than {encoder}. {command}")
    return DenseIndex(KeptTexts(folder), vectors_ND, model.queries)


def write_dense(corpus: Path, encoder: Encoder, batch: int, progress: Callable[[int, int], None]) -> None:
    """Write the index of a corpus, in the place of an older one.

    Args:
        batch: passages that are encoded at a time.
        progress: called with the number of passages that are done, and of all.

    Raises:
        ForeignFolder: something else lies in the index's place.
        ValueError: the corpus is missing or broken, or another process holds the index's lock.
    """
    passages = read_corpus(corpus)
    folder = folder_of(corpus, KIND)

    def write(partial: Path) -> None:
        shape = (len(passages), encoder.num_dims)
        vectors = np.lib.format.open_memmap(partial / VECTORS, mode="w+", dtype=np.float16, shape=shape)
        # Texts of like lengths need little padding.
        order = sorted(range(len(passages)), key=lambda place: len(passages[place].text))
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            vectors[places] = encoder.texts([passages[place].text for place in places]).numpy()
            progress(start + len(places), len(order))
        vectors.flush()
        KeptTexts.write(partial, (one.shown for one in passages))
        write_whole(partial / PROBES, json.dumps([one.text for one in passages[:NUM_PROBES]]))

    with locked(folder):
        write_index(folder, corpus, MADE_WITH, write)


def _mapped(file: Path) -> Tensor:
    with warnings.catch_warnings():
        # Torch cannot say that a tensor is read only; nothing writes into this one.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.load(file, mmap_mode="r"))
