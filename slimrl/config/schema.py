"""Every setting of a run with its default, as nested dataclasses.

A recipe is YAML over these classes and must give each field without a default.
Times end in `_s` (seconds), sizes in `_bytes` or `_tokens`; paths are relative to the working directory.
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
    """bfloat16 weights and activations, float32 main weights."""

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, as torch prints it without the prefix."""
        return "bfloat16" if self is Precision.bf16 else "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self is Precision.bf16 else 4


class LrSchedule(str, Enum):
    constant = "constant"
    """`lr` throughout."""
    linear = "linear"
    """Linear decay to `min_lr`."""
    cosine = "cosine"
    """Half a cosine down to `min_lr`."""


class AlgorithmName(str, Enum):
    gspo = "gspo"
    """Length-normalised importance ratio of each sequence (arXiv:2507.18071)."""


class AdvantageName(str, Enum):
    grpo = "grpo"
    """(r - mean) / (std + 1e-6) within the group."""
    dr_grpo = "dr_grpo"
    """r - mean within the group."""
    rloo = "rloo"
    """r minus the mean of the other rewards of the group."""


class HistoryMode(str, Enum):
    """What the policy is shown of its earlier turns."""

    keep = "keep"
    """The tokens that it sampled, thinking included."""
    template = "template"
    """What the chat template writes of them, which may leave thinking out; where it does, a new segment begins."""


class TruncationMode(str, Enum):
    score = "score"
    """A truncated trajectory is rewarded like any other."""
    zero = "zero"
    """It is trained on with reward 0, or with its own reward if that is below 0."""
    mask = "mask"
    """It counts in its group's baseline, but its own tokens are not trained on."""


class TransportName(str, Enum):
    ipc = "ipc"
    """Same node: CUDA IPC on a GPU, a named shared-memory segment on a CPU."""
    collective = "collective"
    """Across nodes: NCCL or gloo broadcast from trainer rank 0."""
    disk = "disk"
    """Through a shared file system: a Hugging Face checkpoint of each version, which engines reload."""
    delta = "delta"
    """Through a shared file system: changes since the last version, applied to a copy on the engine's node."""


class DeltaEncoding(str, Enum):
    """Encoding of a changed tensor; slimrl/versions/codec.py has the formats."""

    xor = "xor"
    """Exclusive or of old and new bits: smallest if most elements change, as in fp32."""
    overwrite = "overwrite"
    """Positions and new values of changed elements: fastest if few elements change, as in bf16."""


class PauseMode(str, Enum):
    """Treatment of running requests when the weights change."""

    retract = "retract"
    """They return to the queue, and their KV cache is computed again with the new weights."""
    abort = "abort"
    """They end, and their trajectories are aborted."""
    in_place = "in_place"
    """They continue with the KV cache of the old weights and are counted as stale."""


class VerifyMode(str, Enum):
    off = "off"
    """No comparison."""
    sampled = "sampled"
    """Some tensors at each resync, all of them in turn."""
    full = "full"
    """Every tensor at each resync."""


class WandbMode(str, Enum):
    offline = "offline"
    """Written into the run folder, for a later `wandb sync`."""
    online = "online"
    """Sent during the run."""
    disabled = "disabled"
    """wandb is not used."""


@dataclass(kw_only=True)
class RunConfig:
    name: str = MISSING
    """Name of the run; its folder is `<dir>/<name>`."""
    dir: str = "runs"
    """Folder that holds the run folders."""


@dataclass(kw_only=True)
class ModelConfig:
    path: str = MISSING
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer with chat template. Or a model of the Hugging
    Face Hub by its id, such as `Qwen/Qwen3-30B-A3B`, which is fetched once per node (docs/models.md)."""
    megatron: str = ""
    """Checkpoint of the same model in Megatron's format for the trainer, from `slimrl-tools convert` or a run's
    `checkpoints/step_N`; empty to load `path`. Engines load `path` and get the trainer's weights before they first
    generate."""
    chat_template: str = ""
    """File of a chat template in Jinja; empty for the tokenizer's own."""
    trust_remote_code: bool = False
    """Run the code that the folder of the model brings along, which some tokenizers need (Kimi-K2)."""


@dataclass(kw_only=True)
class ParallelConfig:
    tensor: int = 1
    """Ranks that share each matrix by rows or columns; each holds whole key-value heads."""
    pipeline: int = 1
    """Pipeline stages into which the layers are divided."""
    virtual_pipeline: int | None = None
    """Model chunks per pipeline rank; None for the plain 1F1B schedule."""
    expert: int = 1
    """Expert parallelism (EP): ranks over which the experts of a layer are divided."""
    expert_tensor: int = 1
    """Tensor parallelism within an expert (ETP), independent of `tensor`."""
    context: int = 1
    """Context parallelism: ranks that share the tokens of a micro-batch."""
    sequence: bool = False
    """Sequence parallelism over the tensor-parallel group; a MoE with tensor > 1 needs it."""

    def data(self, num_ranks: int) -> int:
        """The data-parallel size: ranks over which the sequences of an update are divided."""
        return num_ranks // (self.tensor * self.pipeline * self.context)


@dataclass(kw_only=True)
class OptimizerConfig:
    lr: float = MISSING
    """Peak learning rate."""
    schedule: LrSchedule = LrSchedule.constant
    """Schedule after the warm-up, over all updates of the run."""
    warmup_updates: int = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    min_lr: float = 0.0
    """Final learning rate of `linear` and `cosine`."""
    weight_decay: float = 0.0
    """Decoupled from the gradient, as in AdamW."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.98
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
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
    """Precision of weights and activations; log-probs, gradients and optimizer state are always float32."""
    max_tokens_per_rank: int = MISSING
    """Token budget of a packed micro-batch on one rank (a context-parallel group holds `context` times as many)."""
    token_multiple: int = 1
    """A rank's tokens of a micro-batch are padded to a multiple of this, within the budget. With 128 a GPU's kernels
    and its allocator see few sizes."""
    updates_per_rollout: int = 1
    """Optimizer updates per rollout batch, each on an equal part of its groups."""
    logprob_chunk_tokens: int = 4096
    """Tokens whose log-probs are computed at a time; bounds the memory of float32 [tokens, vocabulary] logits."""
    max_skipped_updates: int = 3
    """The run stops after this many consecutive updates with a NaN or infinite gradient."""
    startup_timeout_s: float = 600.0
    """Deadline for all ranks to build the model and load its weights."""
    timeout_s: float = 1800.0
    """Deadline of one trainer call: a pass over a batch, a checkpoint, an export."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the trainer's processes, such as `NCCL_DEBUG: INFO`; those that slimrl sets are refused."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Any field of megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig."""


class RoutingReplay(str, Enum):
    """Experts that the trainer's log-probs and updates take in a Mixture-of-Experts model."""

    off = "off"
    """Those that its own routers choose."""
    train = "train"
    """In the updates those of the pass over old log-probs (R2, arXiv:2507.18071, section 5.3)."""
    rollout = "rollout"
    """Those that the engines report (R3, arXiv:2510.11370)."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: AlgorithmName = AlgorithmName.gspo
    """Which loss is minimised."""
    clip_low: float = 3e-4
    """Clip range below 1. GSPO's ratios are sequence means, so ranges are three orders of magnitude below PPO's."""
    clip_high: float = 4e-4
    """Clip range above 1."""
    advantage: AdvantageName = AdvantageName.grpo
    """Advantages from the rewards of a group."""
    skip_zero_variance: bool = True
    """Drop groups whose rewards are all equal: their advantages are zero."""
    truncated: TruncationMode = TruncationMode.score
    """Treatment of a trajectory that reached its maximum length or number of turns."""
    max_logprob_mismatch: float = MISSING
    """The run stops above this mismatch/logprob_abs_mean; 1e-4 suits fp32, 0.05 bf16."""
    routing_replay: RoutingReplay = RoutingReplay.off
    """Experts that the trainer takes; `rollout` needs `rollout.routed_experts`. docs/models.md says more."""
    replay_gap_every_steps: int = 10
    """Steps between measurements of routing/unreplayed_*, from the first step on, with `routing_replay: rollout`; each
    costs a pass. 0 for none."""


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability; 1 is off. `slimrl train` refuses it in
    `rollout.sampling`."""
    top_k: int = -1
    """Sample from this many of the likeliest tokens; -1 is off. `slimrl train` refuses it in `rollout.sampling`."""
    max_new_tokens: int = 1024
    """Most new tokens of a turn."""
    ignore_end_of_turn: bool = False
    """Sample exactly `max_new_tokens` tokens: fixed work, for benchmarks."""


@dataclass(kw_only=True)
class RolloutConfig:
    num_engines: int = 1
    """SGLang servers, each with a whole model."""
    engine_tp: int = 1
    """Tensor-parallel size of an engine, which is its number of ranks."""
    engine_ep: int = 1
    """Expert-parallel size of an engine; it divides `engine_tp`."""
    engine_attention_dp: int = 1
    """Groups of an engine's ranks, each of which computes attention for requests of its own and caches these alone,
    while experts stay spread over all ranks; it divides `engine_tp`. docs/recipes.md says when it pays."""
    engine_nodes: int = 1
    """Nodes over which each engine spreads its ranks evenly; not with resync.transport ipc."""
    threads_per_engine: int = 1
    """CPU threads of each engine process (OMP_NUM_THREADS)."""
    colocated: bool = False
    """Engines share the trainer's devices: each side releases its memory while the other works."""
    max_replacements: int = 3
    """Most engines that a run replaces, because they ended or failed in a resync, before it stops."""
    router: bool = True
    """Route requests through smg; without it a trajectory stays on one engine, chosen by hash."""
    prompts_per_step: int = 32
    """Groups (prompts) per step."""
    samples_per_prompt: int = 8
    """Trajectories per group."""
    max_concurrency_per_engine: int = 256
    """Concurrent trajectories per engine on average: `num_engines` times as many in all."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_turns: int = 4
    """Most assistant turns of a trajectory."""
    max_trajectory_tokens: int = MISSING
    """Maximum length of a trajectory with its prompt and tool results; a longer one is truncated. With `agent.history:
    template`, of each of its segments."""
    stop_at_tool_call: bool = True
    """With tools, end the turn at the first closed tool call instead of at the end-of-turn token, if the text that
    closes a call is one token."""
    routed_experts: bool = False
    """Engines report the experts of each token."""
    request_timeout_s: float = 120.0
    """Deadline of a turn of the model."""
    tool_timeout_s: float = 10.0
    """Deadline of a tool call."""
    trajectory_timeout_s: float = 600.0
    """Deadline of a whole trajectory."""
    max_failed_fraction: float = 0.1
    """Fraction of the trajectories of a step or an evaluation that may fail (engine, tool, reward) or be aborted
    (deadline)."""
    startup_timeout_s: float = 300.0
    """Deadline for an engine to start."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the engines' processes; those that slimrl sets are refused."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Fields of SGLang's ServerArgs, but for those that slimrl sets and for layouts into which a resync cannot place
    weights (slimrl/config/sglang_layouts.py: pipelines, EPLB, DeepEP and other all-to-all backends, LoRA and more)."""

    @property
    def attention_tp(self) -> int:
        """Ranks of an engine that share the attention of a request."""
        return self.engine_tp // self.engine_attention_dp


@dataclass(kw_only=True)
class AgentConfig:
    tools: list[str] = field(default_factory=list)
    """Import paths `module:function` of the model's tools; annotations and docstrings become their schemas."""
    parser: str = ""
    """Format of tool calls: a parser of SGLang by its name there (`qwen25`, `deepseekv31`, `glm45`, `kimi_k2`), or the
    import path `module:name` of a function or class that returns a `Parser` (slimrl/agent/parsers.py); empty for the
    one of the model's family that reads what the chat template writes. docs/chat.md has a table."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a turn; null for the model's: `eos_token_id` of generation_config.json, else of config.json, else
    the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking` or `reasoning_effort`."""
    history: HistoryMode = HistoryMode.keep
    """What the policy is shown of its earlier turns."""
    max_result_chars: int = 4000
    """Maximum length of a tool result; a longer one loses its middle."""
    system_prompt: str | None = None
    """System message of prompts without one."""


@dataclass(kw_only=True)
class RewardConfig:
    function: str = MISSING
    """Import path `module:function` of a function of a trajectory and its prompt (slimrl/rewards)."""
    group_filters: list[str] = field(default_factory=list)
    """Import paths of functions that decide, from the trajectories of a group, whether to keep it."""


@dataclass(kw_only=True)
class ResyncConfig:
    transport: TransportName = TransportName.ipc
    """Transport of weights to the engines; docs/resync.md compares them."""
    bucket_bytes: int = 256 * 1024**2
    """Most bytes gathered and sent at a time."""
    verify: VerifyMode = VerifyMode.sampled
    """Comparison of fingerprints of the engines' loaded tensors with the trainer's after each resync."""
    sampled_versions: int = 50
    """Resyncs in which `sampled` compares every tensor once."""
    sampled_bytes: int = 16 * 1024**2
    """Minimum size of a sample; a model of less than twice this is compared whole at each resync."""
    timeout_s: float = 300.0
    """Deadline of one resync."""
    pause: PauseMode = PauseMode.retract
    """Treatment of running requests."""
    dir: str = ""
    """Folder for versions, at the same path for trainer and engines (disk, delta); empty for `resync` in the run
    folder."""
    keep: int = 2
    """Newest versions kept in `dir`, besides those on which they build."""
    local_dir: str = ""
    """Folder on a local disk of each node with engines, with room for one model per engine, and of the node of trainer
    rank 0, with room for one model (delta)."""
    full_every: int = 20
    """Every how many versions a whole one is written (delta)."""
    delta_encoding: DeltaEncoding = DeltaEncoding.overwrite
    """Encoding of changes (delta)."""


@dataclass(kw_only=True)
class DataConfig:
    train: str = MISSING
    """File of prompts (`slimrl train`) or of conversations (`slimrl sft`): Parquet if its name ends in `.parquet`, else
    JSONL."""
    eval: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name, files like `train`."""
    more: dict[str, str] = field(default_factory=dict)
    """Further files to train on by name."""
    weights: dict[str, float] = field(default_factory=dict)
    """How much of the training is on each file: a number for `train` and for each name of `more`, of which only the
    proportions count. Empty to take each item of all files once per epoch."""
    keys: dict[str, str] = field(default_factory=dict)
    """Columns of the files by our names: `{prompt: problem, label: answer}`; `a.b` is the key `b` of the column `a`.
    The columns that it does not name are the prompt's metadata. Empty for files with our names."""
    eval_keys: dict[str, str] = field(default_factory=dict)
    """The same of the evaluation sets; empty for `keys`."""
    shuffle: bool = True
    """A new order each epoch, derived from the seed."""
    max_prompt_tokens: int | None = None
    """Prompts longer than this, with tools and system prompt, are left out and counted. Null leaves none out: prompts
    without room for an answer are refused."""

    @property
    def train_files(self) -> dict[str, str]:
        """Files to train on by name, `train` first."""
        return {"train": self.train, **self.more}

    @staticmethod
    def train_key(name: str) -> str:
        """The setting that names a training file."""
        return "data.train" if name == "train" else f"data.more.{name}"

    @property
    def keys_of_eval(self) -> dict[str, str]:
        """Columns of the evaluation sets."""
        return self.eval_keys or self.keys


@dataclass(kw_only=True)
class EvalConfig:
    every_steps: int = 0
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""


@dataclass(kw_only=True)
class SftConfig:
    batch_conversations: int = 64
    """Conversations per optimizer update; one that the chat template rewrites as it goes on counts once for each of its
    sequences."""
    max_tokens: int = MISSING
    """Maximum length; a longer conversation is refused with its line before training starts."""
    summary_every_steps: int = 20
    """Updates between summary rows on the terminal; metrics.jsonl has every update."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every_steps: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    grace_s: float = 60.0
    """After SIGUSR1 the run finishes and saves its step, but drops a rollout that takes longer than this."""
    keep: int = 2
    """Newest checkpoints kept."""


@dataclass(kw_only=True)
class TrackingConfig:
    wandb: WandbMode = WandbMode.offline
    """Use of wandb."""
    wandb_project: str = "slimrl"
    """wandb's project for the run."""
    trajectories_per_step: int = 4
    """Readable trajectories written at each step."""


@dataclass(kw_only=True)
class Recipe:
    """One run of `slimrl train`, `sft`, `eval` or `rollout`."""

    seed: int = 0
    """Seed of all randomness: data order, sampling, initial states."""
    deterministic: bool = False
    """Same seed, same metrics: seeded requests, rollout in lockstep batches, and on GPUs slower algorithms that add in
    the same order each time."""
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

    @property
    def shares_devices(self) -> bool:
        """Whether engines run on the devices of trainer ranks: colocated, or because `ipc` cannot reach others."""
        return self.rollout.colocated or self.resync.transport is TransportName.ipc
