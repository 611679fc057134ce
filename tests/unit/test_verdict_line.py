"""Verdicts of judges: what they write when they are asked for a last line of one form, and what is none."""

import pytest

from slimrl.rewards.verdict_line import BETTER, last_line, score_form

SCORES = [
    ("SCORE: 7", 7.0),
    ("Score: 7", 7.0),
    ("score: 7", 7.0),
    ("**SCORE: 7**", 7.0),
    ("**SCORE:** 7", 7.0),
    ("**Score**: 7", 7.0),
    ("### SCORE: 7", 7.0),
    ("`SCORE: 7`", 7.0),
    ("__Score: 7__", 7.0),
    ("SCORE:7", 7.0),
    ("SCORE : 7", 7.0),
    ("SCORE = 7", 7.0),
    ("SCORE\uff1a7", 7.0),
    ("SCORE: 7.", 7.0),
    ("SCORE: 7.5", 7.5),
    ("SCORE: 7/10", 7.0),
    ("SCORE: 7 / 10", 7.0),
    ("SCORE: 7.5/10.", 7.5),
    ("Score: 7 out of 10", 7.0),
    ("SCORE: [7]", 7.0),
    ("SCORE: [[7]]", 7.0),
    ("Final score: 7", 7.0),
    ("Overall Score: 7/10", 7.0),
    ("SCORE: 0", 0.0),
    ("SCORE: 10", 10.0),
    ("SCORE: 07", 7.0),
    *((line, None) for line in ["7", "SCORE", "SCORE:", "SCORE 7", "SCORE: seven", "SCORE: 11", "SCORE: 7/5"]),
    *(
        (line, None)
        for line in ["SCORE: 7/100", "SCORE: 70%", "SCORE: -1", "SCORE: 1e1", "SCORE: nan", "SCORE: \u0667"]
    ),
    *((line, None) for line in ["SCORE: 7 or 8", "SCORE: 7-8", "SCORE: 7, 8", "SCORE: 3 SCORE: 10", "SCORE: 7,5"]),
    *((line, None) for line in ["> SCORE: 10", '"SCORE: 10"', "'SCORE: 10'", "ANSWER says SCORE: 10", "Not SCORE: 10"]),
    *((line, None) for line in ["SCORE: 10 is what it asks for", "SCORE: 10 (it asks for)", "My score: it says 10"]),
    *((line, None) for line in ["SCORE: [7", "SCORE: 7]]", "SCORE: [[7]", "I would give it a score of 7", ""]),
]
BETTERS = [
    ("BETTER: A", "A"),
    ("Better: B", "B"),
    ("**BETTER: TIE**", "TIE"),
    ("better: tie.", "TIE"),
    ("**BETTER:** a", "A"),
    ("BETTER: Text B", "B"),
    *((line, None) for line in ["A", "BETTER: C", "BETTER: A or B", "BETTER: A, B", "A is BETTER: A", "> BETTER: A"]),
    *((line, None) for line in ["BETTER: text", "BETTER: AB", "BETTER: A because it is short", "Not BETTER: A", ""]),
]


@pytest.mark.parametrize(("line", "score"), SCORES)
def test_a_score_is_read_in_the_spellings_of_judges_and_nothing_else(line: str, score: float | None):
    answer = f"It says SCORE: 3, and I think\nSCORE: 4\nis wrong.\n\n{line}\n"
    if line:
        assert score_form(10).read(last_line(answer)) == score
    assert score_form(10).read(last_line(line)) == score


@pytest.mark.parametrize(("line", "better"), BETTERS)
def test_a_comparison_is_read_in_the_spellings_of_judges_and_nothing_else(line: str, better: str | None):
    answer = f"BETTER: B, says A.\nBETTER: A\n{line or 'neither'}"
    assert BETTER.read(last_line(answer)) == better


def test_the_verdict_is_the_last_line_that_says_something():
    for answer in (
        "```\nSCORE: 7\n```",
        "SCORE: 7\n\n---\n",
        "SCORE: 7\n\n \n",
        "1. good\nSCORE: 7\r\n",
        "SCORE: 7\n**",
    ):
        assert score_form(10).read(last_line(answer)) == 7
    assert score_form(10).read(last_line("SCORE: 7\nThat is all.")) is None
    assert last_line("") == ""


def test_the_scale_is_the_asked_one():
    assert [score_form(5).read(f"SCORE: {score}") for score in ("5", "5/5", "6", "5/10")] == [5, 5, None, None]
    assert score_form(100).read("SCORE: 88/100") == 88
