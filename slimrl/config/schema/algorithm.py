"""The algorithm: its name, and every choice that a name stands for."""

from dataclasses import dataclass, field
from enum import Enum

from slimrl.config.schema.credit import CreditConfig, CreditName, DynamicSamplingConfig, OverlongConfig, SelectionConfig
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.types import MISSING, Flag, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat


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
    """GRPO with prompts drawn by value in place of zero-variance groups (after arXiv:2512.07478;
    docs/algorithms.md#dynamic-sampling)."""
    rejection_sampling = "rejection_sampling"
    """Supervised training on the best trajectory of each group."""
    distillation = "distillation"
    """On-policy distillation: the teacher's log-prob minus the policy's is the advantage of each token
    (arXiv:2306.13649)."""


class LossName(str, Enum):
    """Losses of a policy; `slimrl/algorithms/losses.py` has the formulas."""

    gspo = "gspo"
    """PPO's clipped loss on the importance ratio of the sequence."""
    gspo_token = "gspo_token"
    """The same value, with the gradient and the advantage of each token."""
    ppo = "ppo"
    """PPO's clipped loss on the importance ratio of the token, with `dual_clip` bounded for negative advantages too."""
    cispo = "cispo"
    """Log-probs weighted by the clipped ratio of the token, which has no gradient."""
    gpg = "gpg"
    """The plain policy gradient: log-probs weighted by advantages."""
    sapo = "sapo"
    """The importance ratio of the token behind a soft gate in place of the clip."""
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
    """The policy whose log-probs of the sampled tokens are the denominator of the importance ratio."""

    trainer = "trainer"
    """The trainer's policy, under the weights before the rollout's first update."""
    rollout = "rollout"
    """The engine's policy: log-probs as they came with the trajectories; never an extra pass."""


class KlEstimator(str, Enum):
    """Estimators of KL(policy, reference) at a sampled token, with x = log pi - log pi_ref
    (http://joschu.net/blog/kl-approx.html)."""

    k1 = "k1"
    """x: unbiased, of either sign. Only in the reward: as a loss its gradient is zero on average."""
    k2 = "k2"
    """x^2 / 2: biased as a value, but on policy its gradient is that of KL(policy, reference)."""
    k3 = "k3"
    """exp(-x) - 1 + x: unbiased as a value and never negative; on policy its gradient is that of KL(reference, policy).
    """
    k3_weighted = "k3_weighted"
    """k3 times the token's importance ratio: its gradient is that of KL(policy, reference), off policy too
    (arXiv:2512.02556)."""


class KlPlace(str, Enum):
    loss = "loss"
    """Added to the loss of each token."""
    reward = "reward"
    """Subtracted from the reward of each token, which earlier tokens answer for too."""


class CorrectionLevel(str, Enum):
    """What shares one importance weight exp(u), with u = log pi_trainer - log pi_engine of a sampled token under the
    old policy."""

    off = "off"
    """No importance weights."""
    token = "token"
    """A weight for each token, from its u."""
    sequence = "sequence"
    """A weight for each trajectory, from the sum of its tokens' u."""
    geometric = "geometric"
    """A weight for each trajectory, from the mean of its tokens' u."""


class CorrectionMode(str, Enum):
    """Treatment of a weight outside [low, high]."""

    truncate = "truncate"
    """The weight becomes `high` if it is above; `low` is not used."""
    clip = "clip"
    """The weight becomes the bound that it passes."""
    mask = "mask"
    """The weight becomes 0, which leaves the token or the trajectory out (IcePop)."""


class RoutingReplay(str, Enum):
    """Experts that the trainer's log-probs and updates take in a Mixture-of-Experts model."""

    off = "off"
    """The experts that the trainer's own routers choose."""
    train = "train"
    """The experts of the pass over old log-probs, in the updates (R2, arXiv:2507.18071, section 5.3)."""
    rollout = "rollout"
    """The experts that the engines report (R3, arXiv:2510.11370)."""


@dataclass(kw_only=True)
class CorrectionConfig:
    """Importance weights for the difference between the engines' policy, which sampled, and the trainer's."""

    level: CorrectionLevel = CorrectionLevel.off
    """What has an importance weight of its own."""
    mode: CorrectionMode = CorrectionMode.truncate
    """Treatment of a weight outside the bounds."""
    low: NonNegativeFloat = 0.0
    """Lower bound of a weight, for `clip` and `mask`."""
    high: PositiveFloat = 2.0
    """Upper bound of a weight."""
    veto: NonNegativeFloat = 0.0
    """A trajectory with a token whose probability fell below this fraction of the engine's is left out; 0 is off."""
    max_gap: NonNegativeFloat = 0.0
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
class AlgorithmConfig:
    """From rewards to a loss: the settings of the section `algorithm` (docs/algorithms.md)."""

    name: AlgorithmName = AlgorithmName.gspo
    """The algorithm, which gives the defaults of this section; those listed here are GSPO's."""
    loss: str = "gspo"
    """A [loss](#lossname) by its name, or the import path `module:function` of one (docs/algorithms.md)."""
    advantage: str = "grpo"
    """An [advantage](#advantagename) by its name, or the import path `module:function` of one (docs/algorithms.md)."""
    baseline_by_role: Flag = True
    """In episodes of several roles, compare a role with the same role of the prompt's other trajectories, so that who
    moves first has no advantage from it; otherwise with all roles (docs/agents.md#several-roles)."""
    aggregation: Aggregation = Aggregation.trajectory
    """How the losses of tokens become the loss of an update."""
    clip_low: PositiveFloat = 3e-4
    """Clip range below 1. GSPO's ratios are sequence means, so ranges are three orders of magnitude below PPO's."""
    clip_high: PositiveFloat = 4e-4
    """Clip range above 1."""
    dual_clip: NonNegativeFloat = 0.0
    """The loss of a token of negative advantage A is at most -A times this (arXiv:1912.09729, with `ppo`); 0 is off."""
    old_policy: OldPolicy = OldPolicy.trainer
    """The policy whose log-probs are the denominator of the importance ratio."""
    teacher_coef: NonNegativeFloat = 0.0
    """Weight of log pi_teacher - log pi_old, which is added to the advantage of each token; 0 is off. It needs the
    section `teacher`."""
    whiten: Flag = False
    """Subtract the mean of the advantages of all tokens of a rollout and divide by their standard deviation."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference, which is the model before the run; 0 is off."""
    kl_estimator: KlEstimator = KlEstimator.k3
    """Estimator of the KL."""
    kl_place: KlPlace = KlPlace.loss
    """Whether the KL is charged in the loss or in the reward."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, its first with `entropy_target`; 0 is off."""
    entropy_target: PositiveFloat | None = None
    """The bonus holds the policy's entropy per token here: after each step its weight rises by `entropy_step` if the
    entropy is below, and falls by as much, to 0 at the least, if it is above. Null for a fixed weight."""
    entropy_step: PositiveFloat = 1e-4
    """Change of the entropy bonus's weight after each step, with `entropy_target`."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    skip_zero_variance: Flag = True
    """Leave groups whose rewards are all equal out of the passes where they add nothing to the gradient; they count in
    the means of their update all the same (docs/algorithms.md#selection)."""
    truncated: TruncationMode = TruncationMode.score
    """Treatment of a trajectory that reached its maximum length or number of turns."""
    max_logprob_mismatch: PositiveFloat = MISSING
    """The run stops above this mismatch/logprob_abs_mean; 1e-4 suits fp32, 0.05 bf16."""
    max_far_tokens: Fraction = 0.005
    """The run stops above this mismatch/far_fraction, of tokens that differ by more than 20 times
    `max_logprob_mismatch`; 1 is off."""
    score_every_steps: NonNegativeInt = 10
    """Steps between measurements of mismatch/* with `rollout.mode` other than `sync`, where none of a step's tokens was
    sampled by the trainer's present weights: engines then score some of its trajectories again. 0 for none."""
    routing_replay: RoutingReplay = RoutingReplay.off
    """Experts that the trainer takes; `rollout` needs `rollout.routed_experts`. docs/models.md says more."""
    replay_gap_every_steps: NonNegativeInt = 10
    """Steps between measurements of routing/unreplayed_*, from the first step on, with `routing_replay: rollout`; each
    costs a pass. 0 for none."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    @property
    def given_by_turn(self) -> bool:
        """Whether the task, or a search, gives the advantage of each turn."""
        return self.advantage == AdvantageName.given and self.credit.name is CreditName.turn
