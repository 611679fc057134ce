"""Which passes over an update's tokens come before its gradients. Each is a forward pass of the whole model.

With one update per rollout there are none: the training forward runs under the old policy, so its own log-probs are the
old ones, and the mismatch with the engines is measured there, before the optimizer steps. docs/algorithms.md lists the
settings that cost a pass.
"""

from slimrl.algorithms.remote import needs_remote
from slimrl.algorithms.token_advantages import charges_kl
from slimrl.config.schema import OldPolicy, Recipe


def needs_old(recipe: Recipe, number: int) -> bool:
    """Whether an update needs the old policy's log-probs before the first update changes the policy.

    Args:
        number: of the update in its rollout, from 0.
    """
    algorithm = recipe.algorithm
    if number > 0 and algorithm.old_policy is OldPolicy.trainer:
        return True
    # Experts are recorded without gradient, and dropout acts in training alone.
    return charges_kl(algorithm) or recipe.rollout.routed_experts or _has_dropout(recipe)


def needs_reference(recipe: Recipe) -> bool:
    """Whether the reference's log-probs are needed."""
    return recipe.algorithm.kl_coef > 0


def needs_sums(recipe: Recipe, number: int, *, split: bool) -> bool:
    """Whether an update needs sums over trajectories' tokens in other micro-batches, just before its gradients.

    Args:
        split: some trajectory has sampled tokens in several micro-batches.
    """
    return split and needs_remote(recipe.algorithm, first=number == 0)


def _has_dropout(recipe: Recipe) -> bool:
    return any(recipe.trainer.megatron.get(name) for name in ("hidden_dropout", "attention_dropout"))
