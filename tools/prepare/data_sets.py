"""How rows of published data sets become a problem and its answer.

GSM8K (openai/gsm8k): `question`, and `answer`, whose last line is `#### 1,234`.
DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k): `prompt`, one user message with an instruction around the problem, and
`reward_model.ground_truth`. Each problem comes about a hundred times. In slime's copy (zhuzilin/dapo-math-17k), where
each problem comes once: `prompt` with another instruction, and `label`.
MATH (EleutherAI/hendrycks_math, HuggingFaceH4/MATH-500): `problem`, and `solution`, which has the answer in its last
box; the second also has it as `answer`.
AIME (Maxwell-Jia/AIME_2024, HuggingFaceH4/aime_2024, math-ai/aime25, gneubig/aime-1983-2024): a problem and an answer
under names that differ, or a solution that ends with the boxed answer.
DeepScaleR (agentica-org/DeepScaleR-Preview-Dataset): `problem` and `answer`, which is LaTeX.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimrl.rewards.texts import boxed

NUMBER = re.compile(r"-?\d+(\.\d+)?")
_BARE_BOX = re.compile(r"\\boxed ([^{}$ ]+)(?=\$)")
"""A box of one thing without braces, as a few solutions of MATH have it"""
LARGEST_AIME = 999
"""Answers are integers from 0 to this."""

DAPO_BEFORE = re.compile(
    r"^Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"(\$Answer \(without quotes\)|\\boxed\{\$Answer\}) where \$Answer is the answer to the problem\."
)
DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'
"""The instruction around a problem, which asks for another form than a box alone."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    text: str
    answer: str


def gsm8k(row: dict[str, Any]) -> Problem:
    """Raises ValueError: a text is missing, or the answer's last line is no number after `####`."""
    answer = _text(row, "answer")
    _, mark, last = answer.rpartition("####")
    number = last.strip().replace(",", "").removeprefix("$")
    if not mark or not NUMBER.fullmatch(number):
        raise ValueError(f"answer ends with {answer[-30:]!r}, not with a number after ####")
    return Problem(text=_text(row, "question"), answer=number)


def dapo_math(row: dict[str, Any]) -> Problem:
    """Raises ValueError: the prompt is not one user message, or the answer is missing."""
    prompt, judged = row.get("prompt"), row.get("reward_model")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
            raise ValueError("prompt is not one user message")
        prompt = prompt[0].get("content")
    if judged is not None and not isinstance(judged, dict):
        raise ValueError("reward_model is no object")
    answer = _text(row, "label", "reward_model") if judged is None else _text(judged, "ground_truth")
    text = DAPO_BEFORE.sub("", _text({"prompt": prompt}, "prompt"), 1).removesuffix(DAPO_AFTER).strip()
    if not text:
        raise ValueError("prompt holds no problem beside the instruction")
    return Problem(text=text, answer=answer)


def math(row: dict[str, Any]) -> Problem:
    """Raises ValueError: a text is missing, or the solution has no answer in a box."""
    if row.get("answer") is not None:
        return Problem(text=_text(row, "problem"), answer=_text(row, "answer"))
    solution = _text(row, "solution")
    marked = _BARE_BOX.sub(r"\\boxed{\1}", solution.replace("\\fbox", "\\boxed"))
    if not (answer := (boxed(marked) or "").strip()):
        raise ValueError("the solution has no answer in a box")
    return Problem(text=_text(row, "problem"), answer=answer)


def aime(row: dict[str, Any]) -> Problem:
    """Raises ValueError: the problem is missing, or the answer is no integer of a contest."""
    columns = {name.lower(): value for name, value in row.items()}
    if columns.get("answer") is None:
        solution = _text(columns, "answer", "solution")
        answer = boxed(solution)
        if answer is None:
            raise ValueError("no answer, and the solution has none in a box")
    else:
        answer = _text(columns, "answer")
    answer = re.sub(r"\$|\^\\circ|\^\{\\circ\}", "", boxed(answer) or answer).strip().removesuffix(".0")
    if not answer.isdecimal() or int(answer) > LARGEST_AIME:
        raise ValueError(f"the answer {answer!r} is no integer from 0 to {LARGEST_AIME}")
    return Problem(text=_text(columns, "problem", "question"), answer=str(int(answer)))


def deepscaler(row: dict[str, Any]) -> Problem:
    """Raises ValueError: a text is missing."""
    return Problem(text=_text(row, "problem"), answer=_text(row, "answer"))


DATA_SETS: dict[str, Callable[[dict[str, Any]], Problem]] = {
    "gsm8k": gsm8k,
    "dapo-math": dapo_math,
    "math": math,
    "aime": aime,
    "deepscaler": deepscaler,
}
"""Name on the command line -> the problem of a row."""


def _text(row: dict[str, Any], *names: str) -> str:
    """The first of these columns that is there, a number as text.

    Raises:
        ValueError: there is none, or it is empty or no text.
    """
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None:
        raise ValueError(f"no {' or '.join(names)}; the row has {', '.join(map(str, row))}")
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise ValueError(f"{' or '.join(names)} is {value!r}")
    return str(value).strip()
