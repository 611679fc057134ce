"""Plants faults in a copy of the source, one at a time, and prints which of them no test notices.

1. The repository is copied, once for each worker; the copy comes first on the import path of all that is started.
2. A fault is planted, and the unit tests of its package run until one fails; then the package's integration tests that
   `make test` has.
3. The test that failed must pass without the fault; otherwise the script ends, since it shows nothing.
Exit codes: 0 every fault was noticed, 1 some were not, 2 the tables or the tests are wrong.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import pytest
from faults import Fault, planted, read_table
from selection import integration_files, unit_files

ROOT = Path(__file__).parents[2]
TABLES = sorted(Path(__file__).parent.glob("*.yaml"))
UNIT_TIMEOUT_S = 600
INTEGRATION_TIMEOUT_S = 2400
NO_END = "tests that did not end"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    fault: Fault
    noticed_by: str | None
    """The test that failed, as pytest names it, or NO_END; None where none did."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", type=Path, default=TABLES, help="YAML files of faults; all by default")
    parser.add_argument("--only", default="", help="faults whose name or module holds this text")
    parser.add_argument("--unit", action="store_true", help="leave out the integration tests")
    parser.add_argument("--workers", type=int, default=1, help="copies at work at a time")
    options = parser.parse_args()
    chosen = [fault for table in options.tables for fault in read_table(table)]
    chosen = [fault for fault in chosen if options.only in f"{fault.module}: {fault.what}"]
    for fault in chosen:
        planted(ROOT, fault)
    with tempfile.TemporaryDirectory(prefix="slimrl-mutation-") as folder:
        copies: Queue[Path] = Queue()
        for number in range(options.workers):
            copies.put(_copy(Path(folder) / str(number)))

        def in_a_copy(fault: Fault) -> Verdict:
            copy = copies.get()
            try:
                verdict = judge(copy, fault, unit_only=options.unit)
            finally:
                copies.put(copy)
            _say(verdict)
            return verdict

        with ThreadPoolExecutor(options.workers) as pool:
            verdicts = list(pool.map(in_a_copy, chosen))
    missed = [verdict for verdict in verdicts if verdict.noticed_by is None]
    print(f"\n{len(verdicts) - len(missed)} of {len(verdicts)} faults were noticed.")
    for verdict in missed:
        print(f"not noticed: {verdict.fault.module} {verdict.fault.where}: {verdict.fault.what}")
    return int(bool(missed))


def _copy(folder: Path) -> Path:
    """The files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "slimrl_tools").symlink_to("tools")
    return folder


def judge(copy: Path, fault: Fault, *, unit_only: bool) -> Verdict:
    """Plant one fault in a copy, run the tests that have to notice it, and take it out again.

    Raises:
        ValueError: the test that failed does so without the fault too, or does not end then.
    """
    start = time.monotonic()
    path, text = planted(copy, fault)
    original = path.read_text()
    path.write_text(text)
    try:
        failed = _first_failure(copy, unit_files(copy, fault), UNIT_TIMEOUT_S)
        if failed is None and not unit_only:
            failed = _first_failure(copy, integration_files(copy, fault), INTEGRATION_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Verdict(fault=fault, noticed_by=NO_END, seconds=time.monotonic() - start)
    finally:
        path.write_text(original)
    try:
        if failed is not None and _first_failure(copy, [failed], INTEGRATION_TIMEOUT_S) is not None:
            raise ValueError(f"{failed} fails without a fault too")
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{failed} does not end without a fault either") from error
    return Verdict(fault=fault, noticed_by=failed, seconds=time.monotonic() - start)


def _first_failure(copy: Path, tests: Sequence[Path | str], timeout_s: float) -> str | None:
    """The first test that fails, or the file that cannot be collected; None where all pass.

    Raises:
        TimeoutExpired: the tests did not end.
        ValueError: pytest did not get as far as a verdict.
    """
    if not tests:
        return None
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not full and not gpu", *map(str, tests)],
        cwd=copy, env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    # Of some packages all integration tests are of the full matrix.
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    if found := _FAILED.search(done.stdout):
        return found[1]
    raise ValueError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _say(verdict: Verdict) -> None:
    fault = verdict.fault
    outcome = f"noticed by {verdict.noticed_by}" if verdict.noticed_by else "NOT NOTICED"
    print(f"{verdict.seconds:6.0f} s  {fault.module} {fault.where}: {fault.what}: {outcome}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
