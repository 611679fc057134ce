"""Figures of evaluations against enumerations and closed forms, their files, and what is refused."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from slimrl.config.schema.data import EvalConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.evaluation.answer_rows import answer_of, answer_rows
from slimrl.evaluation.comparison import compare
from slimrl.evaluation.estimates import eval_metrics, intervals, pass_at, prompt_scores
from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.item import Item, item_keys, item_of, to_line
from slimrl.evaluation.items import Items, read_items
from slimrl.evaluation.record import checkpoint_files, describe, open_record
from slimrl.evaluation.result import ToolRow, TurnRow, set_result
from slimrl.evaluation.tables import print_answers, print_comparison, print_results
from slimrl.observability.metrics import is_metric


def item(prompt: str, sample: int, reward: float = 1.0, status=Status.completed, turns=(5,), tools=None, name="held"):
    return Item(
        set=name, prompt_id=prompt, sample=sample, status=status, reward=reward, rewards={}, num_turns=len(turns),
        num_sampled_tokens=sum(turns), turn_tokens=list(turns), tool_calls=tools or {}, error=None,
        messages=[{"role": "user", "content": "größer?\n"}],
    )  # fmt: skip


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_fraction_of_all_choices_of_k_samples_with_one_that_passes(num_samples: int):
    for num_passed in range(num_samples + 1):
        passes = [sample < num_passed for sample in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = [any(chosen) for chosen in combinations(passes, k)]
            assert pass_at(num_samples, num_passed, k) == pytest.approx(sum(choices) / len(choices), abs=1e-15)


def test_scores_are_of_prompts_and_their_means_are_metrics():
    settings = EvalConfig(samples_per_prompt=2, pass_at=[1, 2], pass_reward=0.5)
    items = [item("a", 0, 1.0), item("a", 1, 0.0), item("b", 0, 0.0, Status.failed), item("b", 1, 0.0)]
    scores = {name: values.tolist() for name, values in prompt_scores(items, settings).items()}
    assert scores == {
        "reward_mean": [0.5, 0.0], "accuracy": [0.5, 0.0], "pass_at_1": [0.5, 0.0], "pass_at_2": [1.0, 0.0],
    }  # fmt: skip
    metrics = eval_metrics(items, settings)
    assert metrics == {
        "eval/held/reward_mean": 0.25, "eval/held/accuracy": 0.25, "eval/held/pass_at_1": 0.25,
        "eval/held/pass_at_2": 0.5,
        # The prompts' means are 0.5 and 0: a deviation of 0.25 * sqrt(2) over sqrt(2); of pass@2 they are 1 and 0.
        "eval/held/stderr/reward_mean": 0.25, "eval/held/stderr/accuracy": 0.25,
        "eval/held/stderr/pass_at_1": 0.25, "eval/held/stderr/pass_at_2": 0.5,
    }  # fmt: skip
    assert all(map(is_metric, metrics))
    assert not is_metric("eval/held/pass_at_0")
    # With other rewards than 0 and 1 there is no accuracy, and half a point is enough to pass.
    other = prompt_scores([*items[:3], item("b", 1, 0.5)], settings)
    assert other["pass_at_2"].tolist() == [1.0, 1.0]
    assert "accuracy" not in other
    # A trajectory that failed never passes, whatever its 0 is compared with.
    none = prompt_scores(items, replace(settings, pass_reward=-1.0))
    assert none["pass_at_1"].tolist() == [1.0, 0.5]


def test_several_parts_of_the_reward_have_means_of_their_own():
    def of_parts(prompt, sample, status=Status.completed, **rewards):
        return replace(item(prompt, sample, sum(rewards.values()), status), rewards=rewards)

    settings = EvalConfig(samples_per_prompt=2)
    items = [of_parts("a", 0, right=1.0, exact=0.5), of_parts("a", 1, right=1.0, exact=0.0),
             of_parts("b", 0, Status.failed), of_parts("b", 1, right=1.0, exact=1.0)]  # fmt: skip
    scores = prompt_scores(items, settings)
    assert scores["parts/right"].tolist() == [1.0, 0.5]
    assert scores["parts/exact"].tolist() == [0.25, 0.5]
    metrics = eval_metrics(items, settings)
    assert metrics["eval/held/parts/exact"] == 0.375
    assert all(map(is_metric, metrics))
    # A single part is the reward.
    alone = prompt_scores([of_parts("a", 0, right=1.0), of_parts("a", 1, right=0.0)], settings)
    assert alone.keys() == {"reward_mean", "accuracy"}


def test_the_interval_of_many_prompts_is_that_of_the_normal_distribution():
    values_P = np.random.default_rng(1).exponential(size=2000)
    low, high = intervals({"x": values_P}, seed=3)["x"]
    half = 1.959964 * values_P.std() / math.sqrt(len(values_P))
    assert low == pytest.approx(values_P.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(values_P.mean() + half, abs=0.06 * half)


def test_the_interval_of_few_prompts_is_that_of_all_their_resamples():
    """If c of n prompts pass, the mean of a resample is binomial over n: its quantiles are exact."""
    n, c = 12, 5
    masses = [math.comb(n, x) * (c / n) ** x * (1 - c / n) ** (n - x) for x in range(n + 1)]
    expected = tuple(int(np.searchsorted(np.cumsum(masses), tail)) / n for tail in (0.025, 0.975))
    values_P = np.array([1.0] * c + [0.0] * (n - c))
    both = intervals({"x": values_P, "y": 2 * values_P}, seed=3)
    assert both["x"] == pytest.approx(expected)
    # The same resamples for each measure, and the same for the same seed.
    assert both["y"] == pytest.approx((2 * expected[0], 2 * expected[1]))
    assert intervals({"x": values_P}, seed=3)["x"] == both["x"]


def test_the_interval_holds_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(150):
        low, high = intervals({"x": (rng.random(60) < 0.4).astype(float)}, seed=trial)["x"]
        held += low <= 0.4 <= high
    # Binomial: 142.5 +- 2.7; three standard deviations and what percentiles of 60 prompts lack.
    assert 130 <= held <= 150


def segment(turns: list[int], sampled: list[bool]) -> Segment:
    length = len(turns)
    return Segment(
        tokens=np.zeros(length, np.int32),
        loss_mask=np.array(sampled),
        rollout_logprobs=np.zeros(length, np.float32),
        weight_versions=np.zeros(length, np.int32),
        turn_ids=np.array(turns, np.int16),
    )


def test_an_item_has_the_sampled_tokens_of_each_turn_and_a_failed_one_no_reward():
    trajectory = Trajectory(
        group_id="p",
        trajectory_id="t",
        segments=[
            segment([-1, 0, 0, 0, 1], [False, True, True, False, True]),
            segment([-1, 2, 2], [False, True, True]),
        ],
        status=Status.truncated,
        reward=0.75,
        rewards={"answer": 0.5, "style": 0.25},
        metadata={"num_turns": 4, "tool_calls": {"f": {"calls": 1, "errors": 0, "malformed": 0}}, "error": "late"},
    )
    made = item_of(trajectory, ("held", "p", 3))
    # The fourth turn ended before its first token; the tool's answer in the first one was not sampled.
    assert (made.num_turns, made.turn_tokens, made.num_sampled_tokens) == (4, [2, 1, 2, 0], 5)
    assert (made.key, made.reward, made.rewards) == (("held", "p", 3), 0.75, {"answer": 0.5, "style": 0.25})
    assert (made.tool_calls, made.error) == ({"f": {"calls": 1, "errors": 0, "malformed": 0}}, "late")
    failed = item_of(replace(trajectory, status=Status.failed, reward=math.nan), ("held", "p", 3))
    assert (failed.reward, failed.rewards, failed.broke) == (0.0, {}, True)


def test_a_result_counts_turns_and_tools_by_name():
    good, bad = {"calls": 2, "errors": 0, "malformed": 0}, {"calls": 3, "errors": 2, "malformed": 1}
    items = [
        item("a", 0, 1.0, turns=(10, 4), tools={"calculator": good}),
        item("a", 1, 0.0, Status.truncated, turns=(20,)),
        item("b", 0, 0.5, turns=(30, 6, 2), tools={"calculator": bad, "search": good}),
        item("b", 1, 0.0, Status.failed, turns=(8, 2)),
    ]
    result = set_result(items, EvalConfig(samples_per_prompt=2), seed=0)
    assert (result.num_prompts, result.samples_per_prompt, result.means) == (2, 2, {"reward_mean": 0.375})
    assert (result.turns_mean, result.tool_calls_mean, result.tokens_mean) == (2.0, 7 / 4, 82 / 4)
    assert (result.truncated_fraction, result.aborted_fraction, result.failed_fraction) == (0.25, 0.0, 0.25)
    assert result.turns == [
        TurnRow(turn=1, reached=4, ended=1, reward_mean=0.0, tokens_mean=17.0),
        TurnRow(turn=2, reached=3, ended=2, reward_mean=0.5, tokens_mean=4.0),
        TurnRow(turn=3, reached=1, ended=1, reward_mean=0.5, tokens_mean=2.0),
    ]
    assert result.tools == {
        "calculator": ToolRow(calls=5, errors=2, malformed=1),
        "search": ToolRow(calls=2, errors=0, malformed=0),
    }
    assert result.to_json()["reward_mean"] == 0.375


def test_a_file_that_ends_in_the_middle_of_a_line_goes_on_after_its_last_whole_one(tmp_path: Path):
    path = tmp_path / "items.jsonl"
    lines = [to_line(item("a", sample, sample / 3)) for sample in range(3)]
    path.write_bytes("".join(lines).encode()[:-20])
    with Items(path) as items:
        keys = item_keys("held", [Prompt(prompt_id="a", messages=[], label=0)], 3)
        assert items.missing(keys) == [("held", "a", 2)]
        assert path.read_text() == lines[0] + lines[1]
        items.add(item("a", 2, 2 / 3))
        assert path.read_text() == "".join(lines)
        assert items.of(keys) == [item("a", sample, sample / 3) for sample in range(3)]


def test_what_failed_or_was_aborted_is_tried_again_and_the_file_ends_in_the_order_of_its_prompts(tmp_path: Path):
    path = tmp_path / "items.jsonl"
    keys = [("held", name, 0) for name in "abcd"]
    with Items(path) as items:
        for name, status in {
            "d": Status.completed,
            "b": Status.failed,
            "a": Status.aborted,
            "c": Status.truncated,
        }.items():
            items.add(item(name, 0, status=status))
        items.write_in_order(keys)
    assert [one.prompt_id for one in read_items(path)] == ["a", "b", "c", "d"]
    with Items(path) as items:
        assert items.missing(keys) == [("held", "a", 0), ("held", "b", 0)]


def test_another_broken_line_is_named(tmp_path: Path):
    path = tmp_path / "items.jsonl"
    for broken in ('{"set": "held"}\n', "{\n", to_line(item("a", 0)).replace('"reward": 1.0', '"reward": NaN')):
        path.write_text(to_line(item("a", 0)) + broken + to_line(item("b", 0)))
        with pytest.raises(ValueError, match=r"items\.jsonl:2: not an item of an evaluation: "):
            Items(path)


PROMPTS = [Prompt(prompt_id=name, messages=[{"role": "user", "content": name}], label=1) for name in "abc"]
SETTINGS = {
    "seed": 5,
    "steps": 3,
    "run": {"name": "x"},
    "eval": {"samples_per_prompt": 1, "pass_at": [1], "pass_reward": 1.0, "every_steps": 0},
    "reward": {"function": "a:b", "group_filters": []},
    "rollout": {"eval_sampling": {"temperature": 0.0}, "num_engines": 1},
    "trainer": {"num_ranks": 8},
}


def changed(section: str, **values) -> dict:
    return {**SETTINGS, section: {**SETTINGS[section], **values}}


def record_of(settings=SETTINGS, checksums=None, prompts=PROMPTS) -> dict:
    return describe(settings, Path("model"), checksums or {"m.safetensors": "12"}, {"held": prompts})


def test_an_evaluation_goes_on_with_settings_that_change_no_item(tmp_path: Path):
    path = tmp_path / "evaluation.json"
    open_record(path, record_of())
    for settings in (
        changed("run", name="y"), changed("trainer", num_ranks=4), changed("rollout", num_engines=4),
        changed("reward", alarm_steps=5, retries=2, startup_timeout_s=9.0),
        changed("eval", pass_at=[], every_steps=7), {**SETTINGS, "steps": 9},
    ):  # fmt: skip
        open_record(path, record_of(settings))
    assert json.loads(path.read_text())["pass_at"] == [1]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (record_of({**SETTINGS, "seed": 6}), "  seed: 5 -> 6\n"),
        (record_of(changed("eval", samples_per_prompt=4)), "  eval.samples_per_prompt: 1 -> 4\n"),
        (record_of(changed("rollout", eval_sampling={"temperature": 0.5})),
         "  rollout.eval_sampling.temperature: 0.0 -> 0.5\n"),
        (record_of(checksums={"m.safetensors": "34"}),
         "  --checkpoint: model -> model, which differ in m.safetensors\n"),
        (record_of(prompts=PROMPTS[:2]), "  data.eval.held: other prompts (3 -> 2)\n"),
        (record_of(prompts=[*PROMPTS[:2], replace(PROMPTS[2], label=2)]), "  data.eval.held: other prompts (3 -> 3)\n"),
    ],
)  # fmt: skip
def test_another_evaluation_does_not_go_on_in_the_same_folder(tmp_path: Path, other: dict, said: str):
    path = tmp_path / "evaluation.json"
    open_record(path, record_of())
    before = path.read_text()
    with pytest.raises(ValueError, match="is of another evaluation") as raised:
        open_record(path, other)
    assert str(raised.value) == (
        f"{path} is of another evaluation:\n{said}"
        f"Evaluate as there to continue it, or give another --out than {tmp_path}."
    )
    assert path.read_text() == before


def test_a_checkpoint_is_known_by_the_files_that_make_the_model(tmp_path: Path):
    for name in ("model.safetensors", "config.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "more.json").mkdir()
    assert checkpoint_files(tmp_path) == ["chat_template.jinja", "config.json", "model.safetensors"]


def evaluation(folder: Path, rewards: dict[str, list[float]], record=None) -> EvalFolder:
    """A complete one, with the rewards of each prompt's samples."""
    folder.mkdir()
    open_record(EvalFolder(folder).record, record or record_of())
    lines = [to_line(item(name, s, reward)) for name, given in rewards.items() for s, reward in enumerate(given)]
    EvalFolder(folder).items.write_text("".join(lines))
    EvalFolder(folder).summary.write_text("{}")
    return EvalFolder(folder)


def test_two_evaluations_are_compared_prompt_by_prompt_in_whatever_order(tmp_path: Path):
    a = evaluation(tmp_path / "a", {"a": [0.0, 1.0], "b": [0.25, 0.25], "c": [1.0, 1.0]})
    b = evaluation(tmp_path / "b", {"c": [0.5], "a": [1.0], "b": [0.25]})
    (held,) = compare(a, b)
    pair = held.measures["reward_mean"]
    assert (held.name, held.num_prompts) == ("held", 3)
    assert (pair.a, pair.b, pair.difference) == pytest.approx((1.75 / 3, 1.75 / 3, 0.0))
    assert (pair.better, pair.worse) == (1, 1)
    # The gaps are 1/2, 0 and -1/2: with three draws the 27 resamples have means from -1/2 to 1/2, the ends 1/27 each.
    assert pair.interval == pytest.approx((-0.5, 0.5))
    (same,) = compare(a, a)
    assert {(one.difference, one.interval, one.better, one.worse) for one in same.measures.values()} == {
        (0.0, (0.0, 0.0), 0, 0)
    }
    # pass@1 with 1.0 needed: 1/2, 0, 1 against 1, 0, 0.
    assert held.measures["pass_at_1"].difference == pytest.approx(-0.5 / 3)


def test_what_is_equally_hard_for_both_cancels(tmp_path: Path):
    """The interval of a paired difference is that of its own standard deviation, and not that of two means."""
    rng = np.random.default_rng(2)
    base, gain = rng.random(400), 0.05 * rng.random(400)
    names = [f"p{i}" for i in range(400)]
    prompts = [Prompt(prompt_id=name, messages=[], label=0) for name in names]
    a = evaluation(
        tmp_path / "a", {n: [float(x)] for n, x in zip(names, base, strict=True)}, record_of(prompts=prompts)
    )
    b = evaluation(
        tmp_path / "b", {n: [float(x)] for n, x in zip(names, base + gain, strict=True)}, record_of(prompts=prompts)
    )
    pair = compare(a, b)[0].measures["reward_mean"]
    half = 1.959964 * gain.std() / math.sqrt(400)
    assert pair.interval == pytest.approx((gain.mean() - half, gain.mean() + half), abs=0.08 * half)
    assert (pair.better, pair.worse) == (400, 0)


def test_sets_are_compared_apart_and_together_with_the_measures_that_all_have(tmp_path: Path):
    record = describe(SETTINGS, Path("m"), {}, {"held": PROMPTS, "other": PROMPTS})
    folders = []
    for name, held, other in (("a", [0.0, 1.0, 0.0], [0.5, 0.0, 0.25]), ("b", [1.0, 1.0, 1.0], [0.5, 0.75, 0.0])):
        folder = evaluation(tmp_path / name, dict(zip("abc", ([reward] for reward in held), strict=True)), record)
        others = [replace(item(prompt, 0, reward), set="other") for prompt, reward in zip("cab", other, strict=True)]
        with folder.items.open("a") as lines:
            lines.writelines(map(to_line, others))
        folders.append(folder)
    held, other, together = compare(*folders)
    assert [(one.name, one.num_prompts) for one in (held, other, together)] == [
        ("held", 3), ("other", 3), ("all sets", 6)
    ]  # fmt: skip
    assert "accuracy" in held.measures
    assert "accuracy" not in together.measures
    pair = together.measures["reward_mean"]
    assert (pair.a, pair.b) == pytest.approx((1.75 / 6, 4.25 / 6))
    assert (pair.better, pair.worse) == (3, 1)


def test_what_cannot_be_paired_is_refused(tmp_path: Path):
    rewards = {name: [1.0] for name in "abc"}
    a = evaluation(tmp_path / "a", rewards)
    refused = {
        "prompts": ({name: [1.0] for name in "abd"}, record_of(), "2 prompts of held are in one alone, such as c"),
        "texts": (rewards, record_of(prompts=[*PROMPTS[:2], replace(PROMPTS[2], label=2)]), "same ids and other texts"),
        "reward": (rewards, record_of(changed("reward", function="a:c")), "other rewards.*reward.function: a:b -> a:c"),
        "passes": (rewards, record_of(changed("eval", pass_reward=0.5)), "another eval.pass_reward: 1 -> 0.5"),
        "sets": (rewards, describe(SETTINGS, Path("m"), {}, {"other": PROMPTS}), "no set in common: held -> other"),
    }  # fmt: skip
    for name, (given, record, said) in refused.items():
        with pytest.raises(ValueError, match=said):
            compare(a, evaluation(tmp_path / name, given, record))
    with pytest.raises(ValueError, match=r"nowhere: not an evaluation; give the --out"):
        compare(a, EvalFolder(tmp_path / "nowhere"))
    a.summary.unlink()
    with pytest.raises(ValueError, match=r"a: the evaluation is not complete"):
        compare(a, a)


def test_tables_name_a_set_once_and_the_accuracy_stands_for_the_mean_reward(capsys, tmp_path: Path):
    items = [item("a", 0, turns=(4, 4), tools={"add": {"calls": 7, "errors": 1, "malformed": 0}}), item("b", 0, 0.0)]
    print_results([set_result(items, EvalConfig(pass_at=[1]), seed=0)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["held", "2", "1", "accuracy", "0.500", "0.000", "to", "1.000"] in lines
    assert ["pass@1", "0.500", "0.000", "to", "1.000"] in lines
    assert ["held", "2", "1", "1", "1.000", "4.0"] not in lines
    assert ["held", "1", "2", "1", "0.000", "4.5"] in lines
    assert ["2", "1", "1", "1.000", "4.0"] in lines
    assert ["held", "add", "7", "1", "0"] in lines
    print_comparison(
        compare(
            evaluation(tmp_path / "a", {n: [0.0] for n in "abc"}), evaluation(tmp_path / "b", {n: [1.0] for n in "abc"})
        )
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["held", "3", "accuracy", "0.000", "1.000", "+1.000", "+1.000", "to", "+1.000", "3", "0"] in lines


def said(name: str, *texts: str, status=Status.completed, reward=1.0):
    roles = ("system", "user", "assistant", "tool", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return replace(item(name, 0, reward, status), messages=messages)


def test_first_questions_are_shown_with_both_last_answers_and_their_rewards(capsys, tmp_path: Path):
    before = [
        said("a", "Be brief.", "2 + 3 =", "I add\nthem, [b]and", status=Status.truncated, reward=0.0),
        said("b", "Be brief.", "1 + 1 =", "call", "2", "It is 2."),
        said("c", "Be brief.", "4 + 4 =", "8"),
    ]
    after = [said("b", "Be brief.", "1 + 1 =", "2"), said("c", "Be brief."), said("a", "Be brief.", "2 + 3 =", "5")]
    folders = [evaluation(tmp_path / name, {"x": [0.0]}) for name in ("before", "after")]
    for folder, items in zip(folders, (before, after), strict=True):
        # A second sample is of no interest here.
        folder.items.write_text("".join(to_line(one) + to_line(replace(one, sample=1, messages=[])) for one in items))
    print_answers(answer_rows(*folders, 2))
    lines = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["set", "question", "answer in A", "reward", "answer in B", "reward"]
    assert lines[2:4] == [
        ["held", "2 + 3 =", "I add them, [b]and ...", "0", "5", "1"],
        ["1 + 1 =", "It is 2.", "1", "2", "1"],
    ]
    (_, _, silent) = answer_rows(*folders, 5)
    assert (answer_of(silent.a), answer_of(silent.b)) == ("8", "")
