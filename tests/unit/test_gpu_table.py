"""The table that ends the GPU suite, and that plain runs of pytest leave the suite alone."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "gpu"


def load_report():
    spec = importlib.util.spec_from_file_location("gpu_report", SUITE / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(nodeid, when="call", **properties):
    given = [(name, value) for name, values in properties.items() for value in values]
    return SimpleNamespace(nodeid=nodeid, when=when, duration=1.25, user_properties=given)


def test_a_row_says_what_ran_how_it_ended_and_what_it_proves(monkeypatch):
    report = load_report()
    stats = {
        "passed": [
            result("two/test_b.py::test_later"),
            result("tier_a/test_a.py::test_bits_are_equal[fp32]", proves=["bits"], figure=["3 GB/s", "a copy 9 GB/s"]),
            result("tier_a/test_a.py::test_bits_are_equal[fp32]", when="teardown", proves=["bits"]),
        ],
        "failed": [result("tier_b/test_c.py::test_run", proves=["the ring"])],
        "skipped": [result("tier_a/test_z.py::test_none", when="setup", proves=["nothing"])],
        "error": [SimpleNamespace(nodeid="tier_a/test_y.py", when="collect")],
        "warnings": [object()],
    }
    found = report.rows(stats)
    assert [(row.tier, row.outcome) for row in found] == [
        ("2 GPUs", "passed"), ("A", "passed"), ("A", "skipped"), ("B", "failed"),
    ]  # fmt: skip
    text = "\n".join(report.table(found))
    assert re.search(
        r"^A +passed +1\.2 s  bits are equal\[fp32\]\n +proves: bits\n +3 GB/s\n +a copy 9 GB/s$", text, re.M
    )
    assert re.search(r"^B +failed +1\.2 s  run\n +about: the ring$", text, re.M)


def test_every_test_of_the_suite_says_what_it_proves():
    for file in SUITE.glob("*/test_*.py"):
        source = file.read_text()
        tests = re.findall(r"((?:^@.*\n(?: .*\n|\)\n)*)*)^def (test_\w+)", source, re.M)
        assert tests, file
        for decorators, name in tests:
            assert "@pytest.mark.proves(" in decorators, f"{file.name}: {name}"


def test_plain_runs_of_pytest_leave_the_suite_to_its_own_settings():
    assert 'collect_ignore = ["gpu"]' in (ROOT / "tests" / "conftest.py").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    own = (SUITE / "pytest.ini").read_text()
    assert {mark.split(":")[0] for mark in settings["markers"]} <= set(
        re.findall(r"^    (\w+)(?:\(\w+\))?:", own, re.M)
    )
