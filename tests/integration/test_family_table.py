"""The tables of docs/models.md are those of the tests as they are."""

import family_table
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def test_the_page_says_which_tests_hold_for_each_family():
    assert family_table.PAGE.read_text() == family_table.page(), "run python tests/family_table.py"
    families, wrapped = family_table.tables()
    assert "| deepseek_v3 | yes | yes | yes | yes | yes | yes | yes | yes | yes | yes | yes |" in families
    assert "| kimi_k25 | yes | yes | yes | yes | yes | yes |" in wrapped
