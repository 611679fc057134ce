"""What each algorithm's name stands for: its settings where a recipe says nothing else. Those of GSPO are the schema's.

The papers are those that the schema names with each algorithm; docs/algorithms.md says which values are theirs, and why
others are not.
"""

from typing import Any

from slimrl.config.schema.algorithm import AdvantageName, Aggregation, AlgorithmName, KlEstimator, KlPlace, LossName
from slimrl.config.schema.credit import RefillMode, SelectionMode

_TOKEN_CLIP = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2}

SETTINGS: dict[AlgorithmName, dict[str, Any]] = {
    AlgorithmName.gspo: {},
    AlgorithmName.gspo_token: {"loss": "gspo_token"},
    AlgorithmName.grpo: _TOKEN_CLIP,
    AlgorithmName.dr_grpo: {**_TOKEN_CLIP, "advantage": "dr_grpo", "aggregation": Aggregation.constant},
    AlgorithmName.dapo: {
        **_TOKEN_CLIP,
        "clip_high": 0.28,
        "aggregation": Aggregation.token,
        "dynamic_sampling.refill": RefillMode.order,
    },
    AlgorithmName.rloo: {**_TOKEN_CLIP, "advantage": "rloo"},
    AlgorithmName.reinforce_pp: {
        **_TOKEN_CLIP,
        "advantage": "reward",
        "aggregation": Aggregation.token,
        "whiten": True,
        "kl_coef": 0.01,
        "kl_estimator": KlEstimator.k1,
        "kl_place": KlPlace.reward,
        "skip_zero_variance": False,
    },
    AlgorithmName.reinforce_pp_baseline: {
        **_TOKEN_CLIP,
        "advantage": "dr_grpo",
        "aggregation": Aggregation.token,
        "whiten": True,
        "kl_estimator": KlEstimator.k2,
    },
    AlgorithmName.opo: {"loss": "gpg", "advantage": "opo", "aggregation": Aggregation.token},
    AlgorithmName.ppo: {
        **_TOKEN_CLIP,
        "advantage": "gae",
        "aggregation": Aggregation.token,
        "whiten": True,
        "skip_zero_variance": False,
    },
    # The paper gives no upper bound; 4 bounds a weight at 5. No lower bound.
    AlgorithmName.cispo: {"loss": "cispo", "aggregation": Aggregation.token, "clip_low": 1.0, "clip_high": 4.0},
    AlgorithmName.gpg: {"loss": "gpg", "advantage": "dr_grpo", "aggregation": Aggregation.token},
    AlgorithmName.sapo: {"loss": "sapo"},
    AlgorithmName.vspo: {**_TOKEN_CLIP, "dynamic_sampling.refill": RefillMode.value},
    # With advantages of 1 the loss is the cross entropy of the chosen trajectories.
    AlgorithmName.rejection_sampling: {
        "loss": "gpg",
        "aggregation": Aggregation.token,
        "selection.mode": SelectionMode.best,
        "skip_zero_variance": False,
    },
    AlgorithmName.distillation: {
        **_TOKEN_CLIP,
        "advantage": "none",
        "aggregation": Aggregation.token,
        "teacher_coef": 1.0,
        "skip_zero_variance": False,
    },
    # exp(-0.4) to exp(0.4), the paper's range of a token's log-ratio.
    AlgorithmName.gmpo: {"loss": "gmpo", "clip_low": 0.3297, "clip_high": 0.4918},
}

COMPARING = frozenset(
    name.value for name in (AdvantageName.grpo, AdvantageName.dr_grpo, AdvantageName.rloo, AdvantageName.opo)
)
"""Advantages that compare the trajectories of a group, so that it must have several."""

TOKEN_LOSSES = frozenset(loss.value for loss in (LossName.ppo, LossName.cispo, LossName.gpg, LossName.sapo))
"""Losses in which a token's term depends on no other token of its trajectory."""
