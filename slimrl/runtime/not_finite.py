"""What becomes of an update whose loss or gradient is not finite: it is skipped, and the run says which trajectories
were in it.

1. The weights, which no later update could mend: if they are not finite, the run ends.
2. The numbers of each sequence, from what the driver gave the ranks to the losses, in a pass without gradient.
3. Where all of these are finite, the gradients: of the whole update, and if they are not finite again, of halves, of
   their halves, down to single trajectories.

After a step's last update the weights are looked at in any case, so that none that are not finite reach an engine, a
checkpoint or an export.

Too many skipped updates in a row end it too. With `stop.rewind_not_finite` it goes back then, which
`runtime/trainer_restarts.py` does.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.algorithms.not_finite import GIVEN, GRADIENT, LOGPROBS, causes, faults_of, given_advantages, narrowed
from slimrl.algorithms.objective import LossFunction
from slimrl.base.errors import NotFinite
from slimrl.data.packing import PackedBatch, micro_batches
from slimrl.data.pieces import pieces_of
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import PROMPT_ID, Trajectory, write_trajectories
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.packed_updates import Update
from slimrl.runtime.state import RunState, count_skipped

MOST_NAMED = 8
"""Largest number of trajectories, or of weights, in a line for the terminal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a sequence is, for the user."""

    name: str
    item: str
    """What the data has it from: the prompt's id, or the place of the conversation"""
    trajectory: Trajectory | None = None


def owners_of(update: Update) -> list[Owner]:
    """The trajectory of each sequence of an update."""
    return [
        Owner(
            name=f"{trajectory.group_id} ({trajectory.trajectory_id})",
            item=trajectory.scratch.get(PROMPT_ID, trajectory.group_id),
            trajectory=trajectory,
        )
        for trajectory in update.trajectories
    ]


@dataclass(frozen=True, kw_only=True)
class Work:
    """How the ranks made an update, which they still hold: by this they can be asked about it."""

    number: int
    """The update's number on the ranks"""
    batch: PackedBatch
    owners: Sequence[Owner]
    """The owner of each sequence. Gradients of an owner's sequences are not told apart"""
    loss: LossFunction
    denominator: float
    temperature: float
    whitens: bool = False
    """Whether advantages of tokens are divided by what all sequences have in common"""
    output: str = LOGPROBS
    """What the model's results are called"""
    noun: str = "trajectories"
    """What owners are called"""

    @cached_property
    def names(self) -> list[str]:
        """The owner of each sequence, and of several segments which one it is, from 1."""
        counts = Counter(owner.name for owner in self.owners)
        seen: Counter[str] = Counter()
        names = []
        for owner in self.owners:
            seen[owner.name] += 1
            names.append(f"{owner.name} segment {seen[owner.name]}" if counts[owner.name] > 1 else owner.name)
        return names


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Numbers of an update that are not finite, and the sequences whose they are."""

    what: str
    """What is not finite"""
    sequences: list[int]
    exact: bool = True
    """Whether it is of each of these, and not of some of them or of their sum"""


class SkippedUpdates:
    """Counts the skipped updates of a trainer or of a critic, and says what was in them."""

    def __init__(
        self,
        ranks: TrainerGroup,
        state: RunState,
        limit: int,
        say: Callable[[str], None],
        folder: RunFolder | None = None,
        *,
        critic: bool = False,
    ) -> None:
        """
        Args:
            limit: number of skipped updates in a row that ends the run.
            say: shows the user a line.
            folder: of the run, which gets the trajectories of skipped updates; None to keep none.
        """
        self._ranks, self._state, self._limit, self._say, self._folder = ranks, state, limit, say, folder
        self._critic = critic

    def count(self, result: UpdateResult, step: int, part: str, work: Work) -> None:
        """Count an update.

        Args:
            part: which update of the step it is, for the user.

        Raises:
            NotFinite: the weights are not finite, or too many updates in a row were skipped.
        """
        if result.skipped:
            where = f"step {step}: {part}"
            self._check_weights(where)
            self._explain(where, step, work)
        count_skipped(self._state, result, self._limit, critic=self._critic)

    def check_weights(self, step: int) -> None:
        """Raise NotFinite if the weights are not finite after the last update of a step."""
        self._check_weights(f"step {step}: after the updates{' of the critic' if self._critic else ''}")

    def _check_weights(self, where: str) -> None:
        if weights := sorted(set(self._ranks.gather(RankBatches.weights_not_finite))):
            # No trajectory is to blame.
            self._state.suspects = []
            raise NotFinite(f"{where}: weights are not finite, which no update can mend: {listed(weights)}")

    def _explain(self, where: str, step: int, work: Work) -> None:
        findings = find(self._ranks, work)
        said = [_text(finding, work) for finding in findings]
        if not said:
            said.append(f"{GRADIENT} were not finite, and are finite when they are computed again")
        self._say(f"warning: {where} skipped: {'; '.join(said)}")
        log.warning("%s skipped:\n%s", where, "\n".join(_details(findings, work)))
        owners = [work.owners[sequence] for finding in findings for sequence in finding.sequences]
        self._keep(step, work, {owner.item for owner in owners})
        self._state.suspects = list(dict.fromkeys([*self._state.suspects, *(owner.item for owner in owners)]))

    def _keep(self, step: int, work: Work, items: set[str]) -> None:
        """Write the whole groups of these prompts."""
        groups = [owner.trajectory for owner in work.owners if owner.item in items and owner.trajectory is not None]
        if self._folder is None or not groups:
            return
        file = self._folder.not_finite_file(step, work.number + 1, critic=self._critic)
        try:
            file.parent.mkdir(exist_ok=True)
            write_trajectories(file, {id(one): one for one in groups}.values())
        except OSError as error:
            self._say(f"warning: {file}: {error.strerror}")


def find(ranks: TrainerGroup, work: Work) -> list[Finding]:
    """What was not finite in an update that was skipped; the weights must be those that it was computed with. Nothing
    if all is finite this time."""
    given = [fault for batch in micro_batches([work.batch]) for fault in faults_of(batch)]
    found = ranks.gather(RankBatches.faults, work.number, work.loss, work.temperature, output=work.output)
    by_sequence = causes(given, found, whitened=work.whitens)
    if not by_sequence:
        return _by_gradient(ranks, work)
    kinds = list(dict.fromkeys(by_sequence.values()))
    return [
        Finding(what=what, sequences=sorted(one for one, cause in by_sequence.items() if cause == what))
        for what in kinds
    ]


def _by_gradient(ranks: TrainerGroup, work: Work) -> list[Finding]:
    """Look for the gradients that are not finite."""
    places = {
        int(sequence): place for part in work.batch for place, batch in enumerate(part) for sequence in batch.sequences
    }
    parts: dict[str, list[int]] = {}
    for sequence in sorted(places, key=lambda one: (places[one], one)):
        parts.setdefault(work.owners[sequence].name, []).append(sequence)

    def is_finite(chosen: Sequence[list[int]]) -> bool:
        sequences = {sequence for part in chosen for sequence in part}
        return ranks.call(
            RankBatches.has_finite_gradient,
            work.number,
            work.loss,
            work.denominator,
            work.temperature,
            sequences=sequences,
            places=_passed({places[one] for one in sequences}, len(work.batch[0]), ranks.layout.micro_batch_multiple),
        )

    if is_finite(list(parts.values())):
        return []
    together = narrowed(list(parts.values()), is_finite)
    single = sorted(sequence for found in together if len(found) == 1 for sequence in found[0])
    findings = [Finding(what=GRADIENT, sequences=single)] if single else []
    for found in together:
        if len(found) > 1:
            sequences = sorted(sequence for part in found for sequence in part)
            findings.append(Finding(what=GRADIENT, sequences=sequences, exact=False))
    return findings


def _passed(places: set[int], available: int, multiple: int) -> list[int]:
    """These places among the micro-batches of a rank, with others if the schedule needs more."""
    others = (place for place in range(available) if place not in places)
    chosen = set(places)
    while len(chosen) % multiple:
        chosen.add(next(others))
    return sorted(chosen)


def _text(finding: Finding, work: Work) -> str:
    """The finding in a line for the terminal."""
    named = work.names if finding.exact else [owner.name for owner in work.owners]
    names = list(dict.fromkeys(named[sequence] for sequence in finding.sequences))
    num_owners = len({work.owners[sequence].name for sequence in finding.sequences})
    of_all = f"{num_owners} of {len({owner.name for owner in work.owners})} {work.noun}"
    if finding.exact:
        return f"{finding.what} of {of_all} are not finite: {listed(names)}"
    return f"{finding.what} of some of {of_all} are not finite, or their sum is not: {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Names in a line, the first of many."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _details(findings: Sequence[Finding], work: Work) -> list[str]:
    """A line for each sequence, with what the driver knows of it."""
    pieces = {
        piece.sequence: piece.values
        for batch in micro_batches([work.batch])
        for piece in pieces_of(
            batch, {"the engines' log-probs": batch.rollout_logprobs, GIVEN: given_advantages(batch)}
        )
    }
    lines = []
    for finding in findings:
        for sequence in finding.sequences:
            values, trajectory = pieces[sequence], work.owners[sequence].trajectory
            facts = [f"{len(values[GIVEN])} tokens"]
            if trajectory is not None and len(values[GIVEN]):
                ranges = [f"{what} from {values_S.min():g} to {values_S.max():g}" for what, values_S in values.items()]
                facts += [f"reward {trajectory.reward:g}", *ranges]
            lines.append(f"  {finding.what} of {work.names[sequence]}: {', '.join(facts)}")
    return lines
