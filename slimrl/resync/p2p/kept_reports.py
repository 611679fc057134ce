"""What the engines have said that their ranks keep."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from slimrl.data.model_weights import EngineControl, EngineModel
from slimrl.resync.engine_calls import fan_out
from slimrl.resync.p2p.demand import Kept, SentTensor
from slimrl.resync.ranks import Ranks

MODEL_OF = {False: EngineModel.target, True: EngineModel.draft}
"""The model that holds a tensor, by its `mtp`"""

Report = Mapping[EngineModel, Sequence[Kept]]
"""What each rank of an engine keeps in each of its models"""


class KeptReports:
    """The reports of all engines, on all ranks. All construct it together.

    Args:
        tensors: all of them, as the engines get them.
    """

    def __init__(self, tensors: Sequence[SentTensor], ranks: Ranks) -> None:
        self._tensors, self._ranks = tensors, ranks
        self._models = [EngineModel.target]
        if any(tensor.spec.mtp for tensor in tensors):
            self._models.append(EngineModel.draft)
        self._asked: dict[str, str] = {}
        """Digests of what this rank's engines have said, by name"""
        self._reports: dict[str, Report] = {}

    def forget(self, names: Collection[str]) -> None:
        """These engines have gone, or are to be asked again."""
        for name in names:
            self._asked.pop(name, None)

    def ask(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        """Ask those of this rank's engines that have not said it yet.

        Raises:
            EnginesFailed: the others have been asked.
            ValueError: a tensor is in no rank's model.
        """

        def ask(engine: EngineControl) -> None:
            report = {model: engine.kept(model) for model in self._models}
            if (name := self._lacking(report)) is not None:
                raise ValueError(f"{engine.name}: no such tensor in its model: {name}")
            digest = _digest(report)
            # Engines that keep the same have the same object.
            self._reports.setdefault(digest, report)
            self._asked[engine.name] = digest

        new = {engine.name: partial(ask, engine) for engine in engines if engine.name not in self._asked}
        fan_out(new, "kept", timeout_s)

    def share(self) -> dict[str, str]:
        """Let all ranks know the reports of all engines that were asked. All ranks call it together.

        Returns:
            The digest of each engine's report, by name.
        """
        asked: dict[str, str] = {}
        owners: dict[str, int] = {}
        answers = self._ranks.gather_objects((self._asked, set(self._reports)))
        for rank, (digests, _) in enumerate(answers):
            asked |= digests
            for digest in digests.values():
                owners.setdefault(digest, rank)
        for digest, owner in owners.items():
            if not all(digest in known for _, known in answers):
                own = self._reports.get(digest)
                report = self._ranks.from_rank(owner, own if self._ranks.rank == owner else None)
                self._reports[digest] = own or report
        return asked

    def _lacking(self, report: Report) -> str | None:
        """A tensor that no rank keeps."""
        kept = {model: {name for rank in ranks for name in rank} for model, ranks in report.items()}
        specs = (tensor.spec for tensor in self._tensors)
        return next((s.name for s in specs if s.name not in kept[MODEL_OF[s.mtp]]), None)

    def of(self, digest: str) -> Report:
        return self._reports[digest]


def _digest(report: Report) -> str:
    text = json.dumps({model.value: ranks for model, ranks in report.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
