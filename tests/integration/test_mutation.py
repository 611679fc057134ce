"""The script of `make mutation` plants a fault where it says, and tells one that is noticed from others."""

from pathlib import Path

import faults
import pytest
import run
import selection
from faults import Fault

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SOURCE = '''"""A package."""


def half(x):
    return x / 2


class Sum:
    def of(self, x, y):
        return x + y
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A small repository: `half` has a test, `Sum.of` has none."""
    for folder in ("slimrl/math", "tests/unit", "tests/integration"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "slimrl" / "__init__.py").touch()
    (tmp_path / "slimrl" / "math" / "__init__.py").touch()
    (tmp_path / "slimrl" / "math" / "numbers.py").write_text(SOURCE)
    test = "from slimrl.math.numbers import half\n\n\ndef test_half():\n    assert half(6) == 3\n"
    (tmp_path / "tests" / "unit" / "test_numbers.py").write_text(test)
    return tmp_path


def fault(**changes: str) -> Fault:
    fields = {"what": "w", "module": "slimrl.math.numbers", "where": "half", "old": "x / 2", "new": "x / 3"}
    return Fault(**{**fields, **changes})


def test_a_fault_is_planted_in_the_named_definition_alone(copy):
    path, text = faults.planted(copy, fault(where="Sum.of", old="x + y", new="x - y"))
    assert path == copy / "slimrl" / "math" / "numbers.py"
    assert text == SOURCE.replace("x + y", "x - y")


def test_a_definition_is_found_in_the_module_to_which_it_moved(copy):
    (copy / "slimrl" / "math" / "numbers.py").rename(copy / "slimrl" / "moved.py")
    assert faults.planted(copy, fault())[0] == copy / "slimrl" / "moved.py"


@pytest.mark.parametrize("changes", [{"old": "x / 4"}, {"where": "third"}, {"where": "", "old": "x"}])
def test_an_old_text_that_is_not_there_or_stands_twice_is_refused(copy, changes):
    with pytest.raises(ValueError, match=r"its old text stands (0|[2-9]) times"):
        faults.planted(copy, fault(**changes))


def test_tests_of_the_package_come_before_those_of_modules_that_use_the_fault_s(copy):
    for name, text in {
        "slimrl/shop/__init__.py": "",
        "slimrl/shop/till.py": "from slimrl.math.numbers import half\n",
        "slimrl/shop/window.py": "",
        "tests/unit/test_a_till.py": "from slimrl.shop.till import half\n",
        "tests/unit/test_a_window.py": "import slimrl.shop.window\n",
    }.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    assert [path.name for path in selection.unit_files(copy, fault())] == ["test_numbers.py", "test_a_till.py"]


@pytest.mark.full
def test_the_script_tells_the_faults_that_tests_notice_from_others(copy):
    noticed = run.judge(copy, fault(), unit_only=True)
    assert noticed.noticed_by == "tests/unit/test_numbers.py::test_half"
    assert run.judge(copy, fault(where="Sum.of", old="x + y", new="x - y"), unit_only=True).noticed_by is None
    assert (copy / "slimrl" / "math" / "numbers.py").read_text() == SOURCE


def test_tests_that_do_not_end_with_a_fault_have_noticed_it(copy, monkeypatch):
    monkeypatch.setattr(run, "UNIT_TIMEOUT_S", 5)
    hanging = fault(old="    return x / 2", new="    while True:\n        pass")
    assert run.judge(copy, hanging, unit_only=True).noticed_by == run.NO_END
    assert (copy / "slimrl" / "math" / "numbers.py").read_text() == SOURCE


def test_a_test_that_fails_without_the_fault_too_shows_nothing(copy):
    (copy / "tests" / "unit" / "test_numbers.py").write_text("import slimrl.math\n\n\ndef test():\n    assert False\n")
    with pytest.raises(ValueError, match="fails without a fault too"):
        run.judge(copy, fault(), unit_only=True)
