"""Questions of `slimrl-tools synthesize questions` for a tiny model: `python benchmarks/synthesis_data.py FOLDER`.

The graphs say of the same few names who is whose mother, works where and was born where, each graph something else. The
first one has the questions to train on, the held-out ones and the corpus; of the others come the demonstrations of the
cold start, in whose searches alone one reads what is true.
"""

import argparse
import random
import shutil
from dataclasses import asdict
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from slimrl_tools.synthesis.phrases import Phrase
from slimrl_tools.synthesis.synthesis import Wanted, synthesize
from slimrl_tools.toy.search_data import RELATIONS, Names, World, make_names

from slimrl.base.atomic import atomic_folder, write_whole
from slimrl.base.jsonl import write_lines

KINDS = ("chain",)
DEPTH = 2
NUM_TOLD = 200
"""Questions of each graph of which there are only demonstrations"""
_SAID = {
    "mother": ("mother of {}", "is a child of {}", "is the mother of {}"),
    "birthplace": ("birthplace of {}", "was born in {}", "is the birthplace of {}"),
    "employer": ("employer of {}", "works for {}", "employs {}"),
    "founder": ("founder of {}", "was founded by {}", "founded {}"),
    "seat": ("seat of {}", "has its seat in {}", "is the seat of {}"),
}
"""Relation -> noun, what is true of its subject, what is true of its object"""


def write_synthesis_data(out: Path, *, seed: int, num: int, heldout: int, conversations: int) -> None:
    """Write the files of a synthesis into a new folder, with so many demonstrations, of other graphs.

    Raises:
        ValueError: `out` exists, or a graph has not so many questions.
    """
    rng = random.Random(seed)
    names = make_names(rng)
    with atomic_folder(out) as partial, TemporaryDirectory() as graphs:
        asked = Wanted(num=num, heldout=heldout, conversations=0, kinds=KINDS, depth=DEPTH, seed=seed)
        told = Wanted(num=NUM_TOLD, heldout=DEPTH, conversations=NUM_TOLD, kinds=KINDS, depth=DEPTH, seed=seed)
        for file in _synthesis(Path(graphs) / "0", names, rng, asked).iterdir():
            shutil.copy(file, partial)
        demonstrations: list[str] = []
        for number in count(1):
            made = _synthesis(Path(graphs) / str(number), names, rng, told)
            demonstrations += (made / "sft.jsonl").read_text().splitlines(keepends=True)
            if len(demonstrations) >= conversations:
                break
        write_whole(partial / "sft.jsonl", "".join(demonstrations[:conversations]))


def _synthesis(folder: Path, names: Names, rng: random.Random, wanted: Wanted) -> Path:
    """Draws a graph and returns the folder of its questions."""
    folder.mkdir()
    facts = World(names, rng).facts.items()
    graph, phrases = folder / "graph.jsonl", folder / "phrases.jsonl"
    write_lines(graph, ({"subject": of, "relation": name, "object": value} for (name, of), value in facts))
    write_lines(phrases, ({"relation": name, **asdict(_phrase(name))} for name in RELATIONS))
    synthesize(graph, phrases, folder / "made", wanted)
    return folder / "made"


def _phrase(relation: str) -> Phrase:
    noun, subject, object_ = _SAID[relation]
    kinds = RELATIONS[relation]
    return Phrase(noun=noun, subject_is=subject, object_is=object_, subject=kinds.of, object=kinds.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=400, help="questions to train on")
    parser.add_argument("--heldout", type=int, default=48)
    parser.add_argument("--conversations", type=int, default=12800)
    options = parser.parse_args()
    write_synthesis_data(
        options.out, seed=options.seed, num=options.num, heldout=options.heldout, conversations=options.conversations
    )


if __name__ == "__main__":
    main()
