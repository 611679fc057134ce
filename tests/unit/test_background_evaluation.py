"""Background evaluations, on a real event loop with made-up episodes: which count, and which are given up."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from slimrl.base.errors import RunError
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.observability.progress import Progress
from slimrl.runtime.background_evaluation import BackgroundEvaluation

PROMPTS = [Prompt(prompt_id=f"p{number}", messages=[], label=None) for number in range(3)]
VERSION = 4


class Parts:
    """Stage, its episodes and the engines at once. Episodes end when they may."""

    def __init__(self) -> None:
        self.loop = LoopThread("slimrl-rollout")
        self.may_end = asyncio.Event()
        self.version, self.status = VERSION, Status.completed
        self.names: list[str] = []
        self.can_spare, self.evaluation_is_lost, self.num_back = 1, False, 0
        self.episodes = self
        self.under_way = self.most_under_way = 0

    def submit(self, coroutine):
        return self.loop.submit(coroutine)

    async def run(self, trajectory_id, prompt, sampling) -> Trajectory:
        self.names.append(trajectory_id)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await self.may_end.wait()
        self.under_way -= 1
        segment = Segment(
            tokens=np.arange(2, dtype=np.int32),
            loss_mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, np.float32),
            weight_versions=np.array([-1, self.version], np.int32),
            turn_ids=np.zeros(2, np.int16),
        )
        metadata = {"num_turns": 1, "tool_calls": {}, "error": "made to fail"}
        return Trajectory(
            group_id=prompt.prompt_id, trajectory_id=trajectory_id, segments=[segment], status=self.status,
            reward=0.5, metadata=metadata,
        )  # fmt: skip

    def end(self) -> None:
        self.loop.run(self._let_end())

    async def _let_end(self) -> None:
        await asyncio.sleep(0.05)  # those that may begin have
        self.may_end.set()

    def set_aside(self, count: int) -> int:
        return min(count, self.can_spare)

    def take_back(self) -> None:
        self.num_back += 1
        self.evaluation_is_lost = False


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.loop.close()


@pytest.fixture
def background(parts: Parts) -> BackgroundEvaluation:
    recipe = Recipe()
    recipe.eval.engines, recipe.rollout.max_concurrency_per_engine = 1, 2
    sets = {"heldout": PROMPTS, "hard": PROMPTS[:1]}
    return BackgroundEvaluation(recipe, sets, parts, parts, Progress(9))  # type: ignore[arg-type]


def nothing() -> None:
    pass


def test_it_is_taken_when_it_has_ended_and_its_engines_go_back(parts: Parts, background: BackgroundEvaluation):
    assert background.begin(7, VERSION, "eval_000007")
    assert (background.step, background.take(), parts.num_back) == (7, None, 0)
    parts.end()
    ended = background.wait(nothing)
    assert ended is not None
    assert ended.step == 7
    assert [item.key for item in ended.sets["heldout"]] == [("heldout", f"p{number}", 0) for number in range(3)]
    assert [item.reward for item in ended.sets["hard"]] == [0.5]
    assert 0 < ended.seconds < 60
    assert parts.names[-1] == "eval_000007/hard/00000/000"
    assert parts.most_under_way == 2, "as many as its engine may have"
    assert (background.step, background.take(), parts.num_back) == (None, None, 1)


def test_without_an_engine_to_spare_it_does_not_begin(parts: Parts, background: BackgroundEvaluation):
    parts.can_spare = 0
    assert not background.begin(7, VERSION, "eval_000007")
    assert (background.step, parts.names) == (None, [])


def test_one_that_loses_its_engines_is_given_up(parts: Parts, background: BackgroundEvaluation, capsys):
    background.begin(7, VERSION, "eval_000007")

    def lose() -> None:
        parts.evaluation_is_lost = True

    assert background.wait(lose) is None
    assert "the evaluation of step 7 has lost its engines and is given up" in capsys.readouterr().out
    assert (background.step, parts.num_back) == (None, 1)
    # By the loss of its engines.
    background.begin(8, VERSION, "eval_000008")
    parts.status = Status.failed
    parts.end()
    parts.loop.run(asyncio.sleep(0.1))
    parts.evaluation_is_lost = True
    assert background.take() is None


def test_one_that_had_ended_before_its_engines_were_lost_counts(parts: Parts, background: BackgroundEvaluation):
    background.begin(7, VERSION, "eval_000007")
    parts.end()
    parts.loop.run(asyncio.sleep(0.1))
    parts.evaluation_is_lost = True
    ended = background.take()
    assert ended is not None
    assert len(ended.sets["heldout"]) == 3
    assert parts.num_back == 1


@pytest.mark.parametrize(
    ("status", "version", "said"),
    [
        (Status.failed, VERSION, r"evaluation heldout: 3 of 3 trajectories failed .*made to fail"),
        (Status.completed, VERSION + 1, r"evaluation heldout of weight version 4: sampled by \[5\] too"),
    ],
)
def test_failures_and_other_weights_end_the_run(parts: Parts, background: BackgroundEvaluation, status, version, said):
    background.begin(7, VERSION, "eval_000007")
    parts.status, parts.version = status, version
    parts.end()
    with pytest.raises(RunError, match=said):
        background.wait(nothing)
    assert parts.num_back == 1
