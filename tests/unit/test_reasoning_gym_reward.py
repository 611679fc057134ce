"""The reward of tasks of reasoning-gym against the library itself, scored in this process."""

import json
from functools import cache

import pytest
from slimrl_tools.prepare.reasoning_gym import REFUSED

from slimrl.base.answering_process import OutOfCpuTime, ProcessFailed
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.limited_processes import LimitedProcesses
from slimrl.rewards.reasoning_gym import ReasoningGym, any_answer

reasoning_gym = pytest.importorskip("reasoning_gym")
reasoning_gym_scorer = pytest.importorskip("slimrl.rewards.reasoning_gym_scorer")

TASKS = sorted(reasoning_gym.factory.DATASETS.keys() - REFUSED.keys())
SOLUTIONS = {
    "boxnet": None,  # the library finds none
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
    "rush_hour": None,
}
"""Tasks whose entries have no answer, and where a right one is found"""
WRONG = "surely no answer"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Scores in this process, as the processes do in theirs."""
    monkeypatch.setattr(LimitedProcesses, "ask", lambda self, request: reasoning_gym_scorer.answer(request))


@cache
def entry_of(task: str):
    return reasoning_gym.create_dataset(task, seed=5, size=2)[1]


def prompt_of(task: str, entry) -> Prompt:
    kept = json.loads(json.dumps(entry))
    return Prompt(prompt_id="p", messages=[], label=entry["answer"], metadata={"task": task, "entry": kept})


def said(text: str) -> Trajectory:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return Trajectory(
        group_id="p", trajectory_id="p/0", segments=[], status=Status.completed, messages=messages,
        metadata={"num_prompt_messages": 1},
    )  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_earns_what_the_library_gives_it(task):
    entry = entry_of(task)
    prompt, reward = prompt_of(task, entry), ReasoningGym(answer_in="text")
    reward.check_prompt(prompt)
    library = reasoning_gym.get_score_answer_fn(task)
    find = SOLUTIONS.get(task, lambda entry: entry["answer"])
    if find is not None:
        right = find(entry)
        assert reward(said(right), prompt) == library(answer=right.strip(), entry=entry) == 1
    wrong = reward(said(WRONG), prompt)
    assert wrong <= 0.1
    if task == "prime_factorization":  # where the library raises
        assert wrong == 0
    elif task in reasoning_gym_scorer.SYMBOLIC:  # where it is not asked
        assert wrong == 0 <= library(answer=WRONG, entry=entry) <= 0.01
    else:
        assert wrong == pytest.approx(library(answer=WRONG, entry=entry))
    assert ReasoningGym(answer_in="text", credit="all")(said(WRONG), prompt) == 0.0


def test_partial_credit_is_the_library_s_and_can_be_refused():
    entry = {"answer": "2 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 3", "metadata": {}}
    prompt = prompt_of("prime_factorization", entry)
    assert ReasoningGym()(said("3 \N{MULTIPLICATION SIGN} 4"), prompt) == 0.5
    assert ReasoningGym(credit="all")(said("3 \N{MULTIPLICATION SIGN} 4"), prompt) == 0.0
    assert ReasoningGym(credit="all")(said("3 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 2"), prompt) == 1.0


@pytest.mark.parametrize("task", sorted(reasoning_gym_scorer.EVALUATING | reasoning_gym_scorer.SYMBOLIC))
def test_an_answer_is_not_run_as_python(task, tmp_path):
    entry = entry_of(task)
    prompt, made = prompt_of(task, entry), tmp_path / "made"
    for cheat in (
        'entry["answer"]',
        f"open({str(made)!r}, 'w')",
        f"__import__('pathlib').Path({str(made)!r}).touch()",
        "exec(chr(49))",
        "(1).__class__",
    ):
        assert ReasoningGym(answer_in="text")(said(cheat), prompt) <= 0.05
    assert not made.exists()


def test_a_list_in_python_s_form_earns_the_little_that_the_library_gives_it():
    entry = entry_of("spiral_matrix")
    listed = str([int(number) for number in entry["answer"].split()])
    earned = ReasoningGym(answer_in="text")(said(listed), prompt_of("spiral_matrix", entry))
    assert earned == 0.1


def test_formulas_of_mathematics_are_no_code():
    entry = entry_of("simple_integration")
    assert ReasoningGym(answer_in="text")(said(entry["answer"]), prompt_of("simple_integration", entry)) == 1
    assert reasoning_gym_scorer._is_formula("-3*x**2/2 + sin(x)*exp(-x) + C")
    assert not reasoning_gym_scorer._is_formula("getattr(x, y)")


@pytest.mark.parametrize(
    ("task", "letters", "plain"),
    [("countdown", "(7 + 2*2)*pi/pi", "(7 + 2*2)"), ("puzzle24", "2*2*2*3*exp(0)", "2*2*2*3")],
)
def test_a_sum_of_given_numbers_has_no_others_by_a_letter(task, letters, plain):
    entry = {"answer": plain, "metadata": {"numbers": [7, 2, 2], "target": 11}}
    prompt = prompt_of(task, entry)
    assert ReasoningGym(answer_in="text")(said(plain), prompt) == 1
    assert ReasoningGym(answer_in="text")(said(letters), prompt) == 0


@pytest.mark.parametrize(
    ("text", "label", "answer"),
    [
        ("So \\boxed{7}, or \\boxed{8}. Answer: 9", "8", "8"),
        ("<answer> 3 x </answer> and \\boxed{}", "3", "3 x"),
        ("First Answer: 4\nthen\n**Answer:** 5.", "5", "5"),
        ("The answer is: yes, it is.\nBye", "yes", "yes, it is"),
        ("Answer:\n\n7", "7", "7"),
        ("3 + 4 is 7\nand 1,234.50 it is.\n", "7", "1,234.50"),
        ("5-3", "2", "3"),
        ("It is -3", "-3", "-3"),
        ("no number", "7", ""),
        ("Long\nago\n`abc`.", "abc", "abc"),
        ("The grid:\n1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
        ("Answer:\n1 2\n3 4\nas asked", "1 2\n3 4", "1 2\n3 4"),
        ("A+1 B-2", None, "A+1 B-2"),
        ("He came.", "He came.", "He came."),
        ("", "7", ""),
        ("Answer: 5, which is right", "5", "5"),
        ("3, 4,5 and 1,2345", "5", "2345"),
        ("Answer: .5", "0.5", ".5"),
        ("It is -.5", "-0.5", "-.5"),
        ("version 1.2.3", "3", "3"),
        ("Answer: \N{MINUS SIGN}5", "-5", "-5"),
        ("Answer: _ Q\nQ _", "_ Q\nQ _", "_ Q\nQ _"),
        ("Here:\n1 < 2\n     \n2   1\n", "1 < 2\n     \n2   1", "1 < 2\n     \n2   1"),
        ("Answer: 1 < 2\n     \n2   1\nas asked", "1 < 2\n     \n2   1", "1 < 2\n     \n2   1"),
        ("Answer:\n1 2\n\n3 4", "1 2\n3 4", "1 2\n3 4"),
    ],
)  # fmt: skip
def test_one_answer_is_found_in_a_free_text(text, label, answer):
    assert any_answer(text, label) == answer


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_is_found_in_each_form_of_a_text(task):
    if task in SOLUTIONS:
        pytest.skip("its entries have no answer")
    entry = entry_of(task)
    right = entry["answer"]
    forms = [
        "{}",
        "Answer: {}",
        "Answer:\n{}",
        "**Answer:** {}",
        "So.\nAnswer: {}\nThat is it.",
        "So:\n\n{}",
        "```\n{}\n```",
    ]
    for form in forms if right.endswith(".") else [*forms, "{}."]:
        found = any_answer(form.format(right), right)
        # The scorer of fractions takes one in LaTeX's dollars and one without.
        assert found == right.strip().strip("$" if task == "fraction_simplification" else ""), form
        kept = json.loads(json.dumps(entry))
        assert reasoning_gym_scorer.answer([task, kept, found]) == 1


def test_a_list_of_guesses_is_one_answer():
    prompt = prompt_of("chain_sum", {"answer": "7", "metadata": {}})
    assert ReasoningGym()(said("7\n8\n9"), prompt) < 0.1
    assert ReasoningGym()(said("It is 7."), prompt) == 1
    assert ReasoningGym(answer_in="boxed")(said("It is 7."), prompt) == 0
    assert ReasoningGym(answer_in="boxed")(said("It is \\boxed{7}."), prompt) == 1


def test_a_scorer_that_is_too_slow_earns_nothing_and_is_counted(monkeypatch):
    def slow(self, request):
        raise OutOfCpuTime("too slow")

    monkeypatch.setattr(LimitedProcesses, "ask", slow)
    trajectory = said("7")
    assert ReasoningGym()(trajectory, prompt_of("chain_sum", {"answer": "7", "metadata": {}})) == 0
    assert trajectory.metadata["reward_timed_out"] is True


def test_what_is_no_score_fails(monkeypatch):
    prompt = prompt_of("chain_sum", {"answer": "7", "metadata": {}})
    for answer in ("ValueError: no", 1.5, float("nan"), None):
        monkeypatch.setattr(LimitedProcesses, "ask", lambda self, request, answer=answer: answer)
        with pytest.raises(ProcessFailed, match="the scorer of chain_sum gave no number from 0 to 1"):
            ReasoningGym()(said("7"), prompt)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"task": "gcd"},
        {"task": 3, "entry": {"answer": "1", "metadata": {}}},
        {"task": "gcd", "entry": {"answer": "1"}},
    ],
)
def test_a_prompt_of_another_kind_is_refused(metadata):
    with pytest.raises(ValueError, match="slimrl-tools prepare reasoning-gym"):
        ReasoningGym().check_prompt(Prompt(prompt_id="p", messages=[], label="1", metadata=metadata))


def test_an_entry_that_its_own_answer_does_not_solve_is_refused():
    broken = {"answer": "1 2", "metadata": {"output": [[3]]}}
    with pytest.raises(ValueError, match="its own answer earns 0"):
        ReasoningGym().check_prompt(prompt_of("rearc", broken))


def test_wrong_settings_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="credit: 'some' is neither fraction nor all"):
        ReasoningGym(credit="some")
    with pytest.raises(ValueError, match="answer_in: 'boxd'"):
        ReasoningGym(answer_in="boxd")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package reasoning-gym\. Install it with: .*'\.\[reasoning\]'"):
        ReasoningGym()


def test_the_data_set_of_a_task_is_made_once(monkeypatch):
    made, real = [], reasoning_gym.get_score_answer_fn
    monkeypatch.setattr(reasoning_gym, "get_score_answer_fn", lambda task: (made.append(task), real(task))[1])
    reasoning_gym_scorer._scorer.cache_clear()
    for _ in range(3):
        for task in ("gcd", "lcm"):
            assert reasoning_gym_scorer.answer([task, entry_of(task), entry_of(task)["answer"]]) == 1
    assert made == ["gcd", "lcm"]
