"""Makes tasks of software repair: bugs that the package's own tests catch.

1. The sources of the packages are downloaded and cut down to base folders, which all tasks of a package share.
2. Each base's suite is run twice, in two folders; what does not pass both times is no evidence.
3. A bug is planted in a copy and the suite run again. A task is kept if some tests fail and others still pass, and
   those that fail pass in the same copy without the bug.
4. Functions that have a held-out bug have none among the training tasks.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import write_lines
from slimrl.environments.software_repair import patches
from slimrl.environments.software_repair.bugs import Bug, candidates, import_parts
from slimrl.environments.software_repair.issues import issue
from slimrl.environments.software_repair.packages import PACKAGES, Package, make_base, pins
from slimrl.environments.software_repair.suite import suite_command

BASE_S = 300.0
"""Deadline of a suite without a bug"""
MIN_DEADLINE_S, SLOWER = 20.0, 6.0
"""Deadline of a suite with a bug: so many times as long as without, and at least so many seconds."""
SHORTEST_LEAK = 12
"""Changed lines of at least so many characters must not be in an issue."""


@dataclass
class _Place:
    """A package with its base, and what its tests do without a bug."""

    package: Package
    base: Path
    passing: list[str]
    deadline_s: float
    bugs: Iterator[Bug]
    seen: set[str] = field(default_factory=set)


def write(out: Path, *, num: int, heldout: int, seed: int, packages: str = "", max_lines: int = 20) -> None:
    """Write train.jsonl, heldout.jsonl, and the folders that they name below `bases`.

    Args:
        num: number of training tasks.
        heldout: number of held-out tasks.
        packages: names of the packages to use, with commas between them; all of them by default.
        max_lines: most lines that a bug changes.

    Raises:
        ValueError: there is no such package, a download fails, or there are not so many bugs.
    """
    named = {name.strip() for name in packages.split(",") if name.strip()}
    chosen = [package for package in PACKAGES if not named or package.name in named]
    if unknown := named - {package.name for package in PACKAGES}:
        raise ValueError(f"packages: {', '.join(sorted(unknown))}: not among {', '.join(pins())}")
    (out / "bases").mkdir(parents=True, exist_ok=True)
    places = [_place(package, out, seed) for package in chosen]
    held = list(_tasks(places, heldout, seed, max_lines, barred=set()))
    barred = {place for place, _ in held}
    training = list(_tasks(places, num, seed, max_lines, barred=barred))
    for name, tasks in (("heldout", held), ("train", training)):
        write_lines(out / f"{name}.jsonl", (line for _, line in tasks))


def _place(package: Package, out: Path, seed: int) -> _Place:
    base = make_base(package, out / "sources", out / "bases")
    start = time.monotonic()
    runs = [run_suite(base, package.tests, timeout_s=BASE_S)]
    with tempfile.TemporaryDirectory() as folder:  # a test that passes in one folder alone is no evidence
        copy = shutil.copytree(base, Path(folder, base.name))
        runs.append(run_suite(copy, package.tests, timeout_s=BASE_S))
    seconds = (time.monotonic() - start) / 2
    passing = [test for test in runs[0] if all(run.get(test) == "PASSED" for run in runs)]
    if not passing:
        raise ValueError(f"{package.name}: no test passes here in {base}")
    deadline_s = max(MIN_DEADLINE_S, SLOWER * seconds)
    return _Place(package, base, passing, deadline_s, candidates(package, base, seed))


def _tasks(
    places: list[_Place], number: int, seed: int, max_lines: int, barred: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tasks with the place of their bug, from each package in turn as long as it has any."""
    waiting, made = list(places), Counter[str]()
    while sum(made.values()) < number:
        if not waiting:
            raise ValueError(
                f"there are only {sum(made.values())} bugs of {number}: ask for less, or for more packages"
            )
        place = waiting.pop(0)
        bug, line = _next_task(place, seed, max_lines, barred)
        if line is None:
            continue
        made[place.package.name] += 1
        waiting.append(place)
        yield bug, line


def _next_task(place: _Place, seed: int, max_lines: int, barred: set[str]) -> tuple[str, dict[str, Any] | None]:
    for bug in place.bugs:
        where = f"{place.package.name}/{bug.place}"
        if where in barred or bug.text in place.seen:
            continue
        place.seen.add(bug.text)
        patch = patches.make(bug.path, bug.text, (place.base / bug.path).read_text())
        changed = [line for line in patch.split("\n")[2:] if line.startswith(("-", "+"))]
        if len(changed) <= max_lines and (line := _task(place, bug, patch, changed, seed)):
            return where, line
    return "", None


def _task(place: _Place, bug: Bug, patch: str, changed: list[str], seed: int) -> dict[str, Any] | None:
    """The line of a prompt file, if tests catch the bug."""
    package, base = place.package, place.base
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, base.name)
        shutil.copytree(base, copy)
        (copy / bug.path).write_text(bug.text)
        try:
            after = run_suite(copy, package.tests, timeout_s=place.deadline_s)
            fail_to_pass, pass_to_pass = _split(place.passing, after)
            if not fail_to_pass or not pass_to_pass:
                return None
            files = sorted({test.partition("::")[0] for test in fail_to_pass})
            log = _run(copy, files, "--tb=short --show-capture=no -q -p no:cacheprovider", place.deadline_s)
            log = log.replace(folder, "")
            shutil.copy(base / bug.path, copy / bug.path)
            repaired = run_suite(copy, files, timeout_s=place.deadline_s)
            if any(repaired.get(test) != "PASSED" for test in fail_to_pass):
                return None  # something else than the bug made them fail
        except subprocess.TimeoutExpired:
            return None
    version, _ = pins()[package.name]
    number = len(place.seen)
    text = issue(log, package.name, version, package.tests, f"{seed} {package.name} {number}")
    if text is None or any(part in text for part in _secrets(changed, bug)):
        return None
    metadata = {
        "repo": f"{package.name} {version}",
        "base": f"bases/{base.name}",
        "code": list(package.code),
        "tests": list(package.tests),
        "FAIL_TO_PASS": fail_to_pass,
        "PASS_TO_PASS": pass_to_pass,
        "patch": patch,
        "modifier": bug.modifier,
    }
    return {"id": f"{package.name}-{number}", "prompt": text, "label": None, "metadata": metadata}


def _split(passing: list[str], after: dict[str, str]) -> tuple[list[str], list[str]]:
    """FAIL_TO_PASS and PASS_TO_PASS as SWE-bench's own grading sees them."""
    import_parts()
    from swebench.harness.grading import test_failed, test_maintained

    failing = [test for test in passing if test_failed(test, after)]
    return failing, [test for test in passing if test not in failing and test_maintained(test, after)]


def _secrets(changed: list[str], bug: Bug) -> list[str]:
    lines = [line[1:].strip() for line in changed]
    return [bug.modifier, bug.path, *(line for line in lines if len(line) >= SHORTEST_LEAK)]


def run_suite(folder: Path, tests: Sequence[str], *, timeout_s: float) -> dict[str, str]:
    """The statuses of all tests, read by SWE-bench's own parser. Raises subprocess.TimeoutExpired."""
    import_parts()
    from swebench.harness.log_parsers.python import parse_log_pytest

    log = _shell(suite_command(tests, shlex.quote(sys.executable)), folder, timeout_s)
    found: dict[str, str] = parse_log_pytest(log, None)
    return found


def _run(folder: Path, tests: Sequence[str], flags: str, timeout_s: float) -> str:
    return _shell(f"{shlex.quote(sys.executable)} -m pytest {flags} {shlex.join(tests)}", folder, timeout_s)


def _shell(command: str, folder: Path, timeout_s: float) -> str:
    """What a command prints to stdout; all its processes end with it."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    words = ["timeout", "--signal=KILL", str(timeout_s), "bash", "-c", command]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode in (-9, 137):
        raise subprocess.TimeoutExpired(command, timeout_s)
    return done.stdout.decode("utf-8", "replace")
