"""Tasks of SWE-bench: read from published files and graded by its own package in a virtual environment, and which
files of a repair count."""

import json
import subprocess
from pathlib import Path

import pytest
from venvs import run_in

from slimrl.environments.swe_bench.counted import apply_arguments, touched

NAME = "swe_bench"
EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed
: '>>>>> Start Test Output'
pytest -rA tests
: '>>>>> End Test Output'
git checkout abc tests/test_a.py
"""


def row(number: int, **changes) -> dict:
    """A row of a data set of SWE-bench 5."""
    return {
        "instance_id": f"o__r-{number}", "repo": "o/r", "base_commit": "abc", "problem_statement": f"issue {number}",
        "hints_text": "", "version": "1.0", "environment_setup_commit": "abc",
        "patch": "--- a/r/a.py\n+++ b/r/a.py\n@@ -1 +1 @@\n-x\n+y\n",
        "test_patch": "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-x\n+y\n",
        "FAIL_TO_PASS": '["tests/test_a.py::test_a"]', "PASS_TO_PASS": '["tests/test_a.py::test_b"]',
        "image": f"swebench/sweb.eval.x86_64.o_1776_r-{number}:latest", "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail", "eval_script": EVAL, **changes,
    }  # fmt: skip


def written(out: Path, file: Path, num: int = 3, heldout: int = 2) -> None:
    run_in(
        NAME,
        "from pathlib import Path\nfrom slimrl.environments.swe_bench.data import write\n"
        f"Path({str(out)!r}).mkdir()\n"
        f"write(Path({str(out)!r}), num={num}, heldout={heldout}, seed=1, dataset={str(file)!r})",
    )


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_data_have_all_that_the_verdict_needs_from_jsonl_as_from_parquet(tmp_path):
    from pyarrow import Table, parquet

    rows = [row(number, image_assets="") for number in range(5)]
    rows.append(row(9, image_assets='{"test_patch": [{"path": "a.png", "url": "https://example.com/a.png"}]}'))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    for kind in ("jsonl", "parquet"):
        written(tmp_path / kind, tmp_path / f"rows.{kind}")
    for name in ("train.jsonl", "heldout.jsonl", "images.txt"):
        assert (tmp_path / "jsonl" / name).read_text() == (tmp_path / "parquet" / name).read_text()
    train, heldout = (lines_of(tmp_path / "jsonl" / f"{name}.jsonl") for name in ("train", "heldout"))
    assert {len(train), len(heldout)} == {3, 2}
    both = sorted([*train, *heldout], key=lambda line: line["id"])
    assert [line["id"] for line in both] == [f"o__r-{number}" for number in range(5)]
    first = both[0]
    assert first["prompt"] == "issue 0"
    marked = EVAL.replace("pytest -rA tests\n", "pytest -rA tests\nSWEBENCH_TEST_EXIT_CODE=$?\n").replace(
        "End Test Output'\n", 'End Test Output\'\necho ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"\n'
    )
    assert first["metadata"] == {
        "image": "swebench/sweb.eval.x86_64.o_1776_r-0:latest", "eval_script": marked, "repo": "o/r", "version": "1.0",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"], "PASS_TO_PASS": ["tests/test_a.py::test_b"],
        "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "base_commit": "abc",
        "patch": rows[0]["patch"], "test_files": ["tests/test_a.py"],
    }  # fmt: skip
    images = (tmp_path / "jsonl/images.txt").read_text().split()
    assert images == [line["metadata"]["image"] for line in both]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{k: v for k, v in row(0).items() if k not in ("image", "eval_script")}], "of before SWE-bench 5"),
        ([row(0, log_parser="parse_log_none")], "has no parse_log_none"),
        ([row(0), row(1)], "2 tasks"),
        ([row(0), row(1), row(2), row(3), row(3)], "o__r-3 occurs more than once"),
    ],
)
def test_files_that_make_no_tasks_are_refused(tmp_path, rows, says):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(AssertionError, match=says):
        written(tmp_path / "out", tmp_path / "rows.jsonl")


RAN = "PASSED tests/a.py::one\nPASSED tests/a.py::two\n"
LOGS = {
    "resolved": (RAN, 0),
    "half": (RAN.replace("PASSED tests/a.py::one", "FAILED tests/a.py::one - assert 0"), 1),
    "broken": (RAN.replace("PASSED tests/a.py::two", "FAILED tests/a.py::two - assert 0"), 1),
    "skipped": (RAN.replace("PASSED", "SKIPPED"), 0),
    "expected to fail": (RAN.replace("PASSED", "XFAIL"), 0),
    "contradicted by the exit code": (RAN, 3),
    "nothing": ("no tests ran", 5),
    "no end": (None, 0),
}


def test_logs_are_graded_by_swebench_and_what_is_expected_to_fail_repairs_nothing(tmp_path):
    paths = {}
    for name, (text, code) in LOGS.items():
        begun = f"+ : '>>>>> Start Test Output'\n{text or RAN}"
        end = f"+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: {code}\n" if text else ""
        paths[name] = str(tmp_path / name)
        Path(paths[name]).write_text(begun + end)
    task = {
        "image": "i", "repo": "o/r", "version": "1", "FAIL_TO_PASS": ["tests/a.py::one"],
        "PASS_TO_PASS": ["tests/a.py::two"], "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail",
    }  # fmt: skip
    code = f"""
import json
from pathlib import Path
from slimrl.environments.swe_bench.package import grade
graded = {{}}
for name, path in {paths!r}.items():
    grade("o__r-1", {task!r}, path, path + ".json")
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec
    spec = TestSpec(instance_id="o__r-1", eval_script_list=[], **{task!r})
    theirs = get_eval_report(spec, {{"instance_id": "o__r-1", "model_patch": "x"}}, path, False)["o__r-1"]
    said = json.loads(Path(path + ".json").read_text())
    assert said["resolved"] == theirs["resolved"] and said["ran"] == theirs["patch_successfully_applied"], name
    graded[name] = [said["resolved"], said["ran"], said["repaired"], said["kept"]]
print(json.dumps(graded))
"""
    assert json.loads(run_in(NAME, code)) == {
        "resolved": [True, True, 1, 1],
        "half": [False, True, 0, 1],
        "broken": [False, True, 1, 0],
        "skipped": [False, True, 0, 1],
        "expected to fail": [True, True, 0, 1],
        "contradicted by the exit code": [False, False, 0, 0],
        "nothing": [False, False, 0, 0],
        "no end": [False, False, 0, 0],
    }


COUNTED = ("r/a.py", "r/new.py", "pyproject.toml", "attestation/a.py", "r/[x].py")
NOT_COUNTED = (
    "tests/test_a.py", "r/tests/helper.py", "testing/x.py", "conftest.py", "r/conftest.py", "setup.cfg", "pytest.ini",
    "sitecustomize.py", "r/test_b.py", "web/a.test.js", "web/__tests__/a.js", "bin/test", "r/odd*.py",
)  # fmt: skip


def test_of_a_repair_git_takes_over_the_source_and_what_the_reference_changes(tmp_path):
    def git(*words: str, **options) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, **options).stdout

    def write(names, text):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    git("init", "--quiet")
    write(["r/odd1.py", *(set(COUNTED) | set(NOT_COUNTED)) - {"r/new.py", "conftest.py"}], "old\n")
    git("add", "--all")
    git("commit", "--quiet", "--message", "base")
    write([*COUNTED, *NOT_COUNTED, "r/odd1.py"], "new\n")
    git("add", "--all")
    patch = git("diff", "--cached", "--binary", "--no-renames")
    git("reset", "--quiet", "--hard")
    reference = "--- a/pyproject.toml\n+++ b/pyproject.toml\n@@ -1 +1 @@\n-old\n+new\n"
    git("apply", *apply_arguments(reference, ["tests/test_a.py", "r/odd*.py"]), "-", input=patch)
    git("add", "--all")
    # A name with a star is no pattern.
    assert git("diff", "--cached", "--name-only").split() == sorted([*COUNTED, "r/odd1.py"])


def test_the_files_of_a_patch_are_those_that_it_adds_changes_removes_renames_and_those_without_text():
    patch = """\
diff --git a/new.py b/new.py
new file mode 100644
--- /dev/null
+++ b/new.py
@@ -0,0 +1 @@
+x
diff --git a/gone.py b/gone.py
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/from.py b/to.py
similarity index 100%
rename from from.py
rename to to.py
diff --git a/with space.py b/with space.py
--- a/with space.py\t
+++ b/with space.py\t
@@ -1 +1 @@
-x
+y
diff --git a/picture.png b/picture.png
index 1..2 100644
Binary files a/picture.png and b/picture.png differ
"""
    assert touched(patch) == ["from.py", "gone.py", "new.py", "picture.png", "to.py", "with space.py"]
