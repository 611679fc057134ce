"""The rollout service on a real event loop: what is taken, dropped, saved and restored. The episodes are made up."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.base.errors import RunError
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode, TooOld
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Segment, Status, Trajectory
from slimrl.engines.turn_logs import LoggedTurn
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.groups import Group
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.service import RolloutService
from slimrl.rollout.slots import Slots
from slimrl.runtime.preemption import Preemption

BATCH, SAMPLES, STEPS = 3, 2, 8
OPENED: list[LoopThread] = []


@pytest.fixture(autouse=True)
def no_loop_outlives_its_test():
    yield
    while OPENED:
        OPENED.pop().close()
    assert not [thread for thread in threading.enumerate() if thread.name == "slimrl-rollout"]


class Stage:
    """Episodes that wait as long as they are told; every trajectory has one token of the weights at its end."""

    def __init__(self, seconds: Callable[[str], float] = lambda trajectory_id: 0.001) -> None:
        self.loop, self.seconds, self.version = LoopThread("slimrl-rollout"), seconds, 0
        OPENED.append(self.loop)
        self.saved: dict[str, Sequence[LoggedTurn]] = {}
        self.logs: dict[str, list[LoggedTurn]] = {}
        self.begun: Counter[str] = Counter()
        self.flushed: list[int] = []
        """Number of trajectories that had begun at each flush of the engines' caches"""
        self.status, self.reward = Status.completed, lambda trajectory_id: float(trajectory_id[-1])
        self.fault: Exception | None = None
        self.pressure = SimpleNamespace(slots=lambda: Slots(64))

    def run(self, coroutine):
        return self.loop.run(coroutine)

    async def turns(self):
        return self.logs

    def flush_if_deterministic(self):
        self.flushed.append(len(self.begun))

    async def run_groups(self, groups, slots, kept, ended, saved):
        self.saved |= saved

        async def one(group: Group, trajectory_id: str) -> None:
            async with slots:
                self.begun[trajectory_id] += 1
                started = time.time()
                first = self.version
                await asyncio.sleep(self.seconds(trajectory_id))
                if self.fault is not None:
                    raise self.fault
                status, reward = self.status, self.reward(trajectory_id)
                made = trajectory(group.prompt, trajectory_id, [first, self.version], status, reward)
                made.measured |= {STARTED_AT: started, ENDED_AT: time.time()}
                group.keep(made)
                kept()
            if not group.left:
                ended(group)

        await asyncio.gather(*(one(group, trajectory_id) for group in groups for trajectory_id in group.left))


def trajectory(prompt: Prompt, name: str, versions: list[int], status: Status, reward: float) -> Trajectory:
    count = len(versions)
    segment = Segment(
        tokens=np.arange(count + 1, dtype=np.int32),
        loss_mask=np.array([False] + [True] * count),
        rollout_logprobs=np.zeros(count + 1, np.float32),
        weight_versions=np.array([-1, *versions], np.int32),
        turn_ids=np.zeros(count + 1, np.int16),
    )
    metadata = {"num_turns": 1} if status is Status.completed else {"num_turns": 1, "error": "made to fail"}
    return Trajectory(
        group_id=prompt.prompt_id, trajectory_id=name, segments=[segment], status=status, reward=reward,
        metadata=metadata,
    )  # fmt: skip


def turn(key: str) -> LoggedTurn:
    return LoggedTurn(key=key)


def stop_after(seconds: float) -> Callable[[], None]:
    deadline = time.monotonic() + seconds

    def check() -> None:
        assert time.monotonic() < deadline, "there is no batch"

    return check


def recipe_of(**rollout) -> Recipe:
    recipe = Recipe(steps=STEPS)
    recipe.rollout.mode = RolloutMode.async_
    recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt = BATCH, SAMPLES
    recipe.rollout.max_concurrency_per_engine = 64
    for name, value in rollout.items():
        setattr(recipe.rollout, name, value)
    return recipe


PROMPTS = [Prompt(prompt_id=f"p:{n}", messages=[], label=None) for n in range(100)]


class Running:
    """A service, and the updates of a trainer that takes no time."""

    def __init__(
        self,
        folder: Path,
        stage: Stage,
        recipe: Recipe,
        *,
        step: int = 0,
        saved: Path | None = None,
        keeps: Callable[[list[Trajectory]], bool] = lambda group: True,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.stage, self.recipe, self.step, stage.version = stage, recipe, step, step
        self.preemption = Preemption(0.0)
        self.ledger = folder / "groups.jsonl"
        ledger = GroupLedger(self.ledger)
        ledger.keep(step)
        self.data = Sampler(PROMPTS, seed=0, shuffle=False)
        self.data.leave_out(lambda prompt: prompt.prompt_id in left_out)
        self.tried: dict[str, list[float]] = {}
        source = PromptSource(recipe, self.data, PROMPTS, self.tried)
        self.service = RolloutService(recipe, source, PROMPTS, stage, keeps, ledger, left_out)  # type: ignore[arg-type]
        self.service.start(step, step, saved)

    def take(self) -> list[Trajectory]:
        return self.service.take(lambda: None).sampled

    def update(self) -> None:
        self.step += 1
        if self.recipe.rollout.mode is RolloutMode.one_step_off:
            self.service.drain(lambda: None, lambda: self.preemption.asked)
        self.stage.version = self.step
        self.service.advance(self.step)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_engines_are_at_most_so_many_updates_ahead_and_the_last_step_leaves_nothing(tmp_path, staleness):
    run = Running(tmp_path, Stage(), recipe_of(max_staleness=staleness))
    for step in range(STEPS):
        taken = run.take()
        assert len(taken) == BATCH * SAMPLES
        run.stage.run(asyncio.sleep(0.05))
        groups = len(run.stage.begun) // SAMPLES
        assert groups == min(staleness + step + 1, STEPS) * BATCH
        run.update()
    assert run.service.admission.counts == {"running": 0, "waiting": 0, "taken": STEPS * BATCH} | dict.fromkeys(
        ("filtered", "failed", "dropped"), 0
    )
    assert [line["group"] for line in run.lines()] == list(range(STEPS * BATCH))
    assert max(run.stage.begun.values()) == 1


def test_a_batch_is_of_the_time_since_the_one_before_and_not_of_the_wait_for_it(tmp_path):
    run = Running(tmp_path, Stage(), recipe_of())
    start = time.monotonic()
    run.take()
    time.sleep(0.2)  # training
    batch = run.service.take(lambda: None)
    assert 0.2 + batch.metrics["async/wait_s"] <= batch.seconds <= time.monotonic() - start


def test_a_group_that_would_be_too_old_is_dropped_while_it_runs_and_counted(tmp_path):
    slow = Stage(lambda trajectory_id: 30.0 if trajectory_id.startswith("group_00000001") else 0.001)
    run = Running(tmp_path, slow, recipe_of(max_staleness=1))
    for _ in range(3):
        assert not any(t.trajectory_id.startswith("group_00000001") for t in run.take())
        run.update()
    run.take()
    dropped = [line for line in run.lines() if line["end"] == "dropped"]
    assert [(line["group"], line["ended"]) for line in dropped] == [(1, [None, None])]
    assert run.service.admission.counts["dropped"] == 1


def test_a_group_that_is_dropped_between_a_batch_and_its_checkpoint_counts_in_the_step_after_it(tmp_path):
    slow = Stage(lambda trajectory_id: 30.0 if trajectory_id.startswith("group_00000001") else 0.001)
    run = Running(tmp_path, slow, recipe_of(max_staleness=1))
    while not run.service.admission.counts["dropped"]:
        run.take()
        run.update()
    run.service.save(tmp_path / "saved")
    resumed = Running(tmp_path, Stage(), recipe_of(max_staleness=1), step=run.step, saved=tmp_path / "saved")
    assert resumed.service.take(lambda: None).metrics["async/dropped_groups"] == 1
    assert [line["group"] for line in resumed.lines() if line["end"] == "dropped"] == [1]


def test_with_wait_the_trainer_waits_for_the_slow_group_and_nothing_is_dropped(tmp_path):
    slow = Stage(lambda trajectory_id: 1.0 if trajectory_id.startswith("group_00000001") else 0.001)
    run = Running(tmp_path, slow, recipe_of(max_staleness=1, too_old=TooOld.wait))
    run.take()
    run.update()
    second = run.service.take(lambda: None)
    assert any(t.trajectory_id.startswith("group_00000001") for t in second.sampled)
    assert second.metrics["async/age_max"] == 1
    assert second.metrics["async/wait_s"] > 0.5


def test_the_ledger_has_when_each_trajectory_got_its_slot_and_ended_also_after_a_resume(tmp_path):
    stage = Stage(lambda trajectory_id: 0.1 if trajectory_id.endswith("1") else 0.01)
    stage.pressure = SimpleNamespace(slots=lambda: Slots(1))
    recipe = recipe_of(max_staleness=0, prompts_per_step=1)
    run = Running(tmp_path, stage, recipe)
    stage.run(asyncio.sleep(0.2))
    run.service.save(tmp_path / "rollout")
    run.take()
    [line] = run.lines()
    begun, [first, second], [first_end, second_end] = line["begun"], line["started"], line["ended"]
    assert begun <= first < first_end <= second < second_end - 0.05
    resumed = Running(tmp_path, Stage(), recipe, saved=tmp_path / "rollout")
    resumed.take()
    assert resumed.lines() == [line]


def test_one_step_off_changes_the_weights_when_nothing_runs(tmp_path):
    run = Running(tmp_path, Stage(lambda trajectory_id: 0.1), recipe_of(mode=RolloutMode.one_step_off))
    for _ in range(STEPS):
        for one in run.take():
            assert len(set(one.segments[0].weight_versions[1:])) == 1
        run.update()
    assert {line["end"] for line in run.lines()} == {"taken"}


def test_a_run_that_is_asked_to_end_does_not_wait_for_the_rollout_beside_it(tmp_path):
    run = Running(
        tmp_path,
        Stage(lambda trajectory_id: 30.0 if trajectory_id > "group_00000003" else 0.001),
        recipe_of(mode=RolloutMode.one_step_off),
    )
    run.take()
    run.preemption.ask()
    run.update()


def test_a_synchronous_step_ends_with_its_batch_and_the_others_go_on_in_the_next(tmp_path):
    slow = Stage(lambda trajectory_id: 1.0 if int(trajectory_id[6:14]) in (0, 1) else 0.001)
    run = Running(tmp_path, slow, recipe_of(mode=RolloutMode.sync, oversample=5 / 3))
    first = run.take()
    assert len(run.stage.begun) == 5 * SAMPLES
    assert {int(t.trajectory_id[6:14]) for t in first} == {2, 3, 4}
    run.stage.run(asyncio.sleep(0.1))
    assert len(run.stage.begun) == 5 * SAMPLES
    run.update()
    run.stage.run(asyncio.sleep(1.1))
    assert len(run.stage.begun) == 8 * SAMPLES
    second = run.service.take(lambda: None)
    assert {int(t.trajectory_id[6:14]) for t in second.sampled} >= {0, 1}
    assert second.metrics["async/age_max"] == 1


def test_the_age_is_that_of_the_oldest_token(tmp_path):
    run = Running(tmp_path, Stage(), recipe_of(max_staleness=1))
    run.take()
    run.stage.run(asyncio.sleep(0.05))
    run.update()
    metrics = run.service.take(lambda: None).metrics
    assert (metrics["async/age_mean"], metrics["async/current_token_fraction"]) == (1.0, 0.0)


def test_zero_variance_groups_are_replaced_where_the_recipe_refills(tmp_path):
    stage = Stage()
    stage.reward = lambda trajectory_id: float(trajectory_id[-1]) if int(trajectory_id[6:14]) % 2 else 1.0
    recipe = recipe_of()
    recipe.algorithm.dynamic_sampling.refill = RefillMode.order
    run = Running(tmp_path, stage, recipe)
    assert {int(t.trajectory_id[6:14]) % 2 for t in run.take()} == {1}
    assert {line["end"] for line in run.lines() if line["group"] % 2 == 0} == {"filtered"}


def test_too_many_failures_end_the_run_with_their_cause(tmp_path):
    stage = Stage(lambda trajectory_id: 0.05 * int(trajectory_id[6:14]))
    run = Running(tmp_path, stage, recipe_of())
    run.take()
    run.update()
    stage.status = Status.failed
    run.stage.run(asyncio.sleep(1.0))
    stage.status = Status.completed
    with pytest.raises(RunError, match=r"more than rollout\.max_failed_fraction = 0\.1 allows: made to fail"):
        run.take()


def test_a_run_whose_trajectories_all_fail_ends_though_there_is_never_a_batch(tmp_path):
    stage = Stage()
    stage.status = Status.failed
    run = Running(tmp_path, stage, recipe_of())
    with pytest.raises(RunError, match=r"rollout\.max_failed_fraction = 0\.1 allows: made to fail"):
        run.service.take(stop_after(3.0))


@pytest.mark.parametrize("updates", [0, 1])
def test_a_version_between_two_updates_is_as_old_as_the_updates_that_made_its_weights(tmp_path, updates):
    stage = Stage(lambda trajectory_id: 0.001 if trajectory_id < "group_00000003" else 0.1)
    run = Running(tmp_path, stage, recipe_of(max_staleness=3))
    run.take()
    stage.version = 50
    run.service.note_version(50, updates)
    stage.run(asyncio.sleep(0.3))
    run.step = 1
    run.service.advance(51)
    stage.version = 51
    batch = run.service.take(lambda: None)
    assert {one.weight_versions.max() for t in batch.sampled for one in t.segments} == {50}
    # The first of a trajectory's two tokens is of version 0.
    assert batch.metrics["async/current_token_fraction"] == updates / 2


def test_a_rollout_beside_the_training_of_which_all_fails_is_not_waited_for(tmp_path):
    stage = Stage(lambda trajectory_id: 0.001 if trajectory_id < "group_00000003" else 0.2)
    run = Running(tmp_path, stage, recipe_of(mode=RolloutMode.one_step_off))
    run.take()
    stage.status = Status.failed
    with pytest.raises(RunError, match=r"rollout\.max_failed_fraction = 0\.1 allows: made to fail"):
        run.service.drain(stop_after(3.0), lambda: run.preemption.asked)


def test_of_few_that_ended_since_the_last_batch_as_many_may_fail_as_of_a_batch(tmp_path):
    stage = Stage(lambda trajectory_id: 0.001 if trajectory_id < "group_00000007" else 30.0)
    run = Running(tmp_path, stage, recipe_of(max_failed_fraction=0.4))
    stage.run(asyncio.sleep(0.1))
    run.take()
    stage.status = Status.failed
    run.update()
    stage.run(asyncio.sleep(0.1))
    batch = run.service.take(lambda: None)
    assert (len(batch.sampled), batch.metrics["async/failed_groups"]) == (BATCH * SAMPLES, 1)


def test_zero_variance_groups_are_replaced_so_often_and_then_a_part_of_the_batch(tmp_path):
    stage = Stage()
    stage.reward = lambda trajectory_id: 1.0
    recipe = recipe_of()
    recipe.algorithm.dynamic_sampling.refill, recipe.algorithm.dynamic_sampling.max_refills = RefillMode.order, 2
    run = Running(tmp_path, stage, recipe)
    batch = run.service.take(stop_after(3.0))
    assert len(batch.sampled) == BATCH * SAMPLES
    assert batch.metrics["async/filtered_groups"] == 2 * BATCH


def test_what_goes_wrong_while_a_dropped_group_ends_does_not_end_the_run(tmp_path):
    class Failing(Stage):
        async def run_groups(self, *of):
            try:
                await super().run_groups(*of)
            except asyncio.CancelledError as error:
                raise OSError("the environment could not be closed") from error

    stage = Failing(lambda trajectory_id: 30.0 if trajectory_id.startswith("group_00000001") else 0.001)
    run = Running(tmp_path, stage, recipe_of(max_staleness=1))
    for _ in range(STEPS):
        run.take()
        run.update()
    assert run.service.admission.counts["dropped"] == 1


def test_a_fault_of_ours_reaches_the_driver(tmp_path):
    stage = Stage()
    stage.fault = KeyError("a fault")
    run = Running(tmp_path, stage, recipe_of())
    with pytest.raises(KeyError, match="a fault"):
        run.take()


def test_groups_that_ended_before_a_stage_of_the_run_are_selected_for_the_step_that_trains_on_them(tmp_path):
    recipe = recipe_of(max_staleness=2)
    credit = recipe.algorithm.credit
    credit.stage_starts, credit.process_weights, credit.outcome_weights = [3], [0.0, 0.0], [1.0, -1.0]
    run = Running(tmp_path, Stage(), recipe)
    for step in range(1, 5):
        run.stage.run(asyncio.sleep(0.1))  # so that those of later steps have ended too
        advantages = run.service.take(lambda: None).selection.advantages.reshape(-1, SAMPLES)
        assert (np.sign(advantages) == ([-1, 1] if step < 3 else [1, -1])).all(), step
        run.update()


def test_a_wait_ends_with_the_exception_of_its_check(tmp_path):
    def stop() -> None:
        raise InterruptedError

    run = Running(tmp_path, Stage(lambda trajectory_id: 30.0), recipe_of())
    with pytest.raises(InterruptedError):
        run.service.take(stop)


def test_a_resumed_run_trains_on_every_group_once_and_runs_no_ended_trajectory_again(tmp_path):
    def half(trajectory_id: str) -> float:
        return 30.0 if trajectory_id.endswith("1") and int(trajectory_id[6:14]) >= 4 else 0.001

    recipe = recipe_of(max_staleness=2)
    run = Running(tmp_path, Stage(half), recipe)
    run.take()
    run.update()
    run.stage.run(asyncio.sleep(0.1))
    run.stage.logs = {f"group_0000000{n}/00{sample}": [turn(f"{n}/{sample}")] for n in range(9) for sample in range(2)}
    digests = run.service.save(tmp_path / "rollout")
    assert set(digests) == {path.name for path in (tmp_path / "rollout").iterdir()}
    # What the run did after its checkpoint counts for nothing.
    run.stage.run(asyncio.sleep(0))
    resumed = Running(tmp_path, Stage(), recipe, step=1, saved=tmp_path / "rollout")
    resumed.stage.run(asyncio.sleep(0.1))
    assert {name: [one.key for one in turns] for name, turns in resumed.stage.saved.items()} == {
        f"group_0000000{n}/001": [f"{n}/1"] for n in range(4, 9)
    }
    assert resumed.service._saved_turns == {}
    for _ in range(STEPS - 1):
        batch = resumed.service.take(lambda: None)
        assert batch.selection.trajectories == batch.sampled, "of what was saved too"
        resumed.update()
    assert sorted(line["group"] for line in resumed.lines()) == list(range(STEPS * BATCH))
    assert [line["prompt_id"] for line in sorted(resumed.lines(), key=lambda line: line["group"])] == [
        f"p:{n}" for n in range(STEPS * BATCH)
    ]
    again = resumed.stage.begun & run.stage.begun
    assert again
    assert all(trajectory_id.endswith("1") and int(trajectory_id[6:14]) >= 4 for trajectory_id in again)


def test_saved_groups_of_prompts_that_are_left_out_since_are_dropped_and_the_order_stays(tmp_path):
    def slow(trajectory_id: str) -> float:
        return 30.0 if int(trajectory_id[6:14]) >= 4 else 0.001

    run = Running(tmp_path, Stage(slow), recipe_of(max_staleness=2))
    run.take()
    run.update()
    run.stage.run(asyncio.sleep(0.1))
    run.service.save(tmp_path / "rollout")
    # One that waits, one that runs, one that comes later.
    left_out = ("p:3", "p:5", "p:12")
    resumed = Running(
        tmp_path, Stage(), recipe_of(max_staleness=2), step=1, saved=tmp_path / "rollout", left_out=left_out
    )
    assert {"waiting": 0, "dropped": 2}.items() <= resumed.service.admission.counts.items()
    for _ in range(STEPS - 1):
        resumed.take()
        resumed.update()
    counts = resumed.service.admission.counts
    assert (counts["taken"], counts["dropped"], counts["running"] + counts["waiting"]) == (STEPS * BATCH, 2, 0)
    ends = {line["group"]: (line["prompt_id"], line["end"]) for line in resumed.lines()}
    assert ends.pop(3) == ("p:3", "dropped")
    assert ends.pop(5) == ("p:5", "dropped")
    assert {end for _, end in ends.values()} == {"taken"}
    order = [f"p:{n}" for n in range(STEPS * BATCH + 3) if f"p:{n}" not in left_out]
    assert [prompt_id for _, (prompt_id, _) in sorted(ends.items())] == order


def test_what_is_saved_is_of_one_moment_though_groups_go_on_while_it_is_written(tmp_path):
    stage = Stage(lambda trajectory_id: 30.0 if trajectory_id.endswith("001") else 0.001)
    run = Running(tmp_path, stage, recipe_of())
    run.stage.run(asyncio.sleep(0.1))
    loop_run = stage.run

    def run_and_go_on(coroutine):
        result = loop_run(coroutine)
        for group in run.service._groups.values():
            for one in group.done.values():
                one.reward, one.rewards["of the group"], one.metadata["error"] = 5.0, 5.0, "later"
        return result

    stage.run = run_and_go_on
    run.service.save(tmp_path / "rollout")
    lines = [json.loads(line) for line in (tmp_path / "rollout" / "groups.jsonl").read_text().splitlines()]
    saved = [one for line in lines for one in line["done"]]
    assert len(saved) == 2 * BATCH
    assert {(one["reward"], len(one["rewards"]), one["metadata"].get("error")) for one in saved} == {(0.0, 0, None)}


def test_the_position_in_the_data_is_read_where_prompts_are_taken(tmp_path):
    class Noted(Sampler):
        def state(self):
            assert threading.current_thread().name == "slimrl-rollout"
            return super().state()

    stage = Stage()
    ledger = GroupLedger(tmp_path / "groups.jsonl")
    data = Noted(PROMPTS, seed=0, shuffle=False)
    source = PromptSource(recipe_of(), data, PROMPTS, {})
    service = RolloutService(recipe_of(), source, PROMPTS, stage, lambda group: True, ledger)  # type: ignore[arg-type]
    service.start(0, 0, None)
    stage.run(asyncio.sleep(0.05))
    assert service.position() == Sampler(PROMPTS, seed=0, shuffle=False).state() | {"index": 2 * BATCH}


def test_saved_groups_of_prompts_that_are_gone_are_refused(tmp_path):
    run = Running(tmp_path, Stage(), recipe_of())
    run.take()
    run.update()
    run.service.save(tmp_path / "rollout")
    source = PromptSource(run.recipe, Sampler(PROMPTS, seed=0, shuffle=False), PROMPTS, {})
    other = RolloutService(run.recipe, source, PROMPTS[:1], Stage(), lambda group: True, GroupLedger(run.ledger))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt p:3 of a saved group is not in the data any more"):
        other.start(1, 1, tmp_path / "rollout")
