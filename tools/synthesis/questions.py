"""Questions to train on and held-out ones, drawn and filtered.

Some entities are held out. Each held-out question asks for one of them; no question to train on asks for one, names
one, or has one in its proof, so that no fact by which a held-out answer is found was learned on the way.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.progress import count_progress
from slimrl_tools.synthesis.filters import has_shortcut, names_one
from slimrl_tools.synthesis.graph import Graph
from slimrl_tools.synthesis.proof import Proof, proof
from slimrl_tools.synthesis.query import Query, as_json, constants, members
from slimrl_tools.synthesis.rendering import Renderer
from slimrl_tools.synthesis.sampling import MIN_DEPTH, Sampler
from slimrl_tools.synthesis.solver import Solver

HELDOUT_SHARE = 0.1
"""Entities that are held out."""
MAX_TRIES = 20_000
"""Draws in a row of which none is a question."""


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: str
    query: Query
    text: str
    answer: str
    proof: Proof
    rewritten: bool = False
    """Whether a model has said the text in its words"""


class Questions:
    """Draws questions.

    Args:
        rng: where all of them come from.

    Raises:
        ValueError: the graph has too few entities that can be answers.
    """

    def __init__(self, graph: Graph, renderer: Renderer, rng: random.Random) -> None:
        self._graph, self._renderer, self._rng = graph, renderer, rng
        self._sampler = Sampler(graph, rng)
        self._known: set[str] = set()
        self.left_out: Counter[str] = Counter()
        """Reason -> draws that were no questions"""
        if len(graph.answerable) < 2:
            raise ValueError("the graph has fewer than two entities that can be answers")
        held = rng.sample(graph.answerable, max(1, round(HELDOUT_SHARE * len(graph.answerable))))
        self.heldout = frozenset(held)

    def draw(self, count: int, kinds: Sequence[str], max_depth: int, *, heldout: bool) -> list[Question]:
        """So many questions, in equal parts of each kind and of each depth of a kind, in any order.

        Raises:
            ValueError: the graph has not so many of a kind and depth; says how many were found.
            CheckFailed: the two solvers differ.
        """
        targets = sorted(self.heldout) if heldout else self._graph.answerable
        found: list[Question] = []
        cells = shares(count, [(kind, hops) for kind in kinds for hops in range(MIN_DEPTH[kind], max_depth + 1)])
        title = "held-out questions" if heldout else "questions to train on"
        with Solver(self._graph.facts) as solver, count_progress(title, count, "questions") as advance:
            for (kind, hops), share in cells:
                for number in range(share):
                    question = self._new(kind, hops, targets, heldout)
                    if question is None:
                        raise ValueError(
                            f"the graph has not so many questions: {number} of {share} {'held-out ' if heldout else ''}"
                            f"ones of kind {kind} and depth {hops} were found. Ask for fewer, for a smaller --depth, "
                            "or for other --kinds"
                        )
                    verify(question, solver)
                    found.append(question)
                    advance(1)
        self._rng.shuffle(found)
        return found

    def _new(self, kind: str, hops: int, targets: Sequence[str], heldout: bool) -> Question | None:
        """A question that was not drawn before; None after MAX_TRIES."""
        for _ in range(MAX_TRIES):
            target = self._rng.choice(targets)
            query = self._sampler.draw(kind, hops, target)
            if query is None:
                continue
            question = self.ask(kind, query, target, heldout=heldout)
            if question is not None:
                return question
        return None

    def ask(self, kind: str, query: Query, answer: str, *, heldout: bool) -> Question | None:
        """A question for a member of a query; None, and why is counted in `left_out`, if it is none that is wanted."""
        asked = self._question(kind, query, answer, heldout)
        if isinstance(asked, Question):
            return asked
        self.left_out[asked] += 1
        return None

    def _question(self, kind: str, query: Query, answer: str, heldout: bool) -> Question | str:
        """A question, or why it is none."""
        if not heldout and constants(query) & self.heldout:
            return "held_out"
        if members(query, self._graph) != {answer}:
            return "several_answers"
        if has_shortcut(query, answer, self._graph):
            return "shortcut"
        shown = proof(query, answer, self._graph)
        if not heldout and shown.found & self.heldout:
            return "held_out"
        text = self._renderer.question(query)
        if names_one(text, shown.found):
            return "names_what_is_looked_for"
        key = json.dumps(as_json(query))
        if key in self._known or text in self._known:
            return "repeated"
        self._known |= {key, text}
        return Question(kind=kind, query=query, text=text, answer=answer, proof=shown)


def verify(question: Question, solver: Solver) -> None:
    """Raises CheckFailed if the second solver has other answers than a question."""
    if (answers := solver.answers(question.query)) != {question.answer}:
        raise CheckFailed(f"{question.text} {question.answer}, but the second solver has {answers}")


def shares[T](count: int, cells: Sequence[T]) -> list[tuple[T, int]]:
    """A number in equal parts, the first ones larger by one."""
    each, more = divmod(count, len(cells))
    return [(cell, each + (place < more)) for place, cell in enumerate(cells)]
