"""Settings of every algorithm and of every option of one, for tests of losses and of layouts."""

from slimrl.config.algorithms import SETTINGS
from slimrl.config.schema.algorithm import (
    Aggregation,
    AlgorithmConfig,
    AlgorithmName,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    KlEstimator,
    KlPlace,
    OldPolicy,
)


def config(**settings) -> AlgorithmConfig:
    return AlgorithmConfig(**{"max_logprob_mismatch": 1.0, **settings})


def named(name: AlgorithmName) -> AlgorithmConfig:
    """The settings that a name stands for, without those of selection and rollouts."""
    return config(name=name, **{key: value for key, value in SETTINGS[name].items() if "." not in key})


def corrected(**settings) -> AlgorithmConfig:
    correction = CorrectionConfig(**settings)
    return config(loss="ppo", clip_low=0.2, clip_high=0.3, correction=correction)


PPO = {"loss": "ppo", "clip_low": 0.1, "clip_high": 0.2}
KL = {**PPO, "kl_coef": 0.3}
CASES = {
    **{name.value: named(name) for name in AlgorithmName},
    "gspo that clips": config(clip_low=0.02, clip_high=0.03),
    "gspo over tokens": config(clip_low=0.02, clip_high=0.03, aggregation=Aggregation.token),
    "gmpo that clips": config(loss="gmpo", clip_low=0.05, clip_high=0.05),
    "dual clip": config(**PPO, dual_clip=1.1),
    "cispo with a lower bound": config(loss="cispo", clip_low=0.1, clip_high=0.1, aggregation=Aggregation.constant),
    "against the engine": config(**PPO, old_policy=OldPolicy.rollout),
    **{f"kl {kind.value}": config(**KL, kl_estimator=kind) for kind in KlEstimator},
    "kl in the reward": config(**KL, kl_estimator=KlEstimator.k1, kl_place=KlPlace.reward),
    "tokens truncated": corrected(level=CorrectionLevel.token, high=1.05),
    "tokens clipped": corrected(level=CorrectionLevel.token, mode=CorrectionMode.clip, low=0.95, high=1.05),
    "icepop": corrected(level=CorrectionLevel.token, mode=CorrectionMode.mask, low=0.9, high=1.1),
    "sequences truncated": corrected(level=CorrectionLevel.sequence, high=1.1),
    "sequences masked": corrected(level=CorrectionLevel.geometric, mode=CorrectionMode.mask, low=0.99, high=1.02),
    "vetoed": corrected(veto=0.8),
    "without gaps": corrected(max_gap=0.01),
    "all of them": config(
        loss="gmpo", clip_low=0.05, clip_high=0.05, kl_coef=0.2, kl_estimator=KlEstimator.k3_weighted,
        correction=CorrectionConfig(level=CorrectionLevel.sequence, high=1.1, veto=0.7, max_gap=0.02),
    ),
}  # fmt: skip
