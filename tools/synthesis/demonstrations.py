"""Conversations for a cold start: a search for each thing that a question needs, then the boxed answer."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from slimrl_tools.synthesis.graph import Graph
from slimrl_tools.synthesis.passages import Passages
from slimrl_tools.synthesis.proof import witness
from slimrl_tools.synthesis.query import Difference, Entity, Intersection, Projection, Query, Union, members
from slimrl_tools.synthesis.questions import Question
from slimrl_tools.synthesis.rendering import Renderer
from slimrl_tools.toy.task_lines import asked, call

from slimrl.agent.retrieval.bm25 import Bm25Index
from slimrl.agent.retrieval.passages import Passage, shown_ids
from slimrl.agent.search import answer, search
from slimrl.agent.tools import make_tool

NUM_RESULTS = 3
"""Passages in an answer, as `agent.tool_args.num_results` of the recipes that search says."""


class Demonstrator:
    def __init__(self, graph: Graph, renderer: Renderer, passages: Passages) -> None:
        self._graph, self._renderer, self._passages = graph, renderer, passages
        self._index = Bm25Index.build([Passage(one["text"], one["id"]) for one in passages.lines()])

    def conversation(self, question: Question) -> dict[str, Any] | None:
        """A line of a file for `slimrl sft`; None if the searches do not find all passages that the proof needs."""
        messages = asked(question.text)
        shown: set[str] = set()
        for query in dict.fromkeys(self._searches(question.query, question.answer, {})):
            result = answer(self._index, query, NUM_RESULTS)
            shown.update(shown_ids(result))
            messages += [call("search", query=query), {"role": "tool", "content": result}]
        if not shown.issuperset(self._passages.of(question.proof.facts)):
            return None
        return finished(messages, question)

    def _searches(self, query: Query, found: str, names: dict[Query, str]) -> Iterator[str]:
        """What to search for until a member of a query is found.

        Args:
            names: is filled with what is found for queries on the way.
        """
        match query:
            case Difference(kept, removed):
                yield from self._searches(kept, found, names)
                for other in sorted(members(kept, self._graph) - {found}):
                    parts = removed.parts if isinstance(removed, Union) else (removed,)
                    yield from self._searches(next(p for p in parts if other in members(p, self._graph)), other, names)
            case Intersection() | Projection():
                for part in query.parts if isinstance(query, Intersection) else (query,):
                    assert isinstance(part, Projection)
                    if not isinstance(part.of, Entity | Union):
                        source = witness(part, found, self._graph)
                        yield from self._searches(part.of, source, names)
                        names[part.of] = source
                yield self._renderer.search(query, names)


def finished(messages: list[dict[str, Any]], question: Question) -> dict[str, Any]:
    """A conversation that ends with the answer."""
    last = {"role": "assistant", "content": f"The answer is \\boxed{{{question.answer}}}."}
    return {"messages": [*messages, last], "tools": [_schema()]}


@cache
def _schema() -> dict[str, Any]:
    return make_tool(search, {"corpus": "", "num_results": NUM_RESULTS}).schema
