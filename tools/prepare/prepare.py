"""Writes a prompt file from a downloaded data set."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.prepare.data_sets import DATA_SETS, Problem
from slimrl_tools.prepare.published_files import num_rows, read_published
from slimrl_tools.progress import count_progress

from slimrl.base.atomic import atomic_file
from slimrl.config.problems import suggestion

SHOWN_ROWS = 1000
"""Rows between two changes of the progress bar"""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What became of the rows of a file."""

    rows: int
    written: int
    repeated: int
    """Rows with the problem and the answer of an earlier one"""
    contradicting: int
    """Rows of problems that come with different answers, none of which is written"""


def prepare(name: str, file: Path, out: Path) -> Prepared:
    """Write each problem of a data set once, in the order of the file.

    Raises:
        ValueError: there is no such data set, `out` exists or does not end in .jsonl, or the file is refused; names its
            broken rows.
    """
    if name not in DATA_SETS:
        raise ValueError(f"{name}: no such data set; known are {', '.join(DATA_SETS)}.{suggestion(name, DATA_SETS)}")
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: must end in .jsonl, as it is written as JSONL")
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")
    problem_of = DATA_SETS[name]
    with count_progress("reading", num_rows(file), "rows") as advance:

        def parse(row: dict[str, Any], number: int) -> tuple[int, Problem]:
            if number % SHOWN_ROWS == 0:
                advance(SHOWN_ROWS)
            return number, problem_of(row)

        rows = read_published(file, parse)
    answers: dict[str, dict[str, int]] = {}
    """Problem -> its answers, each with the row that first has it"""
    for number, problem in rows:
        answers.setdefault(problem.text, {}).setdefault(problem.answer, number)
    lines = [_line(name, text, found) for text, found in answers.items() if len(found) == 1]
    if not lines:
        raise ValueError(f"{file}: every problem comes with different answers")
    contradicting = sum(len(answers[problem.text]) > 1 for _, problem in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as stream:
        stream.writelines(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    repeated = len(rows) - contradicting - len(lines)
    return Prepared(rows=len(rows), written=len(lines), repeated=repeated, contradicting=contradicting)


def _line(name: str, text: str, found: dict[str, int]) -> dict[str, Any]:
    ((answer, number),) = found.items()
    return {"prompt": text, "label": answer, "metadata": {"data_set": name, "row": number}}
