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


class Fp8Scaling(str, Enum):
    """Who shares a scale when linear layers of the trainer compute in FP8; docs/fp8.md has the rules."""

    off = "off"
    """Linear layers compute in `precision`."""
    blockwise = "blockwise"
    """128 x 128 elements of a weight, 128 elements in a row of activations and gradients, all in e4m3: the format of
    engines in block FP8."""
    tensorwise = "tensorwise"
    """Each tensor, by its present largest value; gradients in e5m2."""
    delayed = "delayed"
    """Each tensor, by its largest value in earlier micro-batches; gradients in e5m2."""
    mxfp8 = "mxfp8"
    """32 elements in a row, a power of two, all in e4m3; Blackwell GPUs."""


class LrSchedule(str, Enum):
    constant = "constant"
    """`lr` throughout."""
    linear = "linear"
    """Linear decay to `min_lr`."""
    cosine = "cosine"
    """Half a cosine down to `min_lr`."""


class AlgorithmName(str, Enum):
    """Each name stands for the settings of one published algorithm, which a recipe may then change (docs/algorithms.md
    has the table)."""

    gspo = "gspo"
    """Length-normalised importance ratio of each sequence (arXiv:2507.18071)."""
    gspo_token = "gspo_token"
    """GSPO with advantages that may differ by token (the same paper, section 4.3)."""
    grpo = "grpo"
    """PPO's clipped loss with advantages within the group (arXiv:2402.03300)."""
    dr_grpo = "dr_grpo"
    """GRPO without the division by the standard deviation and by the length (arXiv:2503.20783)."""
    dapo = "dapo"
    """A higher upper clip, and every token of the batch counts alike (arXiv:2503.14476)."""
    rloo = "rloo"
    """The mean of the others is the baseline (arXiv:2402.14740)."""
    reinforce_pp = "reinforce_pp"
    """REINFORCE++: no groups, KL in the reward, advantages whitened over the batch (arXiv:2501.03262)."""
    reinforce_pp_baseline = "reinforce_pp_baseline"
    """The mean of the group is the baseline, then advantages are whitened over the batch (arXiv:2501.03262)."""
    ppo = "ppo"
    """PPO: the values of a critic are the baseline, by generalised advantage estimation (arXiv:1707.06347)."""
    opo = "opo"
    """The optimal baseline, the mean reward weighted by length, exactly on policy (arXiv:2505.23585)."""
    cispo = "cispo"
    """Clipped importance weights in place of a clipped objective, so that no token loses its gradient
    (arXiv:2506.13585)."""
    gpg = "gpg"
    """The plain policy gradient with the mean of the group as its baseline (arXiv:2504.02546)."""
    sapo = "sapo"
    """A soft gate in place of the clip (arXiv:2511.20347)."""
    gmpo = "gmpo"
    """The geometric mean of clipped token ratios (arXiv:2507.20673)."""
    vspo = "vspo"
    """GRPO with prompts drawn by value in place of groups without a signal (after arXiv:2512.07478; docs/credit.md)."""
    rejection_sampling = "rejection_sampling"
    """Supervised training on the best trajectory of each group."""
    distillation = "distillation"
    """On-policy distillation: the teacher's log-prob minus the policy's is the advantage of each token
    (arXiv:2306.13649)."""


class LossName(str, Enum):
    """Losses of a policy; `slimrl/algorithms/losses.py` has the formulas."""

    gspo = "gspo"
    """Clipped ratio of the sequence."""
    gspo_token = "gspo_token"
    """The same value, with the gradient and the advantage of each token."""
    ppo = "ppo"
    """Clipped ratio of the token, with `dual_clip` bounded for negative advantages too."""
    cispo = "cispo"
    """Log-probs weighted by the clipped ratio of the token, which has no gradient."""
    gpg = "gpg"
    """Log-probs weighted by advantages."""
    sapo = "sapo"
    """Gated ratio of the token."""
    gmpo = "gmpo"
    """Geometric mean of the clipped ratios of a sequence's tokens."""


class AdvantageName(str, Enum):
    """Advantages of the trajectories of a group; r are their rewards."""

    grpo = "grpo"
    """(r - mean) / (std + 1e-6)."""
    dr_grpo = "dr_grpo"
    """r - mean."""
    rloo = "rloo"
    """r minus the mean of the others."""
    opo = "opo"
    """r minus the mean weighted by the number of sampled tokens."""
    reward = "reward"
    """r itself: no baseline, and a group may have one trajectory."""
    gae = "gae"
    """Generalised advantage estimation with a critic, which the section `critic` sets up (arXiv:1506.02438)."""
    none = "none"
    """0, for learning from a teacher alone."""
    given = "given"
    """What the reward function gives for the trajectory, or with `algorithm.credit.name: turn` for its turns."""


class Aggregation(str, Enum):
    """How the losses of tokens become the loss of an update, whatever its micro-batches."""

    trajectory = "trajectory"
    """The mean over trajectories of the mean over their sampled tokens."""
    token = "token"
    """The mean over all sampled tokens of the update."""
    constant = "constant"
    """The sum over tokens, divided by the number of trajectories and by `rollout.max_trajectory_tokens`."""


class OldPolicy(str, Enum):
    """Whose log-probs of the sampled tokens the ratio divides by."""

    trainer = "trainer"
    """The trainer's, under the weights before the rollout's first update."""
    rollout = "rollout"
    """The engine's, as they came with the trajectories; never an extra pass."""


class KlEstimator(str, Enum):
    """Of KL(policy, reference) at a sampled token, with x = log pi - log pi_ref
    (http://joschu.net/blog/kl-approx.html)."""

    k1 = "k1"
    """x: unbiased, of either sign. Only in the reward: as a loss its gradient is zero on average."""
    k2 = "k2"
    """x^2 / 2: its gradient is that of the KL."""
    k3 = "k3"
    """exp(-x) - 1 + x: never negative."""
    k3_weighted = "k3_weighted"
    """k3 times the token's importance ratio, so that its gradient is unbiased off policy too (arXiv:2512.02556)."""


class KlPlace(str, Enum):
    loss = "loss"
    """Added to the loss of each token."""
    reward = "reward"
    """Subtracted from the reward of each token, which earlier tokens answer for too."""


class CorrectionLevel(str, Enum):
    """What has one weight exp(u), with u = log pi_trainer - log pi_engine of a sampled token under the old policy."""

    off = "off"
    """No weights."""
    token = "token"
    """Each token: u."""
    sequence = "sequence"
    """Each trajectory: the sum of its u."""
    geometric = "geometric"
    """Each trajectory: the mean of its u."""


class CorrectionMode(str, Enum):
    """Treatment of a weight outside [low, high]."""

    truncate = "truncate"
    """It becomes `high` if it is above; `low` is not used."""
    clip = "clip"
    """It becomes the bound that it passes."""
    mask = "mask"
    """It becomes 0, which leaves the token or the trajectory out (IcePop)."""


class CreditName(str, Enum):
    """How advantages differ among the turns of a trajectory; docs/credit.md has the formulas."""

    trajectory = "trajectory"
    """Not: every turn has the advantage of its trajectory."""
    turn = "turn"
    """Rewards from the turn on, discounted, compared within the group at each turn."""
    gigpo = "gigpo"
    """The advantage of the trajectory plus that of the turn among turns from the same state (arXiv:2505.10978)."""


class SelectionMode(str, Enum):
    """The trajectories of a group that are trained on."""

    all = "all"
    """All of them."""
    best_and_worst = "best_and_worst"
    """Those with the highest and the lowest rewards; the others only count in the group's baseline."""
    best = "best"
    """Rejection sampling: those with the highest rewards, each with advantage 1."""


class RefillMode(str, Enum):
    """Prompts that replace groups without a signal (dynamic sampling, arXiv:2503.14476)."""

    off = "off"
    """None: a step has as many prompts as `rollout.prompts_per_step`, with or without a signal."""
    order = "order"
    """The next ones in the order of the training data."""
    value = "value"
    """Drawn from all prompts with weights that prefer those of middling difficulty and those seldom tried."""


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


class SandboxBackend(str, Enum):
    """Where code that the policy wrote runs; docs/sandbox.md compares them."""

    bubblewrap = "bubblewrap"
    """Namespaces, seccomp and limits on this machine, forked from a warm interpreter."""
    subprocess = "subprocess"
    """A plain process with limits: no isolation."""
    remote = "remote"
    """A server with the HTTP interface of SandboxFusion."""
    container = "container"
    """docker or podman, a container for each run or session."""


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
class LoraConfig:
    rank: int = 0
    """Rank of the adapters; 0 trains the model's own weights."""
    alpha: float = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by the last part of their name in Hugging Face's model (`q_proj`,
    `kv_b_proj`, `down_proj`), in attention, MLPs and experts; or `all-linear`."""
    dropout: float = 0.0
    """Probability with which a value of an adapter's input is dropped in training."""


@dataclass(kw_only=True)
class MtpConfig:
    train: bool = False
    """Train the model's layers for multi-token prediction, with which an engine may draft tokens. The rest of the model
    learns the same with and without them (docs/models.md)."""
    loss_weight: float = 0.1
    """Factor of their loss. As it reaches no other weights, it matters little with Adam: the size of their gradient
    before clipping, which they have for themselves."""


@dataclass(kw_only=True)
class TrainerConfig:
    num_ranks: int = 1
    """World size of the trainer: tensor * pipeline * context * data."""
    threads_per_rank: int = 1
    """CPU threads of each trainer process (OMP_NUM_THREADS)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    precision: Precision = Precision.bf16
    """Precision of weights and activations; log-probs, gradients and optimizer state are always float32."""
    fp8: Fp8Scaling = Fp8Scaling.off
    """Linear layers of the transformer compute in FP8, through Transformer Engine; weights and optimizer keep
    `precision`."""
    fp8_emulation: bool = False
    """Round to `fp8` and back around Megatron's own linear layers instead: the numbers of FP8 on any machine without
    Transformer Engine, without its speed."""
    max_tokens_per_rank: int = MISSING
    """Token budget of a packed micro-batch on one rank (a context-parallel group holds `context` times as many)."""
    token_multiple: int = 1
    """A rank's tokens of a micro-batch are padded to a multiple of this, within the budget. With 128 a GPU's kernels
    and its allocator see few sizes."""
    updates_per_rollout: int = 1
    """Optimizer updates per rollout batch, each on an equal part of its groups."""
    logprob_chunk_tokens: int = 1024
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
class CorrectionConfig:
    """Importance weights for the difference between the engines' policy, which sampled, and the trainer's."""

    level: CorrectionLevel = CorrectionLevel.off
    """What has a weight of its own."""
    mode: CorrectionMode = CorrectionMode.truncate
    """Treatment of a weight outside the bounds."""
    low: float = 0.0
    """Lower bound of a weight, for `clip` and `mask`."""
    high: float = 2.0
    """Upper bound of a weight."""
    veto: float = 0.0
    """A trajectory with a token whose probability fell below this fraction of the engine's is left out; 0 is off."""
    max_gap: float = 0.0
    """A trajectory of negative advantage is left out if its mean log pi_engine - log pi is above this
    (arXiv:2512.02556); 0 is off."""

    @property
    def is_active(self) -> bool:
        return self.level is not CorrectionLevel.off or self.by_trajectory

    @property
    def by_trajectory(self) -> bool:
        """Whether a token's weight depends on the other tokens of its trajectory."""
        of_trajectories = self.level in (CorrectionLevel.sequence, CorrectionLevel.geometric)
        return of_trajectories or self.veto > 0 or self.max_gap > 0


@dataclass(kw_only=True)
class CreditConfig:
    name: CreditName = CreditName.trajectory
    """How advantages differ among the turns of a trajectory."""
    discount: float = 1.0
    """Factor on a later turn's reward for each turn in between (turn, gigpo)."""
    step_weight: float = 1.0
    """Weight of the advantage among turns from the same state (gigpo)."""
    turn_weights: list[float] = field(default_factory=list)
    """Factors on the advantages of the first turn, the second and so on; later turns have the last. Empty for 1."""
    process_weights: list[float] = field(default_factory=lambda: [1.0])
    """Weight of the rewards of turns in each stage of the run; `[0.7, 0.3, 0]` moves from dense to sparse rewards."""
    outcome_weights: list[float] = field(default_factory=lambda: [1.0])
    """Weight of the trajectory's own reward in each stage, as `[0.3, 0.7, 1]`."""
    stage_starts: list[int] = field(default_factory=list)
    """Steps at which the second stage and those after it begin."""

    @property
    def by_turn(self) -> bool:
        """Whether advantages differ among the turns of a trajectory."""
        return self.name is not CreditName.trajectory or bool(self.turn_weights)


@dataclass(kw_only=True)
class SelectionConfig:
    mode: SelectionMode = SelectionMode.all
    """The trajectories of a group that are trained on."""
    count: int = 1
    """How many best ones, and with `best_and_worst` how many worst ones."""
    min_reward: float = 1.0
    """Smallest reward of a trajectory that `best` keeps."""


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    refill: RefillMode = RefillMode.off
    """Prompts that replace groups without a signal."""
    max_refills: int = 4
    """Most further rollouts of a step."""
    oversampling: float = 1.0
    """Prompts of each rollout of a step, as a multiple of the groups that are missing."""
    value_decay: float = 0.8
    """Weight of a prompt's earlier results against its newest in its success rate (value)."""
    uncertainty_weight: float = 0.5
    """Weight of how seldom a prompt was tried, against its difficulty (value)."""
    max_weight: float = 4.0
    """Largest weight of a prompt, as a multiple of the mean (value)."""


@dataclass(kw_only=True)
class OverlongConfig:
    max_tokens: int | None = None
    """Sampled tokens of a trajectory at which the penalty is complete; null is off (DAPO, arXiv:2503.14476, eq. 13)."""
    buffer_tokens: int = 1024
    """Last tokens before it over which the penalty grows linearly."""
    penalty: float = 1.0
    """The complete penalty."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: AlgorithmName = AlgorithmName.gspo
    """The algorithm, which gives the defaults of this section; those listed here are GSPO's."""
    loss: str = "gspo"
    """A [loss](#lossname) by its name, or the import path `module:function` of one (docs/algorithms.md)."""
    advantage: str = "grpo"
    """An [advantage](#advantagename) by its name, or the import path `module:function` of one (docs/algorithms.md)."""
    aggregation: Aggregation = Aggregation.trajectory
    """From the losses of tokens to the loss of an update."""
    clip_low: float = 3e-4
    """Clip range below 1. GSPO's ratios are sequence means, so ranges are three orders of magnitude below PPO's."""
    clip_high: float = 4e-4
    """Clip range above 1."""
    dual_clip: float = 0.0
    """The loss of a token of negative advantage A is at most -A times this (arXiv:1912.09729, with `ppo`); 0 is off."""
    old_policy: OldPolicy = OldPolicy.trainer
    """Whose log-probs the ratio divides by."""
    teacher_coef: float = 0.0
    """Weight of log pi_teacher - log pi_old, which is added to the advantage of each token; 0 is off. It needs the
    section `teacher`."""
    whiten: bool = False
    """Subtract the mean of the advantages of all tokens of a rollout and divide by their standard deviation."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, which is the model before the run; 0 is off."""
    kl_estimator: KlEstimator = KlEstimator.k3
    """Estimator of the KL."""
    kl_place: KlPlace = KlPlace.loss
    """Where the KL is charged."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, its first with `entropy_target`; 0 is off."""
    entropy_target: float | None = None
    """The bonus holds the policy's entropy per token here: after each step its weight rises by `entropy_step` if the
    entropy is below, and falls by as much, to 0 at the least, if it is above. Null for a fixed weight."""
    entropy_step: float = 1e-4
    """Change of the weight with `entropy_target`."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
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
    credit: CreditConfig = field(default_factory=CreditConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


@dataclass(kw_only=True)
class StopConfig:
    """Limits of a step's metrics: the run stops when a metric is beyond its limit in several steps in a row."""

    patience_steps: int = 3
    """Steps in a row beyond a limit that stop the run; steps without an optimizer update do not count."""
    mismatch: float | None = None
    """Largest `mismatch/logprob_abs_mean`; `algorithm.max_logprob_mismatch` stops at the first step."""
    kl: float | None = None
    """Largest `policy/kl`."""
    entropy_min: float | None = None
    """Smallest `policy/entropy`."""
    entropy_max: float | None = None
    """Largest `policy/entropy`."""
    grad_norm: float | None = None
    """Largest `policy/grad_norm`."""
    effective_sample_size_min: float | None = None
    """Smallest `policy/effective_sample_size`."""


@dataclass(kw_only=True)
class CriticConfig:
    """The model that estimates values for `algorithm.advantage: gae` (docs/critic.md). It starts from `model` and has
    ranks on devices of its own."""

    discount: float = 1.0
    """Gamma: what a reward is worth one sampled token earlier."""
    gae_lambda: float = 1.0
    """Lambda: 1 takes rewards as they came, 0 the critic's estimate from the next sampled token on."""
    value_clip: float = 0.2
    """An update gains nothing by moving a value further than this from where it was before the rollout's first update;
    0 is off."""
    warmup_steps: int = 0
    """First steps of the run, in which only the critic learns."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Layout, optimizer and batches of the critic: the settings of `trainer`, whose values it has where a recipe gives
    none here."""


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
    template` and `agent.compaction`, of each of its segments."""
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
class TeacherConfig:
    """The model that scores the policy's tokens for on-policy distillation (docs/distillation.md)."""

    path: str = ""
    """Hugging Face checkpoint folder or id on the Hub, as `model.path`; its tokenizer must be the policy's. The run
    serves it on devices of its own. Empty for none."""
    urls: list[str] = field(default_factory=list)
    """SGLang servers of the teacher that somebody else runs, such as `http://node7:30000`, instead of `path`."""
    num_engines: int = 1
    """SGLang servers, each with a whole teacher."""
    engine_tp: int = 1
    """Tensor-parallel size of a teacher's engine, which is its number of ranks."""
    engine_ep: int = 1
    """Expert-parallel size of a teacher's engine; it divides `engine_tp`."""
    engine_nodes: int = 1
    """Nodes over which each of its engines spreads its ranks evenly."""
    threads_per_engine: int = 1
    """CPU threads of each of its processes (OMP_NUM_THREADS)."""
    max_concurrency_per_engine: int = 32
    """Segments that one engine, or one server of `urls`, scores at a time."""
    request_timeout_s: float = 300.0
    """Deadline for the score of a segment, once it is its turn."""
    startup_timeout_s: float = 600.0
    """Deadline for an engine to start."""
    max_replacements: int = 3
    """Most of its engines that a run restarts, because they ended, before it stops."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its engines' processes; those that slimrl sets are refused."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Fields of SGLang's ServerArgs for its engines, but for those that slimrl sets."""

    @property
    def is_given(self) -> bool:
        return bool(self.path or self.urls)

    @property
    def engines_to_start(self) -> int:
        """Engines that the run starts itself."""
        return self.num_engines if self.path else 0


@dataclass(kw_only=True)
class McpServerConfig:
    """A server of tools that speaks the Model Context Protocol (docs/mcp.md): the settings of `agent.mcp.NAME`."""

    command: list[str] = field(default_factory=list)
    """Command that starts the server, which talks over its standard input and output."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command, which gets PATH, HOME and the like besides."""
    url: str = ""
    """URL of a server over streamable HTTP, instead of a command."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers of each request to the URL."""
    tools: list[str] = field(default_factory=list)
    """The server's tools that the model is shown; empty for all."""
    pure: list[str] = field(default_factory=list)
    """Its tools whose answers follow from their arguments alone: answers are given again, and calls are repeated that a
    server which ended may have taken."""
    per_trajectory: bool = False
    """A connection, and so a process of a command, for each trajectory, for a server that keeps state."""
    restarts: int = 2
    """How often a call connects anew to a server that has ended."""


@dataclass(kw_only=True)
class SandboxLimits:
    """Limits of a run. docs/sandbox.md says how each backend enforces them."""

    wall_s: float = 8.0
    """Deadline of a run, or of one execution in a session. Below `rollout.tool_timeout_s`, so that a tool answers."""
    cpu_s: int = 8
    """CPU time of each process; whole seconds."""
    memory_bytes: int = 512 * 1024**2
    """Address space that a process may add to the warm interpreter's, and private memory of all processes together."""
    processes: int = 32
    """Processes and threads at the same time."""
    disk_bytes: int = 64 * 1024**2
    """/tmp and /dev/shm together, and the largest file."""
    output_bytes: int = 256 * 1024
    """stdout and stderr together."""


@dataclass(kw_only=True)
class SandboxConfig:
    """Which sandbox, and how much of it at a time (docs/sandbox.md)."""

    backend: SandboxBackend = SandboxBackend.bubblewrap
    """Where code runs; slimrl never falls back from one to another."""
    all_nodes: bool = False
    """Run on all nodes of the Ray cluster, each with these limits and places, instead of the driver's alone."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    session_cpu_s: int = 60
    """CPU time of each process of a session, over the session's life: in place of `limits.cpu_s`."""
    max_running: int = 8
    """Runs at the same time; others wait."""
    max_waiting: int = 1024
    """Runs that wait; one more is refused."""
    wait_s: float = 60.0
    """How long a run waits before it is refused."""
    max_sessions: int = 64
    """Sessions that are open at the same time; others wait, as runs do."""
    packages: list[str] = field(default_factory=lambda: ["numpy", "sympy"])
    """Distributions that the warm interpreter has imported, of bubblewrap: those of them that are installed."""
    url: str = "http://127.0.0.1:8080"
    """Of the remote server."""
    command: str = "docker"
    """Of the container backend: docker, podman or a path."""
    image: str = "python:3.12-slim"
    """Of the container backend; holds python3, sh, bash and, for sessions in a folder, tar."""


@dataclass(kw_only=True)
class CompactionConfig:
    at_tokens: int | None = None
    """Length from which on a context is compacted: a summary takes the place of its turns (docs/environments.md). Null
    for never."""
    keep_turns: int = 1
    """Newest turns that stay beside the summary, with what they led to, where they fit."""
    prompt: str = (
        "The conversation has become too long. Write a summary that takes its place: what the task is, what was done "
        "and found so far, and what is left to do."
    )
    """What asks the policy for the summary, which it is trained on."""
    function: str = ""
    """Import path `module:function` of a function of the messages that writes the summary instead of the policy."""


@dataclass(kw_only=True)
class SubagentConfig:
    description: str = MISSING
    """What the policy is told of it."""
    system_prompt: str | None = None
    """System message of its context."""
    tools: list[str] = field(default_factory=list)
    """Import paths `module:function` of its tools."""
    max_turns: int = 4
    """Most turns of a call of it; they count in `rollout.max_turns`."""


@dataclass(kw_only=True)
class GatewayConfig:
    """The server through which `agent.command` and `agent.function` reach the policy (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on, at a free port; part of the URLs that agents get."""
    max_body_bytes: int = 33_554_432
    """Largest body of a request."""
    body_timeout_s: float = 30.0
    """Deadline for the body of a request to arrive."""
    max_concurrent_requests: int = 64
    """Most requests of a trajectory at a time."""
    max_requests_per_s: float = 100.0
    """Most requests of a trajectory in a second, on average; as many may come at once."""


@dataclass(kw_only=True)
class AgentConfig:
    tools: list[str] = field(default_factory=list)
    """Import paths `module:function` of the model's tools; annotations and docstrings become their schemas."""
    tool_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of tools by name, such as `{corpus: wiki.jsonl}`. The model is not shown these parameters."""
    mcp: dict[str, McpServerConfig] = field(default_factory=dict)
    """Servers of further tools by name (docs/mcp.md)."""
    max_tool_calls: int | None = None
    """Most calls of a trajectory that tools answer; further ones are answered with an error message."""
    subagents: dict[str, SubagentConfig] = field(default_factory=dict)
    """Tools that are the policy itself with a task, a context and tools of its own (docs/environments.md)."""
    environment: str = ""
    """Import path `module:Class` of the environment, instead of tools (docs/environments.md)."""
    environment_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of each instance of the environment."""
    workers: int = 1
    """Processes that run the episodes; 1 for the driver itself (docs/environments.md)."""
    start_timeout_s: float = 120.0
    """Deadline of an environment's start."""
    start_retries: int = 2
    """Further attempts to start an environment, each with a new instance."""
    step_timeout_s: float = 120.0
    """Deadline of an environment's answer to a turn."""
    close_timeout_s: float = 30.0
    """Deadline of an environment's close, after which it is left behind."""
    episode: str = ""
    """Import path `module:function` of a function that plays an episode, instead of turn and answer in turn
    (docs/environments.md)."""
    command: Any = ""
    """Command that is run for each trajectory and asks the policy through the gateway (docs/gateway.md): a list of
    words, or one text that is split into words as a shell does. No shell runs it."""
    function: str = ""
    """Import path `module:function` of a function that is called for each trajectory instead of a command."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
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
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    max_result_chars: int = 4000
    """Maximum length of a tool result; a longer one loses its middle."""
    system_prompt: str | None = None
    """System message of prompts without one."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    @property
    def uses_gateway(self) -> bool:
        return bool(self.command or self.function)


@dataclass(kw_only=True)
class RewardPartConfig:
    """A named number that counts in the reward (docs/rewards.md): the settings of `reward.by_name.NAME` and
    `reward.group.NAME` too."""

    function: str = MISSING
    """Import path `module:name` of a function of a trajectory and its prompt, or of a class of such functions; in
    `group`, of the trajectories of a prompt and the prompt."""
    weight: float = 1.0
    """Factor of the part in the reward; below 0 for a cost, 0 to log the part alone."""
    cap: float | None = None
    """Values beyond plus or minus this count as this; null for no cap."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""
    verified: bool = False
    """The part is checked against the truth, such as a label or tests. The others are proxies, which
    `reward.alarm_steps` compares with it."""


@dataclass(kw_only=True)
class RewardConfig:
    function: str = ""
    """Import path `module:name` of one reward: a function of a trajectory and its prompt, or a class of such functions
    (slimrl/rewards). Empty where `parts`, `by_name` or `group` have the reward."""
    parts: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Parts of the reward of every trajectory: the reward is their weighted sum."""
    by_name: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Further parts, of which a prompt has the one that its metadata names."""
    name_key: str = "reward"
    """Key of a prompt's metadata that names its part of `by_name`."""
    group: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Parts that are computed for all trajectories of a prompt at once; not in evaluations."""
    group_filters: list[str] = field(default_factory=list)
    """Import paths of functions that decide, from the trajectories of a group, whether to keep it."""
    retries: int = 0
    """How often a reward function that failed is called again, within the trajectory's deadline."""
    retry_on: list[str] = field(default_factory=lambda: ["builtins:OSError", "httpx:TransportError"])
    """Import paths of the exceptions that count for `retries`; any other fails the trajectory at once."""
    startup_timeout_s: float = 120.0
    """Deadline for a reward with a method `start` to start, and for its `close`."""
    alarm_steps: int = 20
    """Steps over which reward/hacking_alarm looks for a proxy that rises while the verified parts fall; 0 is off."""


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
    samples_per_prompt: int = 1
    """Trajectories of each prompt; more than one needs a temperature above 0 in `rollout.eval_sampling`."""
    pass_at: list[int] = field(default_factory=list)
    """Each k of which pass@k is estimated, at most `samples_per_prompt` (docs/evaluation.md)."""
    pass_reward: float = 1.0
    """Smallest reward with which a trajectory passes."""


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
    critic: CriticConfig = field(default_factory=CriticConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    resync: ResyncConfig = field(default_factory=ResyncConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage == AdvantageName.gae.value

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic that the run starts."""
        return self.critic.trainer.num_ranks if self.has_critic else 0

    @property
    def shares_devices(self) -> bool:
        """Whether engines run on the devices of trainer ranks: colocated, or because `ipc` cannot reach others."""
        return self.rollout.colocated or self.resync.transport is TransportName.ipc
