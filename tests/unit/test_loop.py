"""The order of a run: what each step does, where checkpoints and evaluations lie, and what a run leaves that ends.

The stages are fakes that write down their calls; steps, metrics, checkpoints and the state are real.
"""

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import RunError, StepDropped
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, RolloutMode
from slimrl.config.schema.run import WandbMode
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Status
from slimrl.engines.teacher import ScoringTimes
from slimrl.evaluation.item import Item
from slimrl.observability.metrics import read_metrics
from slimrl.observability.profiling.tables import PHASES
from slimrl.observability.run_folder import RunFolder, open_run_folder
from slimrl.observability.trackers import Trackers
from slimrl.resync.report import ResyncReport
from slimrl.rollout.pressure import CachePressure
from slimrl.rollout.step_rollout import StepRollout
from slimrl.runtime import past_versions, train_run
from slimrl.runtime.background_evaluation import Evaluated
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.loop import train
from slimrl.runtime.state import CheckpointFolder, RunState, read_state
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.train_run import TrainRun
from slimrl.runtime.trainer_restarts import TrainerRestarts


class Stages:
    """Trainer, learner, engines, rollouts and terminal at once; `calls` has what was asked of them, in order."""

    role = "trainer"
    nodes = ()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.said: list[str] = []
        self.waits: list[tuple[str, int, int, str]] = []
        """What was shown of waits for groups"""
        self.receivers: list[SimpleNamespace] = [SimpleNamespace(name="engine 0")]
        self.num_replaced, self.need_weights = 0, False
        self.num_prompts = 0
        self.failing_evaluations: set[str] = set()
        self.asked = False
        self.asked_in = ""
        self.lost_in = ""
        """The evaluation in which the last engine ends and is restarted"""
        self.pressure = CachePressure(RolloutConfig(), lambda: ())

    def take_lags(self):
        return []

    def take_scoring(self):
        return ScoringTimes()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.asked = self.asked or call == self.asked_in

    def connect_engines(self, addresses):
        self._note("connect")

    def wait_for_receivers(self):
        assert self.receivers

    def have_weights(self, names):
        assert names == {"engine 0"}
        self.need_weights = False

    def prepare(self, step, selection):
        assert selection == "a selection"
        self._note("prepare")
        return ["an update"]

    def compute_inputs(self, step, updates):
        assert updates == ["an update"]
        self._note("logprobs")

    def train(self, step, updates):
        assert updates == ["an update"]
        step.record({"policy/loss": float(step.number)})
        self._note("train")

    def resync(self, version):
        self._note(f"resync {version}")
        return ResyncReport(
            version=version, bytes=1, buckets=1, seconds=0.1, stage_seconds={}, verified_tensors=1, mismatching=(),
            failed_engines={}, stale_requests=0, peak_extra_bytes=0,
        )  # fmt: skip

    def evaluate(self, name, prompts, *, label, check, seen):
        self._note(f"{label} on {name}")
        self.need_weights = self.lost_in == label
        check()
        if label in self.failing_evaluations:
            raise RunError(f"evaluation {name}: 3 of 4 trajectories failed")
        # Another figure for each step, whoever makes it.
        accuracy = int(label[-6:]) / 8
        return [
            Item(
                set=name, prompt_id="p", sample=0, status=Status.completed, reward=accuracy, rewards={}, num_turns=1,
                num_sampled_tokens=1, turn_tokens=[1], tool_calls={}, error=None, messages=[],
            )
        ]  # fmt: skip

    def begin_checkpoint(self, directory: Path):
        self._note("checkpoint")
        directory.mkdir(parents=True)

    has_failed = False

    def has_written(self, directory):
        return True

    def finish_checkpoint(self, directory):
        return {}

    def export_hf(self, directory: Path):
        # A run with a model is complete, and is not resumed for its curve.
        assert RunFolder(directory.parents[1]).curve.is_file()
        self._note("export")

    def release_memory(self, parts):
        self._note(f"away with {', '.join(sorted(part.value for part in parts))}")

    def resume_memory(self, parts):
        self._note(f"take {', '.join(sorted(part.value for part in parts))}")

    def check(self) -> None:
        if self.asked and self.asked_in.startswith("rollout"):
            raise StepDropped("its rollout took longer than checkpoint.grace_s")

    def say(self, text):
        self.said.append(text)

    def part(self, name):
        return nullcontext()

    def phase(self, name, total, unit):
        return nullcontext(SimpleNamespace(update=lambda done: self.waits.append((name, done, total, unit))))

    step = part

    def summary(self, step, metrics):
        self._note(f"line {step}")


def recipe_of(steps: int, *, every: int = 0, **evaluation) -> Recipe:
    recipe = Recipe()
    recipe.run.name, recipe.steps = "run", steps
    recipe.rollout.prompts_per_step, recipe.rollout.num_engines = 2, 1
    recipe.checkpoint.every_steps = every
    recipe.tracking.wandb = WandbMode.disabled
    recipe.tracking.recorded_trajectories_per_step = 0
    for name, value in {"every_steps": 0, "at_start": False, "at_end": False, **evaluation}.items():
        setattr(recipe.eval, name, value)
    return recipe


@pytest.fixture(autouse=True)
def no_figures_of_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "rollout_metrics", lambda trajectories, seconds: {"rollout/trajectories": 1})
    monkeypatch.setattr(train_run, "teacher_metrics", lambda trajectories, times: {})
    monkeypatch.setattr(train_run, "environment_metrics", lambda trajectories: {})
    monkeypatch.setattr(train_run, "write_samples", lambda path, trajectories, prompts, limit: None)
    monkeypatch.setattr(train_run, "write_curve", lambda files, path, *, title: path.touch())


def batch_of(**metrics: float) -> StepRollout:
    return StepRollout(sampled=["a trajectory"], prompts={}, selection="a selection", metrics=metrics, seconds=0.002)  # type: ignore[arg-type, list-item]


class InSteps:
    """A rollout of synchronous steps, of two prompts each."""

    def __init__(self, stages: Stages, data: Sampler[Prompt]) -> None:
        self.stages, self.data = stages, data

    def start(self, step, weight_version, saved):
        assert saved is None
        self.step = step

    def hold(self, held):
        pass

    def advance(self, weight_version):
        self.step += 1

    def position(self):
        return self.data.state()

    def take(self, check):
        prompts = ", ".join(prompt.prompt_id for prompt in self.data.take(2))
        self.stages._note(f"rollout step_{self.step + 1:06d} of {prompts}")
        check()
        return batch_of()


def saved_state(folder: RunFolder) -> RunState:
    """The run state in the newest checkpoint."""
    newest = max(folder.checkpoints.glob("step_*"))
    saved = json.loads((newest / "state.json").read_text())
    return RunState(**{name: saved[name] for name in vars(RunState())})


def play(
    recipe: Recipe,
    stages: Stages,
    where: Path,
    *,
    resume: bool = False,
    sets=("heldout",),
    train_files=None,
    service=None,
    past=None,
    memory=None,
) -> RunFolder:
    """A run from its start, or from its newest checkpoint, to wherever it comes."""
    folder = open_run_folder(where, "run", "seed: 1\n", resume=resume)
    state = saved_state(folder) if resume else RunState()
    prompts = Sampler([Prompt(prompt_id=str(i), messages=[], label=None) for i in range(5)], seed=3, shuffle=True)
    if state.cursor:
        prompts.restore(state.cursor)
    with Trackers(folder, recipe.tracking, {}, keep_through_step=state.step if resume else -1) as trackers:
        run = TrainRun(
            recipe=recipe,
            folder=folder,
            task=SimpleNamespace(
                eval_sets={name: ["a prompt"] for name in sets},
                group_filters=[],
                train=train_files or {},
                rewards=SimpleNamespace(parts=()),
            ),
            trainers=stages,
            engines=stages,
            stage=stages,
            past_engines=past,
            trackers=trackers,
            progress=stages,
            state=state,
            data=prompts,
            preemption=stages,
            memory_folder=memory,
        )
        run.learner = stages
        run._service = service or InSteps(stages, prompts)
        left_out = LeftOut(folder.left_out, lambda items: None)
        TrainerRestarts(recipe.run, lambda: (None, state), stages, left_out=left_out).go_on(
            lambda *_: (run, lambda: train(run)), None, state
        )
    return folder


def lines(folder: RunFolder) -> list[dict[str, float]]:
    """What repeats of metrics.jsonl."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in read_metrics(folder.metrics)
    ]


def numbers(calls: list[str], what: str) -> list[int]:
    """The steps, by the lines and trainings so far, after which `what` was done."""
    return [calls[: i + 1].count("train") for i, call in enumerate(calls) if call.startswith(what)]


def test_a_step_goes_round_the_ring_and_a_checkpoint_comes_before_the_evaluation(tmp_path: Path):
    stages = Stages()
    folder = play(recipe_of(2, every=1, at_start=True, every_steps=2), stages, tmp_path, sets=("heldout", "hard"))
    order = [str(i) for i in Sampler(range(5), seed=3, shuffle=True).take(4)]
    assert stages.calls == [
        "connect", "resync 0", "eval_000000 on heldout", "eval_000000 on hard", "line 0",
        f"rollout step_000001 of {order[0]}, {order[1]}", "prepare", "logprobs", "train", "resync 1", "line 1",
        "checkpoint",
        f"rollout step_000002 of {order[2]}, {order[3]}", "prepare", "logprobs", "train", "resync 2", "checkpoint",
        "eval_000002 on heldout", "eval_000002 on hard", "line 2",
        "export",
    ]  # fmt: skip
    first, second, third = read_metrics(folder.metrics)
    assert [line["step"] for line in (first, second, third)] == [0, 1, 2]
    assert (first["eval/hard/reward_mean"], third["eval/hard/reward_mean"]) == (0.0, 0.25)
    # A quarter of a point is no accuracy.
    assert ("eval/hard/accuracy" in first, "eval/hard/accuracy" in third) == (True, False)
    shown = json.loads(folder.eval_sample_file(2, "hard").read_text())
    assert (shown["set"], shown["reward"]) == ("hard", 0.25)
    assert [line["policy/loss"] for line in (second, third)] == [1.0, 2.0]
    assert [line["resync/version"] for line in (first, second, third)] == [0, 1, 2]
    for phase in ("rollout", "logprobs", "train", "resync", "step"):
        assert second[f"time/{phase}_s"] >= 0
    assert first["time/step_s"] >= 0
    assert ("time/eval_s" in first, "time/eval_s" in second, "time/eval_s" in third) == (True, False, True)


@pytest.mark.parametrize(
    ("settings", "sets", "expected"),
    [
        ({"every_steps": 2}, ("heldout",), [2, 4]),
        ({"every_steps": 2, "at_end": True}, ("heldout",), [2, 4, 5]),
        ({"every_steps": 5, "at_end": True}, ("heldout",), [5]),
        ({"at_start": True}, ("heldout",), [0]),
        ({"at_start": True, "at_end": True}, ("heldout",), [0, 5]),
        ({}, ("heldout",), []),
        ({"every_steps": 1, "at_start": True, "at_end": True}, (), []),
    ],
)
def test_evaluations_lie_where_the_recipe_says(tmp_path: Path, settings, sets, expected):
    stages = Stages()
    folder = play(recipe_of(5, **settings), stages, tmp_path, sets=sets)
    assert numbers(stages.calls, "eval_") == expected
    assert [line["step"] for line in lines(folder) if "eval/heldout/reward_mean" in line] == expected
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("every", "expected"), [(0, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_checkpoints_lie_where_the_recipe_says_and_the_last_step_has_one(tmp_path: Path, every: int, expected):
    stages = Stages()
    play(recipe_of(5, every=every, every_steps=1), stages, tmp_path)
    assert numbers(stages.calls, "checkpoint") == expected


class Memory(CheckpointFolder):
    """Copies in memory, and of which steps they were made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.nodes = SimpleNamespace(use=lambda nodes: None)
        self.made = []

    def finish(self, partial, state, files):
        self.made.append(state.step)
        return super().finish(partial, state, files)


@pytest.mark.parametrize(
    ("every", "in_memory", "saved", "copied"), [(2, 1, [2, 4, 5], [1, 2, 3, 4]), (0, 2, [5], [2, 4])]
)
def test_copies_in_memory_are_made_beside_checkpoints_and_not_of_the_last_step(
    tmp_path: Path, every: int, in_memory: int, saved, copied
):
    stages, memory = Stages(), Memory(tmp_path / "memory")
    recipe = recipe_of(5, every=every)
    recipe.checkpoint.in_memory_every_steps = in_memory
    folder = play(recipe, stages, tmp_path, memory=memory)
    assert (stages.folders, memory.made, memory.steps()) == (memory, copied, copied[-1:])
    assert numbers(stages.calls, "checkpoint") == sorted(saved + copied)
    assert CheckpointFolder(folder.checkpoints).steps() == saved[-2:]
    assert read_state(memory.named(copied[-1]))[0].step == copied[-1]


class WrittenInRollouts(Stages):
    """Its checkpoints are written while a rollout is waited for."""

    def has_written(self, directory):
        return self.calls[-1].startswith("rollout")

    def finish_checkpoint(self, directory):
        self._note("whole")
        return {}


def test_a_checkpoint_is_whole_as_soon_as_it_is_written_in_a_rollout(tmp_path: Path):
    stages = WrittenInRollouts()
    play(recipe_of(3, every=1), stages, tmp_path)
    after = [stages.calls[place - 1].partition(" ")[0] for place, call in enumerate(stages.calls) if call == "whole"]
    # The last one is waited for.
    assert after[:2] == ["rollout", "rollout"]
    assert len(after) == 3


@pytest.mark.parametrize("failing", [2, 4])
def test_a_failed_evaluation_costs_no_step_and_a_resumed_run_makes_it(tmp_path: Path, failing: int):
    recipe = recipe_of(4, every=2, every_steps=2)
    whole = play(recipe, Stages(), tmp_path / "whole")
    stages = Stages()
    stages.failing_evaluations = {f"eval_{failing:06d}"}
    with pytest.raises(RunError, match="evaluation heldout"):
        play(recipe, stages, tmp_path / "failed")
    failed = RunFolder(tmp_path / "failed" / "run")
    assert saved_state(failed).step == failing
    # A line is of a whole step.
    assert [line["step"] for line in lines(failed)] == list(range(failing))
    stages = Stages()
    play(recipe, stages, tmp_path / "failed", resume=True)
    assert stages.calls[:3] == ["connect", f"resync {failing}", f"eval_{failing:06d} on heldout"]
    assert numbers(stages.calls, "eval_") == ([0, 2] if failing == 2 else [0])
    assert lines(failed) == lines(whole)


def test_a_run_that_is_resumed_for_fewer_steps_than_it_made_is_exported(tmp_path: Path):
    stages = Stages()
    stages.failing_evaluations = {"eval_000004"}
    with pytest.raises(RunError):
        play(recipe_of(6, every=2, every_steps=2), stages, tmp_path)
    stages = Stages()
    play(recipe_of(3), stages, tmp_path, resume=True)
    assert "train" not in stages.calls
    assert stages.calls[-1] == "export"


def test_an_evaluation_that_was_made_after_the_checkpoint_is_not_made_again(tmp_path: Path):
    recipe = recipe_of(4, every=2, every_steps=2)
    whole = play(recipe, Stages(), tmp_path / "whole")
    killed = Stages()
    killed.failing_evaluations = {"eval_000004"}
    with pytest.raises(RunError):
        play(recipe, killed, tmp_path / "killed")
    folder = RunFolder(tmp_path / "killed" / "run")
    (folder.checkpoints / "step_000004").rename(tmp_path / "lost")
    stages = Stages()
    play(recipe, stages, tmp_path / "killed", resume=True)
    assert numbers(stages.calls, "eval_") == [2]
    assert stages.calls[2].startswith("rollout step_000003")
    assert lines(folder) == lines(whole)


def test_a_resumed_run_without_evaluations_writes_the_step_that_waited_for_one(tmp_path: Path):
    stages = Stages()
    stages.failing_evaluations = {"eval_000002"}
    with pytest.raises(RunError):
        play(recipe_of(3, every=2, every_steps=2), stages, tmp_path)
    stages = Stages()
    folder = play(recipe_of(3, every=2), stages, tmp_path, resume=True)
    assert numbers(stages.calls, "eval_") == []
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3]
    assert lines(folder)[2]["policy/loss"] == 2.0


def test_a_resumed_run_whose_line_was_written_and_lost_writes_none_anew(tmp_path: Path):
    recipe = recipe_of(2, every=1)
    stages = Stages()
    stages.asked_in = "train"
    folder = play(recipe, stages, tmp_path)
    folder.metrics.unlink()
    play(recipe, Stages(), tmp_path, resume=True)
    assert [line["step"] for line in lines(folder)] == [2]


def test_a_dropped_step_leaves_the_step_before_it_with_a_checkpoint(tmp_path: Path):
    recipe = recipe_of(3, every_steps=3)
    whole = play(recipe, Stages(), tmp_path / "whole")
    stages = Stages()
    order = Sampler(range(5), seed=3, shuffle=True).take(4)
    stages.asked_in = f"rollout step_000002 of {order[2]}, {order[3]}"
    folder = play(recipe, stages, tmp_path / "dropped")
    assert stages.calls[-3:] == ["line 1", stages.asked_in, "checkpoint"]
    assert stages.said == ["step 2 dropped: its rollout took longer than checkpoint.grace_s"]
    assert (saved_state(folder).step, [line["step"] for line in lines(folder)]) == (1, [0, 1])
    stages = Stages()
    play(recipe, stages, tmp_path / "dropped", resume=True)
    assert stages.calls[2] == f"rollout step_000002 of {order[2]}, {order[3]}"
    assert lines(folder) == lines(whole)


@pytest.mark.parametrize("moment", ["train", "eval_000002 on heldout"])
def test_a_run_that_is_asked_to_make_room_finishes_its_step_and_evaluation(tmp_path: Path, moment: str):
    recipe = recipe_of(4, every_steps=1 if moment == "train" else 2)
    stages = Stages()
    stages.asked_in = moment
    folder = play(recipe, stages, tmp_path)
    step = saved_state(folder).step
    assert step == (1 if moment == "train" else 2)
    assert stages.calls.count("checkpoint") == 1
    assert "export" not in stages.calls
    assert lines(folder)[-1] == {**lines(folder)[-1], "step": step, "eval/heldout/reward_mean": step / 8}
    resumed = Stages()
    play(recipe, resumed, tmp_path, resume=True)
    # The one that was made is not made again.
    assert numbers(resumed.calls, "eval_") == ([1, 2, 3] if moment == "train" else [2])
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3, 4]


def test_a_run_that_is_asked_to_make_room_before_its_first_step_has_nothing_to_save(tmp_path: Path):
    stages = Stages()
    stages.asked_in = "eval_000000 on heldout"
    folder = play(recipe_of(2, at_start=True), stages, tmp_path)
    assert stages.calls == ["connect", "resync 0", "eval_000000 on heldout", "line 0"]
    assert list(folder.checkpoints.iterdir()) == []


def test_what_comes_after_a_steps_end_is_not_in_its_seconds(monkeypatch: pytest.MonkeyPatch):
    now = iter([0.0, 1.0, 4.0, 6.0, 7.0, 8.0, 28.0])
    monkeypatch.setattr("slimrl.runtime.step_metrics.time.monotonic", lambda: next(now))
    step = Step(1)
    with step.timed("train"):
        pass
    step.close()
    later = Step(1, step.metrics)
    with later.timed("eval"):
        pass
    assert later.metrics == {"time/train_s": 3.0, "time/step_s": 6.0, "time/other_s": 3.0, "time/eval_s": 20.0}
    assert "time/eval_s" not in step.metrics


REQUESTS = "cuda_graph, kv_cache"
"""What an engine holds for requests alone."""


def test_devices_that_are_shared_are_handed_over_at_every_turn(tmp_path: Path):
    """Engines hold a cache of keys and values, the trainer gradients and an optimizer; both hold weights."""
    recipe = recipe_of(1)
    recipe.rollout.colocated = True
    stages = Stages()
    play(recipe, stages, tmp_path)
    order = [str(i) for i in Sampler(range(5), seed=3, shuffle=True).take(2)]
    assert stages.calls == [
        f"away with {REQUESTS}", "take weights", "connect", "resync 0", "away with weights", f"take {REQUESTS}",
        "line 0",
        f"rollout step_000001 of {order[0]}, {order[1]}",
        f"away with {REQUESTS}, weights", "take gradients, optimizer, weights", "prepare", "logprobs", "train",
        "away with gradients, optimizer", "take weights", "resync 1", "away with weights", f"take {REQUESTS}", "line 1",
        f"away with {REQUESTS}", "take optimizer, weights", "checkpoint",
        "away with optimizer, weights", f"take {REQUESTS}",
        f"away with {REQUESTS}", "take weights", "export",
    ]  # fmt: skip


def test_a_run_on_several_files_has_the_reward_of_each(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        train_run, "source_metrics", lambda batch, sources: {f"reward/source/{name}": 1 for name in sources.values()}
    )
    files = {"train": [Prompt(prompt_id="0", messages=[], label=None)]}
    (alone,) = lines(play(recipe_of(1), Stages(), tmp_path / "one", train_files=files))[1:]
    files["gsm8k"] = [Prompt(prompt_id="gsm8k/0", messages=[], label=None)]
    (both,) = lines(play(recipe_of(1), Stages(), tmp_path / "two", train_files=files))[1:]
    assert both.keys() - alone.keys() == {"reward/source/train", "reward/source/gsm8k"}


def test_what_a_rollout_earned_is_measured_and_sampled_as_the_recipe_says(tmp_path: Path, monkeypatch):
    seen = []

    def noted(name, result=None):
        return lambda *given, **named: seen.append((name, *given)) or result

    monkeypatch.setattr(train_run, "rollout_metrics", noted("figures", {"rollout/tokens": 5}))
    monkeypatch.setattr(train_run, "teacher_metrics", lambda trajectories, times: {})
    monkeypatch.setattr(train_run, "environment_metrics", lambda trajectories: {})
    monkeypatch.setattr(train_run, "write_samples", noted("samples"))
    recipe = recipe_of(1)
    recipe.tracking.trajectories_per_step = 3
    folder = play(recipe, Stages(), tmp_path)
    batch = ["a trajectory"]
    assert seen == [("figures", batch, 0.002), ("samples", folder.sample_file(1), batch, {}, 3)]
    assert lines(folder)[1]["rollout/tokens"] == 5


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_s_trajectories_are_recorded_after_its_updates_also_where_these_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    stages = Stages()

    class Recording:
        def __init__(self, settings, folder, task, step, say):
            assert (settings.recorded_trajectories_per_step, folder.path.name, step) == (0, "run", 0)

        def choose(self, step, batch):
            stages.calls.append(f"choose of {step.number}")

        def write_step(self):
            stages.calls.append("write")

        def finish(self):
            stages.calls.append("written")

    train_well = stages.train

    def learn(step, updates):
        train_well(step, updates)
        if fails:
            raise RunError("trainer and engines disagree")

    monkeypatch.setattr(stages, "train", learn)
    monkeypatch.setattr(train_run, "Recording", Recording)
    with pytest.raises(RunError) if fails else nullcontext():
        play(recipe_of(1), stages, tmp_path)
    calls = stages.calls[stages.calls.index("choose of 1") :]
    assert calls[:5] == ["choose of 1", "prepare", "logprobs", "train", "write"]
    assert calls[5:6] == (["written"] if fails else ["resync 1"])
    assert calls.count("written") == 1


class Beside:
    """A rollout beside the training, of which a group ends at each look; the run is preempted in one of the waits."""

    admission = SimpleNamespace(waiting={4: 0, 7: 0})

    def __init__(self, stages: Stages, asked_at: int = 2, dropped: Sequence[int] = ()) -> None:
        """
        Args:
            dropped: groups that became too old before each of the first steps.
        """
        self.stages, self.num_taken, self.num_ended, self.asked_at = stages, 0, 0, asked_at
        self.dropped = dict(enumerate(dropped, 1))

    def start(self, step, weight_version, saved):
        pass

    def hold(self, held):
        pass

    def note_version(self, weight_version, updates):
        self.stages.calls.append(f"version {weight_version} has {updates} updates more")

    def advance(self, weight_version):
        pass

    def position(self):
        return {"taken": self.num_taken}

    def take(self, check):
        self.num_taken += 1
        self.num_ended += 1
        self.stages.asked = self.num_taken == self.asked_at
        check()
        figures = {"async/current_token_fraction": 1.0, "async/dropped_groups": self.dropped.get(self.num_taken, 0)}
        return batch_of(**figures)

    def save(self, folder: Path):
        folder.mkdir()
        (folder / "ended").write_text(str(self.num_ended))
        return {}


def test_what_ended_since_the_step_s_checkpoint_is_saved_when_a_wait_for_groups_is_preempted(
    tmp_path: Path,
):
    stages, recipe = Stages(), recipe_of(3, every=1)
    recipe.rollout.mode = RolloutMode.async_
    folder = play(recipe, stages, tmp_path, service=Beside(stages))
    assert [one.name for one in folder.checkpoints.iterdir()] == ["step_000001"]
    assert (folder.checkpoints / "step_000001" / "rollout" / "ended").read_text() == "2"
    assert saved_state(folder).cursor == {"taken": 1}, "as the service says"
    assert stages.said == ["step 2 dropped: the run ends while it waits for groups"]
    assert stages.waits == [("rollout", 2, recipe.rollout.prompts_per_step, "groups")] * 2
    assert stages.calls[-2:] == ["checkpoint", "checkpoint"]


def test_the_terminal_says_how_many_groups_a_step_has_lost_by_age(tmp_path: Path):
    stages, recipe = Stages(), recipe_of(3)
    recipe.rollout.mode = RolloutMode.async_
    folder = play(recipe, stages, tmp_path, service=Beside(stages, asked_at=9, dropped=[0, 4]))
    said = [text for text in stages.said if "dropped" in text]
    assert said == ["step 2: groups that became too old and were dropped: 4"]
    assert [line["async/dropped_groups"] for line in lines(folder)[1:]] == [0, 4, 0]


def test_an_evaluation_in_which_the_last_engine_ends_goes_on_with_the_same_weights_on_the_one_that_replaces_it(
    tmp_path: Path,
):
    stages, recipe = Stages(), recipe_of(1, at_end=True)
    recipe.rollout.mode, stages.lost_in = RolloutMode.async_, "eval_000001"
    service = Beside(stages, asked_at=9)
    folder = play(recipe, stages, tmp_path, service=service)
    evaluated = stages.calls.index("eval_000001 on heldout")
    assert stages.calls[evaluated + 1 : evaluated + 4] == ["version 2 has 0 updates more", "resync 2", "line 1"]
    assert [line["resync/version"] for line in lines(folder)] == [0, 1]


def test_the_wait_for_a_background_evaluation_is_a_part_of_the_step_and_not_of_its_resync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class EvaluatesSlowly:
        """What was begun has only ended when it is waited for."""

        step = None

        def __init__(self, *_: object) -> None:
            self.running: list[int] = []

        def begin(self, step, weight_version, label):
            self.running.append(step)
            return True

        def take(self):
            return None

        def wait(self, check):
            if self.running:
                time.sleep(0.2)
                return Evaluated(step=self.running.pop(), sets={}, trajectories={}, seconds=0.3)
            return None

    monkeypatch.setattr(train_run, "BackgroundEvaluation", EvaluatesSlowly)
    monkeypatch.setattr(Stages, "evaluation", lambda self, step, metrics: None, raising=False)
    stages, recipe = Stages(), recipe_of(4, every_steps=2, at_start=True)
    recipe.rollout.mode, recipe.eval.engines = RolloutMode.async_, 1
    folder = play(recipe, stages, tmp_path, service=Beside(stages, asked_at=9))
    steps = {line["step"]: line for line in read_metrics(folder.metrics)}
    for step in range(1, 5):
        line = steps[step]
        waited = step in (2, 4)
        assert (line["time/eval_wait_s"] >= 0.2) == waited, step
        assert line["time/resync_s"] < 0.2
        assert sum(line.get(f"time/{phase}_s", 0.0) for phase in PHASES) == pytest.approx(line["time/step_s"])
    without = read_metrics(play(recipe_of(1), Stages(), tmp_path / "without").metrics)
    assert not any("time/eval_wait_s" in line for line in without)


class WithOlderVersions(Stages):
    """Writes versions, and has the engines that load them."""

    def export_hf(self, directory: Path):
        self._note(f"write {'/'.join(directory.parts[-2:])}")
        directory.mkdir(parents=True)

    def load_checkpoint(self, folder: Path, version: int):
        assert folder.is_dir()
        self._note(f"load {version}")


def test_an_older_version_is_written_after_a_resync_and_loaded_before_a_rollout(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(past_versions, "against_past", lambda trajectory: 1.0)
    monkeypatch.setattr(train_run, "plays_past", lambda prompts, agent: True)
    monkeypatch.setattr(past_versions, "chosen", lambda results, choice, seed, step: int(list(results)[-1]))
    recipe, stages = recipe_of(3, every=1, every_steps=2), WithOlderVersions()
    recipe.agent.past_versions.every_steps = 1
    folder = play(recipe, stages, tmp_path, past=stages)
    shown = [call for call in stages.calls if not call.startswith(("prepare", "logprobs", "line", "connect"))]
    assert [call.partition(" of ")[0] for call in shown] == [
        "resync 0", "write past_versions/step_000000",
        "load 0", "rollout step_000001", "train", "resync 1", "write past_versions/step_000001", "checkpoint",
        "load 1", "rollout step_000002", "train", "resync 2", "write past_versions/step_000002", "checkpoint",
        "load 0", "eval_000002 on heldout",
        "load 2", "rollout step_000003", "train", "resync 3", "write past_versions/step_000003", "checkpoint",
        "write export/hf",
    ]  # fmt: skip
    assert [line.get("past/version") for line in read_metrics(folder.metrics)] == [None, 0, 1, 2]
    assert list(saved_state(folder).past_versions) == ["0", "1", "2", "3"]
    assert saved_state(folder).past_versions["2"] == [1.0, 1.0]
