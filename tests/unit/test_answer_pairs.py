"""Answers in boxes against a mathematician's verdicts, and what the reading of them takes."""

import re
import time
from pathlib import Path

import pytest
from answer_pairs import KNOWN_WRONG, PAIRS, RULES, table
from reward_cases import asked, said

from slimrl.rewards.comparison import equivalent
from slimrl.rewards.equality import is_label, same
from slimrl.rewards.kinds import Quantity, read
from slimrl.rewards.latex import plain, squeezed
from slimrl.rewards.math import boxed_equivalent, boxed_exact

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
ALL = [(kind, *pair) for kind, pairs in PAIRS.items() for pair in pairs]


class InProcess:
    """Compares here, as the processes of comparers.py do in theirs."""

    def equivalent(self, answer, label):
        return equivalent(answer, label)


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", InProcess)


@pytest.mark.parametrize(("kind", "label", "answer", "right"), ALL, ids=[f"{k}: {a} for {b}" for k, b, a, _ in ALL])
def test_the_verdict_is_a_mathematicians(in_process, kind, label, answer, right):
    given = said(f"\\boxed{{{answer}}}"), asked(label)
    verdict = right != ((label, answer) in KNOWN_WRONG)
    assert boxed_equivalent(*given) == float(verdict)
    # What needs no symbols is the same for both rewards, and the exact one pays for nothing else.
    assert boxed_exact(*given) <= boxed_equivalent(*given)


def test_at_most_five_of_the_pairs_are_known_to_be_wrong():
    assert len(ALL) >= 250
    assert len({pair[1:3] for pair in ALL}) == len(ALL)
    assert len(KNOWN_WRONG) <= 5
    assert {pair[1:3] for pair in ALL} >= KNOWN_WRONG.keys()
    assert RULES.keys() == PAIRS.keys()


def test_the_page_has_the_table_of_the_kinds():
    assert table() in PAGE.read_text(), f"docs/rewards.md lacks this table:\n{table()}"


NUMBERS = ("integers", "decimals", "scientific notation", "fractions", "mixed numbers", "percent", "thousands", "bases")


@pytest.mark.parametrize("kind", [*NUMBERS, "choices", "empty sets", "words", "orders", "ratios and times"])
def test_these_kinds_are_decided_without_symbols(kind):
    for label, answer, right in PAIRS[kind]:
        assert is_label(answer, str(label), lambda *pair: pytest.fail(f"{pair} was asked")) is right


def test_an_answer_is_not_right_for_two_labels_that_differ():
    """But for units, which an answer may leave out, and 10%, which is 10 and 0.1."""

    def is_same(one, other):
        return same(one, other, lambda *texts: squeezed(texts[0]) == squeezed(texts[1]))

    answers = {answer: read(plain(answer)) for _, _, answer, _ in ALL if "%" not in answer}
    labels = {str(label): read(plain(str(label))) for _, label, _, _ in ALL}
    # 5 m may be meant with or without a unit.
    units = {label for label, said in labels.items() if isinstance(said, Quantity) and said.unit}
    units |= {label for label in labels if re.search(r"[\di] ?[mhs]$", label)}
    bare = {label: said for label, said in labels.items() if label not in units}
    for answer, given in answers.items():
        paid = [(label, wanted) for label, wanted in bare.items() if is_same(given, wanted)]
        assert all(is_same(wanted, paid[0][1]) for _, wanted in paid), (answer, paid)


@pytest.mark.parametrize("answer", [r"5 \text{ meters}", r"5 \text{ m}", r"5 \text{ cubic meters}"])
def test_a_length_or_a_volume_is_no_area_in_words(answer):
    asked_for = r"5 \text{ square meters}"
    assert boxed_exact(said(f"\\boxed{{{answer}}}"), asked(asked_for)) == 0.0
    assert boxed_exact(said(r"\boxed{5 \text{ m}^2}"), asked(asked_for)) == 1.0


LONG = 4000
HOSTILE = [
    "5" + "%" * LONG, r"\$" * LONG + "5", "5" + r"\text{cm}" * 100, "(" * LONG, ")" * LONG, "{" * LONG,
    "(" * 400 + "5" + ")" * 400, r"\frac{1}{" * 400, r"{1\over" * 600, "," * LONG, "1," * 499, "x=" * 499, ":" * 999,
    r"x\in " * 190, "²" * LONG, " or " * 249, r"\pm" * 300, "A. " * 300, "(A)" * 300, "5 " + "cm " * 300, "9" * LONG,
    "1e999999999", "10^{" + "9" * 900 + "}", r"0.\overline{" + "3" * 900 + "}", "1" + " 000" * 900, "1/" * 499,
    r"\text{" * 200 + "a" + "}" * 200, "\\" * LONG, "$" * LONG, r"\sqrt" * 800, "((1,2)," * 100, r"\cup" * 249,
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:12])
def test_reading_an_answer_is_bounded(answer):
    began = time.process_time()
    read(plain(answer))
    assert time.process_time() - began < 1.0


def test_a_long_number_is_still_one():
    assert read("1" * 3000) == Quantity("1" * 3000, int("1" * 3000))
