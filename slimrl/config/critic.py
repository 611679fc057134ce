"""The recipe of a critic: its ranks are placed, started, checked and planned by the same code as the policy's."""

from dataclasses import replace

from slimrl.config.schema.algorithm import KlPlace, RoutingReplay
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import LoraConfig, MtpConfig


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
