"""Every setting of a run: nested dataclasses, the one home of every default.

A recipe is YAML over these classes. A field without a default must be given by the recipe.
Times end in `_s` (seconds), sizes in `_bytes` or `_tokens`, paths are relative to the working directory.
This module imports no torch, so that a recipe is checked in milliseconds.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Precision(str, Enum):
    fp32 = "fp32"
    """float32 throughout."""
    bf16 = "bf16"
    """bfloat16 weights and activations beside float32 main weights."""


class LrSchedule(str, Enum):
    constant = "constant"
    """`lr` throughout."""
    linear = "linear"
    """In a straight line to `min_lr`."""
    cosine = "cosine"
    """Along half a cosine to `min_lr`."""


class AlgorithmName(str, Enum):
    gspo = "gspo"
    """Ratio of sequences, length-normalised (arXiv:2507.18071)."""


class AdvantageName(str, Enum):
    grpo = "grpo"
    """(r - mean) / (std + 1e-6) within the group."""
    dr_grpo = "dr_grpo"
    """r - mean within the group."""
    rloo = "rloo"
    """r minus the mean of the other rewards of the group."""


class ParserName(str, Enum):
    hermes = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write."""


class TruncatedRule(str, Enum):
    score = "score"
    """A truncated trajectory is rewarded like any other."""
    zero = "zero"
    """It gets reward 0 and is trained on."""
    mask = "mask"
    """It counts in its group's baseline, but its own tokens are not trained on."""


class TransportName(str, Enum):
    ipc = "ipc"
    """Same node: CUDA IPC on a GPU, a named shared-memory segment on a CPU."""
    collective = "collective"
    """Across nodes: NCCL or gloo broadcast from trainer rank 0."""
    disk = "disk"
    """Through a shared file system: a whole Hugging Face checkpoint of each version, which engines reload."""
    delta = "delta"
    """Through a shared file system: what changed against the version before, applied to a copy beside the engine."""


class DeltaEncoding(str, Enum):
    """How a changed tensor is written; slimrl/models/versions/codec.py has the formats."""

    xor = "xor"
    """Exclusive or of old and new bits: smallest where most elements change, as in fp32."""
    overwrite = "overwrite"
    """Places and new values of changed elements: fastest where few of them change, as in bf16."""


class PauseMode(str, Enum):
    """What becomes of requests that run when the weights change."""

    retract = "retract"
    """They go back into the queue, and their keys and values are computed again with the new weights."""
    abort = "abort"
    """They end with what they have; their trajectories are aborted."""
    in_place = "in_place"
    """They go on with keys and values of the old weights, which are counted as stale and not flushed."""


class VerifyMode(str, Enum):
    off = "off"
    """No comparison."""
    sampled = "sampled"
    """Some tensors each time, all of them in turn."""
    full = "full"
    """Every tensor each time."""


class WandbMode(str, Enum):
    offline = "offline"
    """Written into the run folder, to be synchronised later."""
    online = "online"
    """Sent while the run goes on."""
    disabled = "disabled"
    """Nothing."""


@dataclass(kw_only=True)
class RunConfig:
    name: str = MISSING
    """Name of the run; its folder is `<dir>/<name>`."""
    dir: str = "runs"
    """Folder that holds the run folders."""


@dataclass(kw_only=True)
class ModelConfig:
    path: str = MISSING
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer with chat template."""
    megatron: str = ""
    """Checkpoint of the same model in Megatron's format, from which the trainer takes its weights instead: written by
    `slimrl-tools convert`, or `checkpoints/step_N` of a run. Empty for those of `path`. Engines start with the weights
    of `path` and get the trainer's before they first generate."""


@dataclass(kw_only=True)
class ParallelConfig:
    tensor: int = 1
    """Ranks that share each matrix by rows or columns; each holds whole key-value heads."""
    pipeline: int = 1
    """Stages into which the layers are divided."""
    virtual_pipeline: int | None = None
    """Model chunks per pipeline rank; None for the plain 1F1B schedule."""
    expert: int = 1
    """Parts into which the experts of a layer are divided."""
    expert_tensor: int = 1
    """Tensor parallelism inside an expert (ETP), independent of `tensor`."""
    context: int = 1
    """Ranks that share the tokens of one micro-batch."""
    sequence: bool = False
    """Sequence parallelism over the tensor-parallel group; a MoE with tensor > 1 needs it."""


@dataclass(kw_only=True)
class OptimizerConfig:
    lr: float = MISSING
    """Learning rate at its highest."""
    schedule: LrSchedule = LrSchedule.constant
    """Of the rate after the warm-up, over all updates of the run."""
    warmup_steps: int = 0
    """Optimizer updates over which the rate rises linearly from 0."""
    min_lr: float = 0.0
    """Where `linear` and `cosine` end."""
    weight_decay: float = 0.0
    """Decoupled from the gradient, as in AdamW."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.98
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks."""


@dataclass(kw_only=True)
class TrainerConfig:
    num_ranks: int = 1
    """World size of the trainer: tensor * pipeline * context * data."""
    threads_per_rank: int = 1
    """CPU threads of each trainer process (OMP_NUM_THREADS)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Precision = Precision.bf16
    """Of weights and activations; log-probs, gradients and optimizer state are float32 in any case."""
    max_tokens_per_rank: int = MISSING
    """Token budget of one packed micro-batch on one rank (a context-parallel group holds `context` times as many)."""
    updates_per_rollout: int = 1
    """Optimizer updates made of one rollout batch, each on its own share of the groups."""
    logprob_chunk_tokens: int = 4096
    """Tokens whose logits are turned into log-probs at a time; bounds the float32 [tokens, vocabulary] memory."""
    max_skipped_steps: int = 3
    """Updates in a row with a NaN or infinite gradient after which the run stops."""
    startup_timeout_s: float = 600.0
    """Until all ranks have built the model and loaded its weights."""
    timeout_s: float = 1800.0
    """Deadline of one trainer call: a pass over a batch, a checkpoint, an export."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Any field of megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: AlgorithmName = AlgorithmName.gspo
    """Which loss is minimised."""
    clip_low: float = 3e-4
    """GSPO ratios are sequence means; ranges are three orders of magnitude below PPO's."""
    clip_high: float = 4e-4
    """Above 1; `clip_low` is below it."""
    advantage: AdvantageName = AdvantageName.grpo
    """How the rewards of a group become advantages."""
    skip_zero_variance: bool = True
    """Drop groups whose rewards are all equal: their advantages are zero."""
    truncated: TruncatedRule = TruncatedRule.score
    """What becomes of a trajectory that reached its longest length or its last turn."""
    max_logprob_mismatch: float = MISSING
    """Largest mismatch/logprob_abs_mean that the run continues with; 1e-4 suits fp32, 0.05 bf16."""


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together; 1 is off."""
    top_k: int = -1
    """-1 is off."""
    max_new_tokens: int = 1024
    """Of one turn."""
    ignore_end_of_turn: bool = False
    """Sample `max_new_tokens` whatever comes, and truncate there: fixed work, for measurements of speed."""


@dataclass(kw_only=True)
class RolloutConfig:
    num_engines: int = 1
    """SGLang servers, each with the whole model."""
    engine_tensor: int = 1
    """Tensor-parallel size of one engine: its ranks."""
    engine_expert: int = 1
    """Expert-parallel size of one engine: parts into which its experts are divided among these ranks."""
    threads_per_engine: int = 1
    """CPU threads of each engine process (OMP_NUM_THREADS)."""
    colocated: bool = False
    """Engines share the trainer's devices: each side gives its memory away while the other one works."""
    max_replacements: int = 3
    """Engines started anew in one run, because they ended or failed in a resync, before the run stops."""
    router: bool = True
    """Put smg in front of the engines; without it a session is pinned to an engine by its hash."""
    prompts_per_step: int = 32
    """Groups of one step."""
    samples_per_prompt: int = 8
    """Trajectories of one group."""
    max_concurrency: int = 256
    """Trajectories under way at once."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_turns: int = 4
    """Assistant turns of one trajectory."""
    max_trajectory_tokens: int = MISSING
    """Longest trajectory, prompt and tool results included; a longer one is truncated."""
    stop_at_tool_call: bool = True
    """End the turn at the first closed tool call instead of at the end-of-turn token."""
    routed_experts: bool = False
    """Have the engines report which experts each token took."""
    request_timeout_s: float = 120.0
    """Deadline of one turn of the model."""
    tool_timeout_s: float = 10.0
    """Deadline of one call of a tool."""
    trajectory_timeout_s: float = 600.0
    """Deadline of one trajectory, all its turns together."""
    max_failed_fraction: float = 0.1
    """Share of the trajectories of a step or an evaluation that may fail or be aborted before the run stops."""
    startup_timeout_s: float = 300.0
    """Until an engine answers."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Any field of SGLang's ServerArgs."""


@dataclass(kw_only=True)
class AgentConfig:
    tools: list[str] = field(default_factory=list)
    """Import paths `module:function` of the tools that the model may call; their docstrings make the schema."""
    parser: ParserName = ParserName.hermes
    """How tool calls are written."""
    max_result_chars: int = 4000
    """Longest tool result; the middle of a longer one is left out."""
    system_prompt: str | None = None
    """Put before a prompt that has no system message of its own."""


@dataclass(kw_only=True)
class RewardConfig:
    function: str = MISSING
    """Import path `module:function`, called with the trajectory and its prompt (slimrl/rewards)."""
    group_filters: list[str] = field(default_factory=list)
    """Import paths of functions that get the trajectories of one group and say whether to keep it."""


@dataclass(kw_only=True)
class ResyncConfig:
    transport: TransportName = TransportName.ipc
    """How weights reach the engines; docs/resync.md compares them."""
    bucket_bytes: int = 256 * 1024**2
    """Most bytes gathered and sent at a time."""
    verify: VerifyMode = VerifyMode.sampled
    """Compare fingerprints of the engines' loaded tensors with the trainer's after each resync."""
    sampled_versions: int = 50
    """Resyncs in which `sampled` compares every tensor once: each time another share of them."""
    sampled_bytes: int = 16 * 1024**2
    """Least share of the model that is worth a sample; one of less than twice this is compared whole each time."""
    timeout_s: float = 300.0
    """Deadline of one resync."""
    pause: PauseMode = PauseMode.retract
    """What becomes of requests that are under way."""
    dir: str = ""
    """Folder for versions, reached by trainer and engines under one path (disk, delta); empty for `resync` in the run's
    folder."""
    keep: int = 2
    """Newest versions kept in `dir`, besides those that they build on."""
    local_dir: str = ""
    """Folder on the own disk of each node with engines, with room for the model once per engine, and of the node of
    trainer rank 0, with room for it once (delta)."""
    full_every: int = 20
    """Every so many versions one is written whole (delta)."""
    delta_encoding: DeltaEncoding = DeltaEncoding.overwrite
    """How changes are written (delta)."""


@dataclass(kw_only=True)
class DataConfig:
    train: str = MISSING
    """JSONL of prompts (`slimrl train`) or of conversations (`slimrl sft`)."""
    eval: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name."""
    shuffle: bool = True
    """A new order each epoch, derived from the seed."""


@dataclass(kw_only=True)
class EvalConfig:
    every_steps: int = 0
    """Steps between evaluations; 0 evaluates at the start and the end alone."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""


@dataclass(kw_only=True)
class SftConfig:
    batch_conversations: int = 64
    """Conversations of one optimizer update."""
    max_tokens: int = MISSING
    """A longer conversation is refused, by line, before training starts."""
    summary_every_steps: int = 20
    """Updates between two summary rows on the terminal; metrics.jsonl has every update."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every_steps: int = 0
    """0 saves at the end alone."""
    grace_s: float = 60.0
    """After SIGUSR1 the step under way is finished and saved; a rollout that takes longer than this is dropped."""
    keep: int = 2
    """Newest checkpoints kept."""


@dataclass(kw_only=True)
class TrackingConfig:
    wandb: WandbMode = WandbMode.offline
    """`offline` writes into the run folder, `disabled` nothing."""
    wandb_project: str = "slimrl"
    """Under which wandb files the run."""
    trajectories_per_step: int = 4
    """Trajectories written out readably at each step."""


@dataclass(kw_only=True)
class Recipe:
    """One run of `slimrl train`, `sft`, `eval` or `rollout`."""

    seed: int = 0
    """Of everything random in the run: data order, sampling, initial states."""
    deterministic: bool = False
    """Same seed, same metrics: seeded requests, rollout in lock-step batches."""
    steps: int = MISSING
    """Rollout-and-train steps of `slimrl train`, optimizer updates of `slimrl sft`."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    resync: ResyncConfig = field(default_factory=ResyncConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
