"""For the GPU suite: tests are skipped without GPUs unless they are to run on a CPU, and a table ends the run."""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

LEFT_OUT = ["tier_b/*", "two/test_replaced_engine.py"] if find_spec("sglang") is None else []
"""Tests whose imports fail on a bare machine."""

collect_ignore_glob = LEFT_OUT

TIER_A = (
    "test_shared_slots.py",
    "test_staging_buffer.py",
    "test_waiting_engine.py",
    "test_absent_peer.py",
    "test_released_memory.py",
    "test_kernel_bits.py",
    "test_families_on_gpu.py",
)
"""In this order: what takes seconds first, so that a run that is cut off has shown most. The families are long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from machine import missing_gpus
    from report import PROVES

    items.sort(key=lambda item: TIER_A.index(item.path.name) if item.path.parent.name == "tier_a" else len(TIER_A))
    for item in items:
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("proves")
        assert marker is not None, f"{item.nodeid} does not say what it proves"
        item.user_properties.append((PROVES, marker.args[0]))
        if reason := missing_gpus(2 if "two" in item.path.parts else 1):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from machine import name_of_device
    from report import rows, table

    if found := rows(terminalreporter.stats):
        if LEFT_OUT:
            terminalreporter.write_line(f"left out, since SGLang is not installed: {', '.join(LEFT_OUT)}")
        terminalreporter.section(f"what ran and what it proves, {name_of_device()}")
        for line in table(found):
            terminalreporter.write_line(line)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Adds a line to the test's row in the table."""
    return lambda text: record_property("figure", text)
