"""The rollout of every mode: groups begin, and the trainer takes them in batches.

1. Its groups run on the stage's event loop. Admission (rollout/admission.py) says when one may begin; a free slot for a
   trajectory says when the engines have room for it. In `sync` without `oversample` the groups of a step begin
   together, while the trainer waits for them, and nothing runs beside it.
2. A group ends when all its trajectories are scored, and is selected then, and again if the step that trains on it is
   of another stage of the run. A zero-variance group is left out where the recipe refills
   (docs/algorithms.md#dynamic-sampling); one without a trajectory to train on always. Where groups span steps, at most
   `max_refills` times a batch's groups are replaced.
3. The trainer takes the oldest groups. The weights change while others run, or with `one_step_off` when all have ended.
4. `save` keeps the groups that wait, the ended trajectories of those that run, and the turns of their others, which a
   resumed run replays (engines/turn_logs.py). Between two steps of which none spans the other there are none.

All state is the event loop's; the driver's thread calls `run` of the loop.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.algorithms.selection import Selection, joined, select
from slimrl.algorithms.shaping import shape_rewards
from slimrl.algorithms.turn_credit import stage_weights
from slimrl.base.errors import StepDropped
from slimrl.checkpoints.digests import FileDigest, file_digest
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import REPLAYED_TOKENS, Status, Trajectory
from slimrl.engines.turn_logs import LoggedTurn, read_turns, write_turns
from slimrl.rollout.admission import StepAdmission, admission_of
from slimrl.rollout.errors import refuse_failures
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.groups import GROUPS_FILE, Group, read_groups, write_groups
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.stage import END_S, RolloutStage
from slimrl.rollout.step_rollout import StepRollout

POLL_S = 1.0
"""Seconds between two checks that engines are alive and the run goes on, while the driver waits."""
STATE_FILE = "admission.json"

LOST = ("filtered", "failed", "dropped")
"""Ways in which groups leave that are not trained on"""

log = logging.getLogger(__name__)


class RolloutService:
    """Runs groups from `start` until `end`, or until the stage is closed."""

    def __init__(
        self,
        recipe: Recipe,
        source: PromptSource,
        prompts: Sequence[Prompt],
        stage: RolloutStage,
        keeps: Callable[[list[Trajectory]], bool],
        ledger: GroupLedger,
        left_out: Collection[str] = (),
    ) -> None:
        """
        Args:
            left_out: ids of prompts whose saved groups are dropped.
            ledger: gets a line for each group that leaves, when the step after it has its batch.
            prompts: all prompts of the training data, among which are those of saved groups.
            keeps: the task's group filters.
        """
        self._recipe, self._source, self._stage, self._keeps, self._ledger = recipe, source, stage, keeps, ledger
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._left_out = left_out
        self.admission = admission_of(recipe)
        self._steps = self.admission if isinstance(self.admission, StepAdmission) else None
        """The admission, where no group spans steps"""
        self._slots = stage.pressure.slots()
        self._groups: dict[int, Group] = {}
        """Groups that run or wait to be taken, by number"""
        self._of_step: list[Group] = []
        """All groups of the step, where none spans steps"""
        self._saved_turns: dict[str, list[LoggedTurn]] = {}
        """Turns of trajectories that are to run again after a resume, by the trajectories' ids"""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks that run groups, by the number of their first one"""
        self._changed = asyncio.Event()
        self._held = False
        self._fault: BaseException | None = None
        self._versions: dict[int, int] = {}
        """Number of updates that made each version of the engines' weights, by version"""
        self.num_ended = 0
        """Number of trajectories in groups that ended since the last batch, in whatever way"""
        self._failed: list[Trajectory] = []
        """Trajectories that failed or were aborted, in the groups that ended since the last batch"""
        self._left: list[dict[str, Any]] = []
        """Lines of the ledger for groups that left since the last batch"""
        self._counted: dict[str, int] = {}
        """Counts of the admission at the last batch"""
        self._last_take = time.monotonic()
        self._serving: asyncio.Task[None] | None = None

    def start(self, step: int, weight_version: int, saved: Path | None) -> None:
        """Begin with groups; call it when the engines serve their first weights.

        Args:
            step: steps completed.
            saved: folder of `save` in the checkpoint that the run continues from.

        Raises:
            ValueError: the saved groups do not fit the data.
        """
        if saved is None:
            self.admission.skip(step)
            self._counted = self.admission.counts
        else:
            self._restore(saved)
        self._versions[weight_version] = self.admission.version
        self._stage.run(self._start())

    async def _start(self) -> None:
        for number in self.admission.running:
            self._run([self._groups[number]])
        if self._steps is None:
            self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """Begin groups while there is room for them."""
        try:
            while True:
                self._changed.clear()
                while not self._held and self.admission.capacity and not self._slots.locked():
                    number = self.admission.begin()
                    self._begin([number], self._source.take(1), "group_{:08d}")
                    # Its first trajectories take their slots.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                await self._changed.wait()
        except Exception as error:
            self._fault = error
            self._changed.set()
            raise

    async def _begin_round(self, steps: StepAdmission) -> None:
        """Begin the next round of the step; without a prompt for it the step has none."""
        # The driver's thread waits meanwhile.
        await asyncio.to_thread(self._stage.flush_if_deterministic)
        count, step, refill = steps.capacity, steps.version + 1, steps.rounds
        used = {group.prompt.prompt_id for group in self._of_step}
        prompts = self._source.refill(count, step, refill, used) if refill else self._source.take(count)
        if numbers := steps.begin_round(len(prompts)):
            label = f"step_{step:06d}" + (f"/refill_{refill}" if refill else "")
            self._begin(numbers, prompts, label + "/{:05d}", first=numbers[0])
            self._of_step += [self._groups[number] for number in numbers]
        self._changed.set()

    def _begin(self, numbers: Sequence[int], prompts: Sequence[Prompt], name: str, *, first: int = 0) -> None:
        """Begin groups, whose names are their numbers from `first` on in the form `name`."""
        samples = range(self._recipe.rollout.samples_per_prompt)
        begun = [
            Group(number=n, prompt=prompt, ids=[f"{name.format(n - first)}/{sample:03d}" for sample in samples])
            for n, prompt in zip(numbers, prompts, strict=True)
        ]
        self._groups |= {group.number: group for group in begun}
        self._run(begun)

    def _run(self, groups: Sequence[Group]) -> None:
        first = groups[0].number
        saved = {one: turns for group in groups for one in group.ids if (turns := self._saved_turns.pop(one, None))}

        async def run() -> None:
            try:
                await self._stage.run_groups(groups, self._slots, self._changed.set, self._end, saved)
            except Exception as error:  # a fault of ours, which the driver raises
                if self._steps is not None or first in self._groups:
                    self._fault = error
                else:
                    log.warning("group %d, when it was dropped: %s", first, error, exc_info=error)
            finally:
                self._tasks.pop(first, None)
                self._changed.set()

        self._tasks[first] = asyncio.create_task(run())

    def _end(self, group: Group) -> None:
        """Note that all trajectories of a group are scored."""
        trajectories = group.trajectories
        shape_rewards(trajectories, self._recipe.algorithm)
        self.num_ended += len(trajectories)
        if self._steps is None:
            # Zero-variance groups too, which may be in no batch.
            self._source.count(trajectories)
        bad = (Status.failed, Status.aborted)
        self._failed += [t for t in trajectories if t.status in bad]
        useful = self._selection_of(group).is_useful
        if all(t.status is Status.failed for t in trajectories):
            self._leave(group, "failed")
        elif self._may_refill and not useful:
            self._leave(group, "filtered")
        else:
            self.admission.finish(group.number, self._lowest(trajectories))
        self._changed.set()

    def _leave(self, group: Group, end: str) -> None:
        self.admission.leave(group.number, end)
        self._forget(group.number, end)

    def _forget(self, number: int, end: str) -> Group:
        """Drop a group that has left admission; its line of the ledger waits for the next step."""
        group = self._groups.pop(number)
        updates = np.unique(self._updates_of(list(group.done.values())))
        self._left.append(group.line(end, [int(count) for count in updates]))
        return group

    @property
    def _may_refill(self) -> bool:
        """Whether another group may take the place of a zero-variance group; without a limit there might never be a
        batch."""
        settings = self._recipe.algorithm.dynamic_sampling
        if self._steps is not None or settings.refill is RefillMode.off:
            return settings.refill is not RefillMode.off
        replaced = self.admission.counts["filtered"] - self._counted["filtered"]
        return replaced < settings.max_refills * self.admission.batch

    def _selection_of(self, group: Group) -> Selection:
        """What the next step trains on of a group that has ended: made once, and again where that step is of another
        stage of the run."""
        step = self.admission.version + 1
        weights = stage_weights(self._recipe.algorithm.credit, step)
        if group.selection is None or group.stage_weights != weights:
            group.selection = select(group.trajectories, self._recipe.algorithm, self._keeps, step=step)
            group.stage_weights = weights
        return group.selection

    def _updates_of(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """int64 [sampled tokens], how many updates had made the weights that sampled each."""
        versions = [s.weight_versions[s.loss_mask] for t in trajectories for s in t.segments]
        found, inverse = np.unique(np.concatenate([np.zeros(0, np.int32), *versions]), return_inverse=True)
        # Engines may serve the next update's weights a moment before `advance`.
        newest = self.admission.version + 1
        return np.array([self._versions.get(int(version), newest) for version in found], np.int64)[inverse]

    def _lowest(self, trajectories: Sequence[Trajectory]) -> int:
        return int(self._updates_of(trajectories).min(initial=self.admission.version))

    def take(self, check: Callable[[], None]) -> StepRollout:
        """The next batch, as soon as there is one.

        Args:
            check: called every second; an exception that it raises ends the wait, and nothing is taken. With
                StepDropped, after which the run goes on to its end, what runs of the step is cancelled.

        Raises:
            TooManyFailed: too many that ended since the last batch did; a batch may never come then.
        """
        start = time.monotonic()
        try:
            while (batch := self._stage.run(self._take())) is None:
                check()
        except StepDropped:
            # The run goes on to its end without the step.
            if self._steps is not None:
                self._stage.run(self._cancel())
            raise
        now = time.monotonic()
        interval, self._last_take = now - self._last_take, now
        if self._steps is not None:
            batch.seconds = now - start
            # In the order in which the groups began, whichever ended first.
            self._source.count(batch.sampled)
        else:
            batch.seconds = interval
            batch.metrics["async/wait_s"] = now - start
        batch.metrics |= self._stage.run(self._source_metrics())
        return batch

    async def _source_metrics(self) -> dict[str, float]:
        return self._source.metrics()

    async def _take(self) -> StepRollout | None:
        """The next batch, or None if there is none within POLL_S."""
        deadline, steps = time.monotonic() + POLL_S, self._steps
        while not self.admission.is_ready or (steps is not None and self._tasks):
            self._refuse()
            self._changed.clear()
            if steps is not None and not self._tasks:
                await self._begin_round(steps)
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                return None
        self._refuse()
        self.num_ended, self._failed = 0, []
        num_useful = len(self.admission.waiting)
        taken = [self._forget(number, "taken") for number in self.admission.take()]
        if steps is not None:
            # In the next step they would be of an older policy.
            for number in list(steps.waiting):
                self._leave(self._groups[number], "filtered")
        metrics = self._metrics(taken, num_useful)
        # A synchronous step's engines wait for the trainer.
        self._held = self._recipe.rollout.mode is RolloutMode.sync
        self._ledger.add(self.admission.version + 1, sorted(self._left, key=lambda line: line["group"]))
        self._left, self._counted = [], self.admission.counts
        self._changed.set()
        sampled, self._of_step = taken if steps is None else self._of_step, []
        selections = [self._selection_of(group) for group in taken]
        return StepRollout(
            sampled=[trajectory for group in sampled for trajectory in group.trajectories],
            prompts={group.prompt.prompt_id: group.prompt for group in sampled},
            selection=joined(selections),
            metrics=metrics,
            seconds=0.0,
        )

    def end(self) -> None:
        """End what runs, with nothing saved."""
        self._stage.run(self._end_all())

    async def _end_all(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        await self._cancel()

    async def _cancel(self) -> None:
        """End what runs; its step is made again by a resumed run."""
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._recipe.agent.close_timeout_s + END_S)

    def _metrics(self, taken: Sequence[Group], num_useful: int) -> dict[str, float]:
        """Metrics of a batch; `num_useful` groups waited before it was taken."""
        if self._steps is None:
            counts = self.admission.counts
            counts |= {name: counts[name] - self._counted[name] for name in LOST}
            replayed = (t.metadata.get(REPLAYED_TOKENS, 0) for group in taken for t in group.trajectories)
            return {
                **self._ages(taken),
                **{f"async/{name}_groups": counts[name] for name in ("running", "waiting", *LOST)},
                "async/group_s_max": max(group.seconds for group in taken),
                "async/replayed_tokens": sum(replayed),
            }
        if self._recipe.algorithm.dynamic_sampling.refill is RefillMode.off:
            return {}
        return {
            "rollout/refills": self._steps.rounds - 1,
            "rollout/groups_sampled": len(self._of_step),
            "rollout/groups_useful": num_useful,
            "rollout/groups_kept": len(taken),
        }

    def _refuse(self) -> None:
        """Raise the fault of a group, or TooManyFailed if more did than may of those that ended, or than of a batch."""
        if self._fault is not None:
            raise self._fault
        rollout = self._recipe.rollout
        num_counted = max(self.num_ended, rollout.prompts_per_step * rollout.samples_per_prompt)
        refuse_failures(rollout, "rollout", self._failed, num_counted)

    def _ages(self, groups: Sequence[Group]) -> dict[str, float]:
        ages = [self.admission.age(self._lowest(group.trajectories)) for group in groups]
        of_tokens = self.admission.version - self._updates_of([t for group in groups for t in group.trajectories])
        return {
            "async/age_mean": float(np.mean(ages)),
            "async/age_max": float(max(ages)),
            "async/current_token_fraction": float(np.mean(of_tokens <= 0)) if len(of_tokens) else 0.0,
        }

    def drain(self, check: Callable[[], None], asked_to_end: Callable[[], bool]) -> None:
        """Wait until no group runs, or the run is asked to end."""
        while not asked_to_end() and not self._stage.run(self._is_drained()):
            check()

    async def _is_drained(self) -> bool:
        self._refuse()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=POLL_S)
        return not self._tasks and not (self.admission.capacity and not self._held)

    def advance(self, weight_version: int) -> None:
        """Note that the engines serve the next update's weights, as this version."""
        self._stage.run(self._advance(weight_version))

    async def _advance(self, weight_version: int) -> None:
        self._versions[weight_version] = self.admission.version + 1
        self._held = False
        for number in self.admission.advance():
            group = self._forget(number, "dropped")
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            log.info("group %d of %s is too old and dropped", number, group.prompt.prompt_id)
        self._changed.set()

    def note_version(self, weight_version: int, updates: int) -> None:
        """Note that the engines serve weights, as this version, which so many updates have changed since the last
        `advance`."""
        self._stage.run(self._note_version(weight_version, updates))

    async def _note_version(self, weight_version: int, updates: int) -> None:
        self._versions[weight_version] = self.admission.version + updates

    def hold(self, held: bool) -> None:
        """Set whether no group may begin; those that run go on."""
        self._stage.run(self._hold(held))

    async def _hold(self, held: bool) -> None:
        self._held = held
        self._changed.set()

    def position(self) -> dict[str, Any]:
        """Position in the data, from which the event loop takes the groups' prompts."""
        return self._stage.run(self._position())

    async def _position(self) -> dict[str, Any]:
        return self._source.state()

    def save(self, folder: Path) -> Mapping[str, FileDigest]:
        """Write what a resumed run continues from, and return the files' checksums."""
        state, groups, turns = self._stage.run(self._snapshot())
        folder.mkdir(parents=True)
        # In the driver's thread: thousands of trajectories would hold up the episodes for seconds.
        write_groups(folder, groups)
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n")
        names = [GROUPS_FILE, STATE_FILE, *write_turns(folder, turns)]
        return {name: file_digest(folder / name) for name in names}

    async def _snapshot(self) -> tuple[dict[str, Any], list[Group], dict[str, Sequence[LoggedTurn]]]:
        """The state, the groups with their ended trajectories, and the turns of the others, as they are now.

        What ends or begins while workers are asked for their turns is ended or has none.
        """
        logs = await self._stage.turns()
        state = {
            "admission": self.admission.state(),
            "versions": list(self._versions.items()),
            "cursor": self._source.state(),
            "left": list(self._left),
            "counted": self._counted,
        }
        groups = [group.snapshot() for group in self._groups.values()]
        left = [one for group in groups for one in group.left]
        return state, groups, {one: logs[one] for one in left if one in logs}

    def _restore(self, folder: Path) -> None:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        self.admission.restore(state["admission"])
        self._versions = dict(state["versions"])
        self._source.restore(state["cursor"])
        self._left, self._counted = state["left"], state["counted"]
        self._groups = read_groups(folder, self._prompts)
        out = [number for number, group in self._groups.items() if group.prompt.prompt_id in self._left_out]
        for number in self.admission.drop(out):
            group = self._forget(number, "dropped")
            log.info("group %d of %s is dropped, since the run leaves out its prompt", number, group.prompt.prompt_id)
        for number in self.admission.refit():
            group = self._forget(number, "dropped")
            log.info("group %d of %s is too old for the recipe now and dropped", number, group.prompt.prompt_id)
        ids = {trajectory_id for group in self._groups.values() for trajectory_id in group.ids}
        self._saved_turns = {one: turns for one, turns in read_turns(folder).items() if one in ids}
        count = sum(turn.num_tokens for turns in self._saved_turns.values() for turn in turns)
        log.info("%d trajectories go on with %d tokens that they had", len(self._saved_turns), count)
