"""SWE-bench's own verdict on the logs of suites, in the virtual environment that has its package."""

import json
from pathlib import Path

from slimrl.environments.software_repair.bugs import import_parts


def grade(logs: str, out: str) -> None:
    """Write a verdict for each log.

    Args:
        logs: file of lines with `log`, `FAIL_TO_PASS` and `PASS_TO_PASS`.
        out: file of lines with `statuses`, `repaired`, `kept` (fractions) and `resolved`, in the same order.
    """
    import_parts()
    from swebench.harness.constants import ResolvedStatus
    from swebench.harness.grading import (
        compute_fail_to_pass,
        compute_pass_to_pass,
        get_eval_tests_report,
        get_resolution_status,
    )
    from swebench.harness.log_parsers.python import parse_log_pytest

    with Path(logs).open() as given, Path(out).open("w") as verdicts:
        for text in given:
            line = json.loads(text)
            statuses = parse_log_pytest(line["log"], None)
            report = get_eval_tests_report(statuses, line)
            verdict = {
                "statuses": statuses,
                "repaired": compute_fail_to_pass(report),
                "kept": compute_pass_to_pass(report),
                "resolved": get_resolution_status(report) == ResolvedStatus.FULL.value,
            }
            verdicts.write(json.dumps(verdict) + "\n")
