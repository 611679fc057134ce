"""`slimrl eval`: what it starts, writes and refuses; the parts are stand-ins, items and files are real."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipe_problems import recipe_problems
from typer.testing import CliRunner

from slimrl import cli
from slimrl.config.schema.agent import RoleConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.evaluation import comparison
from slimrl.evaluation.item import Item, item_keys
from slimrl.runtime import evaluation

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
PROMPTS = [Prompt(prompt_id=str(i), messages=[], label=None) for i in range(3)]


class Parts:
    """Engines and stage at once."""

    def __init__(self) -> None:
        self.recipe = Recipe()
        self.sampled: list[tuple] = []
        self.starts: list[dict] = []
        self.prepared: tuple = ()
        self.ends_after: int | None = None
        self.loaded: list[tuple] = []

    def evaluate(self, name, prompts, *, label, items):
        assert label == "eval"
        keys = item_keys(name, prompts, self.recipe.eval.samples_per_prompt)
        for key in items.missing(keys):
            if len(self.sampled) == self.ends_after:
                raise KeyboardInterrupt
            self.sampled.append(key)
            items.add(
                Item(
                    set=name, prompt_id=key[1], sample=key[2], status=Status.completed, reward=float(key[1] == "1"),
                    rewards={}, num_turns=1, num_sampled_tokens=2, turn_tokens=[2], tool_calls={}, error=None,
                    messages=[],
                )
            )  # fmt: skip
        return items.of(keys)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    made = Parts()
    made.recipe.run.dir = str(tmp_path / "runs")
    task = SimpleNamespace(eval_sets={"one": PROMPTS[:2], "two": PROMPTS}, notes=[])

    def prepare(path, overrides, command, progress, read, **more):
        made.prepared = (list(overrides), command, read.keywords, more)
        return SimpleNamespace(recipe=made.recipe), task

    @contextmanager
    def started(recipe, folder, progress, **how):
        made.starts.append(how)
        past = SimpleNamespace(load_checkpoint=lambda *given: made.loaded.append(given))
        yield SimpleNamespace(engines="engines", past=past if how["with_past"] else None)

    @contextmanager
    def rollout_stage(loaded, task, processes, progress):
        yield made

    def resolved(loaded):
        settings = vars(loaded.recipe.eval)
        return {"seed": loaded.recipe.seed, "eval": dict(settings), "reward": {"function": "a:b"}}

    for name, value in {
        "prepare": prepare, "started": started, "rollout_stage": rollout_stage, "resolved_dict": resolved,
        "logs_of_command": lambda *_: "logs", "refuse_another_model": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(evaluation, name, value)
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def evaluate(
    checkpoint: Path,
    out: Path | None = None,
    json_file: Path | None = None,
    *overrides: str,
    past: Path | None = None,
) -> None:
    evaluation.evaluate(
        Path("r.yaml"), overrides, checkpoint=checkpoint, past=past, out=out, json_file=json_file, ray_address="head:1"
    )


def test_an_evaluation_reports_every_set_and_starts_no_trainer(parts: Parts, checkpoint: Path, tmp_path: Path, capsys):
    report = tmp_path / "deep" / "report.json"
    evaluate(checkpoint, None, report, "a=1")
    read = {"train": False, "evaluate": True}
    assert parts.prepared == (["a=1", f"model.path={checkpoint}"], "eval", read, {"ray_address": "head:1"})
    assert parts.starts == [{"with_engines": True, "with_past": False, "ray_address": "head:1"}]
    written = json.loads(report.read_text())
    assert written["checkpoint"] == str(checkpoint)
    figures = {name: (one["num_prompts"], one["reward_mean"]) for name, one in written["sets"].items()}
    assert figures == {"one": (2, 0.5), "two": (3, pytest.approx(1 / 3))}
    assert "0.333" in capsys.readouterr().out


def test_an_interrupted_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    parts: Parts, checkpoint: Path, tmp_path: Path
):
    evaluate(checkpoint, whole := tmp_path / "whole")
    planned, parts.sampled, parts.ends_after = parts.sampled, [], 3
    with pytest.raises(KeyboardInterrupt):
        evaluate(checkpoint, out := tmp_path / "out")
    assert not (out / "summary.json").exists()
    parts.ends_after = None
    evaluate(checkpoint, out)
    assert parts.sampled == planned
    for name in ("items.jsonl", "summary.json", "evaluation.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    # What is complete needs no engine, and may be asked for another pass@k.
    starts, parts.recipe.eval.pass_at = len(parts.starts), [1]
    evaluate(checkpoint, out)
    assert len(parts.starts) == starts
    assert json.loads((out / "summary.json").read_text())["sets"]["one"]["pass_at_1"] == 0.5


def test_a_folder_of_something_else_is_refused_before_anything_starts(parts: Parts, checkpoint: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match=r"other: not the folder of an evaluation\. Give one that is new or empty"):
        evaluate(checkpoint, tmp_path / "other")
    with pytest.raises(ValueError, match=r"file: not the folder of an evaluation"):
        evaluate(checkpoint, tmp_path / "other" / "file")
    for json_file, said in ((tmp_path, "is a folder"), (tmp_path / "other/file/x.json", "folder cannot be made")):
        with pytest.raises(ValueError, match=f"--json-file .*{said}"):
            evaluate(checkpoint, None, json_file)
    assert not parts.starts
    evaluate(checkpoint, out := tmp_path / "out")
    (checkpoint / "config.json").write_text("{} ")
    with pytest.raises(ValueError, match=r"is of another evaluation:\n  --checkpoint: .* differ in config\.json"):
        evaluate(checkpoint, out)
    assert len(parts.starts) == 1
    assert (out / "summary.json").is_file()


def test_only_a_hugging_face_folder_is_evaluated(parts: Parts, tmp_path: Path):
    folder = tmp_path / "model"
    for said in ("no such folder", "holds no config.json", "slimrl export r.yaml --checkpoint"):
        with pytest.raises(ValueError, match=said):
            evaluate(folder)
        (folder / "trainer").mkdir(parents=True, exist_ok=True) if folder.is_dir() else folder.mkdir()
    assert parts.starts == []


def test_two_evaluations_are_compared_where_a_recipe_could_stand(monkeypatch, tmp_path: Path):
    asked = []
    monkeypatch.setattr(comparison, "compare", lambda a, b: asked.append((a.path, b.path)) or [])
    report = tmp_path / "deep" / "report.json"
    result = CliRunner().invoke(cli.app, ["eval", "compare", "x", "y", "--json-file", str(report)])
    assert (result.exit_code, asked) == (0, [(Path("x"), Path("y"))])
    assert json.loads(report.read_text()) == {"a": "x", "b": "y", "together": None, "sets": {}}
    for arguments in (["eval"], ["eval", "--checkpoint", "hf"]):
        assert "Missing argument 'RECIPE'" in CliRunner().invoke(cli.app, arguments).output
    assert "--checkpoint" in CliRunner().invoke(cli.app, ["eval", "--help"]).output


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["eval.samples_per_prompt=2"], "eval.samples_per_prompt",
         "2 samples of a prompt would all be the same, since rollout.eval_sampling.temperature is 0. Set that to a "
         "temperature such as 0.7, or samples_per_prompt to 1."),
        (["eval.samples_per_prompt=2", "rollout.eval_sampling={temperature: 1.0, top_k: 1}"], "eval.samples_per_prompt",
         "2 samples of a prompt would all be the same, since rollout.eval_sampling.top_k is 1. Set that to -1, or "
         "samples_per_prompt to 1."),
        (["eval.pass_at=[1, 4]"], "eval.pass_at",
         "pass@4 needs 4 samples of each prompt, and eval.samples_per_prompt is 1. Raise that, or leave this k out."),
        (["eval.pass_at=[0]"], "eval.pass_at", "0: must be at least 1."),
        (["eval.samples_per_prompt=0"], "eval.samples_per_prompt", "0: must be at least 1."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "eval"])
def test_samples_that_measure_nothing_are_refused(command, overrides, key, said):
    problems = recipe_problems(RECIPE, overrides, command=command)
    assert (key, said) in [(problem.key, problem.message) for problem in problems]


@pytest.mark.parametrize(
    "overrides",
    [
        ["eval.pass_at=[1]"],
        ["eval.samples_per_prompt=4", "eval.pass_at=[1,4]", "rollout.eval_sampling.temperature=0.7"],
    ],
)
def test_samples_at_a_temperature_are_fine_and_so_is_one_greedy_sample(overrides):
    assert recipe_problems(RECIPE, overrides, command="eval") == []


def test_an_older_version_plays_from_a_folder_of_its_own(parts: Parts, checkpoint: Path, tmp_path: Path):
    parts.recipe.agent.roles = {"right": RoleConfig(player="past")}
    with pytest.raises(ValueError, match="a role has the player past, an older version"):
        evaluate(checkpoint)
    older = tmp_path / "older"
    older.mkdir()
    with pytest.raises(ValueError, match=r"--past .*older: holds no config\.json"):
        evaluate(checkpoint, past=older)
    (older / "config.json").write_text("{}")
    out = tmp_path / "out"
    evaluate(checkpoint, out, past=older)
    assert parts.prepared[0] == [f"model.path={checkpoint}", "agent.past_versions.every_steps=1"]
    assert parts.starts[-1]["with_past"]
    assert parts.loaded == [(older, 0)]
    # Games against another version are another evaluation.
    (older / "config.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"which differ in past/config\.json"):
        evaluate(checkpoint, out, past=older)
