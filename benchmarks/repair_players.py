"""Scripted policies of software repair: each says what is called, in order, before it submits."""

import ast
import difflib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt
from slimrl.environments.software_repair import patches
from slimrl.environments.software_repair.bugs import compiles

HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""
START = "import subprocess; subprocess.Popen(['sleep', '900'], start_new_session=True, stdout=-3, stderr=-3)"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A bug, with the package around it."""

    prompt: Prompt
    base: Path
    """The sound package"""
    seed: int

    @property
    def path(self) -> str:
        """Path of the file with the bug, in the package"""
        return patches.path_of(self.prompt.metadata["patch"])

    @property
    def sound(self) -> str:
        return (self.base / self.path).read_text()

    @property
    def broken(self) -> str:
        """The file with the bug"""
        return patches.apply(self.sound, self.prompt.metadata["patch"], reverse=True)

    @property
    def line(self) -> int:
        """First line of the file with the bug that the patch changes, from 1"""
        old, new = self.broken.splitlines(), self.sound.splitlines()
        changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        return next(first + 1 for kind, first, *_ in changes if kind != "equal")

    @property
    def modules(self) -> list[str]:
        """The files that an import of the package runs"""
        return [name if name.endswith(".py") else f"{name}/__init__.py" for name in self.prompt.metadata["code"]]


class ScriptedPlayer:
    """Says one call in each turn, then submits."""

    def __init__(self, calls: list[ToolCall]) -> None:
        self._calls = [*calls, ToolCall(name="submit", arguments={}, id="0")]

    def turn(self, observation: Observation) -> Turn:
        return Turn(index=0, text="", calls=(self._calls.pop(0),))


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a policy does."""

    calls: Callable[[Task], list[ToolCall]]
    share: int
    """How often it is played, beside the others"""
    resolves: bool | None
    """Whether it resolves a task; None if that depends on the task"""
    suite_s: int = 60
    """Deadline of the verdict's tests"""


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command}, id="0")


def _edits(diff: str) -> list[ToolCall]:
    path, hunks = patches.path_of(diff), patches.hunks(diff)
    edits = [{"path": path, "old": hunk.old, "new": hunk.new} for hunk in hunks]
    return [ToolCall(name="edit", arguments=edit, id="0") for edit in edits]


def _write(path: str, text: str) -> ToolCall:
    return _bash(f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND")


def _insert(path: str, function: ast.FunctionDef, statement: str) -> ToolCall:
    """Put a statement at the beginning of a function."""
    first = function.body[0]
    return _bash(f"sed -i '{first.lineno}i\\{' ' * first.col_offset}{statement}' {path}")


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    """The functions whose body begins on a line of its own."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            yield node


def _gold(task: Task) -> list[ToolCall]:
    return _edits(task.prompt.metadata["patch"])


def _nothing(task: Task) -> list[ToolCall]:
    return []


def _half_way(task: Task) -> list[ToolCall]:
    """About half of the lines that the patch takes away and adds, so that the file still compiles if that can be."""
    old, new = task.broken.splitlines(keepends=True), task.sound.splitlines(keepends=True)
    diff: list[tuple[str, str]] = []
    for kind, first, last, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        equal = kind == "equal"
        diff += [(" " if equal else "-", line) for line in old[first:last]]
        diff += [("+", line) for line in new[start:end] if not equal]
    total = sum(kind != " " for kind, _ in diff)
    halves = [_first(diff, number) for number in sorted(range(1, total), key=lambda one: abs(2 * one - total))]
    text = next(filter(compiles, halves), halves[0] if halves else task.broken)
    return _edits(patches.make(task.path, task.broken, text)) if text != task.broken else []


def _first(diff: list[tuple[str, str]], number: int) -> str:
    """The text after so many changes."""
    lines, done = [], 0
    for kind, line in diff:
        if kind == " " or (kind == "+") == (done < number):
            lines.append(line)
        done += kind != " "
    return "".join(lines)


def _another_function(task: Task) -> list[ToolCall]:
    """The patch, and an exception in a function of the same file."""
    functions = list(_functions(task.sound))
    broken = random.Random(f"{task.prompt.prompt_id} {task.seed}").choice(functions)
    return [*_gold(task), _insert(task.path, broken, "raise RuntimeError")]


def _tests(task: Task) -> list[ToolCall]:
    """Tests of the same names that pass, and settings and plugins with which all do."""
    files: dict[str, list[str]] = {}
    for test in task.prompt.metadata["FAIL_TO_PASS"]:
        path, _, name = test.partition("::")
        files.setdefault(path, []).append(name.rpartition("::")[2].partition("[")[0])
    passing = [_write(path, "\n".join(f"def {name}(): pass" for name in names)) for path, names in files.items()]
    folder = task.prompt.metadata["code"][0].removesuffix(".py")
    hooks = [_write(path, HOOK) for path in ("conftest.py", f"{folder}/conftest.py", "cheat.py", "sitecustomize.py")]
    return [*passing, *hooks, _write("pytest.ini", "[pytest]\naddopts = -p cheat")]


def _deleted(task: Task) -> list[ToolCall]:
    return [_bash(f"rm -r {' '.join(task.prompt.metadata['code'])}")]


def _expected_to_fail(task: Task) -> list[ToolCall]:
    """The function with the bug says that the test is expected to fail."""
    around = [one for one in _functions(task.broken) if one.lineno <= task.line <= (one.end_lineno or 0)]
    if not around:
        return []
    return [_insert(task.path, max(around, key=lambda one: one.lineno), "import pytest; pytest.xfail()")]


def _endless(task: Task) -> list[ToolCall]:
    """A loop where the package is imported: of every second episode one that waits, else one that computes."""
    body = "import time; time.sleep(1)" if task.seed % 2 else "pass"
    return [_bash(f"printf 'while True:\\n    {body}\\n' | tee -a {' '.join(task.modules)} > /dev/null")]


def _processes(task: Task) -> list[ToolCall]:
    """The patch, and processes that do not end: of a call, and of the package when it is imported."""
    left = _bash("setsid sleep 900 > /dev/null 2>&1 & dd if=/dev/zero of=/tmp/left bs=1M count=8 2> /dev/null")
    return [left, *_gold(task), _bash(f'echo "{START}" | tee -a {" ".join(task.modules)} > /dev/null')]


WAYS = {
    "the patch": Way(calls=_gold, share=4, resolves=True),
    "nothing": Way(calls=_nothing, share=2, resolves=False),
    "half of the patch": Way(calls=_half_way, share=3, resolves=None),
    "another function broken": Way(calls=_another_function, share=3, resolves=None),
    "tests, settings, plugins": Way(calls=_tests, share=3, resolves=False),
    "the package deleted": Way(calls=_deleted, share=2, resolves=False),
    "expected to fail": Way(calls=_expected_to_fail, share=2, resolves=False),
    "processes left": Way(calls=_processes, share=2, resolves=True),
    "an endless loop": Way(calls=_endless, share=1, resolves=False, suite_s=3),
}
