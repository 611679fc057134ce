"""Which of the files that the policy changed count: its source, and not what decides how the tests come out.

SWE-bench takes a whole diff. Here a changed test, a conftest.py or settings of pytest would be the cheapest reward, so
they are left out, as arguments of `git apply`: for a path the first pattern decides that matches it. A file that the
reference repair changes counts, whatever its name.
"""

import re
from collections.abc import Sequence

_FOLDERS = ("test", "tests", "testing", "e2e", "spec", "specs", "__tests__")
_TESTS = ("test", "tests.py", "runtests.py", "test_*.py", "*_test.*", "*.test.*", "*_spec.*", "*.spec.*")
_SETTINGS = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
_IMPORTED_BY_PYTHON = ("sitecustomize.py", "usercustomize.py", "*.pth")
_NAMED = re.compile(r"^(?:--- a/|\+\+\+ b/|rename from |rename to )(.+?)\t?$", re.MULTILINE)
_HEADING = re.compile(r"^diff --git a/(.+) b/\1$", re.MULTILINE)
"""All that names a binary file"""
_SPECIAL = re.compile(r"([*?\[\]\\])")


def touched(patch: str) -> list[str]:
    """Paths of the files that a published patch changes, as git writes them."""
    return sorted({*_NAMED.findall(patch), *_HEADING.findall(patch)})


def apply_arguments(patch: str, test_files: Sequence[str]) -> list[str]:
    """Options of `git apply` that leave out what does not count.

    Args:
        patch: the reference repair.
        test_files: that the tests of the verdict replace.
    """
    names = [*_TESTS, *_SETTINGS, *_IMPORTED_BY_PYTHON]
    # `*` of git apply takes slashes, too.
    hidden = [*names, *(f"*/{name}" for name in names), *(f"{folder}/*" for folder in _FOLDERS)]
    hidden += [f"*/{folder}/*" for folder in _FOLDERS]
    return [
        *(f"--exclude={_literal(path)}" for path in test_files),
        *(f"--include={_literal(path)}" for path in touched(patch)),
        *(f"--exclude={pattern}" for pattern in hidden),
        "--include=*",
    ]


def _literal(path: str) -> str:
    """A pattern that matches this path alone."""
    return _SPECIAL.sub(r"\\\1", path)
