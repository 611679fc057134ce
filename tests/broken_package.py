"""A task of software repair in a package of a few lines, for tests."""

import difflib
from pathlib import Path

from slimrl.data.prompt import Prompt

SOUND = "def total(values):\n    return sum(values)\n\n\ndef mean(values):\n    return total(values) / len(values)\n"
BROKEN = SOUND.replace("return sum(values)", "return sum(values[1:])")
TESTS = {
    "tests/test_total.py": "import tally\n\n\ndef test_total():\n    assert tally.total([1, 2]) == 3\n\n\n"
    "def test_of_nothing():\n    assert tally.total([]) == 0\n",
    "tests/test_mean.py": "import tally\n\n\ndef test_mean():\n    assert tally.mean([0, 4]) == 2\n",
}
PATCH = "".join(
    difflib.unified_diff(
        BROKEN.splitlines(keepends=True), SOUND.splitlines(keepends=True), "a/tally/__init__.py", "b/tally/__init__.py"
    )
)
METADATA = {
    "repo": "tally 1.0",
    "base": "bases/tally-1.0",
    "code": ["tally"],
    "tests": ["tests"],
    "FAIL_TO_PASS": ["tests/test_total.py::test_total"],
    "PASS_TO_PASS": ["tests/test_total.py::test_of_nothing", "tests/test_mean.py::test_mean"],
    "patch": PATCH,
}
PROMPT = Prompt(
    prompt_id="tally-1", messages=[{"role": "user", "content": "total([1, 2]) is 2"}], label=None, metadata=METADATA
)
REPAIR = "sed -i 's/values\\[1:\\]/values/' tally/__init__.py"
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""


def write_tasks(folder: Path) -> Path:
    """The folder, with what `slimrl-tools environment data` writes of the sound package."""
    base = folder / METADATA["base"]
    for name, text in {"tally/__init__.py": SOUND, "pytest.ini": "[pytest]\n", **TESTS}.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    return folder
