"""Steps with refills, their checkpoints and their preemption: a resumed run asks for what an uninterrupted one does.

The stage and the trainer are fakes; the run, its state and its checkpoints are real.
"""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from instant_stage import InstantStage

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.credit import DynamicSamplingConfig, RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import WandbMode
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.observability.run_folder import open_run_folder
from slimrl.observability.trackers import Trackers
from slimrl.rollout import service
from slimrl.runtime.checkpoint_writer import WrittenAtOnce
from slimrl.runtime.state import CheckpointFolder, RunState, read_state
from slimrl.runtime.train_run import TrainRun

PROMPTS = [Prompt(prompt_id=f"p{i}", messages=[], label=None) for i in range(40)]


def stage_of(dropped_in: str = "") -> InstantStage:
    """Half of all samples are right, which ones follows from their ids alone."""
    return InstantStage(lambda prompt, name: float(derive_seed(prompt.prompt_id, name) % 2), dropped_in)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.05)


def play(where: Path, stage: InstantStage, refill: RefillMode, *, until: int, resume: bool = False) -> RunState:
    """Steps up to `until` or to one that is dropped, each with a checkpoint; returns what the last one holds."""
    recipe = Recipe()
    recipe.run.name, recipe.steps = "run", 9
    recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.rollout.num_engines = 3, 2, 1
    recipe.checkpoint.every_steps = 1
    recipe.tracking.wandb = WandbMode.disabled
    recipe.tracking.recorded_trajectories_per_step = 0
    recipe.algorithm.dynamic_sampling = DynamicSamplingConfig(refill=refill, oversampling=1.5)
    folder = open_run_folder(where, "run", "seed: 1\n", resume=resume)
    state, data = RunState(), Sampler(PROMPTS, seed=3, shuffle=True)
    if resume:
        state, _ = read_state(CheckpointFolder(folder.checkpoints).complete()[-1])
        data.restore(state.cursor)
    trainers = WrittenAtOnce(lambda path: path.mkdir() or {})
    trainers.role, trainers.has_failed = "trainer", False
    silent = SimpleNamespace(
        summary=lambda step, metrics: None, say=lambda text: None, step=nullcontext, part=nullcontext
    )
    with stage, Trackers(folder, recipe.tracking, {}, keep_through_step=state.step if resume else -1) as trackers:
        run = TrainRun(
            recipe=recipe, folder=folder, trainers=trainers, engines=SimpleNamespace(need_weights=False),
            stage=stage, data=data,
            task=SimpleNamespace(
                group_filters=[], train={"train": PROMPTS}, eval_sets={}, rewards=SimpleNamespace(parts=())
            ),
            trackers=trackers, progress=silent, state=state,
            preemption=SimpleNamespace(check=lambda: None, asked=False),
        )  # fmt: skip
        run._service.start(state.step, 0, None)
        while state.step < until:
            before = state.step
            with run.next_step() as step:
                selection = run.rollout(step)
                assert selection.num_groups == step.metrics["rollout/groups_kept"] <= 3
                run._service.advance(0)
            if state.step == before:
                break
            run.save_checkpoint()
            run.complete_checkpoint()
    return read_state(CheckpointFolder(folder.checkpoints).complete()[-1])[0]


def ledger(where: Path) -> list[dict[str, Any]]:
    """Without the times of the begins."""
    lines = [json.loads(line) for line in (where / "run" / "groups.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "begun"} for line in lines]


@pytest.mark.parametrize("refill", [RefillMode.order, RefillMode.value])
def test_a_resumed_run_asks_for_the_prompts_that_an_uninterrupted_one_does(tmp_path: Path, refill: RefillMode):
    whole = stage_of()
    expected = play(tmp_path / "whole", whole, refill, until=6)
    assert any("refill" in label for label, _ in whole.asked)
    first, second = stage_of(), stage_of()
    play(tmp_path / "cut", first, refill, until=3)
    assert play(tmp_path / "cut", second, refill, until=6, resume=True) == expected
    assert first.asked + second.asked == whole.asked
    lines = ledger(tmp_path / "whole")
    assert ledger(tmp_path / "cut") == lines
    asked = [(int(label[5:11]), prompt_id) for label, prompt_ids in whole.asked for prompt_id in prompt_ids]
    assert [(line["step"], line["prompt_id"]) for line in lines] == asked
    taken = Counter(line["step"] for line in lines if line["end"] == "taken")
    assert taken == {step: 3 for step in range(1, 7)}
    assert {line["end"] for line in lines} == {"taken", "filtered"}
    assert all((line["started"], line["ended"], line["tokens"]) == ([3.0] * 2, [4.0] * 2, [1, 1]) for line in lines)
    assert all(line["updates"] == [line["step"] - 1] for line in lines)


@pytest.mark.parametrize("refill", [RefillMode.order, RefillMode.value])
def test_a_step_that_is_dropped_in_a_refill_is_repeated_whole(tmp_path: Path, refill: RefillMode):
    whole = stage_of()
    expected = play(tmp_path / "whole", whole, refill, until=6)
    # The last refill from the third step on.
    dropped_in = [label for label, _ in whole.asked if "refill" in label and label >= "step_000003"][-1]
    number = int(dropped_in[5:11])
    first, second = stage_of(dropped_in), stage_of()
    play(tmp_path / "cut", first, refill, until=6)
    assert first.asked[-1][0] == dropped_in
    assert first.cancelled == [dropped_in]
    assert play(tmp_path / "cut", second, refill, until=6, resume=True) == expected
    assert second.asked == [asked for asked in whole.asked if int(asked[0][5:11]) >= number]
