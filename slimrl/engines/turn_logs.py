"""Logs of the engines' answers to running episodes, so that a resumed run does not sample them again.

1. Each request of a trajectory that a checkpoint may have to hold is noted with its answer: a whole turn, or the parts
   so far of one that runs (continued.py).
2. A resumed run replays such an episode from its beginning, with environment and tools. A request that was noted gets
   the answer from there, and a turn that was not whole goes on with its tokens.
3. A request is the same if its tokens, seed and sampling settings are. After a tool that answers differently they are
   not, and the rest of the episode is sampled.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash

from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.data.trajectory import REPLAYED_TOKENS

INDEX_FILE, ARRAYS_FILE = "turns.jsonl", "turns.npy"
_TOKEN = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("weight_version", "<i4")])
_VALUES = ("finish_reason", "cached_tokens", "num_retries", "counts")


@dataclass(kw_only=True, eq=False)
class LoggedTurn:
    """A request for a turn, and the answers to it so far."""

    key: str
    """Hash of the request: equal for equal requests"""
    answers: list[GenerateResult] = field(default_factory=list)
    """The turn if it is whole; else its parts in order"""
    is_whole: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def end(self, result: GenerateResult) -> None:
        """Replace the parts by the whole turn."""
        self.answers, self.is_whole = [result], True


@dataclass(kw_only=True, eq=False)
class _Log:
    """The log of one trajectory."""

    turns: list[LoggedTurn] = field(default_factory=list)
    left: list[LoggedTurn] = field(default_factory=list)
    """Turns of an earlier run that have not been asked for yet"""


class TurnLogs:
    """Logs of the trajectories between `begin` and `forget`; used on one event loop."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    def begin(self, trajectory_id: str, saved: Sequence[LoggedTurn] = ()) -> None:
        """Log a trajectory from now on.

        Args:
            saved: its turns of an earlier run.
        """
        self._logs[trajectory_id] = _Log(left=list(saved))

    def forget(self, trajectory_id: str) -> None:
        """Drop the log of a trajectory, or do nothing if it was never logged."""
        self._logs.pop(trajectory_id, None)

    def turn(self, request: GenerateRequest) -> LoggedTurn:
        """The logged turn of a request: as it was saved, or a new one."""
        of_trajectory = self._logs.get(request.session_id)
        if of_trajectory is None:
            return LoggedTurn(key="")
        key = _key(request)
        turn = next((one for one in of_trajectory.left if one.key == key), None)
        if turn is None:
            turn = LoggedTurn(key=key)
        else:
            of_trajectory.left.remove(turn)
            counts = {**turn.answers[0].counts, REPLAYED_TOKENS: turn.num_tokens}
            turn.answers[0] = replace(turn.answers[0], counts=counts)
        of_trajectory.turns.append(turn)
        return turn

    def snapshot(self) -> dict[str, list[LoggedTurn]]:
        """A copy of the turns with tokens as they are now, by trajectory."""
        return {
            trajectory_id: [
                replace(turn, answers=list(turn.answers)) for turn in (*one.turns, *one.left) if turn.num_tokens
            ]
            for trajectory_id, one in self._logs.items()
        }


def _key(request: GenerateRequest) -> str:
    digest = xxhash.xxh3_128(array("i", request.input_ids))
    settings = (
        request.seed,
        request.temperature,
        request.top_p,
        request.top_k,
        request.max_new_tokens,
        request.stop_token_ids,
        request.stop,
        request.experts_from,
    )
    digest.update(repr(settings).encode())
    return digest.hexdigest()


def write_turns(folder: Path, logs: Mapping[str, Sequence[LoggedTurn]]) -> list[str]:
    """Write logs into a folder; returns the names of the files.

    A line of INDEX_FILE is a turn. Of each of its answers ARRAYS_FILE has an array of tokens with their log-probs and
    weight versions, and one of the experts if the engine reported them.
    """
    with (folder / INDEX_FILE).open("w") as index, (folder / ARRAYS_FILE).open("wb") as arrays:
        for trajectory_id, turns in logs.items():
            for turn in turns:
                answers = []
                for answer in turn.answers:
                    tokens = np.empty(len(answer.tokens), _TOKEN)
                    tokens["token"], tokens["logprob"] = answer.tokens, answer.logprobs
                    tokens["weight_version"] = answer.weight_versions
                    np.save(arrays, tokens)
                    if answer.routed_experts is not None:
                        np.save(arrays, answer.routed_experts)
                    values = {name: getattr(answer, name) for name in _VALUES}
                    answers.append({**values, "has_experts": answer.routed_experts is not None})
                line = {"trajectory": trajectory_id, "key": turn.key, "is_whole": turn.is_whole, "answers": answers}
                index.write(json.dumps(line) + "\n")
    return [INDEX_FILE, ARRAYS_FILE]


def read_turns(folder: Path) -> dict[str, list[LoggedTurn]]:
    """The logs in a folder; none where a run wrote none."""
    logs: dict[str, list[LoggedTurn]] = {}
    if not (folder / INDEX_FILE).is_file():
        return logs
    with (folder / INDEX_FILE).open() as index, (folder / ARRAYS_FILE).open("rb") as arrays:
        for line in map(json.loads, index):
            answers = []
            for values in line["answers"]:
                has_experts = values.pop("has_experts")
                tokens = np.load(arrays)
                answers.append(
                    GenerateResult(
                        tokens=tokens["token"].tolist(),
                        logprobs=tokens["logprob"].tolist(),
                        weight_versions=tokens["weight_version"].copy(),
                        routed_experts=np.load(arrays) if has_experts else None,
                        **values,
                    )
                )
            turn = LoggedTurn(key=line["key"], answers=answers, is_whole=line["is_whole"])
            logs.setdefault(line["trajectory"], []).append(turn)
    return logs
