"""A rollout as one call: how many failures it bears, who is told of its episodes, and what ends it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.agent.sandbox.interface import Ended, Program, Result
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolsUnavailable
from slimrl.base.errors import RunError, StageError
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.credit import CreditName
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import EvalSamplingConfig, RolloutMode
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Segment, Status, Trajectory
from slimrl.evaluation.items import Items
from slimrl.rewards.loading import Rewards
from slimrl.rewards.parts import Part
from slimrl.rewards.services import RewardServices
from slimrl.rollout import stage as rollout_stage
from slimrl.rollout.errors import TooManyFailed
from slimrl.rollout.groups import Group
from slimrl.rollout.slots import Slots
from slimrl.rollout.stage import RolloutStage

PROMPTS = [Prompt(prompt_id=f"p{i}", messages=[], label=i) for i in range(5)]


class Episodes:
    """Engine, runner of episodes and display at once; an episode ends as `endings` says for its number."""

    def __init__(self) -> None:
        self.endings: dict[int, Status] = {}
        self.takes_s = 0.0
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.journal: list[str] = []
        self.settings: list[tuple[float, int]] = []
        self.begun: list[str] = []
        self.slow: set[str] = set()
        """Ids of trajectories that take 0.05 s"""
        self.announced: list[tuple[list[str], int]] = []
        self.under_way = self.most_under_way = 0
        self.cancelled = 0

    def open(self, session_ids, *, at_once):
        assert not self.under_way
        self.announced.append((list(session_ids), at_once))

    def close(self, session_id):
        self.journal.append(f"close {session_id}")

    async def aclose(self):
        self.journal.append("connections closed")

    async def start(self):
        self.journal.append("episodes start")
        if self.start_error is not None:
            raise self.start_error

    async def stop(self):
        self.journal.append("episodes stop")
        if self.stop_error is not None:
            raise self.stop_error

    async def run(self, prompt, *, trajectory_id, sampling, seed) -> Trajectory:
        number = len(self.settings)
        self.settings.append((sampling.temperature, seed))
        self.begun.append(trajectory_id)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0.05 if trajectory_id in self.slow else self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        status = self.endings.get(number, Status.completed)
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[
                Segment(
                    tokens=np.zeros(2, np.int32),
                    loss_mask=np.array([False, True]),
                    rollout_logprobs=np.zeros(2, np.float32),
                    weight_versions=np.zeros(2, np.int32),
                    turn_ids=np.zeros(2, np.int16),
                )
            ],
            status=status,
            metadata={
                "num_turns": 1,
                "num_tool_calls": 0,
                "num_tool_errors": 0,
                "num_malformed_calls": 0,
                "num_retries": 0,
                "num_prompt_messages": 1,
                "environment": {},
            }
            | ({} if status is Status.completed else {"error": f"cause of {status.value}"}),
        )

    async def reward(self, trajectory, prompt) -> float:
        self.journal.append(f"score {trajectory.trajectory_id}")
        return float(prompt.label)

    @contextmanager
    def phase(self, name, total, unit) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(advance=lambda: None)


Start = Callable[..., RolloutStage]


def stage_of(episodes: Episodes, *, watch: Callable[[], None] = lambda: None, **settings) -> RolloutStage:
    recipe = Recipe()
    recipe.rollout.samples_per_prompt = 2
    for name, value in settings.items():
        setattr(recipe.rollout, name, value)
    task = SimpleNamespace(
        sandbox=SandboxPool(SandboxConfig()),
        episode_runner=lambda *_: episodes,
        rewards=Rewards(function=episodes.reward),
        roles=(),
    )
    return RolloutStage(recipe, task, episodes, episodes, watch=watch, flush_caches=lambda: None)


@pytest.fixture
def start() -> Iterator[Start]:
    stages = []

    def begin(episodes: Episodes, **settings) -> RolloutStage:
        stages.append(stage_of(episodes, **settings))
        return stages[-1].__enter__()

    yield begin
    for stage in stages:
        stage.__exit__(None, None, None)


def test_what_the_episodes_need_starts_first_and_ends_before_the_connections():
    episodes = Episodes()
    with stage_of(episodes) as stage:
        stage.rollout(PROMPTS[:1], label="step_000001")
    assert episodes.journal[0] == "episodes start"
    assert episodes.journal[-2:] == ["episodes stop", "connections closed"]


def test_games_have_a_trajectory_for_each_prompt_with_the_sampling_of_an_evaluation():
    episodes = Episodes()
    with stage_of(episodes, eval_sampling=EvalSamplingConfig(temperature=0.5)) as stage:
        planned = {"tournament/a b/0": PROMPTS[0], "tournament/a b/1": PROMPTS[1]}
        played = stage.play("a against b", planned)
        assert {one.trajectory_id: one.group_id for one in played} == {
            name: prompt.prompt_id for name, prompt in planned.items()
        }
        assert [temperature for temperature, _ in episodes.settings] == [0.5, 0.5]
        episodes.endings = {2: Status.failed}
        with pytest.raises(TooManyFailed, match="a against b"):
            stage.play("a against b", planned)


def test_an_evaluation_beside_groups_neither_holds_them_up_nor_ends_the_measuring_of_their_event_loop():
    def judge() -> None:
        """As an engine that does not end when it is told to."""
        judged_in.append(threading.current_thread())
        time.sleep(0.5)

    judged_in: list[threading.Thread] = []

    class Beside(Episodes):
        def open(self, session_ids, *, at_once):
            """While others are under way."""

    episodes = Beside()
    episodes.takes_s = 0.05
    with stage_of(episodes, watch=judge, mode=RolloutMode.async_) as stage:

        async def begin(name: str) -> asyncio.Task[None]:
            made = Group(number=0, prompt=PROMPTS[0], ids=[f"{name}/0"])
            task = asyncio.create_task(stage.run_groups([made], Slots(1)))
            await asyncio.sleep(0.01)
            return task

        group = stage.run(begin("g"))
        episodes.takes_s = 60.0
        other = stage.run(begin("h"))
        episodes.takes_s = 1.5 * rollout_stage.WATCH_S
        items = stage.evaluate("heldout", PROMPTS[:1], label="eval_000001")
        assert len(items) == stage._recipe.eval.samples_per_prompt
        assert (group.done(), other.done()) == (True, False)
        stage.take_lags()
        stage.run(asyncio.sleep(0.2))
        assert stage.take_lags(), "the groups' loop is still measured"
    assert set(judged_in) == {threading.current_thread()}


def test_an_evaluation_beside_groups_is_looked_at_from_the_thread_that_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_stage, "WATCH_S", 0.01)
    episodes = Episodes()
    episodes.takes_s = 60.0
    looked_in: list[threading.Thread] = []

    def check() -> None:
        looked_in.append(threading.current_thread())
        if len(looked_in) == 3:
            raise InterruptedError

    with stage_of(episodes, mode=RolloutMode.async_) as stage:
        with pytest.raises(InterruptedError):
            stage.evaluate("heldout", PROMPTS[:1], label="eval_000001", check=check)
        stage.run(asyncio.sleep(0.1))
        assert episodes.cancelled == 1
    assert looked_in == [threading.current_thread()] * 3


def test_what_does_not_start_ends_the_start_and_leaves_nothing_open():
    episodes = Episodes()
    episodes.start_error = ToolsUnavailable("MCP server time ended")
    with pytest.raises(RunError, match=r"^MCP server time ended$"), stage_of(episodes):
        pass
    assert episodes.journal == ["episodes start", "episodes stop", "connections closed"]


def test_what_does_not_close_leaves_nothing_else_open():
    episodes = Episodes()
    episodes.stop_error = RuntimeError("it does not end")
    with pytest.raises(RuntimeError, match="it does not end"), stage_of(episodes):
        pass
    assert episodes.journal == ["episodes start", "episodes stop", "connections closed"]


def test_a_start_that_fails_lets_the_rewards_end_their_own_tasks():
    class Service:
        async def __call__(self, trajectory, prompt) -> float:
            return 0.0

        async def start(self):
            self.task = asyncio.create_task(asyncio.sleep(60))

        async def close(self):
            journal.append("cancelled" if self.task.cancelled() else "under way")
            self.task.cancel()

    journal: list[str] = []
    episodes = Episodes()
    episodes.start_error = ToolsUnavailable("MCP server time ended")
    stage = stage_of(episodes)
    stage._services = RewardServices([Part(name="service", function=Service(), path="task:Service")])
    with pytest.raises(RunError), stage:
        pass
    assert journal == ["under way"]


FAILED, ABORTED, TRUNCATED = Status.failed, Status.aborted, Status.truncated


@pytest.mark.parametrize(
    ("limit", "endings"),
    [
        (0.2, []),
        (0.2, [FAILED]),
        (0.2, [FAILED, FAILED]),
        (0.2, [ABORTED, FAILED]),
        (0.0, [TRUNCATED] * 10),
        (1.0, [FAILED] * 10),
    ],
)
def test_as_many_may_fail_as_the_limit_says(start: Start, limit: float, endings: list[Status]):
    episodes = Episodes()
    episodes.endings = dict(enumerate(endings))
    batch = start(episodes, max_failed_fraction=limit).rollout(PROMPTS, label="step_000001")
    assert [t.status for t in batch][: len(endings)] == endings
    assert len(batch) == 10


@pytest.mark.parametrize(
    ("limit", "endings"),
    [
        (0.2, [FAILED] * 3),
        (0.2, [ABORTED] * 3),
        (0.2, [ABORTED, FAILED, ABORTED]),
        (0.0, [ABORTED]),
        (0.95, [FAILED] * 10),
    ],
)
def test_one_more_than_the_limit_stops_the_run_with_the_causes(start: Start, limit: float, endings: list[Status]):
    episodes = Episodes()
    episodes.endings = dict(enumerate(endings))
    stage = start(episodes, max_failed_fraction=limit)
    with pytest.raises(RunError) as raised:
        stage.rollout(PROMPTS, label="step_000001")
    assert str(raised.value).startswith(f"rollout: {len(endings)} of 10 trajectories failed or were aborted")
    assert f"max_failed_fraction = {limit:g}" in str(raised.value)
    for status in set(endings):
        assert f"cause of {status.value}" in str(raised.value)


def test_an_evaluation_has_the_same_limit_and_its_failure_is_named_as_one(start: Start):
    episodes = Episodes()
    episodes.endings = {0: FAILED}
    stage = start(episodes, max_failed_fraction=0.2)
    evaluated = stage.evaluate("heldout", PROMPTS, label="eval_000001")
    assert [(item.status is FAILED, item.reward) for item in evaluated] == [
        (True, 0), (False, 1), (False, 2), (False, 3), (False, 4),
    ]  # fmt: skip
    episodes.endings = {len(episodes.settings): FAILED, len(episodes.settings) + 1: ABORTED}
    with pytest.raises(RunError, match=r"^evaluation heldout: 2 of 5 trajectories"):
        stage.evaluate("heldout", PROMPTS, label="eval_000002")


def test_training_samples_each_prompt_several_times_and_an_evaluation_once_under_its_own_settings(start: Start):
    episodes = Episodes()
    stage = start(episodes)
    batch = stage.rollout(PROMPTS, label="step_000001")
    assert [t.group_id for t in batch] == [name for i in range(5) for name in [f"p{i}"] * 2]
    assert [t.reward for t in batch] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    evaluated = stage.evaluate("heldout", PROMPTS, label="eval_000001")
    assert [item.key for item in evaluated] == [("heldout", f"p{i}", 0) for i in range(5)]
    assert [temperature for temperature, _ in episodes.settings] == [1.0] * 10 + [0.0] * 5
    assert episodes.announced[1][0] == [f"eval_000001/heldout/{i:05d}/000" for i in range(5)]


def test_an_evaluation_samples_only_what_is_missing_with_the_seeds_that_it_would_have_had(start: Start):
    episodes = Episodes()
    stage = start(episodes)
    stage._recipe.eval.samples_per_prompt = 2
    whole = stage.evaluate("heldout", PROMPTS, label="eval")
    assert [item.key for item in whole] == [("heldout", f"p{i}", sample) for i in range(5) for sample in range(2)]
    kept = Items()
    for item in (whole[0], whole[3], whole[9]):
        kept.add(item)
    others = start(more := Episodes())
    others._recipe.eval.samples_per_prompt = 2
    assert others.evaluate("heldout", PROMPTS, label="eval", items=kept) == whole
    assert more.settings == [episodes.settings[i] for i in (1, 2, 4, 5, 6, 7, 8)]
    assert others.evaluate("heldout", PROMPTS, label="eval", items=kept) == whole
    assert len(more.settings) == 7


def test_a_deterministic_evaluation_samples_an_interrupted_set_again_as_a_whole(start: Start):
    episodes = Episodes()
    stage = start(episodes)
    stage._recipe.deterministic = True
    kept = Items()
    kept.add(stage.evaluate("heldout", PROMPTS, label="eval")[2])
    stage.evaluate("heldout", PROMPTS, label="eval", items=kept)
    assert episodes.settings[5:] == episodes.settings[:5]
    stage.evaluate("heldout", PROMPTS, label="eval", items=kept)
    assert len(episodes.settings) == 10


def test_what_went_well_before_an_interruption_counts_in_the_fraction_that_may_fail(start: Start):
    episodes = Episodes()
    stage = start(episodes, max_failed_fraction=0.2)
    kept = Items()
    for item in stage.evaluate("heldout", PROMPTS, label="eval")[:4]:
        kept.add(item)
    episodes.endings = {5: FAILED}
    assert stage.evaluate("heldout", PROMPTS, label="eval", items=kept)[4].status is FAILED
    # One of five, and now two of five.
    for item in stage.evaluate("other", PROMPTS, label="eval")[:3]:
        kept.add(item)
    episodes.endings = {len(episodes.settings) + i: FAILED for i in range(2)}
    with pytest.raises(RunError, match=r"^evaluation other: 2 of 5 trajectories"):
        stage.evaluate("other", PROMPTS, label="eval", items=kept)


def test_no_two_trajectories_of_a_run_share_a_seed(start: Start):
    episodes = Episodes()
    stage = start(episodes)
    for number in (1, 2):
        stage.rollout(PROMPTS, label=f"step_{number:06d}")
        stage.evaluate("heldout", PROMPTS, label=f"eval_{number:06d}")
    assert len({seed for _, seed in episodes.settings}) == 30
    again = Episodes()
    start(again).rollout(PROMPTS, label="step_000002")
    assert again.settings == episodes.settings[15:25]


def test_the_engine_hears_of_each_session_before_it_asks_and_when_it_has_ended(start: Start):
    episodes = Episodes()
    episodes.takes_s = 0.002
    batch = start(episodes, max_concurrency_per_engine=3).rollout(PROMPTS, label="step_000001")
    # Ten, three at a time.
    names = [t.trajectory_id for t in batch]
    assert episodes.announced == [(names, 3)]
    assert episodes.most_under_way == 3
    starts, ends = (sorted(t.measured[name] for t in batch) for name in (STARTED_AT, ENDED_AT))
    assert all(start >= end for start, end in zip(starts[3:], ends, strict=False)), "from the slot on"
    said = [f"close {name}" for name in names] + [f"score {name}" for name in names]
    assert sorted(episodes.journal) == sorted(["episodes start", *said])
    for name in names:
        # Nobody waits for a session that is being scored.
        assert episodes.journal.index(f"close {name}") < episodes.journal.index(f"score {name}")


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_slots_are_scarce_groups_with_long_ones_go_on_first_but_in_order_where_that_decides(
    start: Start, deterministic: bool
):
    episodes = Episodes()
    episodes.slow = {"s/00002/000"}
    stage = start(episodes, samples_per_prompt=3, max_concurrency_per_engine=1)
    stage._recipe.deterministic = deterministic
    batch = stage.rollout(PROMPTS, label="s")
    ids = [f"s/{prompt:05d}/{sample:03d}" for prompt in range(5) for sample in range(3)]
    assert [t.trajectory_id for t in batch] == ids
    assert [t.group_id for t in batch] == [prompt.prompt_id for prompt in PROMPTS for _ in range(3)]
    if deterministic:
        assert episodes.begun == ids
    else:
        assert episodes.begun[:7] == [*ids[::3], "s/00002/001", "s/00002/002"]
        assert sorted(episodes.begun) == ids


def test_who_looks_at_a_rollout_can_end_it(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_stage, "WATCH_S", 0.01)
    episodes = Episodes()
    episodes.takes_s = 60.0
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise StageError("engine 1 was ended by SIGKILL")

    stage = start(episodes, watch=look)
    with pytest.raises(StageError):
        stage.rollout(PROMPTS, label="step_000001")
    stage.run(asyncio.sleep(0.01))
    assert (episodes.cancelled, len(looks)) == (10, 3)
    # The engines are still there for others.
    episodes.takes_s = 0.0
    assert len(stage.rollout(PROMPTS, label="step_000002")) == 10


def test_a_recipe_with_gigpo_has_states_and_one_with_given_advantages_fails_without_them(start: Start):
    episodes = Episodes()
    stage = start(episodes)
    prompts = [Prompt(prompt_id="p", messages=[{"role": "user", "content": "q"}], label=1)]
    algorithm = stage._recipe.algorithm
    algorithm.credit.name = CreditName.gigpo
    first, second = stage.rollout(prompts, label="step_000001")
    assert first.turn_states == second.turn_states
    assert len(first.turn_states) == 1
    algorithm.credit.name, algorithm.advantage = CreditName.trajectory, "given"
    with pytest.raises(RunError, match=r"has no advantage: algorithm\.advantage given needs one"):
        stage.rollout(prompts, label="step_000002")


def test_code_that_ignores_its_end_does_not_keep_the_run_from_ending(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(rollout_stage, "END_S", 0.1)
    over = threading.Event()

    class Stubborn(Episodes):
        async def run(self, prompt, **how):
            self.left = asyncio.create_task(self.go_on())
            return await super().run(prompt, **how)

        async def go_on(self):
            while not over.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

    episodes = Stubborn()
    recipe = Recipe()
    recipe.agent.close_timeout_s = 0.1
    rewards, sandbox = Rewards(function=episodes.reward), SandboxPool(SandboxConfig())
    task = SimpleNamespace(sandbox=sandbox, episode_runner=lambda *_: episodes, rewards=rewards, roles=())
    stage = RolloutStage(recipe, task, episodes, episodes, watch=lambda: None, flush_caches=lambda: None)

    def run():
        with stage:
            stage.rollout(PROMPTS[:1], label="step_000001")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    ended = not thread.is_alive()
    over.set()
    thread.join()
    assert ended
    assert "do not end when they are cancelled" in caplog.text
    assert episodes.journal[-1] == "connections closed"


def test_the_sandbox_is_closed_with_the_stage_before_which_it_runs_what_a_reward_asks_for():
    class Sandbox:
        async def run(self, program, limits=None):
            assert not episodes.journal or episodes.journal[-1] != "sandbox closed"
            return Result(stdout=program.code, stderr="", exit_status=0, ended=Ended.ok, seconds=0.0)

        async def close(self):
            episodes.journal.append("sandbox closed")

    async def reward(trajectory, prompt) -> float:
        return float((await pool.run(Program(code="0.5"))).stdout)

    episodes, pool = Episodes(), SandboxPool(SandboxConfig(), Sandbox())
    task = SimpleNamespace(sandbox=pool, episode_runner=lambda *_: episodes, rewards=Rewards(function=reward), roles=())
    recipe = Recipe()
    recipe.rollout.samples_per_prompt = 1
    with RolloutStage(recipe, task, episodes, episodes, watch=lambda: None, flush_caches=lambda: None) as stage:
        assert [one.reward for one in stage.rollout(PROMPTS[:2], label="step_000001")] == [0.5, 0.5]
        assert "sandbox closed" not in episodes.journal
    assert episodes.journal[-2:] == ["sandbox closed", "connections closed"]


def test_engines_are_looked_at_in_a_rollout_of_any_length(start: Start):
    looks: list[int] = []
    start(Episodes(), watch=lambda: looks.append(1)).rollout(PROMPTS[:1], label="s")
    assert looks == [1]


def test_event_loops_are_measured_while_episodes_run(start: Start):
    episodes = Episodes()
    episodes.takes_s = 0.2
    stage = start(episodes)
    stage.rollout(PROMPTS[:1], label="s")
    assert stage.take_lags()
    stage.run(asyncio.sleep(0.2))
    assert not stage.take_lags()
