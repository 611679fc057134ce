"""The rollout: its engines, its limits and how they sample."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slimrl.config.schema.speculative import SpeculativeConfig
from slimrl.config.schema.types import (
    MISSING,
    Flag,
    Fraction,
    Multiple,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    TopK,
)


class RolloutMode(str, Enum):
    """Which of trainer and engines wait for the other; docs/async.md."""

    sync = "sync"
    """The trainer waits for the rollout of its step, and the engines for the trainer."""
    one_step_off = "one_step_off"
    """The trainer waits for the rollout of its step, while the engines sample the next one; both wait for each other
    before the weights change."""
    async_ = "async"
    """The trainer waits for enough groups, the engines only when they are `max_staleness` ahead; the weights change
    while they sample."""


class TooOld(str, Enum):
    """Treatment of a group that cannot be trained on within `max_staleness`."""

    drop = "drop"
    """The group ends, at once if it still runs, and is counted."""
    wait = "wait"
    """No group becomes too old: the trainer waits for the groups that would be after its next update."""
    train = "train"
    """The group is trained on: `max_staleness` bounds how far the engines are ahead, and not the age."""


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveFraction = 1.0
    """Sample from the likeliest tokens with this total probability; 1 is off. `slimrl train` refuses it in
    `rollout.sampling`."""
    top_k: TopK = -1
    """Sample from this many of the likeliest tokens; -1 is off. `slimrl train` refuses it in `rollout.sampling`."""
    max_new_tokens: PositiveInt = 1024
    """Most new tokens of a turn."""
    ignore_end_of_turn: Flag = False
    """Sample exactly `max_new_tokens` tokens: fixed work, for benchmarks."""


@dataclass(kw_only=True)
class EvalSamplingConfig(SamplingConfig):
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""


@dataclass(kw_only=True)
class RolloutConfig:
    num_engines: PositiveInt = 1
    """Number of SGLang servers, each with a whole model."""
    min_engines: NonNegativeInt = 0
    """Fewest engines with which a run starts, where the cluster has no room for `num_engines`, and goes on, where nodes
    are lost; 0 to start with all of them and to go on with one."""
    max_engines: NonNegativeInt = 0
    """Most engines, up to which the run takes in devices that become free, on nodes that join the cluster; 0 for
    `num_engines`."""
    engine_tp: PositiveInt = 1
    """Tensor-parallel size of an engine, which is its number of ranks."""
    engine_ep: PositiveInt = 1
    """Expert-parallel size of an engine; it divides `engine_tp`."""
    engine_attention_dp: PositiveInt = 1
    """Groups of an engine's ranks, each of which computes attention for requests of its own and caches these alone,
    while experts stay spread over all ranks; it divides `engine_tp`. docs/recipes.md says when it pays."""
    engine_nodes: PositiveInt = 1
    """Nodes over which each engine spreads its ranks evenly."""
    threads_per_engine: PositiveInt = 1
    """CPU threads of each process of an engine, a teacher's too (OMP_NUM_THREADS)."""
    colocated: Flag = False
    """Engines share the trainer's devices: each side releases its memory while the other works."""
    max_replacements: NonNegativeInt = 3
    """Most engines that a run replaces, because they ended, did not answer or failed in a resync, before it stops."""
    mode: RolloutMode = RolloutMode.sync
    """Which of trainer and engines wait for the other."""
    max_staleness: NonNegativeInt = 1
    """The most updates of the weights, with `async` or `oversample`, between the one that sampled a group's first token
    and the one that trains on the group."""
    too_old: TooOld = TooOld.drop
    """Treatment of groups that become older than `max_staleness`, with `async` or `oversample`."""
    oversample: Multiple = 1.0
    """Groups that a step begins with in `sync` mode, as a multiple of `prompts_per_step`: it ends when that many groups
    have, and the others go on in the next step, with the tokens that they have. They may be `max_staleness` updates
    old. `algorithm.dynamic_sampling.oversampling` is another thing: it replaces zero-variance groups."""
    prompts_per_step: PositiveInt = 32
    """Number of groups (prompts) per step."""
    samples_per_prompt: PositiveInt = 8
    """Number of trajectories per group."""
    max_concurrency_per_engine: PositiveInt = 256
    """Concurrent trajectories per engine on average: `num_engines` or `max_engines` times as many in all."""
    adaptive_concurrency: Flag = False
    """Run fewer trajectories while the engines' KV caches are full, and more while there is room: docs/async.md. Not
    with `deterministic`."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    max_turns: PositiveInt = 4
    """Most assistant turns of a trajectory."""
    max_trajectory_tokens: PositiveInt = MISSING
    """Maximum length of a trajectory with its prompt and tool results; a longer one is truncated. With `agent.history:
    template` and `agent.compaction`, of each of its segments."""
    stop_at_tool_call: Flag = True
    """Whether a turn with tools ends at the first closed tool call instead of at the end-of-turn token, if the text
    that closes a call is one token."""
    routed_experts: Flag = False
    """Whether engines report the experts of each token."""
    chunk_tokens: NonNegativeInt = 0
    """Ask for a turn in requests of at most so many tokens, which is what an engine that dies takes along; 0 for whole
    turns. docs/async.md says how they are joined. Not with `deterministic`."""
    request_timeout_s: PositiveFloat = 120.0
    """Deadline of a turn of the model."""
    tool_timeout_s: PositiveFloat = 10.0
    """Deadline of a tool call."""
    trajectory_timeout_s: PositiveFloat = 600.0
    """Deadline of a whole trajectory."""
    max_failed_fraction: Fraction = 0.1
    """Fraction of the trajectories of a step or an evaluation that may fail (engine, tool, reward) or be aborted
    (deadline)."""
    startup_timeout_s: PositiveFloat = 300.0
    """Deadline for an engine to start."""
    health_timeout_s: PositiveFloat = 60.0
    """Deadline for an engine's workers to answer, which they do between two batches; one that is late is replaced."""
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the engines' processes; those that slimrl sets are refused."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Fields of SGLang's ServerArgs, [those that are safe](#fields-of-megatron-core-and-sglang)."""

    @property
    def most_engines(self) -> int:
        return max(self.num_engines, self.max_engines)

    @property
    def spans_steps(self) -> bool:
        """Whether groups run that are not of the step's own rollout."""
        return self.mode is not RolloutMode.sync or self.oversample > 1

    @property
    def attention_tp(self) -> int:
        """Ranks of an engine that share the attention of a request."""
        return self.engine_tp // self.engine_attention_dp
