"""Rules of routing replay."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.algorithm import RoutingReplay
from slimrl.config.schema.recipe import Recipe


def routing_violations(recipe: Recipe, experts: int | None, command: str) -> Iterator[Violation]:
    """Settings under which routers cannot replay.

    Args:
        experts: of a layer, 0 for a dense model, None if unknown.
    """
    mode, given = recipe.algorithm.routing_replay, recipe.trainer.megatron
    if mode is RoutingReplay.off:
        return
    key = "algorithm.routing_replay"
    if command == "sft":
        yield key, f"{mode.value}: supervised training has no earlier pass and no engine to replay. Use off."
    elif experts == 0:
        yield key, f"{mode.value}: the model has no experts. Use off."
    elif mode is RoutingReplay.rollout and not recipe.rollout.routed_experts:
        yield key, "rollout needs the experts that engines report. Set rollout.routed_experts: true."
    if given.get("moe_router_fusion"):
        yield "trainer.megatron.moe_router_fusion", f"the fused router ignores {key}: {mode.value}. Leave it out."
