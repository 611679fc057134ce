"""What swebench 5.0.2 itself says of a task and of a log. Runs in the environment's interpreter."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slimrl.environments.bare_packages import make_bare

_BARE = ("swebench", "swebench.harness")
_UNUSED = {"datasets": ("Dataset", "load_dataset", "load_from_disk"), "dotenv": ("load_dotenv",), "tqdm": ("tqdm",)}
"""Packages that a module of swebench imports for functions that are not called here, but for `load_dotenv`, which would
read variables from files."""
NEEDED = (
    "instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "eval_script",
)  # fmt: skip
"""Columns that a task of swebench 5 has for its verdict"""


def task_of(instance: Mapping[str, Any]) -> dict[str, Any]:
    """The image, the script and the tests of an instance as `make_test_spec` makes them, as JSON has them."""
    make_bare(_BARE, "swe_bench")
    _without_unused()
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(dict(instance))
    taken = ("image", "eval_script", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
    return {name: getattr(spec, name) for name in taken}


def known_parsers() -> set[str]:
    """Names of the parsers of logs."""
    make_bare(_BARE, "swe_bench")
    from swebench.harness.log_parsers import PARSER_REGISTRY

    return set(PARSER_REGISTRY)


def grade(instance_id: str, task: Mapping[str, Any], log: str, report: str) -> None:
    """Read the log of an eval script and write what it says.

    Args:
        task: of `task_of`.
        log: path of the log.
        report: path of the JSON file that is written: `ran`, whether the log tells what happened; `resolved`, the
            verdict of swebench; `repaired` and `kept`, the fractions of the tests of FAIL_TO_PASS and of PASS_TO_PASS
            that pass. A test of FAIL_TO_PASS that is said to fail as expected counts for `resolved` alone: a line of
            code makes that of any test.
    """
    make_bare(_BARE, "swe_bench")
    from swebench.harness.constants import EvalType, ResolvedStatus, TestStatus
    from swebench.harness.grading import (
        compute_fail_to_pass,
        compute_pass_to_pass,
        get_eval_tests_report,
        get_logs_eval,
        get_resolution_status,
    )
    from swebench.types import TestSpec

    names = ("image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
    spec = TestSpec(instance_id=instance_id, eval_script_list=[], **{name: task[name] for name in names})
    statuses, ran = get_logs_eval(spec, log)
    expected = {"FAIL_TO_PASS": spec.FAIL_TO_PASS, "PASS_TO_PASS": spec.PASS_TO_PASS}
    said = {"ran": ran, "resolved": False, "repaired": 0.0, "kept": 0.0}
    if ran:
        kind = EvalType(spec.eval_type)
        found = get_eval_tests_report(statuses, expected, eval_type=kind)
        failed = TestStatus.FAILED.value
        strict = {name: failed if status == TestStatus.XFAIL.value else status for name, status in statuses.items()}
        said["resolved"] = get_resolution_status(found) == ResolvedStatus.FULL.value
        said["repaired"] = float(compute_fail_to_pass(get_eval_tests_report(strict, expected, eval_type=kind)))
        said["kept"] = float(compute_pass_to_pass(found))
    Path(report).write_text(json.dumps(said))


def _without_unused() -> None:
    for package, functions in _UNUSED.items():
        module = sys.modules.setdefault(package, ModuleType(package))
        for name in functions:
            setattr(module, name, getattr(module, name, lambda *args, **kwargs: None))
