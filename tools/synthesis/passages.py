"""The corpus of a graph: a passage about each subject, with all that is said of it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from slimrl_tools.synthesis.graph import Graph, Triple
from slimrl_tools.synthesis.rendering import Phrases, sentence


class Passages:
    def __init__(self, graph: Graph, phrases: Phrases) -> None:
        self._sentences: dict[str, list[str]] = defaultdict(list)
        for fact in graph.facts.values():
            self._sentences[fact.subject].append(sentence(fact, phrases))
        self._ids = {subject: f"p{place}" for place, subject in enumerate(self._sentences)}
        self.subjects = {name: subject for subject, name in self._ids.items()}
        """Id of a passage -> the entity that it is about"""

    def lines(self) -> Iterator[dict[str, str]]:
        for subject, sentences in self._sentences.items():
            yield {"id": self._ids[subject], "text": " ".join(sentences)}

    def of(self, facts: Iterable[Triple]) -> list[str]:
        """The ids of the passages that say some facts, each once."""
        return list(dict.fromkeys(self._ids[subject] for subject, _, _ in facts))
