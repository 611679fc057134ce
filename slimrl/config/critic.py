"""The recipe of a critic, and its rules: its ranks are placed, started, checked and planned by the same code as the
policy's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from slimrl.config.keys import flatten
from slimrl.config.load import is_needed
from slimrl.config.problems import Violation
from slimrl.config.schema.algorithm import KlPlace, LossName, RoutingReplay
from slimrl.config.schema.credit import RefillMode, SelectionMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import CriticConfig, LoraConfig, MtpConfig


def critic_recipe(recipe: Recipe) -> Recipe:
    """The recipe whose `trainer` is the critic's.

    All of its weights learn, also where the policy has adapters. It has no layers for multi-token prediction, no
    reference, and its routers choose experts themselves.
    """
    trainer = replace(recipe.critic.trainer, lora=LoraConfig(), mtp=MtpConfig())
    algorithm = replace(
        recipe.algorithm, kl_coef=0.0, kl_place=KlPlace.loss, whiten=False, routing_replay=RoutingReplay.off
    )
    return replace(recipe, trainer=trainer, algorithm=algorithm)


def critic_key(key: str) -> str:
    """The recipe's key of a key of `critic_recipe`; also replaces the keys in a message."""
    return key.replace("trainer.", "critic.trainer.")


def critic_violations(recipe: Recipe) -> Iterator[Violation]:
    """Settings that contradict a critic, or need one that is not there."""
    algorithm, critic = recipe.algorithm, recipe.critic
    if not recipe.has_critic:
        yield from _unused(recipe)
        return
    if algorithm.credit.by_turn:
        message = f"{algorithm.credit.name.value}: turns would differ, but a critic gives credit to each token. "
        yield "algorithm.credit.name", message + "Use trajectory, without turn_weights."
    if algorithm.selection.mode is SelectionMode.best:
        yield "algorithm.selection.mode", "best gives every trajectory the advantage 1. Use all with a critic."
    if algorithm.loss == LossName.gspo.value:
        yield "algorithm.loss", "gspo is of whole sequences, and with a critic advantages differ by token. Use ppo."
    if algorithm.dynamic_sampling.refill is not RefillMode.off:
        message = "replaces zero-variance groups, which a critic learns from too. Use off."
        yield "algorithm.dynamic_sampling.refill", f"{algorithm.dynamic_sampling.refill.value} {message}"
    if critic.warmup_steps >= recipe.steps:
        yield "critic.warmup_steps", f"{critic.warmup_steps} leave none of the {recipe.steps} steps to the policy."
    for key in _own(recipe):
        if key.startswith(("critic.trainer.lora.", "critic.trainer.mtp.")):
            yield key, "a critic trains all of its weights and has no further layers. Leave it out."
    updates = recipe.trainer.updates_per_rollout
    if critic.trainer.updates_per_rollout != updates:
        message = f"the critic learns from the policy's updates, trainer.updates_per_rollout {updates}. Leave it out."
        yield "critic.trainer.updates_per_rollout", message
    if critic.trainer.spare_nodes != recipe.trainer.spare_nodes:
        yield "critic.trainer.spare_nodes", "the critic shares trainer.spare_nodes. Leave it out."


def with_critic(rule: Callable[[Recipe], Iterable[Violation]], recipe: Recipe, command: str) -> list[Violation]:
    """What a rule of the trainer says of the policy, and what it says of the critic alone."""
    found = list(rule(recipe))
    if recipe.has_critic and is_needed("critic", command):
        found += of_critic(rule(critic_recipe(recipe)), known=found)
    return found


def of_critic(found: Iterable[Violation], *, known: Sequence[Violation]) -> list[Violation]:
    """Violations of a critic's recipe under the keys that its settings have, without those that the policy has too.

    Args:
        known: the policy's.
    """
    own = [violation for violation in found if violation[0].startswith("trainer.") and violation not in known]
    return [(critic_key(key), critic_key(message)) for key, message in own]


def _unused(recipe: Recipe) -> Iterator[Violation]:
    """Settings of a critic without a critic."""
    unset = CriticConfig(trainer=recipe.trainer)
    changed = [f"critic.{name}" for name, value in vars(unset).items() if getattr(recipe.critic, name) != value]
    if changed:
        key = changed[0] if changed[0] != "critic.trainer" else _own(recipe)[0]
        advantage = recipe.algorithm.advantage
        yield key, f"algorithm.advantage {advantage} has no critic. Set it to gae, or leave out the section critic."


def _own(recipe: Recipe) -> list[str]:
    """Keys of the critic's trainer that differ from the policy's."""
    return [key for key, _ in flatten(recipe) if key.startswith("critic.trainer.")]
