"""One step of supervised training with a trainer that only answers."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from slimrl.algorithms.not_finite import LOSS, Fault
from slimrl.algorithms.objective import cross_entropy
from slimrl.base.errors import RunError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import WandbMode
from slimrl.data.prompts import Sampler
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import Segment
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.runtime.loop import train_on_conversations
from slimrl.runtime.run import Run
from slimrl.runtime.sft import Example, update
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step


class Trainers:
    """One rank; the loss of each token is 0.5, and tokens that are not learned from count in `num_tokens`."""

    role = "trainer"
    layout = SimpleNamespace(alignment=4, data=1, micro_batch_multiple=1)

    def __init__(self) -> None:
        self.denominators: list[float] = []
        self.budgets: list[int] = []
        self.saved: list[str] = []
        self.skips = False
        self.bad: list[int] = []
        """Sequences whose losses are not finite"""
        self.bad_weights: list[str] = []

    def put_batches(self, updates):
        self.held = updates

    def call(self, method, *given, **options):
        return getattr(self, method.__name__)(*given, **options)

    gather = call

    def faults(self, update, loss, temperature, *, output):
        assert (update, loss, temperature) == (0, cross_entropy, 1.0)
        return [Fault(sequence, LOSS) for sequence in self.bad]

    def has_finite_gradient(self, update, loss, denominator, temperature, *, sequences, places):
        return True

    def weights_not_finite(self):
        return list(self.bad_weights)

    def accumulate(self, update, loss, *, denominator, temperature):
        assert (loss, temperature) == (cross_entropy, 1.0)
        parts = self.held[update]
        self.denominators.append(denominator)
        self.budgets += [len(batch.tokens) for part in parts for batch in part]
        self.num_targets = sum(int(batch.mask.sum()) for part in parts for batch in part)

    def step(self, *, skip=False):
        num_targets, denominator = self.num_targets, self.denominators[-1]
        return UpdateResult(
            sums={"loss": 0.5 * num_targets}, denominator=denominator,
            grad_norm=1.0, skipped=self.skips, lr=0.1, num_tokens=100,
            expert_load_max_over_mean=float("nan"), router_entropy=float("nan"),
            expert_load={1: np.array([num_targets, 2]), 4: np.array([0, 5])},
        )  # fmt: skip

    def begin_checkpoint(self, directory):
        self.saved.append(directory.parent.name)
        directory.mkdir()

    has_failed = False

    def has_written(self, directory):
        return True

    def finish_checkpoint(self, directory):
        return {}

    def export_hf(self, directory):
        self.saved.append("export")
        directory.mkdir(parents=True)


def conversation(length: int, learned: int) -> Example:
    segment = Segment.not_sampled(np.arange(length), np.arange(length) >= length - learned)
    return Example(segment=segment, source=f"chats.jsonl:{length}")


class Asked:
    """Asked to make room once `after` steps are made."""

    def __init__(self, after: int = 99) -> None:
        self.after, self.shown, self.said = after, [], []

    def summary(self, step, metrics):
        self.shown.append(step)

    def say(self, text):
        self.said.append(text)

    def part(self, name):
        return nullcontext()

    step = part

    @property
    def asked(self) -> bool:
        return bool(self.shown) and self.shown[-1] >= self.after


def make(tmp_path, recipe, trainers, conversations, state=None, seen=None) -> RunFolder:
    """The folder of a run on these conversations, taken in order."""
    folder, state, seen = RunFolder(tmp_path), state or RunState(), seen or Asked()
    for path in (folder.logs, folder.checkpoints):
        path.mkdir(exist_ok=True)
    recipe.tracking.wandb = WandbMode.disabled
    examples = Sampler(conversations, seed=0, shuffle=False)
    if state.cursor:
        examples.restore(state.cursor)
    with Trackers(folder, recipe.tracking, {}, keep_through_step=state.step) as trackers:
        run = Run(
            recipe=recipe, folder=folder, trainers=trainers, trackers=trackers, progress=seen, state=state,
            preemption=seen, data=examples, summary_every_steps=recipe.sft.summary_every_steps,
        )  # fmt: skip
        train_on_conversations(run, examples)
    return folder


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_that_are_learned_from(tmp_path):
    recipe = Recipe(steps=1)
    recipe.sft.batch_conversations, recipe.trainer.max_tokens_per_rank = 2, 64
    trainers = Trainers()
    folder = make(tmp_path, recipe, trainers, [conversation(9, 3), conversation(14, 4)])
    (line,) = read_metrics(folder.metrics)
    assert trainers.denominators == [7]
    assert line["sft/loss"] == pytest.approx(0.5)
    assert pyarrow.parquet.read_table(folder.expert_load).to_pylist() == [
        {"step": 1, "layer": 1, "tokens": [7, 2]}, {"step": 1, "layer": 4, "tokens": [0, 5]},
    ]  # fmt: skip


def run_of(tmp_path, recipe, state, *, asked=99):
    """A run on the conversations of 4 to 8 tokens; who was trained, and what was shown."""
    trainers, seen = Trainers(), Asked(asked)
    recipe.sft.batch_conversations, recipe.trainer.max_tokens_per_rank = 1, 64
    folder = make(tmp_path, recipe, trainers, [conversation(4 + i, 1 + i) for i in range(5)], state, seen)
    return folder, trainers, seen


@pytest.mark.parametrize(("every", "saved"), [(0, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_checkpoints_lie_where_the_recipe_says_and_the_model_comes_last(tmp_path, every, saved):
    recipe = Recipe(steps=5)
    recipe.checkpoint.every_steps, recipe.checkpoint.keep, recipe.sft.summary_every_steps = every, 2, 3
    folder, trainers, seen = run_of(tmp_path, recipe, RunState())
    assert trainers.saved == [*(f".partial_step_{step:06d}" for step in saved), "export"]
    assert len(list(folder.checkpoints.iterdir())) == min(2, len(saved))
    assert seen.shown == [1, 3, 5]
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3, 4, 5]
    assert trainers.denominators == [1, 2, 3, 4, 5]


def test_models_of_chosen_steps_are_exported_and_replace_those_of_steps_that_the_run_went_back_behind(tmp_path):
    recipe = Recipe(steps=5)
    recipe.checkpoint.export_every_steps = 2
    folder = RunFolder(tmp_path)
    stale = folder.exports / "step_000004" / "stale"
    stale.parent.mkdir(parents=True)
    stale.touch()
    _, trainers, _ = run_of(tmp_path, recipe, RunState())
    assert trainers.saved == ["export", "export", ".partial_step_000005", "export"]
    assert sorted(path.name for path in folder.exports.iterdir()) == ["step_000002", "step_000004"]
    assert not stale.exists()


def test_a_run_that_makes_room_saves_its_step_and_goes_on_with_the_next_conversation(tmp_path):
    recipe, state = Recipe(steps=4), RunState()
    recipe.sft.summary_every_steps = 1
    _, trainers, _ = run_of(tmp_path, recipe, state, asked=2)
    assert trainers.saved == [".partial_step_000002"]
    assert (state.step, trainers.denominators) == (2, [1, 2])
    folder, trainers, _ = run_of(tmp_path, recipe, state)
    assert (state.step, trainers.denominators) == (4, [3, 4])
    assert trainers.saved == [".partial_step_000004", "export"]
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3, 4]


class AskedLate(Asked):
    """Asked to make room between the look at whether a checkpoint is due and that at whether the run goes on."""

    looks = 0

    @property
    def asked(self) -> bool:
        if self.shown != [1, 2]:
            return False
        self.looks += 1
        return self.looks > 1


def test_a_run_that_is_asked_to_make_room_after_its_last_look_saves_its_step_too(tmp_path):
    recipe, state, trainers = Recipe(steps=4), RunState(), Trainers()
    recipe.sft.summary_every_steps, recipe.sft.batch_conversations, recipe.trainer.max_tokens_per_rank = 1, 1, 64
    make(tmp_path, recipe, trainers, [conversation(4 + i, 1 + i) for i in range(5)], state, AskedLate())
    assert (state.step, trainers.saved) == (2, [".partial_step_000002"])


def test_skipped_updates_are_counted_and_too_many_in_a_row_stop_the_run(tmp_path, monkeypatch):
    recipe, state = Recipe(steps=9), RunState()
    recipe.trainer.max_skipped_updates = 3
    monkeypatch.setattr(Trainers, "__init__", skipping(Trainers.__init__))
    with pytest.raises(RunError, match="3 optimizer updates in a row"):
        run_of(tmp_path, recipe, state)
    found = read_metrics(RunFolder(tmp_path).metrics)
    assert [line["train/skipped_steps"] for line in found] == [1, 2]
    assert [line["sft/tokens"] for line in found] == [100, 100]


def test_conversations_at_fault_are_named_by_their_lines():
    recipe, trainers, seen, state = Recipe(steps=1), Trainers(), Asked(), RunState()
    recipe.trainer.max_tokens_per_rank = 64
    trainers.skips, trainers.bad = True, [1, 2]
    examples = [conversation(length, 3) for length in (9, 14, 14, 7, 5)]
    update(Step(5), examples, SimpleNamespace(recipe=recipe, trainers=trainers, state=state, progress=seen))
    assert seen.said == [
        "warning: step 5: update skipped: the losses of 1 of 4 conversations are not finite: "
        "chats.jsonl:14 segment 1, chats.jsonl:14 segment 2"
    ]
    assert state.suspects == ["chats.jsonl:14"]


def skipping(make):
    def made(trainers):
        make(trainers)
        trainers.skips = True

    return made


def test_a_context_parallel_group_holds_the_tokens_of_all_its_ranks(tmp_path):
    recipe, trainers = Recipe(steps=1), Trainers()
    recipe.trainer.max_tokens_per_rank, recipe.trainer.parallel.context = 8, 2
    run = SimpleNamespace(recipe=recipe, trainers=trainers, state=RunState(), progress=Asked())
    update(Step(1), [conversation(9, 8)] * 2, run)
    assert trainers.budgets == [16]
    recipe.trainer.parallel.context = 1
    update(Step(1), [conversation(9, 8)] * 2, run)
    assert trainers.budgets == [16, 8, 8]


def test_micro_batches_come_in_the_groups_that_the_schedule_takes():
    recipe, trainers = Recipe(steps=1), Trainers()
    recipe.trainer.max_tokens_per_rank = 8
    trainers.layout = SimpleNamespace(alignment=4, data=1, micro_batch_multiple=2)
    run = SimpleNamespace(recipe=recipe, trainers=trainers, state=RunState(), progress=Asked())
    update(Step(1), [conversation(9, 8)], run)
    assert len(trainers.budgets) == 2
    assert trainers.denominators == [8]


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(tmp_path):
    recipe, trainers = Recipe(steps=1), Trainers()
    recipe.sft.batch_conversations, recipe.trainer.max_tokens_per_rank = 1, 64
    trainers.bad_weights = ["decoder.layers.0.mlp"]
    with pytest.raises(RunError, match=r"step 1: after the updates: weights are not finite, .*: decoder\.layers\.0"):
        make(tmp_path, recipe, trainers, [conversation(8, 4)])
    assert trainers.saved == []
