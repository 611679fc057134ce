"""A task of SWE-bench with its image, laid out as the published ones are and made of this Debian's own programs.

It has /testbed with a repository of git, and /opt/miniconda3 with an environment `testbed` that the scripts of that
format activate; its conda is a function of bash that does nothing else.
"""

import io
import itertools
import json
import shutil
import subprocess
import tarfile
from importlib.metadata import files
from pathlib import Path

from podman_image import library_files, programs_with_libraries

NAME = "swe-bench__tally-1"
IMAGE = "docker.io/swebench/sweb.eval.x86_64.swe-bench_1776_tally-1:latest"
PROGRAMS = (
    "bash", "sh", "cat", "cp", "find", "git", "grep", "head", "ls", "mkdir", "mktemp", "python3", "rm", "sed", "sleep",
    "timeout", "base64", "xargs", "printf", "touch", "mv", "kill",
)  # fmt: skip
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_CONDA = """
conda() {
    [ "$1" = activate ] && export CONDA_DEFAULT_ENV="$2" PATH="/opt/miniconda3/envs/$2/bin:$PATH"
}
"""
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "root/.bashrc": "source /opt/miniconda3/etc/profile.d/conda.sh && conda activate testbed\n",
    "opt/miniconda3/etc/profile.d/conda.sh": _CONDA,
    "opt/miniconda3/bin/activate": _CONDA,
    "usr/lib/python3/dist-packages/easy-install.pth": "/testbed\n",
    "opt/miniconda3/envs/testbed/bin/python": '#!/bin/sh\nexec /usr/bin/python3 "$@"\n',
    "opt/miniconda3/envs/testbed/bin/pytest": (
        '#!/bin/sh\nexec /usr/bin/python3 -c "import sys, pytest; sys.exit(pytest.main())" "$@"\n'
    ),
}
SOUND = "def total(values):\n    return sum(values)\n\n\ndef mean(values):\n    return total(values) / len(values)\n"
BROKEN = SOUND.replace("return sum(values)", "return sum(values[1:])")
TESTS = "import tally\n\n\ndef test_of_nothing():\n    assert tally.total([]) == 0\n"
NEW_TESTS = TESTS + "\n\ndef test_total():\n    assert tally.total([1, 2]) == 3\n"
REPOSITORY = {
    "tally/__init__.py": BROKEN,
    "tests/test_total.py": TESTS,
    "tests/test_mean.py": "import tally\n\n\ndef test_mean():\n    assert tally.mean([0, 4, 4]) > 0\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p no:cacheprovider\n",
    ".gitignore": "__pycache__/\nbuild/\n",
}
_EVAL = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
python -m pip install -e .
git checkout {base} tests/test_total.py
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA tests
: '>>>>> End Test Output'
git checkout {base} tests/test_total.py
"""


def instance(folder: Path) -> dict[str, str]:
    """A row of the data set, as it is published.

    Args:
        folder: where the repository is made.
    """
    for name, text in REPOSITORY.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _git(folder, "init", "--quiet")
    base = _committed(folder, "base")
    patches = {}
    for kind, path, text in (
        ("patch", "tally/__init__.py", SOUND),
        ("test_patch", "tests/test_total.py", NEW_TESTS),
    ):
        (folder / path).write_text(text)
        patches[kind] = _git(folder, "diff")
        _git(folder, "checkout", "--quiet", ".")
    # As in the published images: a commit of their own, and files that git neither knows nor ignores.
    (folder / "setup.cfg").write_text(REPOSITORY["setup.cfg"] + "# of the image\n")
    _committed(folder, "SWE-bench")
    (folder / "left.txt").write_text("by the build\n")
    return {
        "instance_id": NAME,
        "repo": "swe-bench/tally",
        "base_commit": base,
        "problem_statement": "total([1, 2]) is 2",
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["tests/test_total.py::test_total"]),
        "PASS_TO_PASS": json.dumps(["tests/test_total.py::test_of_nothing", "tests/test_mean.py::test_mean"]),
        "environment_setup_commit": base,
        "image": IMAGE,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL.format(base=base, test_patch=patches["test_patch"].rstrip("\n")),
        **patches,
    }


def import_image(repository: Path) -> None:
    """Raises CalledProcessError if podman refuses the image."""
    programs = [found for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin"))]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for file in sorted(programs_with_libraries(programs) | library_files()):
            archive.add(file, recursive=False)
        for file in itertools.chain.from_iterable(files(name) or [] for name in DISTRIBUTIONS):
            if not {"..", "__pycache__"} & set(file.parts):
                archive.add(str(file.locate()), f"usr/lib/python3/dist-packages/{file}", filter=_of_root)
        archive.add(repository, "testbed", filter=_of_root)
        for name, text in _FILES.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("bin")
        link.type, link.linkname = tarfile.SYMTYPE, "usr/bin"
        archive.addfile(link)
        for name in ("tmp", "root"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(info)
    changes = ["--change", "ENV PATH=/opt/miniconda3/bin:/usr/bin:/bin", "--change", "WORKDIR=/testbed"]
    subprocess.run(["podman", "import", *changes, "-", IMAGE], input=buffer.getvalue(), check=True, capture_output=True)


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def _committed(folder: Path, message: str) -> str:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", message)
    return _git(folder, "rev-parse", "HEAD").strip()
