"""The folder of a synthesis: prompts, conversations, the corpus, and where all of it comes from."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.progress import count_progress
from slimrl_tools.synthesis.demonstrations import Demonstrator
from slimrl_tools.synthesis.graph import Graph, read_graph
from slimrl_tools.synthesis.passages import Passages
from slimrl_tools.synthesis.phrases import read_phrases
from slimrl_tools.synthesis.query import as_json, depth
from slimrl_tools.synthesis.questions import Question, Questions
from slimrl_tools.synthesis.rendering import Phrases, Renderer
from slimrl_tools.synthesis.sampling import MIN_DEPTH

from slimrl.base.atomic import atomic_folder, write_whole
from slimrl.base.jsonl import write_lines

Rewrite = Callable[[list[Question], Phrases], list[Question]]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be made."""

    num: int
    heldout: int
    conversations: int
    kinds: Sequence[str]
    depth: int
    seed: int

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in MIN_DEPTH]:
            raise ValueError(f"--kinds: {unknown[0]!r} is none of {', '.join(MIN_DEPTH)}")
        if len(set(self.kinds)) != len(self.kinds):
            raise ValueError("--kinds: names a kind twice")
        if low := [kind for kind in self.kinds if MIN_DEPTH[kind] > self.depth]:
            raise ValueError(f"--depth {self.depth}: questions of kind {low[0]} have {MIN_DEPTH[low[0]]} hops or more")


def synthesize(
    graph_file: Path, phrases_file: Path | None, out: Path, wanted: Wanted, rewrite: Rewrite | None = None
) -> dict[str, Any]:
    """Write `train.jsonl`, `heldout.jsonl`, `sft.jsonl`, `corpus.jsonl` and `provenance.json` into a new folder.

    The same graph and seed give the same files, unless questions are rewritten.

    Returns:
        What is in `provenance.json`.

    Raises:
        ValueError: `out` exists, a file is broken, or the graph has not so many questions.
        CheckFailed: two solvers differ in an answer.
    """
    with atomic_folder(out) as partial:
        graph = read_graph(graph_file)
        phrases = read_phrases(phrases_file, graph.relations)
        renderer, passages = Renderer(graph, phrases), Passages(graph, phrases)
        questions = Questions(graph, renderer, random.Random(wanted.seed))
        drawn = {
            "heldout": questions.draw(wanted.heldout, wanted.kinds, wanted.depth, heldout=True),
            "train": questions.draw(wanted.num, wanted.kinds, wanted.depth, heldout=False),
        }
        final = drawn if rewrite is None else {name: rewrite(part, phrases) for name, part in drawn.items()}
        demonstrator = Demonstrator(graph, renderer, passages)
        shown, told = final["train"][: wanted.conversations], list[dict[str, Any]]()
        with count_progress("demonstrations", len(shown), "conversations") as advance:
            for one in shown:
                if line := demonstrator.conversation(one):
                    told.append(line)
                advance(1)
        for name, part in final.items():
            write_lines(partial / f"{name}.jsonl", prompt_lines(name, part, graph, passages))
        write_lines(partial / "sft.jsonl", told)
        write_lines(partial / "corpus.jsonl", passages.lines())
        provenance = {
            "graph": {"file": graph_file.name, "sha256": graph.sha256, "facts": len(graph.facts),
                      "entities": len(graph.entities), "relations": len(graph.relations)},
            "phrases": phrases_file and {"file": phrases_file.name, "sha256": sha256_of(phrases_file)},
            "seed": wanted.seed,
            "counts": {name: _counts(part) for name, part in final.items()},
            "heldout_entities": len(questions.heldout),
            "left_out": dict(sorted(questions.left_out.items())),
            "verified": sum(map(len, drawn.values())),
            "rewritten": sum(one.rewritten for part in final.values() for one in part),
            "conversations": len(told),
            "conversations_left_out": min(wanted.conversations, wanted.num) - len(told),
        }  # fmt: skip
        write_whole(partial / "provenance.json", json.dumps(provenance, indent=1))
    return provenance


def prompt_lines(
    name: str, questions: Sequence[Question], graph: Graph, passages: Passages
) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(questions):
        metadata = {
            "kind": one.kind,
            "depth": depth(one.query),
            "query": as_json(one.query),
            "proof": [list(fact) for fact in one.proof.facts],
            "supporting": passages.of(one.proof.facts),
            "provenance": {
                "graph_sha256": graph.sha256,
                "lines": [graph.facts[fact].line for fact in one.proof.facts],
                "text": "rewritten" if one.rewritten else "template",
            },
        }
        yield {"id": f"{name}-{number}", "prompt": one.text, "label": one.answer, "metadata": metadata}


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    """Kind and depth -> number of questions, and of all."""
    counts = Counter(f"{one.kind} {depth(one.query)}" for one in questions)
    return {"all": len(questions), **dict(sorted(counts.items()))}


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
