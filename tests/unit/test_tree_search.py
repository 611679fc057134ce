"""Search over an episode's steps, with an engine that says the digits 0, 1, 2 in turn in each context."""

import asyncio
import dataclasses
import itertools
import json
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from recipe_problems import recipe_problems
from test_agent_rules import GIVEN, RECIPE, recipe_of
from test_episode import CHAT, PROMPT, encode, parser_of

from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import Observation, Turn
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.tree_search.search import TreeSearch
from slimrl.algorithms.selection import select
from slimrl.config.check import check_recipe
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.config.schema.search import SearchConfig, SearchMethod
from slimrl.config.search_rules import most_environments
from slimrl.data.conversation_lines import write_conversations
from slimrl.data.engine import Engine, EngineError, GenerateResult
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.loading import Rewards
from slimrl.rewards.parts import Part, SingleReward
from slimrl.rewards.scoring import Score
from slimrl.rollout.scored_episodes import ScoredEpisodes

DIGITS, DEPTH = 3, 3
GREEDY, GLOBAL = (0, 0, 0), (1, 2, 1)
"""The best path step by step, and the best of all"""


def worth(path: tuple[int, ...]) -> float:
    """Points of a path so far: the first digit 0 is the best at once, and 1 leads to more."""
    points = {(): 0.0, (0,): 0.3, (1,): 0.2, (2,): 0.1}
    if len(path) <= 1:
        return points[path]
    later = sum(0.1 * (digit == wanted) for digit, wanted in zip(path[1:], GLOBAL[1:], strict=False))
    return points[path[:1]] + (3 * later if path[0] == 1 else 0.01 * (path[1] == 0) + 0.01 * (path[2:] == (0,)))


class Digits:
    """`DEPTH` digits, each with its points at once."""

    opened = closed = 0

    async def start(self, prompt, *, seed, scratch):
        type(self).opened += 1
        self.path, self.scratch = (), scratch
        return Observation(messages=prompt.messages, state_id="")

    async def step(self, turn: Turn) -> Observation:
        before, self.path = worth(self.path), (*self.path, int(turn.text))
        self.scratch["path"] = self.path
        given = worth(self.path) - before
        state = "".join(map(str, self.path))
        told = [{"role": "user", "content": f"after {state}"}]
        return Observation(messages=told, reward=given, done=len(self.path) == DEPTH, state_id=state)

    async def close(self) -> None:
        type(self).closed += 1


class Rotation(Engine):
    """Says 0, 1, 2, 0 and so on in each context."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.asked, self.said, self.fails_at = [], defaultdict(int), fails_at

    async def generate(self, request):
        if len(self.asked) == self.fails_at:
            raise EngineError("the engine is gone")
        self.asked.append(request)
        await asyncio.sleep(0)
        key = tuple(request.input_ids)
        digit, self.said[key] = self.said[key] % DIGITS, self.said[key] + 1
        tokens = encode(f"{digit}<|im_end|>")
        return GenerateResult(
            tokens=tokens, logprobs=[-1.0 - digit] * len(tokens), weight_versions=np.full(len(tokens), 3, np.int32),
            finish_reason="stop", routed_experts=None, cached_tokens=0,
        )  # fmt: skip


class Returned:
    """The points so far."""

    num_open = 0

    async def start(self) -> None:
        self.num_open += 1

    async def stop(self) -> None:
        self.num_open -= 1

    async def __call__(self, trajectory: Trajectory, prompt) -> float:
        return sum(trajectory.metadata["environment"].get("rewards", []))


def search(
    method: str, *, engine=None, environment=Digits, trajectory_id: str = "step/1", parallel: bool = True,
    value=None, max_turns: int = 8, **settings,
) -> Trajectory:  # fmt: skip
    settings = {"width": DIGITS, "rollouts": 0, **settings}
    runner = EpisodeRunner(
        engine=engine or Rotation(),
        dialogues=Dialogues(CHAT, parser_of, stop_at_call=True),
        environment=environment,
        rollout=RolloutConfig(max_turns=max_turns, max_trajectory_tokens=512),
        agent=AgentConfig(environment="digits"),
        search=TreeSearch(
            settings=SearchConfig(method=SearchMethod(method), **settings),
            value=value or Returned(),
            parallel=parallel,
            trains=True,
        ),
    )
    sampling = SamplingConfig(max_new_tokens=8)
    return asyncio.run(runner.run(PROMPT, trajectory_id=trajectory_id, sampling=sampling, seed=11))


def path_of(trajectory: Trajectory) -> tuple[int, ...]:
    assert trajectory.status is Status.completed, trajectory.metadata
    return tuple(int(one["content"]) for one in trajectory.messages if one["role"] == "assistant")


def best_beam(size: int) -> tuple[int, ...]:
    kept = [()]
    for _ in range(DEPTH):
        kept = sorted(((*path, digit) for path in kept for digit in range(DIGITS)), key=worth, reverse=True)[:size]
    return kept[0]


def test_the_best_state_after_each_turn_is_the_greedy_path():
    found = search("best_of_n")
    assert path_of(found) == GREEDY == best_beam(1)
    assert found.metadata["search"] == {"num_states": 9, "num_ends": 3, "num_tokens": 18}
    assert found.scratch["path"] == GREEDY


def test_a_beam_of_two_finds_what_leads_to_more():
    assert path_of(search("beam", beam=2)) == GLOBAL == best_beam(2)
    assert max(itertools.product(range(DIGITS), repeat=DEPTH), key=worth) == GLOBAL


def test_a_whole_tree_search_finds_the_best_of_all():
    found = search("mcts", expansions=13, rollouts=1)
    assert path_of(found) == GLOBAL
    assert found.metadata["search"]["num_states"] == 39


def test_the_states_of_a_tree_search_are_those_of_the_upper_confidence_bound():
    """Against a search over paths that knows neither episodes nor nodes."""
    values = defaultdict(list)
    expanded: list[tuple[int, ...]] = []
    for _ in range(7):
        path: tuple[int, ...] = ()
        while path in expanded:
            total = len(values[path])
            bounds = {
                child: np.mean(values[child]) + 0.3 * math.sqrt(math.log(total) / len(values[child]))
                for digit in range(DIGITS)
                if not is_spent(child := (*path, digit), expanded)
            }
            path = max(bounds, key=bounds.__getitem__)
        expanded.append(path)
        for digit in range(DIGITS):
            child = (*path, digit)
            for length in range(len(child) + 1):
                values[child[:length]].append(worth(child))
    engine = Rotation()
    search("mcts", engine=engine, expansions=7, exploration=0.3, parallel=False)
    contexts = [CHAT.template.decode(request.input_ids) for request in engine.asked]
    asked = [tuple(map(int, text.split("after ")[-1].split("<")[0])) if "after" in text else () for text in contexts]
    assert asked[::DIGITS] == expanded


def is_spent(path: tuple[int, ...], expanded: list[tuple[int, ...]]) -> bool:
    children = [(*path, digit) for digit in range(DIGITS)]
    return len(path) == DEPTH or (path in expanded and all(is_spent(child, expanded) for child in children))


def test_rollouts_give_a_state_the_mean_of_their_ends():
    found = search("best_of_n", rollouts=2, parallel=False, max_tokens=1)
    # The first turns are 0, 1, 2, and the plain episodes after each say 0 0 and 1 0.
    ends = [[worth((first, 0, 0)), worth((first, 1, 0))] for first in range(DIGITS)]
    assert found.metadata["search"] == {"num_states": 3, "num_ends": 6, "num_tokens": 3 * (2 + 2 * 4)}
    assert path_of(found) == (0, 0, 0)
    # The path that was chosen has the turns 0 to 2, of which a plain episode sampled the last two.
    means = np.mean(ends, 1)
    assert found.search_tree.turn_advantages == pytest.approx(
        [means[0] - means.mean(), 0, 0, *(means[1:] - means.mean())]
    )


def test_every_environment_is_closed_also_when_the_engine_fails():
    for engine in (Rotation(), Rotation(fails_at=7)):
        Digits.opened = Digits.closed = 0
        found = search("beam", engine=engine, rollouts=1)
        assert Digits.opened == Digits.closed > 5
    assert (found.status, found.metadata["error"]) == (Status.failed, "the engine is gone")
    assert found.metadata["search"]["num_tokens"] == 2 * 7


class Counted(Digits):
    """Endless, but for the turns of the recipe; knows how many were open at once."""

    now = most = 0

    async def start(self, prompt, *, seed, scratch):
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        return await super().start(prompt, seed=seed, scratch=scratch)

    async def step(self, turn: Turn) -> Observation:
        self.path = (*self.path, int(turn.text))
        # All plain episodes have begun before the first one ends.
        await asyncio.sleep(0.002)
        return Observation(messages=[{"role": "user", "content": "on"}], state_id="".join(map(str, self.path)))

    async def close(self) -> None:
        Counted.now -= 1


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "best_of_n", "rollouts": 2},
        {"method": "best_of_n", "width": 1, "rollouts": 0},
        {"method": "beam", "beam": 3, "rollouts": 0},
        {"method": "beam", "beam": 2, "rollouts": 3, "width": 2},
        {"method": "beam", "beam": 4, "rollouts": 1, "width": 1},
        {"method": "mcts", "expansions": 4, "rollouts": 2, "exploration": 100.0},
        {"method": "mcts", "expansions": 3, "rollouts": 0, "exploration": 100.0},
    ],
)
def test_a_search_has_as_many_environments_open_at_once_as_the_check_of_a_recipe_counts(settings, parallel):
    Counted.now = Counted.most = 0
    search(**settings, environment=Counted, parallel=parallel, max_turns=5)
    recipe = recipe_of()
    recipe.deterministic = not parallel
    recipe.agent.search = SearchConfig(**{"width": DIGITS, **settings, "method": SearchMethod(settings["method"])})
    assert Counted.most == most_environments(recipe)


def test_requests_at_the_same_time_find_the_same_tree_with_other_seeds_for_each_branch():
    engines = Rotation(), Rotation()
    one, other = (search("beam", engine=engine, parallel=engine is engines[0]) for engine in engines)
    assert one.search_tree.turn_advantages == other.search_tree.turn_advantages
    seeds = [sorted(request.seed for request in engine.asked) for engine in engines]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])


def test_when_its_tokens_are_spent_a_search_goes_on_with_the_best_state_alone():
    engine = Rotation()
    found = search("beam", engine=engine, max_tokens=6)
    # Three turns of two tokens, and then 0 is gone on from, where each context was new.
    assert path_of(found) == (0, 0, 0)
    assert len(engine.asked) == 5
    assert found.metadata["search"]["num_tokens"] == 10


def test_an_evaluation_of_a_training_run_is_not_searched():
    engine = Rotation()
    found = search("beam", engine=engine, trajectory_id="eval_000003/heldout/p:1/0")
    assert (len(engine.asked), found.search_tree) == (DEPTH, None)


class TwoSeats(Digits):
    async def start(self, prompt, *, seed, scratch):
        await super().start(prompt, seed=seed, scratch=scratch)
        return Observation(messages=prompt.messages, role="white")


def test_an_environment_of_several_roles_is_refused():
    found = search("mcts", environment=TwoSeats)
    assert found.metadata["error"] == "agent.search: the environment has several roles, and a search is for one"


class Fails(Returned):
    async def __call__(self, trajectory, prompt):
        raise ZeroDivisionError("no value")


def test_a_value_that_raises_fails_the_trajectory():
    found = search("mcts", value=Fails())
    assert found.metadata["error"] == "agent.search.value failed: ZeroDivisionError('no value')"


def test_each_turn_is_trained_once_and_its_advantage_is_over_its_siblings():
    found = search("beam", beam=2)
    tree = found.search_tree
    trained = defaultdict(list)
    for segment in tree.segments:
        paths = {}
        for turn in range(int(segment.turn_ids.max()) + 1):
            sampled = segment.tokens[segment.loss_mask & (segment.turn_ids == turn)]
            if len(sampled):
                paths[turn] = CHAT.template.decode(sampled.tolist())
        for turn, text in paths.items():
            trained[turn].append(text)
        outside = ~segment.loss_mask
        assert (segment.weight_versions[outside] == -1).all()
        assert not segment.rollout_logprobs[outside].any()
        assert (segment.weight_versions[segment.loss_mask] == 3).all()
    # 3 first turns, and twice 2 * 3 later ones.
    assert sorted(trained) == list(range(15))
    assert all(len(texts) == 1 for texts in trained.values())
    # The path that was chosen has the first numbers; (1, 2, 1) is compared with (1, 2, 0) and (1, 2, 2).
    assert [trained[turn][0][0] for turn in range(DEPTH)] == list(map(str, GLOBAL))
    siblings = [worth((1, 2, digit)) for digit in range(DIGITS)]
    assert tree.turn_advantages[2] == pytest.approx(worth(GLOBAL) - np.mean(siblings))
    assert sum(tree.turn_advantages) == pytest.approx(0)


def test_a_shared_beginning_trained_once_has_the_gradient_of_all_branches():
    """In float64, with a model whose log-prob of a token depends on all tokens before it."""
    found = search("beam", beam=2, rollouts=0)
    tree = found.search_tree
    torch.manual_seed(0)
    embedding = torch.randn(int(max(s.tokens.max() for s in tree.segments)) + 1, 6, dtype=torch.float64)
    embedding.requires_grad_()
    cell = torch.nn.GRU(6, 6, batch_first=True, dtype=torch.float64)
    parameters = [embedding, *cell.parameters()]

    def log_probs(tokens) -> torch.Tensor:
        """[T - 1], of each token but the first."""
        ids = torch.tensor(np.asarray(tokens), dtype=torch.long)
        hidden, _ = cell(embedding[ids[:-1]][None])
        return torch.log_softmax(hidden[0] @ embedding.T, -1).gather(1, ids[1:, None])[:, 0]

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])

    once = sum(
        (log_probs(s.tokens) * torch.tensor(weights_of(s.turn_ids, s.loss_mask, tree.turn_advantages)[1:])).sum()
        for s in tree.segments
    )
    # All paths as whole episodes: a turn that k of them share has a k-th of its advantage in each.
    sharing = np.zeros(len(tree.turn_advantages))
    for segment in tree.segments:
        for turn in set(segment.turn_ids.tolist()) - {-1}:
            sharing[turn] += 1
    assert sharing.max() > 1
    split = np.array(tree.turn_advantages) / sharing
    sampled = encode("<|im_end|>") + [token for digit in "012" for token in encode(digit)]
    branches = sum(
        (log_probs(s.tokens) * torch.tensor(weights_of(s.turn_ids, sampled_tokens(s, sampled), split)[1:])).sum()
        for s in tree.segments
    )
    assert torch.allclose(gradient(once), gradient(branches), rtol=1e-12, atol=1e-14)


def sampled_tokens(segment, sampled) -> np.ndarray:
    """The first two tokens of each turn: a digit and the end."""
    firsts = np.zeros(len(segment), bool)
    for turn in set(segment.turn_ids.tolist()) - {-1}:
        firsts[np.flatnonzero(segment.turn_ids == turn)[:2]] = True
    assert set(segment.tokens[firsts].tolist()) <= set(sampled)
    return firsts


def weights_of(turn_ids, mask, advantages) -> np.ndarray:
    return np.where(mask, np.array([*advantages, 0.0])[turn_ids], 0.0)


SUBAGENTS = "agent.subagents={solver: {description: Solves a part., max_turns: 1}}"
SEARCHED = ["agent.search.method=beam", "algorithm.name=grpo"]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (SEARCHED, "agent.search.method", "Set algorithm.advantage given and algorithm.credit.name turn."),
        ([*SEARCHED, "agent.episode=a:b"], "agent.episode", "cannot branch such an episode"),
        ([*SEARCHED, "agent.function=a:b"], "agent.function", "cannot branch such an episode"),
        ([*SEARCHED, SUBAGENTS], "agent.subagents", "cannot branch such an episode"),
        ([*SEARCHED, "agent.past_versions.every_steps=2"], "agent.past_versions.every_steps", "one role"),
        (["agent.search.value.args={a: 1}"], "agent.search.value.args", "agent.search.value.function"),
        (["agent.search.method=dfs"], "agent.search.method", "best_of_n"),
    ],
)
def test_what_a_search_cannot_go_with_is_named_before_the_start(overrides, key, message):
    found = {problem.key: problem.message for problem in recipe_problems(RECIPE, [*GIVEN, *overrides])}
    assert message in found[key]


def test_a_run_trains_on_all_turns_of_a_search_and_keeps_the_reward_of_its_path():
    recipe = recipe_of(*SEARCHED, "algorithm.advantage=given", "algorithm.credit.name=turn")
    assert [one.key for one in check_recipe(recipe, None, "train") if not one.warning] == []
    found = search("beam", beam=2)
    tree = found.search_tree

    class Runs:
        async def run(self, prompt, **_):
            return found

    async def paid(trajectory, prompt):
        assert path_of(trajectory) == GLOBAL
        assert sum(int(one.loss_mask.sum()) for one in trajectory.segments) == 2 * DEPTH
        return Score(reward=0.8, turn_rewards=[0.1] * DEPTH)

    rewards = Rewards(function=SingleReward(part=Part(name="", function=paid, path="paid")))
    scored = asyncio.run(
        ScoredEpisodes(recipe, rewards, Runs(), Rotation()).run("step/1", PROMPT, recipe.rollout.sampling)
    )
    assert (scored.reward, scored.turn_rewards, scored.search_tree) == (0.8, [], None)
    assert scored.turn_advantages == tree.turn_advantages
    assert sum(int(one.loss_mask.sum()) for one in scored.segments) == 2 * 15
    chosen = select([scored], recipe.algorithm, lambda _: True, step=1)
    assert chosen.turn_advantages[0] == pytest.approx(tree.turn_advantages)


def test_completed_paths_of_enough_reward_become_conversations(tmp_path):
    found = search("best_of_n")
    found.reward, found.tools = 1.0, {"": [{"type": "function", "function": {"name": "dial", "parameters": {}}}]}
    poor, cut = dataclasses.replace(found, reward=0.5), dataclasses.replace(found, status=Status.truncated)
    file = tmp_path / "sft.jsonl"
    assert write_conversations(file, [found, poor, cut], 1.0) == 1
    line = json.loads(file.read_text())
    assert [one["content"] for one in line["messages"] if one["role"] == "assistant"] == ["0", "0", "0"]
    assert line["tools"] == found.tools[""]
    two = dataclasses.replace(
        found,
        messages=[{**one, "conversation": role} for role in ("white", "black") for one in found.messages],
        role_rewards={"white": 1.0, "black": -1.0},
        metadata={"roles": {"white": {"train": True}, "black": {"train": True}}},
    )
    assert write_conversations(file, [two], 1.0) == 1
    line = json.loads(file.read_text())
    assert (line["id"], len(line["messages"])) == ("step/1 white", len(found.messages))
