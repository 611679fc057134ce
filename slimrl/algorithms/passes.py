"""Which trajectories the passes over an update need, and which passes come before its gradients.

Each pass is a forward pass of the whole model.

With one update per rollout there are none: the training forward runs under the old policy, so its own log-probs are the
old ones, and the mismatch with the engines is measured there, before the optimizer steps. docs/algorithms.md lists the
settings that cost a pass.
"""

from slimrl.algorithms.token_advantages import charges_kl, has_token_advantages
from slimrl.config.algorithms import TOKEN_LOSSES
from slimrl.config.schema.algorithm import AlgorithmConfig, LossName, OldPolicy, RoutingReplay
from slimrl.config.schema.recipe import Recipe

ROUTER_TERMS = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
"""Fields of megatron-core through which routers learn from all tokens of an update; each is off at 0."""


def skips_zero_variance(recipe: Recipe) -> bool:
    """Whether the passes leave out trajectories of zero-variance groups, whose advantages are all 0.

    They do where these add nothing to the gradients: where the loss is one of slimrl's, a token's advantage is its
    turn's or trajectory's, and nothing else is learned from every token.
    """
    algorithm, trainer = recipe.algorithm, recipe.trainer
    by_advantage = algorithm.loss in LossName.__members__ and not has_token_advantages(algorithm)
    of_policy = algorithm.kl_coef > 0 or algorithm.entropy_coef > 0 or algorithm.entropy_target is not None
    of_routers = any(trainer.megatron.get(name) for name in ROUTER_TERMS)
    return algorithm.skip_zero_variance and by_advantage and not (of_policy or of_routers or trainer.mtp.train)


def needs_old(recipe: Recipe, number: int) -> bool:
    """Whether an update needs the old policy's log-probs before the first update changes the policy.

    Args:
        number: of the update in its rollout, from 0.
    """
    algorithm = recipe.algorithm
    if number > 0 and algorithm.old_policy is OldPolicy.trainer:
        return True
    # Experts are recorded without gradient, and dropout acts in training alone.
    of_policy = charges_kl(algorithm) or algorithm.teacher_coef > 0 or algorithm.routing_replay is RoutingReplay.train
    return of_policy or recipe.rollout.routed_experts or _has_dropout(recipe)


def needs_reference(recipe: Recipe) -> bool:
    """Whether the reference's log-probs are needed."""
    return recipe.algorithm.kl_coef > 0


def needs_sums(algorithm: AlgorithmConfig, number: int) -> bool:
    """Whether trajectories in several micro-batches need sums over their tokens elsewhere, just before the gradients.

    Before the rollout's first update the policy is the trainer's old one, so the log-ratios of losses are 0 against it.
    """
    moved = number > 0 or algorithm.old_policy is OldPolicy.rollout
    return algorithm.correction.by_trajectory or (moved and algorithm.loss not in TOKEN_LOSSES)


def num_passes(recipe: Recipe) -> int:
    """Passes over the tokens of an update, added over the updates of a rollout whose trajectories are not split."""
    updates = range(recipe.trainer.updates_per_rollout)
    return sum(needs_old(recipe, number) + needs_reference(recipe) for number in updates)


def _has_dropout(recipe: Recipe) -> bool:
    trainer = recipe.trainer
    of_model = (trainer.megatron.get(name) for name in ("hidden_dropout", "attention_dropout"))
    return any(of_model) or (trainer.lora.rank > 0 and trainer.lora.dropout > 0)
