"""The tables of `make mutation` still fit the source."""

from pathlib import Path

import faults
import pytest
import run
import selection

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("table", run.TABLES, ids=lambda path: path.stem)
def test_the_old_text_of_each_fault_stands_once_in_its_definition(table):
    for one in faults.read_table(table):
        faults.planted(ROOT, one)
        assert selection.unit_files(ROOT, one), f"no unit test imports {one.package}"


def test_each_package_has_integration_tests_that_exist():
    packages = {f"slimrl.{path.stem}" for path in (ROOT / "slimrl").iterdir() if path.stem.strip("_").islower()}
    packages -= {"slimrl.__init__", "slimrl.__pycache__"}
    assert set(selection.INTEGRATION) == packages | {"slimrl_tools", "megatron_patches"}
    for package, names in selection.INTEGRATION.items():
        assert names, package
        for name in names:
            assert (ROOT / "tests" / "integration" / name).is_file(), f"{package}: {name}"
