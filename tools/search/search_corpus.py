"""A corpus of many passages about made-up entities, and questions over it, of one to three facts."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slimrl_tools.search.questions import HOPS, Question, Questions
from slimrl_tools.search.world import World, passage_id, passages

from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines


def write_search_corpus(out: Path, *, seed: int, num_passages: int, num_train: int, num_heldout: int) -> None:
    """Write `corpus.jsonl`, `train.jsonl` and `heldout.jsonl` into a new folder.

    The same seed gives the same files. Nothing that a question of `heldout.jsonl` is about, its answer included, is
    what one of `train.jsonl` is about. A question's metadata has the ids of the passages that it needs as `supporting`.

    Raises:
        ValueError: `out` exists, or there are too few passages for so many questions.
    """
    with atomic_folder(out) as partial:
        rng = random.Random(seed)
        world = World(num_passages, rng)
        questions = Questions(world, rng)
        heldout = questions.draw(num_heldout, frozenset())
        train = questions.draw(num_train, frozenset().union(*(one.entities for one in heldout)))
        write_lines(partial / "heldout.jsonl", _lines(world, heldout))
        write_lines(partial / "train.jsonl", _lines(world, train))
        corpus = ({"id": passage_id(entity), "text": text} for entity, text in enumerate(passages(world, rng)))
        write_lines(partial / "corpus.jsonl", corpus)


def _lines(world: World, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    for one in questions:
        metadata = {
            "kind": one.kind,
            "hops": HOPS[one.kind],
            "relations": list(one.relations),
            "supporting": [passage_id(entity) for entity in one.supporting],
        }
        yield {"prompt": one.text, "label": one.answer, "metadata": metadata}
