"""A second solver, which shares nothing with `query.members` but the tree: joins of facts in SQLite.

Each projection is a row of the table of facts, each set a variable that rows have in common; what is taken away is a
row that must not exist. SQLite chooses the order in which variables are bound.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from types import TracebackType
from typing import Self

from slimrl_tools.synthesis.graph import Triple
from slimrl_tools.synthesis.query import Difference, Entity, Intersection, Projection, Query, Union


class Solver:
    """A database in memory; a context manager."""

    def __init__(self, triples: Iterable[Triple]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE facts (subject TEXT, relation TEXT, object TEXT)")
        self._database.executemany("INSERT INTO facts VALUES (?, ?, ?)", triples)
        self._database.execute("CREATE INDEX by_subject ON facts (subject, relation, object)")
        self._database.execute("CREATE INDEX by_object ON facts (object, relation, subject)")
        self._database.execute("CREATE TABLE entities (name TEXT PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("INSERT INTO entities SELECT subject FROM facts UNION SELECT object FROM facts")
        self._database.execute("ANALYZE")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def answers(self, query: Query) -> set[str]:
        statement = _Statement()
        select = statement.select("x.name", ["entities x"], query)
        with closing(self._database.execute(select, statement.values)) as rows:
            return {name for (name,) in rows}


class _Statement:
    def __init__(self) -> None:
        self.values: list[str] = []
        """What stands for the statement's question marks, in order"""
        self._num_facts = 0

    def select(self, what: str, tables: list[str], query: Query) -> str:
        """SELECT of what is true of a column `x.name` that is a member of the query."""
        conditions = list(self._conditions(query, "x.name", tables))
        return f"SELECT DISTINCT {what} FROM {', '.join(tables)} WHERE {' AND '.join(conditions)}"

    def _conditions(self, query: Query, column: str, tables: list[str]) -> Iterable[str]:
        """Conditions for a column to be a member; the facts that they need are added to the tables."""
        match query:
            case Entity(name):
                self.values.append(name)
                yield f"{column} = ?"
            case Projection(relation, forward, of):
                self._num_facts += 1
                fact = f"f{self._num_facts}"
                tables.append(f"facts {fact}")
                source, end = ("subject", "object") if forward else ("object", "subject")
                self.values.append(relation)
                yield f"{fact}.relation = ? AND {fact}.{end} = {column}"
                yield from self._conditions(of, f"{fact}.{source}", tables)
            case Intersection(parts):
                for part in parts:
                    yield from self._conditions(part, column, tables)
            case Union(parts):
                yield f"({' OR '.join(self._exists(part, column) for part in parts)})"
            case Difference(kept, removed):
                yield from self._conditions(kept, column, tables)
                yield f"NOT {self._exists(removed, column)}"
            case _:
                raise AssertionError("a question leaves nothing out")

    def _exists(self, query: Query, column: str) -> str:
        tables: list[str] = []
        conditions = " AND ".join(self._conditions(query, column, tables))
        return f"EXISTS (SELECT 1{' FROM ' if tables else ''}{', '.join(tables)} WHERE {conditions})"
