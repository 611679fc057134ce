"""Trajectories of a search agent, told again as the solutions of what they did find.

1. A search makes a hop if its words name an entity and a relation, and its result shows the passage that says where the
   relation leads from there.
2. An entity that a hop has found, and that a later search names, is where that search's hops go on. So each entity
   that was found is the answer of a chain.
3. The last such chain that may be a question becomes one, by the rules of all questions (questions.py), and the
   searches that found it are its demonstration.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.progress import count_progress
from slimrl_tools.synthesis.demonstrations import finished
from slimrl_tools.synthesis.filters import names_one
from slimrl_tools.synthesis.graph import Graph, read_graph
from slimrl_tools.synthesis.passages import Passages
from slimrl_tools.synthesis.phrases import read_phrases
from slimrl_tools.synthesis.query import Entity, Projection, Query
from slimrl_tools.synthesis.questions import Question, Questions, verify
from slimrl_tools.synthesis.rendering import Phrases, Renderer
from slimrl_tools.synthesis.rewriting import is_said
from slimrl_tools.synthesis.solver import Solver
from slimrl_tools.synthesis.synthesis import prompt_lines, sha256_of
from slimrl_tools.toy.task_lines import asked, call

from slimrl.agent.retrieval.passages import shown_ids
from slimrl.base.atomic import atomic_folder, write_whole
from slimrl.base.jsonl import read_jsonl, write_lines

TOOL = "search"


@dataclass(frozen=True, slots=True)
class Search:
    words: str
    result: str


@dataclass(frozen=True, slots=True)
class Chain:
    answer: str
    query: Query
    searches: tuple[Search, ...]
    """Those that found it, in order"""


def hindsight(trajectories: Path, graph_file: Path, phrases_file: Path | None, out: Path, seed: int) -> dict[str, Any]:
    """Write `train.jsonl`, `sft.jsonl` and `provenance.json` into a new folder.

    Args:
        trajectories: as `slimrl rollout` writes them, or those in a run's folder.
        seed: that of the questions, with which the same entities are held out.

    Returns:
        What is in `provenance.json`.

    Raises:
        ValueError: `out` exists, or a file is broken.
        CheckFailed: two solvers differ in an answer.
    """
    with atomic_folder(out) as partial:
        graph = read_graph(graph_file)
        phrases = read_phrases(phrases_file, graph.relations)
        passages, questions = Passages(graph, phrases), Questions(graph, Renderer(graph, phrases), random.Random(seed))
        read = read_jsonl(trajectories, _searches, finite=False)
        found: list[Question] = []
        told: list[dict[str, Any]] = []
        with (
            Solver(graph.facts) as solver,
            count_progress("telling again", len(read), "trajectories") as advance,
        ):
            for searches in read:
                advance(1)
                for chain in reversed(list(chains(searches, graph, phrases, passages.subjects))):
                    question = questions.ask("chain", chain.query, chain.answer, heldout=False)
                    if question is not None:
                        verify(question, solver)
                        found.append(question)
                        told.append(_told(question, chain))
                        break
        write_lines(partial / "train.jsonl", prompt_lines("hindsight", found, graph, passages))
        write_lines(partial / "sft.jsonl", told)
        provenance = {
            "graph": {"file": graph_file.name, "sha256": graph.sha256},
            "trajectories": {"file": trajectories.name, "sha256": sha256_of(trajectories), "number": len(read)},
            "seed": seed,
            "questions": len(found),
            "left_out": dict(sorted(questions.left_out.items())),
        }
        write_whole(partial / "provenance.json", json.dumps(provenance, indent=1))
    return provenance


def chains(searches: Sequence[Search], graph: Graph, phrases: Phrases, subjects: Mapping[str, str]) -> Iterator[Chain]:
    """What searches have found one after the other, each entity once.

    Args:
        subjects: id of a passage -> the entity that it is about.
    """
    known: dict[str, Chain] = {}
    for search in searches:
        shown = {subjects[name] for name in shown_ids(search.result) if name in subjects}
        # Only entities that have a fact with a subject that is shown can lead anywhere.
        near = shown | {end for subject in shown for ends in graph.around[subject].values() for end in ends}
        for start in sorted(name for name in near if names_one(search.words, [name])):
            before = known.get(start, Chain(start, Entity(start), ()))
            for (relation, forward), ends in graph.around[start].items():
                # What leads to `start` one way is where `start` leads to the other way.
                if not is_said(relation, search.words, [start], phrases):
                    continue
                for end in ends:
                    if (end if forward else start) in shown and end not in known:
                        query = Projection(relation, not forward, before.query)
                        known[end] = Chain(end, query, (*before.searches, search))
                        yield known[end]


def _told(question: Question, chain: Chain) -> dict[str, Any]:
    """The searches of a chain, as an answer to its question."""
    messages = asked(question.text)
    for search in dict.fromkeys(chain.searches):
        messages += [call(TOOL, query=search.words), {"role": "tool", "content": search.result}]
    return finished(messages, question)


def _searches(line: dict[str, Any], number: int) -> list[Search]:
    """The searches of a trajectory that were answered, in order."""
    messages = line.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError('"messages" is no list of messages')
    found, waiting = [], list[dict[str, Any]]()
    for message in messages:
        waiting += message.get("tool_calls") or ()
        if message.get("role") == "tool" and waiting:
            function = waiting.pop(0).get("function", {})
            words = _words(function.get("arguments"))
            if function.get("name") == TOOL and words and isinstance(message.get("content"), str):
                found.append(Search(words, message["content"]))
    return found


def _words(arguments: Any) -> str:
    """The query of a call; empty if a policy has written none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return ""
    query = arguments.get("query") if isinstance(arguments, dict) else None
    return query if isinstance(query, str) else ""
