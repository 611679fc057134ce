"""Rewards for answers in words, against the SQuAD metrics of transformers, and where an answer is found."""

import math
import random

import numpy as np
import pytest
from reward_cases import asked, said
from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

from slimrl.rewards.answers import F1, ExactMatch
from slimrl.rewards.math import boxed_equivalent, boxed_exact
from slimrl.rewards.texts import AnswerPlace, boxed, fenced, tagged

WORDS = ["The", "an", "a", "Eiffel", "eiffel,", "tower", "Tower.", "in", "PARIS", "1889", "--", "naïve", "O'Neill"]


def test_exact_match_and_f1_are_those_of_squad():
    rng = random.Random(0)
    exact, f1 = ExactMatch(), F1(power=1.0)
    compared = 0
    for _ in range(3000):
        answer, *labels = (" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(rng.randint(2, 4)))
        words = [[word for word in text.lower().split() if word != "--"] for text in (answer, *labels)]
        if any(not text or text[-1] in ("the", "an", "a") for text in words):
            continue  # an article before nothing is a letter, not as in SQuAD
        compared += 1
        given = said(answer), asked(labels)
        assert exact(*given) == max(compute_exact(label, answer) for label in labels)
        assert f1(*given) == pytest.approx(max(compute_f1(label, answer) for label in labels))
    assert compared > 1000


def test_f1_by_its_formula():
    # 2 of 3 words are right, and 2 of 5 are found: 2 * (2/3) * (2/5) / (2/3 + 2/5) = 1/2
    given = said("red blue green"), asked("blue green one two three")
    assert F1(power=1.0)(*given) == pytest.approx(0.5)
    assert F1()(*given) == pytest.approx(0.25)


def test_yes_and_no_share_no_words_with_others_as_in_hotpotqa():
    assert F1()(said("yes it is"), asked("yes")) == 0.0
    assert F1()(said("Yes."), asked("yes")) == 1.0


@pytest.mark.parametrize(
    ("label", "answer", "reward"),
    [("A", "a", 1), ("A", "the", 0), ("A", "", 0), ("...", "", 0), (7, "7.", 1), (1.5, "1.5", 1)],
)
def test_a_label_of_which_the_normal_form_leaves_nothing_is_not_any_answer(label, answer, reward):
    assert ExactMatch()(said(answer), asked(label)) == F1()(said(answer), asked(label)) == reward


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        (
            "A",
            ["A", "(A)", "A.", "A)", "**A**", "a", "(a)", "A. Paris"],
            ["B", "(B)", "A or B", "A, B, C, D", "the", ""],
        ),
        ("B", ["B", "(B)", "B:"], ["A", "(A)"]),
        ("(C) Paris", ["C", "(C)", "(C) Paris", "C. Paris"], ["(C) London", "(B) Paris", "B"]),
        ("J. Smith", ["J. Smith", "J Smith"], ["J. Brown", "J", "(J)", "J. Smith, A. Brown"]),
        ("C. difficile", ["C. difficile"], ["C. elegans", "C"]),
        ("5", ["5", "5.0", "+5", "5.", "$5"], ["-5", "15", "5 or 6", "5/2"]),
        (5.0, ["5", "5.0"], ["50", "-5"]),
        (15, ["15"], ["1.5", "1-5", "1/5"]),
        ("C", ["C"], ["C++", "C#"]),
        ("C++", ["C++", "c++.", "the C++"], ["C", "C#"]),
        ("1234", ["1,234", "1234"], ["1.234", "12:34"]),
        ("10:30", ["10:30", "10:30."], ["1030", "10.30"]),
        ("1998-1999", ["1998\N{EN DASH}1999", "1998\N{HYPHEN}1999"], ["19981999", "1998 1999"]),
        ("\N{MINUS SIGN}5", ["-5", "\N{EN DASH}5"], ["5"]),
        ("ABC 1", ["ＡＢＣ　１", "abc 1"], ["ＡＢＤ　１"]),  # noqa: RUF001
        ("x2", ["X2"], ["x²"]),
        ("Vitamin A", ["vitamin a", "Vitamin A."], ["Vitamin", "Vitamin B"]),
        ("O-", ["O-", "o-"], ["O+", "O"]),
        ("the Eiffel Tower", ["Eiffel tower", "An Eiffel tower!"], ["Eiffel"]),
        (np.int64(7), ["7"], ["70"]),
        (np.float32(0.1), ["0.1", "1/10"], ["1"]),
    ],
)
def test_what_says_something_counts(label, right, wrong):
    for reward in (ExactMatch(), F1()):
        assert [reward(said(answer), asked(label)) for answer in right] == [1.0] * len(right)
        assert all(reward(said(answer), asked(label)) < 1.0 for answer in wrong)


HOLES = [None, math.nan, np.float64("nan"), math.inf, "", " ", "nan", "NaN", "None", "<NA>", True, np.True_, {"a": 1}]


@pytest.mark.parametrize("label", [*HOLES, [], ["x", None], ["x", math.nan]], ids=repr)
def test_a_label_that_no_answer_could_match_is_an_error(label):
    for reward in (ExactMatch(), F1()):
        with pytest.raises(ValueError, match="label of g"):
            reward(said("x"), asked(label))
        with pytest.raises(ValueError, match="label of g"):
            reward.check_prompt(asked(label))


@pytest.mark.parametrize("label", [*HOLES, ["5"], ".", "?", "$$"], ids=repr)
@pytest.mark.parametrize("reward", [boxed_exact, boxed_equivalent])
def test_a_label_that_no_box_could_hold_is_an_error(reward, label):
    for answer in ("None", "nan", "5", "?", "{}"):
        with pytest.raises(ValueError, match="label of g"):
            reward(said(f"\\boxed{{{answer}}}"), asked(label))
    with pytest.raises(ValueError, match="label of g"):
        reward.check_prompt(asked(label))


@pytest.mark.parametrize(
    "label", [5, 5.0, "5", "5.0", np.int64(5), np.float64(5), np.float32(5), np.str_("5")], ids=repr
)
def test_labels_as_tables_hold_them_are_numbers(label):
    assert boxed_exact(said("\\boxed{5}"), asked(label)) == 1.0
    assert boxed_exact(said("\\boxed{-5}"), asked(label)) == 0.0
    assert ExactMatch()(said("5"), asked(label)) == 1.0
    boxed_exact.check_prompt(asked(label))


@pytest.mark.parametrize(
    ("place", "text", "answer"),
    [
        ("text", " x y ", "x y"),
        ("boxed", "\\boxed{1} \\boxed{ {2} }", "{2}"),
        ("<answer>", "<answer>1</answer> <answer> 2 </answer> 3", "2"),
        ("<answer>", "<answer>1</answer> <answer>2", "1"),
        ("<answer>", "</answer>1<answer>", None),
        ("<answer>", "<answer> </answer>", None),
        ("code", "```python\na = 1\n```\nor\n```\nb = 2\n\n```", "b = 2"),
        ("code", "1. So:\n   ```\n   if a:\n       b = 2\n   ```", "if a:\n    b = 2"),
        ("code", "```python\na = 1", None),
    ],
)
def test_an_answer_is_found_where_the_recipe_says(place, text, answer):
    assert AnswerPlace(place).of(said(text)) == answer


@pytest.mark.parametrize("place", ["answer", "<>", "<a b>", "</a>", ""])
def test_another_place_is_refused(place):
    with pytest.raises(ValueError, match=r"answer_in: .* is neither text, boxed, code nor a tag"):
        ExactMatch(answer_in=place)


def test_finding_takes_linear_time():
    for text in ("\\boxed{" * 100_000, "<a>" * 100_000, "```\n" * 100_001, "{" * 400_000):
        assert boxed(text) is None
        assert tagged(text, "a") is None
        assert fenced(text) in (None, "")


GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"
MATH = "The denominator is 0 for $x=2$, so the asymptotes are at $2$ and $-2$: there are $\\boxed{2}$ of them."


@pytest.mark.parametrize(
    ("label", "told"), [(GSM8K, "prepare gsm8k FILE OUT"), (f"{GSM8K}\n", "prepare gsm8k"), (MATH, "prepare math FILE")]
)
def test_a_label_that_is_a_whole_solution_is_refused_with_what_takes_the_answer_out_of_it(label, told):
    for reward in (boxed_exact, boxed_equivalent, ExactMatch(), F1()):
        with pytest.raises(ValueError, match=rf"^the label of g: it is a whole solution, .*{told}"):
            reward.check_prompt(asked(label))
    with pytest.raises(ValueError, match="it is a whole solution"):
        F1().check_prompt(asked(["72", label]))


def test_a_box_or_a_text_is_no_final_answer_but_may_be_what_a_whole_text_is_compared_with():
    words = " ".join(["word"] * 51)
    for label, told in [("\\boxed{5}", "write what stands in it"), ("$\\boxed{5}$", "write what"), (words, "50 words")]:
        for check in (boxed_exact.check_prompt, boxed_equivalent.check_prompt):
            with pytest.raises(ValueError, match=rf"^the label of g: it .*{told}"):
                check(asked(label))
        ExactMatch().check_prompt(asked(label))
        assert ExactMatch()(said(label), asked(label)) == 1.0


@pytest.mark.parametrize(
    "label",
    [
        "#1",
        "#### is a heading\nand this the text below it",
        " ".join(["word"] * 50),
        r"\begin{pmatrix} " + r"\frac{ab}{cd} & \alpha \\ " * 30 + r"\end{pmatrix}",
    ],
)
def test_other_labels_are_no_solutions(label):
    for check in (boxed_exact.check_prompt, ExactMatch().check_prompt):
        check(asked(label))
