"""What the page of runs is given agrees with the runs' files, and no text of a run becomes markup."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from page_run import HOSTILE, STEPS, make_run, make_trajectory, metrics

from slimrl.base.folder_lock import folder_lock
from slimrl.observability.metrics import METRIC_NAMES
from slimrl.observability.page.conversations import GAP, MOST_IMAGE_BYTES, conversations
from slimrl.observability.page.document import page_data, write_page
from slimrl.observability.page.findings import RULES, findings
from slimrl.observability.page.packed import LEVELS, quantity
from slimrl.observability.page.panels import PANELS
from slimrl.observability.page.settings import differences, seed_families, setting_rows
from slimrl.observability.page.times import times
from slimrl.observability.run_files import read_runs, short_names
from slimrl.observability.run_state import state

DEBUGGING = Path(__file__).parents[2] / "docs" / "debugging.md"


class Page(HTMLParser):
    """The elements of a page, and its scripts by their ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict, str]] = []
        self.policy = ""
        self.in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        self.in_script = tag == "script"
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        if self.in_script:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)

    def part(self, kind: str, row: int):
        """The unpacked conversation (`c`) or tokens (`t`) of a row of the table."""
        return self.unpacked(kind + self.unpacked("data")["trajectories"]["columns"]["part"][row])

    def unpacked(self, name: str):
        (text,) = (text for attributes, text in self.scripts if attributes.get("id") == name)
        return json.loads(text) if name == "data" else json.loads(gzip.decompress(base64.b64decode(text)))


def numbers(packed: dict) -> np.ndarray:
    levels = np.frombuffer(base64.b64decode(packed["data"]), "<u2").astype(float)
    levels[levels == LEVELS + 1] = np.nan
    return packed["low"] + levels * (packed["high"] - packed["low"]) / LEVELS


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "seed_0" / "gspo")


@pytest.fixture
def page(run, tmp_path):
    write_page([run.path], tmp_path / "page.html")
    return Page((tmp_path / "page.html").read_text())


def test_the_page_has_every_value_of_the_metrics(page, run):
    curves = page.unpacked("data")["runs"][0]["curves"]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert curves["step"] == [1, 2, 3]
    assert {name: curves[name] for name in lines[0]} == {name: [line[name] for line in lines] for name in lines[0]}
    assert curves["policy/grad_norm"][1] is None


def test_texts_of_a_run_are_data_and_never_markup(page):
    assert page.tags.count("script") == 3 + 2 * 2 * 4 * STEPS + 1, "two scripts, the data, two parts each, the experts"
    assert {"img", "svg", "iframe", "b", "i"} & set(page.tags) == set()
    data = page.unpacked("data")
    assert data["trajectories"]["columns"]["group"][0] == f"group 0 {HOSTILE[2]}"
    conversation = page.part("c", 0)
    assert conversation["messages"][0]["content"] == HOSTILE[0]
    assert conversation["messages"][2]["content"] == HOSTILE[6]
    raw = next(text for attributes, text in page.scripts if attributes.get("id") == "data")
    assert raw.isascii()
    assert not set("<>&") & set(raw)


def test_the_policy_of_the_page_allows_its_own_scripts_alone(page):
    executed = [text for attributes, text in page.scripts if "type" not in attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed]
    directives = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "http" not in page.policy


def test_a_row_has_the_largest_gap_of_its_tokens_and_their_values_can_be_read_back(page):
    columns = page.unpacked("data")["trajectories"]["columns"]
    row = columns["id"].index("step_000002/00001/003")
    trajectory, found = make_trajectory(2, 1, 3, 60)
    (segment,) = trajectory.segments
    sampled_T = segment.loss_mask
    gap_S = found["trainer_logprobs"].astype(np.float32) - segment.rollout_logprobs[sampled_T].astype(np.float64)
    assert columns["gap"][row] == pytest.approx(np.abs(gap_S).max(), rel=1e-6)
    assert (columns["step"][row], columns["reward"][row], columns["advantage"][row]) == (2, 1.0, 0.5)
    assert (columns["version"][row], columns["errors"][row], columns["source"][row]) == (1, 3, "source <i>")
    (packed,) = page.part("t", row)
    assert packed["ids"] == segment.tokens.tolist()
    assert packed["mask"] == sampled_T.astype(int).tolist()
    shown = {title: numbers(one) for title, one in packed["quantities"].items()}
    np.testing.assert_allclose(shown[GAP][sampled_T], gap_S, atol=np.ptp(gap_S) / LEVELS)
    np.testing.assert_allclose(shown["importance ratio"][sampled_T], found["ratios"], atol=1e-5)
    assert np.isnan(shown["entropy"][~sampled_T]).all()


def test_a_packed_quantity_is_as_exact_as_its_levels_and_knows_what_is_unknown():
    values = [0.5, None, -3.0, float("nan"), 7.25]
    back = numbers(quantity(values))
    np.testing.assert_allclose(back[[0, 2, 4]], [0.5, -3.0, 7.25], atol=10.25 / LEVELS)
    assert np.isnan(back[[1, 3]]).all()
    np.testing.assert_array_equal(numbers(quantity([2.5, 2.5])), [2.5, 2.5])
    assert quantity([None, float("inf")]) is None


def test_a_page_that_may_hold_fewer_trajectories_takes_whole_groups_of_each_step(run):
    held = conversations(read_runs([run.path]), 18)
    assert held.found == 2 * 4 * STEPS
    # The shares are 18 / 3 = 6, then (18 - 4) / 2 = 7, then 18 - 8 = 10: one group of 4, one, and two.
    assert list(zip(held.columns["step"], held.columns["id"], strict=True)) == [
        (step, f"step_{step:06d}/{group:05d}/{member:03d}")
        for step, group in ((1, 0), (2, 0), (3, 0), (3, 1))
        for member in range(4)
    ]


def test_a_page_that_may_hold_fewer_trajectories_than_there_are_steps_takes_them_from_the_whole_run(run):
    held = conversations(read_runs([run.path]), 2)
    assert held.columns["step"] == [1, STEPS]


def test_a_number_that_json_has_not_is_shown_as_a_text(tmp_path):
    run = make_run(tmp_path / "run")
    call = '{"function": {"name": "f", "arguments": {"x": NaN, "y": [Infinity, 1.5]}}}'
    message = f'{{"role": "assistant", "content": "", "tool_calls": [{call}]}}'
    known = '"group_id": "g", "trajectory_id": "step_000001/00009/000", "status": "completed", "metadata": {}'
    run.sample_file(1).write_text(f'{{{known}, "messages": [{message}]}}\n')
    held = conversations(read_runs([run.path]), 1000)
    (packed, _) = held.parts[held.columns["id"].index("step_000001/00009/000")]
    shown = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert shown["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"x": "nan", "y": ["inf", 1.5]}


def test_readable_samples_and_evaluations_are_rows_without_tokens(tmp_path):
    run = make_run(tmp_path / "run")
    item = {
        "set": "heldout", "prompt_id": "p", "sample": 2, "status": "completed", "reward": 1.0, "rewards": {},
        "num_turns": 3, "num_sampled_tokens": 9, "turn_tokens": [3, 3, 3],
        "tool_calls": {"f": {"calls": 3, "errors": 2, "malformed": 1}}, "error": None, "messages": [],
    }  # fmt: skip
    run.eval_sample_file(0, "heldout").write_text(json.dumps(item) + "\n")
    known = {"group_id": "g", "trajectory_id": "step_000001/00000/000", "status": "completed"}
    other = {**known, "trajectory_id": "step_000001/00009/000", "messages": [], "metadata": {}}
    run.sample_file(1).write_text(json.dumps(known) + "\n" + json.dumps(other) + "\n")
    held = conversations(read_runs([run.path]), 1000)
    columns = held.columns
    assert len(held.parts) == 2 * 4 * STEPS + 2
    assert [columns[name][0] for name in ("set", "step", "group", "turns", "errors")] == ["heldout", 0, "p", 3, 2]
    assert held.parts[0][1] == "", "no tokens are known"
    assert columns["id"].count("step_000001/00000/000") == 1
    assert columns["group"][columns["id"].index("step_000001/00000/000")].startswith("group 0"), "the recorded one"
    assert "step_000001/00009/000" in columns["id"]


def test_images_of_a_readable_sample_are_in_its_conversation_as_long_as_they_fit(run):
    known = {"group_id": "g", "trajectory_id": "step_000001/00000/001", "images": {"0": "step_000001/0_0.png"}}
    known["images"]["1"] = "step_000001/0_1.png"
    run.sample_file(1).write_text(json.dumps(known) + "\n")
    folder = run.trajectories / "step_000001"
    folder.mkdir()
    (folder / "0_0.png").write_bytes(b"first")
    (folder / "0_1.png").write_bytes(b"x" * MOST_IMAGE_BYTES)
    held = conversations(read_runs([run.path]), 100)
    conversation = json.loads(gzip.decompress(base64.b64decode(held.parts[1][0])))
    assert conversation["images"] == {"0": base64.b64encode(b"first").decode()}
    assert conversation["messages"], "of the recorded one"


def test_every_rule_says_what_its_row_of_the_page_on_debugging_says():
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", DEBUGGING.read_text()).replace("`", "").lower()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for rule in RULES:
        section, metric = sections[rule.section.lower()], rule.signs[0].metric.lower()
        assert metric in section, (rule.section, metric)
        said = [*rule.cause.lower().split("; "), *rule.advice.lower().split("; ")]
        # Each line of the section is a row of a table, a point of a list or a paragraph.
        assert any(all(words in line for words in said) for line in section.splitlines()), (rule.section, metric, said)
        assert {sign.metric for sign in rule.signs} <= set(METRIC_NAMES)


def test_every_panel_draws_metrics_that_there_are():
    names = [name.replace("<", "").replace(">", "") for name in METRIC_NAMES]
    for panel in PANELS:
        for pattern in panel.metrics:
            assert any(re.fullmatch(pattern, name) for name in names), (panel.title, pattern)


def with_lines(run, *values):
    lines = [{"step": step, **value} for step, value in enumerate(values, 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_runs([run.path])[0]


def test_what_is_off_is_found_with_the_limits_of_the_recipe(run):
    assert [one["metric"] for one in findings(read_runs([run.path])[0])] == ["resync/replaced_engines"]
    dead = {"reward/mean": 0.0, "rollout/zero_variance_fraction": 1.0}
    assert findings(with_lines(run, dead, dead))[0]["section"] == "The reward stays at 0"
    assert findings(with_lines(run, {"mismatch/logprob_abs_mean": 6e-5}))[0]["says"] == "6e-05, above 5e-05"
    assert findings(with_lines(run, {"mismatch/logprob_abs_mean": 4e-5})) == []
    falls = [{"policy/entropy": 1.0}] * 5 + [{"policy/entropy": 0.1}] * 5
    assert findings(with_lines(run, *falls))[0]["anchor"] == "the-entropy-collapses"
    halves = [{"policy/entropy": 1.0}] * 5 + [{"policy/entropy": 0.5}] * 5
    assert findings(with_lines(run, *halves)) == []


def test_a_run_says_whether_it_runs_is_complete_or_failed_and_why(run):
    (read,) = read_runs([run.path])
    assert state(read)["word"] == "complete"
    (read,) = [with_lines(run, {"reward/mean": 0.1})]
    assert state(read)["word"] == "ended early"
    # Local times; the newest start is that of 2026-01-01 01:00 UTC.
    earlier = "2025-12-30 00:00:00,000 ERROR slimrl.cli.exit_codes: failed: an older cause\n"
    run.log_file("driver").write_text(earlier)
    assert state(read)["cause"] == ""
    error = "2026-01-03 00:00:00,000 ERROR slimrl.cli.exit_codes: failed: engine 0 ended\nwith exit code 1\n"
    run.log_file("driver").write_text(earlier + error + "2026-01-03 00:00:01,000 INFO slimrl.base: bye\n")
    assert (state(read)["word"], state(read)["cause"]) == ("failed", "engine 0 ended\nwith exit code 1")
    with folder_lock(run.path):
        assert state(read)["word"] == "running"
    run.requeue.write_text("1")
    assert state(read)["word"] == "preempted"


def test_phases_add_up_and_restarts_stand_before_the_first_step_that_began_after_them(run):
    made = times(read_runs([run.path])[0])
    assert made["phases"] == {
        "rollout": [2.0, 4.0, 6.0], "train": [1.0] * 3, "other": [0.5] * 3, "eval": [0.7] * 3
    }  # fmt: skip
    for place, step in enumerate(made["step"]):
        own = sum(values[place] for name, values in made["phases"].items() if name != "eval")
        assert own == metrics(step, 0)["time/step_s"]
    assert (made["restarts"], made["replaced"]) == ([2], [2])


def test_seeds_of_one_recipe_are_a_family_and_other_settings_make_another(tmp_path):
    made = [make_run(tmp_path / f"seed_{seed}" / "gspo", seed=seed) for seed in (0, 1, 2)]
    made[2].config.write_text(made[2].config.read_text().replace("clip_grad: 1.0", "clip_grad: 2.0"))
    runs = read_runs([run.path for run in made])
    assert [run.name for run in runs] == ["seed_0/gspo", "seed_1/gspo", "seed_2/gspo"]
    assert seed_families(runs) == [0, 0, 1]
    differing = {row["key"]: row["values"] for row in differences(runs)}
    assert differing["trainer.optimizer.clip_grad"] == ["1.0", "1.0", "2.0"]
    assert differing["seed"] == ["0", "1", "2"]


def test_a_setting_says_where_it_comes_from_and_what_it_would_be(run):
    rows = {row["key"]: row for row in setting_rows(read_runs([run.path])[0])}
    assert [rows[key]["kind"] for key in ("seed", "steps", "model.path", "trainer.optimizer.clip_grad")] == [
        "command line", "recipe", "base", "default"
    ]  # fmt: skip
    assert (rows["seed"]["value"], rows["seed"]["default"], rows["steps"]["default"]) == ("0", "0", None)


def test_names_are_short_and_differ_and_a_run_is_named_once(run):
    assert short_names([Path("/a/b/c"), Path("/a/d/c")]) == ["b/c", "d/c"]
    assert short_names([Path("/a/x/b/c"), Path("/a/y/b/c")]) == ["x/b/c", "y/b/c"]
    with pytest.raises(ValueError, match="named twice"):
        read_runs([run.path, run.path])


def test_a_line_of_ten_megabytes_is_in_the_page_once(tmp_path):
    run = make_run(tmp_path / "run", groups=1, members=1)
    long = {"group_id": "g", "trajectory_id": "long", "status": "completed", "metadata": {}}
    run.sample_file(1).write_text(json.dumps({**long, "messages": [{"role": "user", "content": "x<" * 5_000_000}]}))
    held = conversations(read_runs([run.path]), 100)
    text = json.loads(gzip.decompress(base64.b64decode(held.parts[1][0])))["messages"][0]["content"]
    assert text == "x<" * 5_000_000
    data = page_data(read_runs([run.path]), held, [], "")
    assert len(json.dumps(data)) < 100_000
