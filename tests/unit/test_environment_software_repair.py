"""Tasks of software repair: made with SWE-smith, read and graded as SWE-bench does, in a virtual environment."""

import json
from pathlib import Path

import pytest
from venvs import run_in

from slimrl.environments.software_repair.issues import issue
from slimrl.environments.software_repair.suite import statuses, verdict

NAME = "software_repair"
CODE = """\
def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value


def count(values, wanted):
    number = 0
    for value in values:
        if value == wanted:
            number = number + 1
    return number


def spread(values):
    low, high = values[0], values[0]
    for value in values:
        if value < low:
            low = value
        elif value > high:
            high = value
    return high - low
"""
TESTS = """\
import inflection as i
import pytest


@pytest.mark.parametrize('value', [1, 5, 'a b'])
def test_same(value):
    assert value == value


def test_clamp():
    assert i.clamp(-1, 0, 9) == 0
    assert i.clamp(11, 0, 9) == 9
    assert i.clamp(4, 0, 9) == 4


def test_count():
    assert i.count([1, 2, 1], 1) == 2


def test_spread():
    assert i.spread([3, 1, 7]) == 6
"""
LOG = """\
PASSED tests/a.py::test_one
PASSED tests/a.py::test_cut[a b]
FAILED tests/a.py::test_two - assert 1 == 2
FAILED tests/a.py::test_three
ERROR tests/b.py - ImportError: no module
ERROR
SKIPPED [2] tests/c.py:3: not here
SKIPPED tests/c.py::test_skipped
XFAIL tests/d.py::test_known - a reason
XPASS tests/d.py::test_better
PASSED [100%]
PASSEDand more
  PASSED tests/a.py::test_indented
3 passed in 0.1s
"""
TESTS_OF_LOG = ["one", "cut[a", "two", "three", "skipped", "known", "better", "gone", "cut[", "c"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with tasks for a package that takes the place of one that would be downloaded."""
    out = tmp_path_factory.mktemp("repair")
    base = out / "bases/inflection-0.5.1"
    (base / "inflection").mkdir(parents=True)
    (base / "inflection/__init__.py").write_text(CODE)
    (base / "test_inflection.py").write_text(TESTS)
    (base / "pytest.ini").write_text("[pytest]\n")
    run_in(
        NAME,
        "from pathlib import Path\nfrom slimrl.environments.software_repair.data import write\n"
        f"write(Path({str(out)!r}), num=2, heldout=1, seed=0, packages='inflection')",
    )
    return out


def test_a_log_is_read_as_swe_bench_does_and_graded_as_strictly_or_more():
    tests = [f"tests/a.py::test_{name}" for name in TESTS_OF_LOG] + [
        "tests/c.py::test_skipped",
        "tests/d.py::test_known",
    ]
    code = f"""
import json
from slimrl.environments.software_repair.bugs import import_parts
import_parts()
from swebench.harness.grading import compute_fail_to_pass, compute_pass_to_pass, get_eval_tests_report
from swebench.harness.log_parsers.python import parse_log_pytest
found = parse_log_pytest({LOG!r}, None)
graded = []
for test in {tests!r}:
    report = get_eval_tests_report(found, {{"FAIL_TO_PASS": [test], "PASS_TO_PASS": [test]}})
    graded.append([compute_fail_to_pass(report), compute_pass_to_pass(report)])
print(json.dumps([found, graded]))
"""
    theirs, graded = json.loads(run_in(NAME, code))
    ours = statuses(LOG)
    assert ours == theirs
    mine = [[(one := verdict(ours, [test], [test])).repaired, one.kept] for test in tests]
    # What a line of the package makes of any test is no evidence here.
    stricter = {"tests/c.py::test_skipped": [0.0, 1.0], "tests/d.py::test_known": [1.0, 1.0]}
    for test, given, theirs_says in zip(tests, mine, graded, strict=True):
        assert theirs_says == stricter.get(test, given), test
        assert test not in stricter or given == [0.0, 0.0], test
    assert {1.0, 0.0} == {number for pair in graded for number in pair}


def test_tasks_have_bugs_that_tests_catch_and_issues_that_do_not_tell_the_place(made):
    lines = [json.loads(line) for name in ("train", "heldout") for line in (made / f"{name}.jsonl").open()]
    assert len(lines) == len({line["id"] for line in lines}) == 3
    for line in lines:
        metadata = line["metadata"]
        assert set(metadata["FAIL_TO_PASS"]) & set(metadata["PASS_TO_PASS"]) == set()
        assert {"test_inflection.py::test_same[1]", "test_inflection.py::test_same[5]"} <= set(metadata["PASS_TO_PASS"])
        assert "i." in line["prompt"]
        assert metadata["modifier"] not in line["prompt"]
        changed = [text[1:].strip() for text in metadata["patch"].split("\n")[2:] if text[:1] in ("-", "+")]
        assert not any(text in line["prompt"] for text in changed if len(text) >= 12)


def test_held_out_bugs_are_in_other_functions_than_those_of_training(made):
    def functions(name: str) -> set[str]:
        names = set()
        for line in (made / f"{name}.jsonl").open():
            patch = json.loads(line)["metadata"]["patch"]
            start = int(patch.split("@@ -")[1].split(",")[0])
            first = next(n for n, text in enumerate(patch.split("\n")[3:]) if text[:1] in ("-", "+"))
            above = CODE.split("\n")[: start + first]
            names.add(next(text for text in reversed(above) if text.startswith("def ")))
        return names

    assert functions("train") & functions("heldout") == set()


def test_the_same_seed_makes_the_same_tasks(made, tmp_path):
    (tmp_path / "bases").symlink_to(made / "bases")
    run_in(
        NAME,
        "from pathlib import Path\nfrom slimrl.environments.software_repair.data import write\n"
        f"write(Path({str(tmp_path)!r}), num=2, heldout=1, seed=0, packages='inflection')",
    )
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (made / name).read_text()


def test_an_issue_shows_the_test_s_line_and_what_came_and_no_line_of_the_package():
    log = (
        "_____ test_a _____\ntests/test_a.py:9: in test_a\n    assert f(1) == 2\n"
        "pkg/f.py:3: in f\n    secret = broken[0]\n"
        "E   IndexError: list index out of range\n=== short test summary info ===\nFAILED tests/test_a.py::test_a\n"
    )
    text = issue(log, "pkg", "1.0", ["tests"], "0")
    assert "```python\nassert f(1) == 2\n```" in text
    assert "IndexError: list index out of range" in text
    assert "secret" not in text
    assert issue("nothing failed", "pkg", "1.0", ["tests"], "0") is None
    assert Path("pkg/f.py").name not in text
